# SPDX-License-Identifier: Apache-2.0
"""The closed form of tall matrices, through a mixing matrix per task.

Since A = Σ_t (S_t + ε_t I), the matrices W_t = (S_t + ε_t I) A⁻¹ sum to the identity, and with the
reference r (see `Covariances`)

    Y = Σ_t C_t W_t = C_r + Σ_{t≠r} (C_t − C_r) W_t,
    R = Σ_{t≠r} (C_t − C_r)(S_t − S/T) − ε̄ C̄ + 1 aᵀ        (a, S, q: see `primal`).

All that is tall is formed, multiplied and forgotten in blocks of rows. What is solved is (i, i), so
that float64 is cheap there: what a float32 solve loses to the condition of A is won back.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from mergekit_ace.algebra.blocks import blocks
from mergekit_ace.algebra.closed_form import (
    IllConditionedError,
    Solution,
    factorize,
    inverse_norm,
    largest_eigenvalue,
    prior_row,
    smallest_eigenvalue,
    tolerance,
)
from mergekit_ace.algebra.covariance import Covariances, Task
from mergekit_ace.algebra.primal import add_task_gram, residual_row
from mergekit_ace.algebra.symmetric import mirror, solve_
from mergekit_ace.algebra.task_vectors import squared_norm

CONDITION_LIMIT = {torch.float32: 1e7, torch.float64: 1e13}


def solve_tall(covariances: Covariances, *, prior: bool, refined: bool) -> Solution:
    """X, and with `refined` F, in blocks of rows.

    Needs memory for T − 1 (i, i) matrices, twice that with `refined`, and one in float64, beside X
    and F.

    Args:
        covariances: the estimates of at least one task.
        prior: whether the structural prior enters.
        refined: whether F is wanted.

    Raises:
        IllConditionedError: A has no factor, a condition number beyond `CONDITION_LIMIT`, or the
            error by `_error` is beyond `tolerance`.
    """
    total, mixing, turned = _covariances(covariances)
    residual = _residual(covariances, total, mixing, turned) if refined else None
    common = total.mean(dim=0) / covariances.mean_tau if prior else None
    lower, condition, error = factorize_exactly(total, covariances)
    for task, matrix in zip(_others(covariances), mixing, strict=True):
        mix_(matrix, task.ridge, lower)
    row = None if common is None else prior_row(lower, common).to(turned)
    return Solution(*_mix(covariances, mixing, row, residual), condition, error)


def factorize_exactly(total: Tensor, covariances: Covariances) -> tuple[Tensor, float, float]:
    """The factor of A in float64, A's condition number, and the estimated error of X.

    Args:
        total: S, (i, i), in float64; overwritten.
        covariances: the estimates.

    Raises:
        IllConditionedError: see `solve_tall`.
    """
    dtype = covariances.tasks[0].mean.dtype
    size = squared_norm(total) ** 0.5
    total.diagonal().add_(covariances.ridge)
    lower = factorize(total)
    condition = largest_eigenvalue(lower) / smallest_eigenvalue(lower)
    error = _error(size * inverse_norm(lower), len(lower), dtype)
    if not condition <= CONDITION_LIMIT[dtype] or error > tolerance(condition):
        raise IllConditionedError(condition)
    return lower, condition, error


def mix_(matrix: Tensor, ridge: float, lower: Tensor) -> Tensor:
    """W_t = (S_t + ε_t I) A⁻¹ in the place of S_t, (i, i); solved in the factor's dtype."""
    matrix.diagonal().add_(ridge)
    for block in blocks(*matrix.shape):  # rows of S_t, which is symmetric, to rows of W_t
        matrix[block] = solve_(matrix[block].to(lower.dtype, copy=True), lower)
    return matrix


def _error(growth: float, columns: int, dtype: torch.dtype) -> float:
    """Estimated relative error of X: only the rounding of the S_t is magnified by A⁻¹.

    Over families of five kinds with 100 to 2048 columns, condition numbers up to 1e7 and errors
    from 1e-7 to 0.3, it was between the error and three times it; for near-duplicates far above.

    Args:
        growth: ‖S‖_F ‖A⁻¹‖_F / √i.
        columns: i; the rounding errors of larger sums even out.
        dtype: of the products.
    """
    return torch.finfo(dtype).eps / 2 * (4 + (0.05 + 0.3 * min(1, 400 / columns)) * growth)


def _others(covariances: Covariances) -> list[Task]:
    """The tasks t ≠ r."""
    return [task for t, task in enumerate(covariances.tasks) if t != covariances.reference]


def _covariances(covariances: Covariances) -> tuple[Tensor, list[Tensor], Tensor]:
    """S in float64, the S_t of t ≠ r, (i, i), and Σ_{t≠r} S_t (μ_t − μ_r), (i,)."""
    _, columns = covariances.shape
    reference = covariances.tasks[covariances.reference]
    first = covariances.new(columns, columns)
    add_task_gram(covariances, first, reference)
    total, others, turned = mirror(first).double(), [], covariances.new(columns)
    for task in _others(covariances):
        other = covariances.new(columns, columns)
        add_task_gram(covariances, other, task)
        total.add_(mirror(other))
        turned.addmv_(other, task.mean - reference.mean)
        others.append(other)
    return total, others, turned


@dataclass(frozen=True)
class _Residual:
    """R = Σ_{t≠r} (C_t − C_r) V_t − ε̄ C̄ + 1 aᵀ, in the unit of F.

    Attributes:
        factors: V_t of t ≠ r, (i, i).
        ridge: ε̄.
        row: a, (i,).
    """

    factors: list[Tensor]
    ridge: float
    row: Tensor


def _residual(
    covariances: Covariances, total: Tensor, others: list[Tensor], turned: Tensor
) -> _Residual:
    unit, count = covariances.covariance_unit, len(covariances.tasks)
    factors = [torch.sub(other, total, alpha=1 / count).to(turned).mul_(unit) for other in others]
    row = residual_row(covariances, total, turned) * unit
    return _Residual(factors, covariances.ridge * unit, row)


def _mix(
    covariances: Covariances, mixing: list[Tensor], row: Tensor | None, residual: _Residual | None
) -> tuple[Tensor, Tensor | None]:
    """X and F."""
    merged = covariances.new(*covariances.shape)
    target = torch.empty_like(merged) if residual is not None else None
    others = _others(covariances)
    for block in blocks(*merged.shape):
        part = merged[block]
        first = covariances.tasks[covariances.reference].centred(block, out=part)
        mean = covariances.buffer("mean", *part.shape).copy_(first)
        differences = [
            task.centred(block, out=covariances.buffer(f"difference {t}", *part.shape)).sub_(first)
            for t, task in enumerate(others)
        ]
        for difference, matrix in zip(differences, mixing, strict=True):
            mean.add_(difference, alpha=1 / len(covariances.tasks))
            part.addmm_(difference, matrix)
        if row is not None:
            part.addr_(part.sum(dim=1), row, alpha=-1)
        if residual is None or target is None:
            continue
        torch.add(part, residual.row, out=target[block]).sub_(mean, alpha=residual.ridge)
        for difference, matrix in zip(differences, residual.factors, strict=True):
            target[block].addmm_(difference, matrix)
    return merged, target
