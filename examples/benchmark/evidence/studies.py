# SPDX-License-Identifier: Apache-2.0
"""What was tried for `ace_relative` and did not become a part of it: rules for ε, balance, λ.

Plain float64, task vectors (o, i) in, merged task vector out. ε and the objective are those of
`mergekit_ace.algebra.relative`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

EPSILON = 0.03
CANDIDATES = (1e-5, 1e-4, 1e-3, 3e-3, 1e-2, 3e-2, 1e-1, 3e-1, 1.0, 3.0)
Rule = Callable[[Sequence[Tensor]], Tensor]


def systems(
    deltas: Sequence[Tensor], epsilons: Sequence[float], extra: Sequence[float] | None = None
) -> tuple[list[Tensor], list[float]]:
    """Σ_t, (i, i), and w_t per expert; `extra` multiplies w_t."""
    sigmas, shares = [], []
    for t, (delta, epsilon) in enumerate(zip(deltas, epsilons, strict=True)):
        width = delta.shape[1]
        gram = delta.T @ delta
        sigma = gram / gram.trace() + epsilon / width * torch.eye(width, dtype=gram.dtype)
        sigmas.append(sigma)
        shares.append((extra[t] if extra else 1.0) / float(((delta @ sigma) * delta).sum()))
    return sigmas, shares


def merge(
    deltas: Sequence[Tensor], epsilons: Sequence[float], extra: Sequence[float] | None = None
) -> Tensor:
    """(Σ_t w_t Δ_t Σ_t)(Σ_t w_t Σ_t)⁻¹ with an ε for each expert."""
    sigmas, shares = systems(deltas, epsilons, extra)
    system = sum(w * s for w, s in zip(shares, sigmas, strict=True))
    target = sum(w * d @ s for w, d, s in zip(shares, deltas, sigmas, strict=True))
    assert isinstance(system, Tensor)
    assert isinstance(target, Tensor)
    return torch.linalg.solve(system, target.T).T


def from_intensity(rho: float) -> float:
    """ε of (1 − ρ) S + ρ tr(S)/i I, a shrinkage by ρ from 0 to 1, up to a factor."""
    return rho / (1 - rho) if rho < 1 else 1e6


def ledoit_wolf(delta: Tensor) -> float:
    """ε by the intensity of Ledoit and Wolf (2004), the rows being the samples, their mean zero."""
    rows, width = delta.shape
    sample = delta.T @ delta / rows
    mean = sample.trace() / width
    away = float((sample - mean * torch.eye(width, dtype=sample.dtype)).square().sum())
    fourth = float(delta.square().sum(1).square().sum()) / rows
    noise = (fourth - float(sample.square().sum())) / rows
    return from_intensity(min(noise / away, 1.0) if away > 0 else 1.0)


def oracle_approximating(delta: Tensor) -> float:
    """ε by the oracle-approximating shrinkage of Chen et al. (2010), likewise."""
    rows, width = delta.shape
    sample = delta.T @ delta / rows
    square = float(sample.trace()) ** 2
    product = float(sample.square().sum())
    above = (1 - 2 / width) * product + square
    below = (rows + 1 - 2 / width) * (product - square / width)
    return from_intensity(min(above / below, 1.0) if below > 0 else 1.0)


def noise_edge(delta: Tensor) -> float:
    """ε at the upper edge of Marchenko and Pastur's law, the median eigenvalue being noise."""
    rows, width = delta.shape
    values = torch.linalg.svdvals(delta).square()
    ratio = min(rows, width) / max(rows, width)
    edge = (1 + math.sqrt(ratio)) ** 2
    # the law's median lies near its mean, 1, and a third of the ratio below it
    noise = float(values.median()) / max(rows, width) / (1 - ratio / 3)
    return width * edge * max(rows, width) * noise / float(values.sum())


def left_out_error(deltas: Sequence[Tensor], epsilon: float) -> float:
    """Relative error on the rows of the Δ_t, each predicted by a merge that has not seen it.

    A row r of Δ_t is a sample of the input x = r, whose output should be Δ_t r. By leverage, as for
    every ridge regression: the residual divided by 1 − h, with h = w_t/τ_t · rᵀA⁻¹r.
    """
    sigmas, shares = systems(deltas, [epsilon] * len(deltas))
    system = sum(w * s for w, s in zip(shares, sigmas, strict=True))
    assert isinstance(system, Tensor)
    inverse = torch.linalg.inv(system)
    merged = merge(deltas, [epsilon] * len(deltas))
    total = 0.0
    for delta, share in zip(deltas, shares, strict=True):
        leverage = share / float(delta.square().sum()) * ((delta @ inverse) * delta).sum(1)
        residual = ((merged - delta) @ delta.T).square().sum(0)
        whole = float((delta @ delta.T).square().sum())
        total += float((residual / (1 - leverage).clamp(min=1e-6).square()).sum()) / whole
    return total


def balanced(deltas: Sequence[Tensor], rounds: int) -> Tensor:
    """w_t multiplied a few times by the root of the expert's relative error over their mean."""
    epsilons = [EPSILON] * len(deltas)
    extra = [1.0] * len(deltas)
    for _ in range(rounds):
        merged = merge(deltas, epsilons, extra)
        sigmas, shares = systems(deltas, epsilons)
        errors = [
            w * float((((merged - d) @ s) * (merged - d)).sum())
            for w, d, s in zip(shares, deltas, sigmas, strict=True)
        ]
        mean = sum(errors) / len(errors)
        extra = [e * (error / mean) ** 0.5 for e, error in zip(extra, errors, strict=True)]
    return merge(deltas, epsilons, extra)


def unshrunk(deltas: Sequence[Tensor]) -> Tensor:
    """λ X with the λ that minimises the sum of relative errors without the ridge."""
    merged = merge(deltas, [EPSILON] * len(deltas))
    sigmas, _ = systems(deltas, [0.0] * len(deltas))
    _, shares = systems(deltas, [EPSILON] * len(deltas))
    along = across = 0.0
    for delta, sigma, share in zip(deltas, sigmas, shares, strict=True):
        along += share * float(((merged @ sigma) * delta).sum())
        across += share * float(((merged @ sigma) * merged).sum())
    return merged * (along / across)


def refined(deltas: Sequence[Tensor], fraction: float = 0.3) -> Tensor:
    """X with ACE's refinement (Eqs. 15-19); S_t and its ridge make up w_t Σ_t, and Σ w_t = 1."""
    sigmas, weights = systems(deltas, [EPSILON] * len(deltas))
    shares = [weight / sum(weights) for weight in weights]
    parts = [w * s for w, s in zip(shares, sigmas, strict=True)]
    merged = merge(deltas, [EPSILON] * len(deltas))
    mean = torch.stack(parts).mean(dim=0)
    width = deltas[0].shape[1]
    residual = torch.zeros_like(merged)
    for delta, part, share in zip(deltas, parts, shares, strict=True):
        ridge = share * EPSILON / width * torch.eye(width, dtype=part.dtype)
        residual += delta @ (part - ridge - mean)
    left, values, right = torch.linalg.svd(residual + merged, full_matrices=False)
    rank = int(fraction * len(values))
    if rank == 0:
        return merged
    return merged + values[:rank].mean() * (left[:, :rank] @ right[:rank])


def _each(rule: Callable[[Tensor], float]) -> Rule:
    return lambda deltas: merge(deltas, [rule(delta) for delta in deltas])


def leave_one_out(deltas: Sequence[Tensor]) -> Tensor:
    """One ε per matrix: the candidate with the least `left_out_error`."""
    best = min(CANDIDATES, key=lambda epsilon: left_out_error(deltas, epsilon))
    return merge(deltas, [best] * len(deltas))


STUDIES: dict[str, Rule] = {
    "fixed": lambda deltas: merge(deltas, [EPSILON] * len(deltas)),
    "Ledoit-Wolf": _each(ledoit_wolf),
    "oracle-approximating": _each(oracle_approximating),
    "noise edge": _each(noise_edge),
    "leave one row out": leave_one_out,
    "balance, 3 rounds": lambda deltas: balanced(deltas, 3),
    "balance, 12 rounds": lambda deltas: balanced(deltas, 12),
    "closed-form λ": unshrunk,
    "refinement": refined,
}
