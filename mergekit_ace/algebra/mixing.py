# SPDX-License-Identifier: Apache-2.0
"""The closed form through a mixing matrix per task.

Since A = Σ_t (S_t + ε_t I), the matrices W_t = (S_t + ε_t I) A⁻¹ sum to the identity, and with the
reference r (see `Covariances`)

    Y = Σ_t C_t W_t = C_r + Σ_{t≠r} (C_t − C_r) W_t.

All that has o rows is formed, multiplied and forgotten in blocks. A is summed up and factored, and
the W_t are solved for, in float64, which is cheap for (i, i) matrices. Two forms differ in what
they remember: ``tall`` keeps all S_t, ``lean`` one, whatever T is, and forms the others once for A
and once more when their turn comes.
"""

from __future__ import annotations

import torch
from torch import Tensor

from mergekit_ace.algebra.closed_form import (
    IllConditionedError,
    Solution,
    complete_,
    factorize_within,
    inverse_norm,
    prior_row,
    residual_row,
    tolerance,
)
from mergekit_ace.algebra.covariance import Covariances, Task
from mergekit_ace.algebra.linalg import add_product_, blocks, mirror, restore_, rounding, solve_
from mergekit_ace.algebra.task_vectors import squared_norm

CONDITION_LIMIT = {torch.float32: 1e7, torch.float64: 1e13}


def solve_tall(covariances: Covariances, *, prior: bool, refined: bool) -> Solution:
    """Solve for X, and with `refined` for F.

    Needs memory for T − 1 (i, i) matrices, and one in float64, beside X; then, with `refined`, for
    the latter and F.

    Args:
        covariances: the estimates of at least one task.
        prior: whether the structural prior enters.
        refined: whether F is wanted.

    Raises:
        IllConditionedError: A has no factor, a condition number beyond `CONDITION_LIMIT`, or the
            error by `_error` is beyond `tolerance`.
    """
    return _solve(covariances, prior, refined, kept=len(covariances.tasks) - 1)


def solve_lean(covariances: Covariances, *, prior: bool, refined: bool) -> Solution:
    """Solve for the same with memory for one (i, i) matrix in the place of T − 1."""
    return _solve(covariances, prior, refined, kept=1)


def _solve(covariances: Covariances, prior: bool, refined: bool, kept: int) -> Solution:
    reference, others = covariances.reference_task, covariances.others
    split = max(0, len(others) - kept)
    forgotten, remembered = others[:split], others[split:]
    total, matrices = _covariances(covariances, [reference, *forgotten], remembered)
    common = total.mean(dim=0) / covariances.mean_tau if prior else None
    total.diagonal().add_(covariances.ridge)
    diagonal, dtype = total.diagonal().clone(), reference.mean.dtype
    lower, condition, error = _factorize(total, dtype)
    row = None if common is None else prior_row(lower, common).to(dtype)

    merged, turned = covariances.new(*covariances.shape), covariances.new(covariances.shape[1])
    while remembered:
        for task, matrix in zip(remembered, matrices, strict=True):
            turned.addmv_(matrix, task.mean - reference.mean)
            _mix(matrix, task.ridge, lower)
        _add_products(covariances, merged, remembered, matrices)
        remembered, matrices = forgotten[:1], matrices[:1]
        for task in remembered:
            mirror(covariances.add_estimate(matrices[0].zero_(), task))
        forgotten = forgotten[1:]
    del matrices
    residual = None
    if refined:
        system = restore_(lower, diagonal).to(dtype)
        residual = system, residual_row(covariances, system, turned)
    del total, lower
    target = complete_(covariances, merged, row, residual)
    return Solution(merged, target, condition, error)


def _covariances(
    covariances: Covariances, forgotten: list[Task], remembered: list[Task]
) -> tuple[Tensor, list[Tensor]]:
    """Return S in float64, and the S_t that are to be remembered, (i, i)."""
    columns = covariances.shape[1]
    total = covariances.new(columns, columns, dtype=torch.float64)
    matrices = [covariances.new(columns, columns)]
    for task in forgotten:
        _widen(total, covariances.add_estimate(matrices[0].zero_(), task))
    for t, task in enumerate(remembered):
        if t == 0:
            matrices[0].zero_()
        else:
            matrices.append(covariances.new(columns, columns))
        _widen(total, mirror(covariances.add_estimate(matrices[t], task)))
    return mirror(total), matrices[: len(remembered)]


def _widen(total: Tensor, part: Tensor) -> None:
    """Add a lower triangle to that of a wider dtype, in blocks: torch would widen it whole."""
    for block in blocks(*total.shape):
        total[block, : block.stop].add_(part[block, : block.stop])


def _factorize(system: Tensor, dtype: torch.dtype) -> tuple[Tensor, float, float]:
    """Return the factor of A, A's condition number, and the estimated error of X.

    Args:
        system: A, (i, i), in float64; overwritten.
        dtype: of the products.

    Raises:
        IllConditionedError: see `solve_tall`.
    """
    size = squared_norm(system) ** 0.5
    lower, condition = factorize_within(system, CONDITION_LIMIT[dtype])
    error = _error(size * inverse_norm(lower), len(lower), rounding(dtype))
    if error > tolerance(condition):
        raise IllConditionedError(condition, error)
    return lower, condition, error


def _error(growth: float, columns: int, unit: float) -> float:
    """Estimate the relative error of X: only the rounding of the S_t is magnified by A⁻¹.

    Args:
        growth: ‖A‖_F ‖A⁻¹‖_F / √i.
        columns: i; the rounding errors of larger sums even out.
        unit: roundoff of products, see `rounding`.
    """
    return unit * (4 + (0.05 + 0.4 * min(1, 400 / columns)) * growth)


def _mix(matrix: Tensor, ridge: float, lower: Tensor) -> None:
    """Write W_t over S_t, (i, i), which is symmetric: a row of it times A⁻¹ is a row of W_t."""
    matrix.diagonal().add_(ridge)
    for block in blocks(*matrix.shape):
        part = matrix[block]
        part.copy_(solve_(part.to(lower.dtype), lower))


def _add_products(
    covariances: Covariances, total: Tensor, tasks: list[Task], matrices: list[Tensor]
) -> None:
    """Add Σ (C_t − C_r) W_t, (o, i)."""
    for block in blocks(*total.shape):
        first = covariances.reference_block(block)
        for task, matrix in zip(tasks, matrices, strict=True):
            add_product_(total[block], covariances.difference(task, block, first), matrix)
