# SPDX-License-Identifier: Apache-2.0
"""What the forms of the closed form (Eq. 14) share: a factor, its condition, X and F.

What the (i, i) forms solve for is Y − C_r with Y = Σ_t C_t (S_t + ε_t I) A⁻¹. All else follows:

    X = Y − (Y 1) qᵀ,        qᵀ = cᵀA⁻¹ / (1 + cᵀA⁻¹1)        (see `prior_row`)
    R = Σ_t Δ_t (S_t − S̄) = (Y − C̄) A − Σ_t ε_t C_t + 1 aᵀ,   F = R + X
    a = Σ_t S_t μ_t − A μ̄ = Σ_{t≠r} S_t (μ_t − μ_r) + S (μ_r − μ̄) − ε̄ μ̄

with C̄ and μ̄ the means over the T tasks. Since Y A is the numerator of Eq. 14, the residual takes
one product whatever T is, and what a weak direction of A magnified in Y, A makes small again.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from mergekit_ace.algebra.covariance import Covariances
from mergekit_ace.algebra.linalg import add_product_, blocks, cholesky_, solve_


class IllConditionedError(ValueError):
    """The digits at hand are not enough: A is singular or nearly so, or the result is too blurred.

    Attributes:
        condition: the estimated condition number of A; infinite where no factor exists.
        error: the estimated relative error of the result that led to this; None where the
            condition number alone did.
    """

    def __init__(self, condition: float, error: float | None = None):
        super().__init__(f"the regularised covariance has condition number {condition:.1e}")
        self.condition = condition
        self.error = error


def tolerance(condition: float) -> float:
    """Return the relative error that float32 may leave in a merged task vector.

    Storing a merged task vector in bfloat16 costs ten times as much.

    Args:
        condition: the condition number of A.
    """
    return max(2e-5, min(2e-7 * condition, 1e-3))


@dataclass(frozen=True)
class Solution:
    """The closed form of one matrix, in units of ``Covariances.unit``.

    Attributes:
        merged: X, (o, i).
        target: F = R + X, (o, i), whose leading directions the refinement adds (Eq. 16); None
            where it was not asked for.
        condition: estimated condition number of A.
        error: estimated relative error of X and F.
    """

    merged: Tensor
    target: Tensor | None
    condition: float
    error: float


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


def prior_row(lower: Tensor, prior: Tensor) -> Tensor:
    """Return q, (i,), with B (A + 1 cᵀ)⁻¹ = Y − (Y 1) qᵀ for Y = B A⁻¹ (Sherman and Morrison).

    c is the mean row of Σ S_t, which commutes with A: 1 + cᵀA⁻¹1 is never below 1.

    Args:
        lower: the Cholesky factor of A, (i, i).
        prior: c, (i,).
    """
    inverse_ones, inverse_prior = solve_(torch.stack([torch.ones_like(prior), prior]), lower)
    return inverse_prior / (1 + prior @ inverse_ones)


def largest_eigenvalue(*factors: Tensor, steps: int = 5) -> float:
    """Estimate λ_max of a symmetric matrix from below by power iterations.

    What comes out is nearly always at least half of it.

    Args:
        factors: one or more whose product is positive semidefinite, (n, n) each, all of them valid.
        steps: iterations of 2 n² operations for each factor.
    """
    vector, value = _start(factors[0]), 0.0
    for _ in range(steps):
        vector = vector / torch.linalg.vector_norm(vector)
        for factor in factors:
            vector = vector @ factor
        value = float(torch.linalg.vector_norm(vector))
    return value


def smallest_eigenvalue(lower: Tensor, steps: int = 5) -> float:
    """Estimate λ_min of L Lᵀ by inverse iterations: from above, like `largest_eigenvalue`.

    Args:
        lower: L, (n, n), of which the lower triangle is read.
        steps: iterations of 2 n² operations.
    """
    vector, value = _start(lower), 0.0
    for _ in range(steps):
        vector = solve_(vector / torch.linalg.vector_norm(vector), lower)
        value = float(torch.linalg.vector_norm(vector))
    return 1 / value if value else float("inf")


def inverse_norm(lower: Tensor, probes: int = 8) -> float:
    """Estimate ‖(L Lᵀ)⁻¹‖_F/√n, the root mean square eigenvalue of the inverse, by random vectors.

    Args:
        lower: L, (n, n), of which the lower triangle is read.
        probes: how many random vectors.
    """
    sides = _start(lower, probes)
    norm = torch.linalg.vector_norm(sides)
    return float(torch.linalg.vector_norm(solve_(sides, lower)) / norm)


def inverse_trace(lower: Tensor, probes: int = 8) -> float:
    """Estimate tr (L Lᵀ)⁻¹ by random vectors; arguments as of `inverse_norm`."""
    sides = _start(lower, probes)
    return max(0.0, float((sides * solve_(sides.clone(), lower)).sum()) / probes)


def _start(lower: Tensor, rows: int = 1) -> Tensor:
    # The same start everywhere, and none of the global random numbers. Named devices, because
    # mergekit's --multi-gpu merges inside of `with torch.device(…)`.
    generator = torch.Generator("cpu").manual_seed(0)
    shape = (rows, len(lower))
    start = torch.randn(shape, generator=generator, dtype=torch.float64, device="cpu")
    return start.to(lower)


def complete_(
    covariances: Covariances,
    merged: Tensor,
    prior: Tensor | None,
    residual: tuple[Tensor, Tensor] | None,
) -> Tensor | None:
    """Write X over Y − C_r, in blocks of rows, and return F.

    Args:
        covariances: the estimates.
        merged: Y − C_r, (o, i); overwritten by X.
        prior: q, (i,); None without a structural prior.
        residual: A, (i, i), and a, (i,); None where F is not wanted.

    Returns:
        F, (o, i), where it is wanted.
    """
    count = len(covariances.tasks)
    target = None if residual is None else torch.empty_like(merged)
    for block in blocks(*merged.shape):
        part = merged[block]
        first = covariances.reference_block(block)
        if target is not None and residual is not None:
            system, row = residual
            beyond = covariances.buffer("beyond", *part.shape).copy_(part)  # Y − C̄
            rest = torch.sub(row, first, alpha=covariances.ridge, out=target[block])
            for task in covariances.others:
                moved = covariances.difference(task, block, first)
                beyond.sub_(moved, alpha=1 / count)
                rest.sub_(moved, alpha=task.ridge)
            add_product_(rest, beyond, system)
        part.add_(first)
        if prior is not None:
            part.addr_(part.sum(dim=1), prior, alpha=-1)
        if target is not None:
            target[block].mul_(covariances.covariance_unit).add_(part)
    return target


def residual_row(covariances: Covariances, system: Tensor, turned: Tensor) -> Tensor:
    """Return a, (i,), from A and Σ_{t≠r} S_t (μ_t − μ_r).

    A (μ_r − μ̄) has ε̄ μ_r where S (μ_r − μ̄) − ε̄ μ̄ has none.
    """
    mean, reference = covariances.mean, covariances.reference_task.mean
    return turned + system @ (reference - mean) - covariances.ridge * reference
