# SPDX-License-Identifier: Apache-2.0
"""What `ace_plus` adds to ACE's regression: a flatter spectrum; in embeddings, TSV-Merge's sum.

A compromise between experts leaves many directions of X = U diag(σ) Vᵀ weak. Where experts are
unlike, F = U diag(σ / (σ² + c)) Vᵀ strengthens these, and X keeps its size.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from functools import reduce
from itertools import combinations

import torch
from torch import Tensor

from mergekit_ace.algebra.linalg import (
    WEAKEST,
    as_vector,
    factorize,
    gram,
    leading_eigenpairs,
    orthogonal_factor,
    product,
    solve,
)
from mergekit_ace.algebra.task_vectors import ActiveExperts, delta_blocks, rounding_floors

# ‖F‖ / ‖X‖ where experts have nothing in common, and c in units of ‖XXᵀ‖² / tr(XXᵀ), a mean of σ²
# that is weighted by σ².
FLATTENING = (0.7, 0.005)
# Of adapters, for each other expert. The strongest direction of an adapter answers to inputs of any
# task, so that the sum of these is what makes a merge forget.
FLATTENING_OF_ADAPTERS = (0.7, 0.05)


def flatten_spectrum(
    whole: Tensor,
    part: Tensor,
    unlikeness: Tensor,
    turned: bool,
    flattening: tuple[float, float],
) -> Tensor:
    """Return what takes the place of X, (o, i), or of a part of it: what parts give adds up.

    Of X it is X / ‖X‖ + f α F / ‖F‖ in the size of X, with F = X (XᵀX + c I)⁻¹ and α, how unlike
    experts are; `flattening` is f, and c as a share. `turned` puts (XXᵀ + c I)⁻¹ on the other side,
    which of a part is not the same.
    """
    strength, ridge = flattening
    size = _nonzero(torch.linalg.vector_norm(whole))
    unit = (whole.mT if turned else whole) / size
    square = product(unit.mT, unit)
    square.diagonal().add_(_nonzero(ridge * torch.linalg.vector_norm(square).square()))
    lower, _ = factorize(square)
    flat = solve(unit.clone(memory_format=torch.contiguous_format), lower)
    share = strength * unlikeness / _nonzero(torch.linalg.vector_norm(flat))
    scale = size / _nonzero(torch.linalg.vector_norm(flat.mul_(share).add_(unit)))
    if part is not whole:
        own = (part.mT if turned else part).div(size).contiguous()
        flat = solve(own.clone(), lower).mul_(share).add_(own)
    flat.mul_(scale)
    return flat.mT if turned else flat


def _nonzero(number: Tensor) -> Tensor:
    """Return a number, or 1 for 0: experts may cancel one another to the last bit."""
    return torch.where(number > 0, number, 1.0)


def measure_unlikeness(
    stacks: Iterable[Tensor], tau: Sequence[float], weights: Sequence[float]
) -> Tensor:
    """Return 1 minus the weighted mean cosine of pairs of experts, kept from 0 to 1.

    The task vectors, (T, m, i), are given by blocks of their rows.
    """
    flat = (stack.flatten(1) for stack in stacks)
    cosines = reduce(Tensor.add_, (product(rows, rows.mT) for rows in flat)).fill_diagonal_(0)
    shares = as_vector([w / t**0.5 for w, t in zip(weights, tau, strict=True)], cosines)
    cosines = cosines * shares * shares[:, None]  # one by one: their product may be out of range
    total = 2 * sum(a * b for a, b in combinations(weights, 2)) or 1.0
    return 1 - (cosines.sum() / total).clamp(0, 1)


def orthogonal_sum(base: Tensor, active: ActiveExperts, dtype: torch.dtype) -> Tensor:
    """Return TSV-Merge's sum, (o, i) (Gargiulo et al., arXiv 2412.00081, Algorithm 1).

    Of Δ_t = U_t diag(σ_t) V_tᵀ the min(o, i) / T leading triplets are kept. The nearest orthonormal
    matrices U⊥ and V⊥ replace the concatenated U_t and V_t: U⊥ diag(λ_t σ_t w_t / max w) V⊥ᵀ.
    Products have `dtype`, decompositions are in float64. The longer side is worked on by blocks:
    U⊥ = P diag(1/σ) C^-½ with P = [Δ_t V_t]_t and C = diag(1/σ) PᵀP diag(1/σ).
    """
    turned = base.shape[0] < base.shape[1]
    origin, *versions = (tensor.mT if turned else tensor for tensor in (base, *active.experts))
    total, sizes = torch.zeros_like(origin, dtype=dtype), [tau**0.5 for tau in active.tau]
    units = as_vector([1 / size for size in sizes], total)[:, None, None]

    def scaled(part: slice = slice(None)) -> Iterator[tuple[slice, Tensor]]:
        """Yield blocks of Δ_t / ‖Δ_t‖ of some experts, whose squares are in range."""
        for rows, stack in delta_blocks(origin, versions[part], dtype):
            yield rows, stack.mul_(units[part])

    rank = max(1, min(active.shape) // len(sizes))  # departure: the paper's share could be none
    own = []
    for t in range(len(sizes)):
        squares = (gram(unit[0].mT).double() for _, unit in scaled(slice(t, t + 1)))
        own.append(leading_eigenpairs(reduce(Tensor.add_, squares), rank)[1])
    rights = torch.stack(own).to(dtype)

    def projected() -> Iterator[tuple[slice, Tensor]]:
        """Yield blocks of P, (m, n), of Δ_t / ‖Δ_t‖."""
        for rows, unit in scaled():
            yield rows, product(unit, rights).transpose(0, 1).flatten(1)

    square = reduce(Tensor.add_, (gram(block.mT).double() for _, block in projected()))
    values = square.diagonal().sqrt().view(len(sizes), -1)
    weights, given = active.relative_weights, active.coefficients
    numbers = zip(rounding_floors(active), given, weights, sizes, strict=True)
    floors, factors = as_vector([[f / size, a * w * size] for f, a, w, size in numbers], values).mT
    weakest = WEAKEST[dtype]
    least = torch.maximum(weakest * values.amax(dim=1), floors)[:, None]
    kept, strengths = (values > least).flatten(), (values * factors[:, None]).flatten()
    values = torch.where(kept, values.flatten(), math.inf)
    overlaps, vectors = leading_eigenpairs(square / torch.outer(values, values), len(square))
    roots = overlaps.clamp(min=0).sqrt()
    roots = torch.where(roots > weakest * roots[:1], 1 / roots, 0)
    outer = orthogonal_factor(rights.transpose(0, 1).flatten(1) * kept)
    mixing = product(vectors * roots, vectors.mT) * strengths / values[:, None]
    mixing = product(mixing, outer.mT).to(dtype)
    for rows, block in projected():
        total[rows] = product(block, mixing)
    return total.mT if turned else total
