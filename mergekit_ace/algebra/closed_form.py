# SPDX-License-Identifier: Apache-2.0
"""The ridge regression that the covariances define (Eq. 14), with its rank-one prior (Eqs. 11-13).

With A = Σ_t (S_t + ε_t I) and B = Σ_t C_t (S_t + ε_t I), the merged task vector is
X = B (A + 1 cᵀ)⁻¹. A is symmetric and positive definite, so it is factored once by Cholesky, and
the prior comes in by the formula of Sherman and Morrison:

    X = Y − (Y 1)(cᵀA⁻¹) / (1 + cᵀA⁻¹1),    Y = B A⁻¹

c is the mean row of Σ S_t, which commutes with A: the denominator is never below 1.
"""

from __future__ import annotations

import torch
from torch import Tensor

from mergekit_ace.algebra.covariance import CovarianceSums

# The relative error of a solve is about the condition number times the precision's 6e-8 or 1e-16.
# Beyond these limits less than about four digits of a result would be right.
CONDITION_LIMIT = {torch.float32: 2e3, torch.float64: 1e12}


class IllConditionedError(ValueError):
    """A is singular, or so near to it that the solution would be noise, in the dtype at hand.

    Attributes:
        condition: the estimated condition number; infinite where no factor exists.
    """

    def __init__(self, condition: float):
        super().__init__(f"the regularised covariance has condition number {condition:.1e}")
        self.condition = condition


def add_ridge(sums: CovarianceSums) -> Tensor:
    """Turn ``sums.system`` into A = Σ_t (S_t + ε_t I), (i, i), in place, and return it."""
    sums.system.diagonal().add_(sums.ridge)
    return sums.system


def structural_prior(sums: CovarianceSums, mean_tau: float | None) -> Tensor:
    """c, (i,), the mean row of Σ S_t before the ridge (Eq. 12).

    Args:
        sums: with ``system`` not yet ridged.
        mean_tau: mean_t τ_t of the original task vectors, by which c is divided exactly when S_t
            was normalised by its trace (Eq. 13); None otherwise.
    """
    prior = sums.system.mean(dim=0)
    return prior if mean_tau is None else prior / mean_tau


def solve(sums: CovarianceSums, prior: Tensor | None) -> tuple[Tensor, float]:
    """X = B (A + 1 cᵀ)⁻¹ in units of ``sums.unit``, and the estimated condition number of A.

    Equivalent to ``torch.linalg.solve(A + ones ⊗ c, B, left=False)``.

    Args:
        sums: with ``system`` already ridged, (i, i).
        prior: c, (i,), or None.

    Raises:
        IllConditionedError: A has no Cholesky factor, or a condition number beyond
            `CONDITION_LIMIT` of its dtype.
    """
    factor, info = torch.linalg.cholesky_ex(sums.system)
    if int(info) != 0:
        raise IllConditionedError(float("inf"))
    condition = estimate_condition(sums.system, factor)
    if not condition <= CONDITION_LIMIT[factor.dtype]:  # NaN, too, is no answer
        raise IllConditionedError(condition)
    solution = torch.cholesky_solve((sums.product + sums.ridged).mT, factor).mT
    if prior is not None:
        ones = torch.ones_like(prior)
        inverse_ones, inverse_prior = torch.cholesky_solve(
            torch.stack([ones, prior], dim=1), factor
        ).unbind(dim=1)
        shift = solution @ ones / (1 + prior @ inverse_ones)
        solution = solution - torch.outer(shift, inverse_prior)
    return solution, condition


def estimate_condition(matrix: Tensor, factor: Tensor, steps: int = 6) -> float:
    """λ_max/λ_min of a symmetric positive definite matrix, from a few power iterations.

    A lower bound that is nearly always within a factor of two; costs 4·steps·i² operations.

    Args:
        matrix: A, (i, i).
        factor: its lower Cholesky factor, (i, i).
        steps: power iterations on A and on A⁻¹.
    """
    generator = torch.Generator().manual_seed(0)  # the same start everywhere, no global state
    start = torch.randn(matrix.shape[0], 1, generator=generator, dtype=torch.float64)
    top = bottom = start.to(matrix)
    largest = inverse_smallest = 0.0
    for _ in range(steps):
        top = matrix @ (top / torch.linalg.vector_norm(top))
        bottom = torch.cholesky_solve(bottom / torch.linalg.vector_norm(bottom), factor)
        largest = float(torch.linalg.vector_norm(top))
        inverse_smallest = float(torch.linalg.vector_norm(bottom))
    return largest * inverse_smallest
