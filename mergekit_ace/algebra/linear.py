# SPDX-License-Identifier: Apache-2.0
"""Sums of task vectors with a coefficient for each."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from mergekit_ace.algebra.linalg import BLOCK_ENTRIES, as_rows, blocks
from mergekit_ace.algebra.records import MatrixRecord, TensorRecord
from mergekit_ace.algebra.task_vectors import select_active, task_vector


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
