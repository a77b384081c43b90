# SPDX-License-Identifier: Apache-2.0
"""The orthonormal factor of a matrix: P = U Vᵀ of A = U diag(σ) Vᵀ, without its singular vectors.

A matrix that is much longer than wide goes by the eigenpairs of its Gram matrix. Others are brought
to P by a few steps of a rational function of the singular values (QDWH; Nakatsukasa, Bai and Gygi,
2010), X ← X (b/c + (a − b/c)(I + c XᵀX)⁻¹), which maps [l, 1] as near to 1 as one step can: three
take singular values from 1e-5 to 0.9995. They consist of products, Cholesky factors and solves.

What rounding adds in a step is measured: (I + c XᵀX) z is known for random z, and so is what
X (I + c XᵀX)⁻¹ makes of it, which is X z. Most matrices allow for float32 throughout, where the
caller does: a step that magnifies weak directions a thousandfold meets few of them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from mergekit_ace.algebra.conditioning import largest_eigenvalue, probes, smallest_eigenvalue
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
# Random vectors by which errors are measured: their norms come out within a third.
PROBES = 16
# A Gram matrix is wrong by up to six units of rounding in the Frobenius norm, and in the spectral
# norm, as random entries are, by 2/√n of that.
GRAM_ERROR = 12
# A step from [l, 1] magnifies by up to 2.5 l^(-2/3).
GROWTH, GROWTH_POWER = 2.5, 1.5


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
        tall = matrix.mT if turned else matrix
        for dtype in dict.fromkeys((matrix.dtype, torch.float64)):
            found = _by_steps(tall.to(dtype), floor, tolerance)
            if found is not None:
                return (found.mT if turned else found).to(matrix.dtype)
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
    """Return the orthonormal factor of a matrix (n, m), n ≥ m.

    None if it is nearly singular, or its dtype has too few digits.
    """
    gram = mirror(smaller_gram(tall.mT, tall.dtype))
    largest, smallest = (1.2 * largest_eigenvalue(gram, steps=10)) ** 0.5, _least_value(gram)
    assumed = largest * least_ratio(tolerance) if tall.dtype == torch.float32 else 0.0
    known, ratio = smallest >= assumed, max(smallest, assumed) / largest
    least = max(floor / largest, LEAST_RATIO)
    if not ratio > least:
        return None
    step, spent = tall / largest, 0.0
    gram.div_(largest**2)
    while 1 - ratio > 1.5 * tolerance:
        a, b, c = step_weights(ratio)
        narrow = 8 * a * rounding(torch.float32) <= tolerance
        moved, error = _through_inverse(step, gram, c, torch.float32 if narrow else tall.dtype)
        if narrow and not (a - b / c) * error <= tolerance / 8 and tall.dtype != torch.float32:
            moved, error = _through_inverse(step, gram, c, tall.dtype)
        spent += (a - b / c) * error
        if not spent <= tolerance / 3:  # nor is NaN an answer
            return None
        step, gram = moved.mul_(a - b / c).add_(step, alpha=b / c), None
        ratio *= (a + b * ratio**2) / (1 + c * ratio**2)
        if not known:  # smaller ones than assumed, a times as large now, can be seen
            gram = mirror(smaller_gram(step.mT, step.dtype))
            ratio, known = _least_value(gram), True
            if not ratio > a * least:
                return None
    step.mul_(2 / (1 + ratio))  # from [ratio, 1] to both sides of 1
    return step if _distance_from_orthonormal(step) <= tolerance else None


def _least_value(gram: Tensor) -> float:
    """Return what no singular value of X is below, 0 if XᵀX, (m, m), cannot tell.

    Powers of its inverse find the smallest one but for a factor, which is allowed for.
    """
    unknown = GRAM_ERROR * rounding(gram.dtype) * squared_norm(gram) ** 0.5 / len(gram) ** 0.5
    lower = gram.clone()
    smallest = smallest_eigenvalue(lower) - unknown if cholesky_(lower) else 0.0
    return (max(0.0, smallest) / 2) ** 0.5


def least_ratio(tolerance: float) -> float:
    """Return the smallest l for which a step from [l, 1] in float32 stays within a tolerance.

    Of a matrix with independent entries, whose weak directions are few, it spends a tenth of it.
    """
    return (16 * GROWTH * rounding(torch.float32) / tolerance) ** GROWTH_POWER


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
    step: Tensor, gram: Tensor | None, weight: float, dtype: torch.dtype
) -> tuple[Tensor, float]:
    """Return X (I + c XᵀX)⁻¹, and its error in the Frobenius norm over √m; inf if it has no digits.

    Args:
        step: X, (n, m), n ≥ m, singular values up to 1.
        gram: XᵀX, if that is known; overwritten if it is of the dtype that is asked for.
        weight: c.
        dtype: of the result.
    """
    known = gram is not None and gram.dtype == dtype
    system = gram if known else mirror(smaller_gram(step.mT, dtype))
    system.mul_(weight).diagonal().add_(1)
    given = step.to(dtype)
    if not cholesky_(system):
        return given, math.inf
    moved = solve_(given.clone(memory_format=torch.contiguous_format), system)
    some = solve_(probes(system, PROBES), system)
    images = product(some, given.mT)
    some.add_(product(images, given), alpha=weight)  # about the probes again, but known exactly
    wrong = product(some, moved.mT).sub_(images)
    return moved, float(torch.linalg.vector_norm(wrong)) / (PROBES * len(system)) ** 0.5


def _distance_from_orthonormal(columns: Tensor) -> float:
    """Measure ‖P − P'‖ / √m of P, (n, m), and the nearest P' with orthonormal columns."""
    some = probes(columns.mT, PROBES)
    wrong = product(product(some, columns.mT), columns).sub_(some)
    return float(torch.linalg.vector_norm(wrong) / torch.linalg.vector_norm(some)) / 2
