# SPDX-License-Identifier: Apache-2.0
"""The ridge regression that the covariances define (Eq. 14), with its rank-one prior (Eqs. 11-13).

With A = Σ_t (S_t + ε_t I) and B = Σ_t C_t (S_t + ε_t I), the merged task vector is
X = B (A + 1 cᵀ)⁻¹. A is symmetric and positive definite, so it is factored once by Cholesky, and
the prior comes in by the formula of Sherman and Morrison:

    X = Y − (Y 1)(cᵀA⁻¹) / (1 + cᵀA⁻¹1),    Y = B A⁻¹

c is the mean row of Σ S_t, which commutes with A: the denominator is never below 1.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from mergekit_ace.algebra.blocks import blocks

# The relative error of a solve is at most about 2e-7 (float32) or 4e-16 (float64) times the
# condition number; half of that has been seen. At these limits it is 4e-4, a twentieth of what
# storing a merged task vector in bfloat16 costs (README, `dtype`).
CONDITION_LIMIT = {torch.float32: 2e3, torch.float64: 1e12}


class IllConditionedError(ValueError):
    """A is singular, or so near to it that the solution would be noise, in the dtype at hand.

    Attributes:
        condition: the estimated condition number; infinite where no factor exists.
    """

    def __init__(self, condition: float):
        super().__init__(f"the regularised covariance has condition number {condition:.1e}")
        self.condition = condition


@dataclass(frozen=True)
class Factor:
    """The Cholesky factor of A = S + ε̄ I.

    Attributes:
        lower: L, (i, i), A = L Lᵀ.
        condition: estimated condition number of A.
    """

    lower: Tensor
    condition: float

    def solve(self, right: Tensor) -> Tensor:
        """A⁻¹ R for a right-hand side R, (i, n)."""
        return torch.cholesky_solve(right, self.lower)


def factorize(covariance: Tensor, ridge: float) -> Factor:
    """Factor A = S + ε̄ I.

    Args:
        covariance: S, (i, i), symmetric and positive semidefinite; overwritten by A.
        ridge: ε̄ ≥ 0.

    Raises:
        IllConditionedError: A has no Cholesky factor, or a condition number beyond
            `CONDITION_LIMIT` of its dtype.
    """
    covariance.diagonal().add_(ridge)
    lower, info = torch.linalg.cholesky_ex(covariance)
    if int(info) != 0:
        raise IllConditionedError(float("inf"))
    condition = estimate_condition(covariance, lower)
    if not condition <= CONDITION_LIMIT[lower.dtype]:  # NaN, too, is no answer
        raise IllConditionedError(condition)
    return Factor(lower, condition)


def structural_prior(covariance: Tensor, mean_tau: float | None) -> Tensor:
    """c, (i,), the mean row of Σ S_t without the ridge (Eq. 12).

    Args:
        covariance: Σ S_t, (i, i).
        mean_tau: mean_t τ_t of the original task vectors, by which c is divided exactly when S_t
            was normalised by its trace (Eq. 13); None otherwise.
    """
    prior = covariance.mean(dim=0)
    return prior if mean_tau is None else prior / mean_tau


def solve(factor: Factor, numerator: Tensor, prior: Tensor | None) -> Tensor:
    """X = B (A + 1 cᵀ)⁻¹, (o, i).

    Equivalent to ``torch.linalg.solve(A + ones ⊗ c, B, left=False)``.

    Args:
        factor: of A, (i, i).
        numerator: B, (o, i); overwritten by X and returned.
        prior: c, (i,), or None.
    """
    for rows in blocks(*numerator.shape):
        numerator[rows] = factor.solve(numerator[rows].mT).mT
    if prior is None:
        return numerator
    sides = torch.stack([torch.ones_like(prior), prior], dim=1)
    inverse_ones, inverse_prior = factor.solve(sides).unbind(dim=1)
    shift = numerator.sum(dim=1) / (1 + prior @ inverse_ones)
    return numerator.addr_(shift, inverse_prior, alpha=-1)


def estimate_condition(matrix: Tensor, lower: Tensor, steps: int = 6) -> float:
    """λ_max/λ_min of a symmetric positive definite matrix, from a few power iterations.

    A lower bound that is nearly always within a factor of two; costs 6·steps·i² operations.

    Args:
        matrix: A, (i, i).
        lower: its Cholesky factor, (i, i).
        steps: power iterations on A and on A⁻¹.
    """
    # The same start everywhere, and none of the global random numbers. Named devices, because
    # mergekit's --multi-gpu merges inside of `with torch.device(…)`.
    generator = torch.Generator("cpu").manual_seed(0)
    start = torch.randn(matrix.shape[0], 1, generator=generator, dtype=torch.float64, device="cpu")
    top = bottom = start.to(matrix)
    largest = inverse_smallest = 0.0
    for _ in range(steps):
        top = matrix @ (top / torch.linalg.vector_norm(top))
        bottom = torch.cholesky_solve(bottom / torch.linalg.vector_norm(bottom), lower)
        largest = float(torch.linalg.vector_norm(top))
        inverse_smallest = float(torch.linalg.vector_norm(bottom))
    return largest * inverse_smallest
