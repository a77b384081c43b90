# SPDX-License-Identifier: Apache-2.0
"""Sums of task vectors with a coefficient for each, of all their entries or of what TIES keeps.

TIES (arXiv 2306.01708) keeps the largest entries of each task vector (trim), and drops those whose
sign is not that of the sum over the experts (elect). AdaMerging++ (arXiv 2310.02575) learns
coefficients of these.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from mergekit_ace.algebra.linalg import BLOCK_ENTRIES, as_rows, blocks
from mergekit_ace.algebra.records import MatrixRecord, TensorRecord
from mergekit_ace.algebra.task_vectors import select_active, task_vector

DENSITY = 0.2  # share of the entries that is kept


def elected_task_vectors(
    base: Tensor, experts: Sequence[Tensor], density: float = DENSITY
) -> list[Tensor]:
    """Return the trimmed task vectors without the entries whose sign was not elected.

    Differs from the published implementations in that the largest entries are those of a tensor,
    as everywhere in mergekit, not those of a whole model, which a merge tensor by tensor never
    sees; in that where the sum is 0, nothing is kept; and in that a task vector counts, and votes,
    not at all where the expert is the base in another precision.

    Args:
        base: θ_0, any shape.
        experts: θ_k, each shaped as `base`.
        density: share of the entries of a task vector that is kept, above 0, at most 1; at least
            one entry is.

    Returns:
        One per expert, shaped as `base`, in float32, or in float64 where the base is.
    """
    dtype = torch.promote_types(torch.float32, base.dtype)
    changed = select_active(base, experts, [1.0] * len(experts), dtype).changed
    trimmed = [
        _trimmed(task_vector(expert, base, dtype), density).mul_(share)
        for expert, share in zip(experts, changed, strict=True)
    ]
    elected = sum(trimmed, torch.zeros_like(base, dtype=dtype)).sign()
    return [delta.where(delta.sign() == elected, 0) for delta in trimmed]


def merge_elected(base: Tensor, experts: Sequence[Tensor], coefficients: Sequence[float]) -> Tensor:
    """Return θ_0 + Σ_k λ_k Δ'_k with the Δ'_k of `elected_task_vectors`; see `merge_linear`."""
    origin = torch.zeros_like(base, dtype=torch.promote_types(torch.float32, base.dtype))
    if not any(coefficients):
        return base
    return base + merge_linear(origin, elected_task_vectors(base, experts), coefficients)


def _trimmed(delta: Tensor, density: float) -> Tensor:
    """Return a task vector with zeros in place of all but its largest entries."""
    kept = max(int(density * delta.numel()), 1)
    if delta.numel() == 0:
        return delta
    sizes = delta.abs()
    least = sizes.flatten().kthvalue(delta.numel() - kept + 1).values
    return delta.where(sizes >= least, 0)


def merge_entries(
    base: Tensor, experts: Sequence[Tensor], coefficients: Sequence[float], rule: str
) -> tuple[Tensor, TensorRecord]:
    """Return θ_0 + Σ_k s_k λ_k (θ_k − θ_0), s_k being 0 where nothing changed, else 1.

    Args:
        base, experts, coefficients: see `merge_linear`.
        rule: the name of the method, for the record.
    """
    record = record_of_entries(rule, base, experts)
    changed = record.matrices[0].changed
    own = [c * s for c, s in zip(coefficients, changed, strict=True)]
    return merge_linear(base, experts, own), record


def record_of_entries(rule: str, base: Tensor, experts: Sequence[Tensor]) -> TensorRecord:
    """Return the record of a merge entry by entry; its layout is that of what is no matrix."""
    active = select_active(base, experts, [1.0] * len(experts), torch.float32)
    record = MatrixRecord(rule, (1.0,) * len(experts), active.all_tau, active.changed)
    return TensorRecord(tuple(base.shape), "mean", (record,))


def merge_linear(base: Tensor, experts: Sequence[Tensor], coefficients: Sequence[float]) -> Tensor:
    """Return θ_0 + Σ_k λ_k (θ_k − θ_0) in float32, or in float64 where the tensors are.

    The task vectors are summed before the base is added, so that the sum is rounded by its own
    size. With all coefficients 0 the result is `base` itself, uncast; with a single one that is 1
    and no other, that expert to the bit.

    Args:
        base: θ_0, any shape.
        experts: θ_k, each shaped as `base`.
        coefficients: λ_k, any finite number, one per expert.
    """
    dtype = torch.promote_types(torch.float32, base.dtype)
    used = [(w, c) for w, c in zip(experts, coefficients, strict=True) if c != 0]
    if not used:
        return base
    if [c for _, c in used] == [1]:
        return used[0][0].to(dtype)
    merged = torch.empty_like(base, dtype=dtype, memory_format=torch.contiguous_format)
    rows = [as_rows(tensor) for tensor in (base, merged, *(expert for expert, _ in used))]
    cached = BLOCK_ENTRIES // 4
    length, width = rows[0].shape
    for block in blocks(length, width, base.device, entries=cached):
        origin, out, *versions = (part[block] for part in rows)
        out.zero_()
        for version, (_, coefficient) in zip(versions, used, strict=True):
            out.add_(task_vector(version, origin, dtype), alpha=coefficient)
        out.add_(origin)
    return merged
