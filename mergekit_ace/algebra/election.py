# SPDX-License-Identifier: Apache-2.0
"""What TIES (arXiv 2306.01708) keeps of task vectors before it adds them.

Of each task vector the largest entries are kept (trim); where the sum over the experts has another
sign, an entry is dropped (elect). AdaMerging++ (arXiv 2310.02575) learns coefficients of these.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from mergekit_ace.algebra.task_vectors import merge_linear, task_vector

DENSITY = 0.2  # share of the entries that is kept


def elected_task_vectors(
    base: Tensor, experts: Sequence[Tensor], density: float = DENSITY
) -> list[Tensor]:
    """Return the trimmed task vectors without the entries whose sign was not elected.

    Differs from the published implementations in that the largest entries are those of a tensor,
    as everywhere in mergekit, not those of a whole model, which a merge tensor by tensor never
    sees; and in that where the sum is 0, nothing is kept.

    Args:
        base: θ_0, any shape.
        experts: θ_k, each shaped as `base`.
        density: share of the entries of a task vector that is kept, above 0, at most 1; at least
            one entry is.

    Returns:
        One per expert, shaped as `base`, in float32, or in float64 where the base is.
    """
    dtype = torch.promote_types(torch.float32, base.dtype)
    trimmed = [_trimmed(task_vector(expert, base, dtype), density) for expert in experts]
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
