# SPDX-License-Identifier: Apache-2.0
"""Factors of matrices that may have none, and estimates of how ill-conditioned they are.

No estimate takes more than a few products with vectors, and a GPU is waited for once.
"""

from __future__ import annotations

import torch
from torch import Tensor

from mergekit_ace.algebra.linalg import cholesky_, solve_
from mergekit_ace.algebra.records import IllConditionedError


def factorize(matrix: Tensor) -> Tensor:
    """Overwrite the lower triangle of a symmetric positive definite matrix by its Cholesky factor.

    Args:
        matrix: (n, n), its lower triangle; what is above the diagonal stays, see `cholesky_`.

    Raises:
        IllConditionedError: there is no factor.
    """
    if not cholesky_(matrix):
        raise IllConditionedError(float("inf"))
    return matrix


def factorize_within(matrix: Tensor, limit: float) -> tuple[Tensor, float]:
    """Do what `factorize` does to a matrix of which all is valid; return its condition number, too.

    Raises:
        IllConditionedError: there is no factor, or the condition number is beyond `limit`.
    """
    largest = largest_eigenvalue(matrix)
    lower = factorize(matrix)
    condition = largest / smallest_eigenvalue(lower)
    if not condition <= limit:  # NaN, too, is no answer
        raise IllConditionedError(condition)
    return lower, condition


def largest_eigenvalue(*factors: Tensor, steps: int = 5) -> float:
    """Estimate λ_max of a symmetric matrix from below by power iterations.

    What comes out is nearly always at least half of it.

    Args:
        factors: one or more whose product is positive semidefinite, (n, n) each, all of them valid.
        steps: iterations of 2 n² operations for each factor.
    """
    vector = probes(factors[0])
    for _ in range(steps):
        vector = vector / torch.linalg.vector_norm(vector)
        for factor in factors:
            vector = vector @ factor
    return float(torch.linalg.vector_norm(vector))


def smallest_eigenvalue(lower: Tensor, steps: int = 5) -> float:
    """Estimate λ_min of L Lᵀ by inverse iterations: from above, like `largest_eigenvalue`.

    Args:
        lower: L, (n, n), of which the lower triangle is read.
        steps: iterations of 2 n² operations.
    """
    vector = probes(lower)
    for _ in range(steps):
        vector = solve_(vector / torch.linalg.vector_norm(vector), lower)
    value = float(torch.linalg.vector_norm(vector))
    return 1 / value if value else float("inf")


def inverse_norm(lower: Tensor, count: int = 8) -> float:
    """Estimate ‖(L Lᵀ)⁻¹‖_F/√n, the root mean square eigenvalue of the inverse, by random vectors.

    Args:
        lower: L, (n, n), of which the lower triangle is read.
        count: how many random vectors.
    """
    sides = probes(lower, count)
    norm = torch.linalg.vector_norm(sides)
    return float(torch.linalg.vector_norm(solve_(sides, lower)) / norm)


def inverse_trace(lower: Tensor, count: int = 8) -> float:
    """Estimate tr (L Lᵀ)⁻¹ by random vectors; arguments as of `inverse_norm`."""
    sides = probes(lower, count)
    return max(0.0, float((sides * solve_(sides.clone(), lower)).sum()) / count)


def probes(like: Tensor, rows: int = 1) -> Tensor:
    """Return random rows of the length, the dtype and the device of a matrix, (rows, len(like)).

    The same start everywhere, and none of the global random numbers.
    """
    generator = torch.Generator("cpu").manual_seed(0)
    # Named devices, because mergekit's --multi-gpu merges inside of `with torch.device(…)`.
    shape = (rows, len(like))
    start = torch.randn(shape, generator=generator, dtype=torch.float64, device="cpu")
    return start.to(like)
