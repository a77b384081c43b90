# SPDX-License-Identifier: Apache-2.0
"""How a stored tensor is read as one or more matrices (o, i), and the merge of a whole tensor."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from mergekit_ace.algebra.records import (
    FixedLayout,
    MatrixRecord,
    RelativeLayout,
    TensorRecord,
)

MatrixRule = Callable[[Tensor, Sequence[Tensor]], tuple[Tensor, MatrixRecord]]


def resolve_layout(
    layout: RelativeLayout,
    name: str | None,
    ndim: int,
    *,
    transposed: bool = False,
    table: bool = False,
) -> FixedLayout:
    """The layout that a tensor of `ndim` axes gets.

    Args:
        layout: as configured. What does not fit the tensor's axes falls back to ``mean``, so that
            one setting can stand for a whole model: a bias under ``layout: matrix`` is a vector.
        name: of the tensor; ``auto`` looks for a component called ``experts``, and for their packed
            biases, (E, n), which are vectors.
        transposed: whether the architecture stores this weight as (…, in, out).
        table: whether the architecture looks up its rows, and the method has a rule for that.
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
        return "mean"
    fits = {"matrix": ndim == 2, "table": ndim == 2, "mean": True}.get(layout, ndim >= 2)
    return layout if fits else "mean"


def by_layout(
    base: Tensor,
    experts: Sequence[Tensor],
    layout: FixedLayout,
    matrix: MatrixRule,
    other: MatrixRule,
) -> tuple[Tensor, TensorRecord]:
    """Merge the versions of one stored tensor, each of its matrices by a rule.

    Args:
        base, experts: W0 and the W_t, of one shape.
        layout: one that fits the tensor, see `resolve_layout`.
        matrix: the rule for a matrix: W0, (o, i), and the W_t, to the merged one and a record.
        other: the rule for what is no matrix, of any shape.
    """
    if layout == "mean" or base.numel() == 0:
        merged, record = other(base, experts)
        return merged, TensorRecord(tuple(base.shape), "mean", (record,))
    views = [as_matrices(tensor, layout) for tensor in (base, *experts)]
    parts, records = [], []
    for matrices in zip(*views, strict=True):
        part, record = matrix(matrices[0], matrices[1:])
        parts.append(part)
        records.append(record)
    merged = base
    if any(record.rule != "base" for record in records):
        merged = from_matrices(parts, base.shape, layout)
    return merged, TensorRecord(tuple(base.shape), layout, tuple(records))


def as_matrices(tensor: Tensor, layout: FixedLayout) -> tuple[Tensor, ...]:
    """The matrices (o, i) of a tensor, as views where strides allow."""
    if layout == "flattened":
        return (tensor.flatten(start_dim=1),)
    if layout == "transposed":
        tensor = tensor.mT
    return tensor.reshape(-1, *tensor.shape[-2:]).unbind(0)


def from_matrices(parts: Sequence[Tensor], shape: torch.Size, layout: FixedLayout) -> Tensor:
    """The inverse of `as_matrices`; the parts may differ in dtype, the widest one wins."""
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
