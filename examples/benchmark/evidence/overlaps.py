# SPDX-License-Identifier: Apache-2.0
"""What was tried against the loss of old skills at λ = 1, without data, on top of `ace_relative`.

Adapters use few inputs each, and hardly any that another one uses: their merge is nearly their sum.
n, from 1 to T, counts how many experts use an input: 1 where each has its own, T where all share
them. It is (Σ_t a_t)² / Σ_t a_t² of the experts' uses a_t of one direction, and likewise with inner
products of matrices for all of them.

Plain float64, task vectors (o, i) in, merged task vector out, as in `studies`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from evidence.studies import EPSILON, Rule, merge, systems
from torch import Tensor

SPENT = 1e-5  # of the largest singular value: what float32 leaves of 0


def ridged(deltas: Sequence[Tensor]) -> Tensor:
    """X of `ace_relative`."""
    return merge(deltas, [EPSILON] * len(deltas))


def weighted(deltas: Sequence[Tensor]) -> tuple[list[Tensor], list[Tensor], list[float]]:
    """w_t Σ_t, Σ_t and w_t."""
    sigmas, shares = systems(deltas, [EPSILON] * len(deltas))
    return [w * s for w, s in zip(shares, sigmas, strict=True)], sigmas, shares


def uses(delta: Tensor, power: float) -> Tensor:
    """(Δᵀ Δ)^power, (i, i): Gram matrix at 1, |Δ| at 1/2, the projector on its rows at 0."""
    _, values, right = torch.linalg.svd(delta, full_matrices=False)
    kept = values > SPENT * values[0]
    return (right[kept].T * values[kept] ** (2 * power)) @ right[kept]


def users(deltas: Sequence[Tensor], power: float) -> float:
    """n of a matrix, every expert counting alike."""
    own = [uses(delta, power) for delta in deltas]
    total = torch.stack([matrix / matrix.norm() for matrix in own]).sum(dim=0)
    return float(total.square().sum()) / len(deltas)


def by_root(power: float) -> Rule:
    """λ = √(n/T): 1/√T where no input is shared, 1 where all are."""
    return lambda deltas: math.sqrt(users(deltas, power) / len(deltas)) * ridged(deltas)


def by_half(power: float) -> Rule:
    """λ = min(1, 2n/T): 1 from where half of the experts use an input."""
    return lambda deltas: min(1.0, 2 * users(deltas, power) / len(deltas)) * ridged(deltas)


def as_large_as_one(deltas: Sequence[Tensor]) -> Tensor:
    """λ such that ‖λX‖² is the mean ‖Δ_t‖², where X is larger."""
    merged = ridged(deltas)
    mean = sum(float(delta.square().sum()) for delta in deltas) / len(deltas)
    return merged * min(1.0, math.sqrt(mean) / float(merged.norm()))


def base_as_expert(deltas: Sequence[Tensor], *, even: bool) -> Tensor:
    """One expert more, Δ = 0 and of their mean weight; Σ_0 = I/i, or the mean of the Σ_t."""
    parts, sigmas, shares = weighted(deltas)
    width = deltas[0].shape[1]
    own = torch.eye(width, dtype=deltas[0].dtype) / width
    own = own if even else torch.stack(sigmas).mean(dim=0)
    system = torch.stack(parts).sum(dim=0) + sum(shares) / len(shares) * own
    target = torch.stack([d @ p for d, p in zip(deltas, parts, strict=True)]).sum(dim=0)
    return torch.linalg.solve(system, target.T).T


def by_direction(deltas: Sequence[Tensor]) -> Tensor:
    """X with n/T of every direction, use being vᵀG(G + ε tr(G)/i I)⁻¹v, 0 to 1."""
    own = []
    for delta in deltas:
        gram = delta.T @ delta
        width = len(gram)
        ridge = EPSILON * gram.trace() / width * torch.eye(width, dtype=gram.dtype)
        own.append(torch.linalg.solve(gram + ridge, gram))
    basis = torch.linalg.eigh(torch.stack(own).sum(dim=0)).eigenvectors
    shares = torch.stack([(basis * (matrix @ basis)).sum(dim=0).clamp(min=0) for matrix in own])
    least = torch.finfo(shares.dtype).tiny
    count = shares.sum(dim=0).square() / shares.square().sum(dim=0).clamp(min=least)
    return ((ridged(deltas) @ basis) * (count / len(deltas))) @ basis.T


def root_of_squares(deltas: Sequence[Tensor]) -> Tensor:
    """√(n/T) of every direction, in the system: √T (Σ_t (w_tΣ_t)²)^½ in the place of Σ_t w_tΣ_t."""
    parts, _, _ = weighted(deltas)
    values, basis = torch.linalg.eigh(torch.stack([p @ p for p in parts]).sum(dim=0))
    root = (basis * values.clamp(min=0).sqrt()) @ basis.T
    target = torch.stack([d @ p for d, p in zip(deltas, parts, strict=True)]).sum(dim=0)
    return torch.linalg.solve(math.sqrt(len(deltas)) * root, target.T).T


def pooled(deltas: Sequence[Tensor], share: float | None = None) -> Tensor:
    """Σ_t with a share of it replaced by the mean of all; by default 1 − √(n/T) by spans."""
    _, sigmas, shares = weighted(deltas)
    if share is None:
        share = 1 - math.sqrt(users(deltas, 0.0) / len(deltas))
    mean = torch.stack(sigmas).mean(dim=0)
    parts = [w * torch.lerp(s, mean, share) for w, s in zip(shares, sigmas, strict=True)]
    target = torch.stack([d @ p for d, p in zip(deltas, parts, strict=True)]).sum(dim=0)
    return torch.linalg.solve(torch.stack(parts).sum(dim=0), target.T).T


OVERLAPS: dict[str, Rule] = {
    "λ = 0.65": lambda deltas: 0.65 * ridged(deltas),
    "λ = √(n/T) of spans": by_root(0.0),
    "λ = √(n/T) of |Δ|": by_root(0.5),
    "λ = min(1, 2n/T) of |Δ|": by_half(0.5),
    "λ = min(1, 2n/T) of ΔᵀΔ": by_half(1.0),
    "as large as one expert": as_large_as_one,
    "the base as an expert": lambda deltas: base_as_expert(deltas, even=False),
    "the base as an even expert": lambda deltas: base_as_expert(deltas, even=True),
    "n/T of every direction": by_direction,
    "√(n/T) in the system": root_of_squares,
    "half pooled": lambda deltas: pooled(deltas, 0.5),
    "pooled by spans": pooled,
}
