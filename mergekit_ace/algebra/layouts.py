# SPDX-License-Identifier: Apache-2.0
"""How a stored tensor is read as matrices, and merged matrix by matrix."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from mergekit_ace.algebra.records import FixedLayout, MatrixRecord, RelativeLayout, TensorRecord

MatrixRule = Callable[[Tensor, Sequence[Tensor]], tuple[Tensor, MatrixRecord]]


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

    Both rules are applied by `merge_by_change`.
    """
    if layout == "mean" or base.numel() == 0:
        merged, record = merge_by_change(base, experts, other)
        return merged, TensorRecord(tuple(base.shape), "mean", (record,))
    views = [as_matrices(tensor, layout) for tensor in (base, *experts)]
    parts, records = [], []
    for matrices in zip(*views, strict=True):
        part, record = merge_by_change(matrices[0], matrices[1:], matrix)
        parts.append(part)
        records.append(record)
    merged = base
    if any(record.rule != "base" for record in records):
        merged = from_matrices(parts, base.shape, layout)
    return merged, TensorRecord(tuple(base.shape), layout, tuple(records))


def merge_by_change(
    base: Tensor, experts: Sequence[Tensor], rule: MatrixRule
) -> tuple[Tensor, MatrixRecord]:
    """Merge the versions of one matrix such that no expert enters or leaves with a jump.

    Every rule leaves out the experts with s_t = 0 (see `select_active`) and takes all others for
    whole, so that at s_t = 0 it jumps. With the s_t in descending order, s_(1) ≥ s_(2) ≥ …, the
    result here is

        Σ_k (s_(k) − s_(k+1)) merge(the experts with s_t ≥ s_(k)) + (1 − s_(1)) W0,

    the Lovász extension (Choquet integral) of the merge as a function of sets of experts. It is
    continuous in the s_t, and one merge unless some lie strictly between 0 and 1.

    Args:
        base, experts: W0 and the W_t, of one shape.
        rule: to the merged tensor, and a record with weights and s_t.

    Returns:
        The merged tensor, and the record of the merge of all experts with s_t > 0.
    """
    merged, record = rule(base, experts)
    (first, _), *others = nested_sets(record.changed, record.weight) or [(1.0, ())]
    if first == 1:
        return merged, record
    total = base.to(merged.dtype).mul(1 - first).add_(merged, alpha=first)
    for share, kept in others:
        chosen = [expert if k else base for expert, k in zip(experts, kept, strict=True)]
        total.add_(rule(base, chosen)[0].to(total.dtype).sub(base), alpha=share)
    return total, record


def nested_sets(
    changed: Sequence[float], weights: Sequence[float]
) -> list[tuple[float, tuple[bool, ...]]]:
    """Return the sets of experts that `merge_by_change` merges, and the share of each merge.

    Args:
        changed: s_t.
        weights: w_t; experts of weight 0 make no set of their own.

    Returns:
        Shares, of sum max s_t, with whether each expert belongs to the set; the largest set first,
        none at all where nobody has changed anything.
    """
    levels = sorted({s for s, w in zip(changed, weights, strict=True) if s > 0 and w != 0})
    below = [0.0, *levels]
    return [
        (level - lower, tuple(s >= level for s in changed))
        for lower, level in zip(below, levels, strict=False)
    ]


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
