# SPDX-License-Identifier: Apache-2.0
"""The orthonormal factor of a matrix: P = U Vᵀ of A = U diag(σ) Vᵀ, without its singular vectors.

A matrix that is much longer than wide goes by the eigenpairs of its Gram matrix. Others are brought
to P by a few steps of a rational function of the singular values (QDWH; Nakatsukasa, Bai and Gygi,
2010), X ← X (b/c + (a − b/c)(I + c XᵀX)⁻¹), which maps [l, 1] as near to 1 as one step can: three
take singular values from 1e-5 to 0.9995. They consist of products, Cholesky factors and solves,
and those that magnify no rounding by much are done in float32 where the caller allows for it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from mergekit_ace.algebra.conditioning import inverse_norm, largest_eigenvalue, smallest_eigenvalue
from mergekit_ace.algebra.eigenpairs import smaller_gram
from mergekit_ace.algebra.linalg import (
    cholesky_,
    mirror,
    product,
    rounding,
    solve_,
    squared_norm,
)
from mergekit_ace.algebra.spectrum import DEFAULT_TOLERANCE, SMALL_SIDE, singular_directions

# From so many times as long as wide on, eigenpairs of the Gram matrix take fewer operations.
LONG = 2
# The smallest σ / σ_1 that a Gram matrix in float64 tells from zero.
LEAST_RATIO = 1e-7


def polar_factor(
    matrix: Tensor, floor: float = 0.0, tolerance: float = DEFAULT_TOLERANCE
) -> Tensor:
    """Return U Vᵀ of A = U diag(σ) Vᵀ: the nearest matrix with orthonormal rows, or columns.

    Directions that rounding cannot tell from zero are left out of it, where a full decomposition
    would return arbitrary vectors.

    Args:
        matrix: A, (o, i), float64, or float32 where `tolerance` allows for it; finite.
        floor: singular values that are no larger count as rounding, see `noise_edge`.
        tolerance: the relative error that is allowed, in the Frobenius norm.

    Returns:
        (o, i), in the dtype of the matrix.
    """
    short, long = sorted(matrix.shape)
    if short > SMALL_SIDE and long < LONG * short:
        turned = matrix.shape[0] < matrix.shape[1]
        found = _by_steps(matrix.mT if turned else matrix, floor, tolerance)
        if found is not None:
            return found.mT if turned else found
    directions = singular_directions(matrix, floor=floor, tolerance=tolerance)
    return product(directions.left, directions.right.mT)


def nearest_orthonormal(columns: Sequence[Tensor], tolerance: float = DEFAULT_TOLERANCE) -> Tensor:
    """Return the matrix with orthonormal columns that is nearest to some columns side by side.

    Columns that repeat others have none (Procrustes, see `polar_factor`).

    Args:
        columns: matrices (n, k_t).
        tolerance: see `polar_factor`.

    Returns:
        (n, Σ k_t).
    """
    return polar_factor(torch.cat(list(columns), dim=1), tolerance=tolerance)


def _by_steps(tall: Tensor, floor: float, tolerance: float) -> Tensor | None:
    """Return the orthonormal factor of a matrix (n, m), n ≥ m; None if it is nearly singular."""
    gram = mirror(smaller_gram(tall.mT, torch.float64))
    smallest, largest = _bounds(gram)
    if not (smallest > LEAST_RATIO * largest and smallest > floor):
        return None
    ratio, step = smallest / largest, tall / largest
    gram.div_(largest**2)
    while 1 - ratio > 1.5 * tolerance:
        a, b, c = step_weights(ratio)
        moved = _through_inverse(step, gram, c, tolerance)
        if moved is None:
            return None
        step, gram = moved.mul_(a - b / c).add_(step, alpha=b / c), None
        ratio *= (a + b * ratio**2) / (1 + c * ratio**2)
    return step.mul_(2 / (1 + ratio)).to(tall.dtype)  # from [ratio, 1] to both sides of 1


def _bounds(gram: Tensor) -> tuple[float, float]:
    """Return what no singular value is below, 0 if one is 0, and what none is above.

    Powers of XᵀX, (m, m), and of its inverse find both but for a factor, which is allowed for.
    """
    largest = largest_eigenvalue(gram, steps=10)
    lower = gram.clone()
    smallest = smallest_eigenvalue(lower) if cholesky_(lower) else 0.0
    return (smallest / 2) ** 0.5, (1.2 * largest) ** 0.5


def step_weights(ratio: float) -> tuple[float, float, float]:
    """Return a, b and c of x (a + b x²)/(1 + c x²), which maps [l, 1] nearest to 1.

    Args:
        ratio: l, above 0 and below 1.
    """
    square = ratio**2
    d = (4 * (1 - square) / square**2) ** (1 / 3)
    root = math.sqrt(1 + d)
    a = root + math.sqrt(max(0.0, 8 - 4 * d + 8 * (2 - square) / (square * root))) / 2
    b = (a - 1) ** 2 / 4
    return a, b, a + b - 1


def _through_inverse(
    step: Tensor, gram: Tensor | None, weight: float, tolerance: float
) -> Tensor | None:
    """Return X (I + c XᵀX)⁻¹ in the first precision that has the digits; None if none has.

    Args:
        step: X, (n, m), n ≥ m, singular values up to 1.
        gram: XᵀX in float64, if that is known; overwritten.
        weight: c.
        tolerance: of the orthonormal factor.
    """
    narrow = weight * rounding(torch.float32) <= tolerance / 8
    for dtype in (torch.float32, torch.float64) if narrow else (torch.float64,):
        known = gram is not None and gram.dtype == dtype
        system = gram if known else mirror(smaller_gram(step.mT, dtype))
        system.mul_(weight).diagonal().add_(1)
        size = squared_norm(system) ** 0.5
        if not cholesky_(system):
            continue
        # what the rounding of XᵀX amounts to, magnified by the inverse
        error = rounding(dtype) * (4 + size * inverse_norm(system) / 2)
        if error <= tolerance / 4:
            rows = step.to(dtype, copy=True, memory_format=torch.contiguous_format)
            return solve_(rows, system)
    return None
