# SPDX-License-Identifier: Apache-2.0
"""A linear combination of task vectors: θ_0 + Σ_k λ_k Δ_k."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from mergekit_ace.algebra.task_vectors import task_vector


def merge_linear(base: Tensor, experts: Sequence[Tensor], coefficients: Sequence[float]) -> Tensor:
    """θ_0 + Σ_k λ_k (θ_k − θ_0) in float32, or in float64 where the tensors are.

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
    total = torch.zeros_like(base, dtype=dtype)
    for expert, coefficient in used:
        total.add_(task_vector(expert, base, dtype), alpha=coefficient)
    return total.add_(base)
