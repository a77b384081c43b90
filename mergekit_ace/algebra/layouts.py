# SPDX-License-Identifier: Apache-2.0
"""How a stored tensor is read as matrices."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from mergekit_ace.algebra.records import FixedLayout, RelativeLayout


def resolve_layout(
    layout: RelativeLayout,
    name: str | None,
    ndim: int,
    *,
    transposed: bool = False,
    table: bool = False,
    kernel: bool = False,
) -> FixedLayout:
    """Return the layout that a tensor of `ndim` axes gets.

    Args:
        layout: as configured. What does not fit the tensor's axes falls back to ``mean``, so that
            one setting can stand for a whole model: a bias under ``layout: matrix`` is a vector.
        name: of the tensor; ``auto`` looks for a component called ``experts``, and for their packed
            biases, (E, n), which are vectors.
        transposed: whether the architecture stores this weight as (…, in, out).
        table: whether the architecture looks up its rows, and the method has a rule for that.
        kernel: whether the architecture is a network of convolutions.
    """
    if layout == "auto":
        components = (name or "").split(".")
        packed = "experts" in components
        if ndim == 3 and packed:
            return "transposed" if transposed else "stacked"
        if ndim == 2 and table:
            return "table"
        if ndim == 2 and not (packed and components[-1].endswith("bias")):
            return "transposed" if transposed else "matrix"
        return "flattened" if ndim > 3 and kernel else "mean"
    fits = {"matrix": ndim == 2, "table": ndim == 2, "mean": True}.get(layout, ndim >= 2)
    return layout if fits else "mean"


def other_side(layout: FixedLayout, ndim: int) -> FixedLayout:
    """Return the layout that reads the transposes of the matrices that a layout reads.

    Tables, means and kernels, of which there is no other reading, keep theirs.

    Args:
        layout: of a tensor.
        ndim: its axes.
    """
    if layout in ("matrix", "stacked"):
        return "transposed"
    if layout == "transposed":
        return "matrix" if ndim == 2 else "stacked"
    return layout


def as_matrices(tensor: Tensor, layout: FixedLayout) -> tuple[Tensor, ...]:
    """Return the matrices (o, i) of a tensor, as views where strides allow."""
    if layout == "flattened":
        return (tensor.flatten(start_dim=1),)
    if layout == "transposed":
        tensor = tensor.mT
    return tensor.reshape(-1, *tensor.shape[-2:]).unbind(0)


def from_matrices(parts: Sequence[Tensor], shape: torch.Size, layout: FixedLayout) -> Tensor:
    """Invert `as_matrices`; the parts may differ in dtype, the widest one wins."""
    widest = parts[0].dtype
    for part in parts[1:]:
        widest = torch.promote_types(widest, part.dtype)
    if len(parts) == 1:
        stacked = parts[0].unsqueeze(0)
    else:
        stacked = torch.stack([part.to(widest) for part in parts])
    if layout == "transposed":
        stacked = stacked.mT
    return stacked.reshape(shape)
