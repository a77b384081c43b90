# SPDX-License-Identifier: Apache-2.0
"""The closed form through the (i, i) system A = Σ_t (S_t + ε_t I).

With the reference r (see `Covariances`) and the numerator B = Σ_{t≠r} (C_t − C_r)(S_t + ε_t I),

    Y = Σ_t C_t (S_t + ε_t I) A⁻¹ = C_r + B A⁻¹.
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
from mergekit_ace.algebra.linalg import (
    add_gram,
    add_product_,
    blocks,
    mirror,
    product,
    restore_,
    rounding,
    solve_,
)
from mergekit_ace.algebra.task_vectors import squared_norm

# Beyond it, even a Cholesky factor is noise.
CONDITION_LIMIT = {torch.float32: 5e4, torch.float64: 1e13}


def solve_primal(covariances: Covariances, *, prior: bool, refined: bool) -> Solution:
    """Solve the (i, i) system for X, and with `refined` for F.

    Needs memory for one (i, i) matrix beside X, or two for a tall one, and for F.

    Args:
        covariances: the estimates of at least one task.
        prior: whether the structural prior enters.
        refined: whether F is wanted.

    Raises:
        IllConditionedError: A has no factor, a condition number beyond `CONDITION_LIMIT`, or the
            error by `_error` is beyond `tolerance`.
    """
    total, numerator, turned = _sum_up(covariances)
    common = total.mean(dim=0) / covariances.mean_tau if prior else None
    total.diagonal().add_(covariances.ridge)
    centre = residual_row(covariances, total, turned) if refined else None
    diagonal = total.diagonal().clone()
    lower, condition = factorize_within(total, CONDITION_LIMIT[total.dtype])
    growth = squared_norm(numerator) ** 0.5 * inverse_norm(lower)
    row = None if common is None else prior_row(lower, common)
    solve_(numerator, lower)
    residual = None if centre is None else (restore_(lower, diagonal), centre)
    target = complete_(covariances, numerator, row, residual)
    size, unit = squared_norm(numerator) ** 0.5, rounding(numerator.dtype)
    error = _error(growth / size if size else 0.0, unit)  # all coefficients may be 0
    if error > tolerance(condition):
        raise IllConditionedError(condition)
    return Solution(numerator, target, condition, error)


def _error(growth: float, unit: float) -> float:
    """Estimate the relative error of X.

    The products in B are rounded against its largest entries, however small C_t and S_t are along
    the weak directions of A; the solve magnifies that by A⁻¹.

    Args:
        growth: ‖B‖_F ‖A⁻¹‖_F / (√i ‖X‖_F).
        unit: roundoff of products and solve, see `rounding`.
    """
    return unit * (3 + 8 * growth)


def _sum_up(covariances: Covariances) -> tuple[Tensor, Tensor, Tensor]:
    """Return S, (i, i), the numerator B, (o, i), and Σ_{t≠r} S_t (μ_t − μ_r), (i,)."""
    rows, columns = covariances.shape
    total = covariances.new(columns, columns)
    numerator, turned = covariances.new(rows, columns), covariances.new(columns)
    reference = covariances.reference_task
    gram = covariances.new(columns, columns) if through_gram(rows, columns) else None
    covariances.add_estimate(total, reference)
    for task in covariances.others:
        if gram is None:
            _add_through_rows(total, numerator, turned, task, reference)
        else:
            covariances.add_estimate(gram.zero_(), task)
            total.add_(gram)
            turned.addmv_(mirror(gram), task.mean - reference.mean)
            gram.diagonal().add_(task.ridge)
            for block in blocks(rows, columns):
                first = covariances.reference_block(block)
                difference = covariances.difference(task, block, first)
                add_product_(numerator[block], difference, gram)
    return mirror(total), numerator, turned


def through_gram(rows: int, columns: int) -> bool:
    """Tell whether C_tᵀC_t is formed for the numerator, or rather (C_t − C_r) C_tᵀ, (o, o)."""
    return columns <= 2 * rows


def _add_through_rows(
    total: Tensor, numerator: Tensor, turned: Tensor, task: Task, reference: Task
) -> None:
    """Add one task's part to the sums, its numerator through the smaller square."""
    centred = task.centred()
    add_gram(total, centred.mT, task.scale)
    turned.addmv_(centred.mT, centred @ (task.mean - reference.mean), alpha=task.scale)
    difference = reference.centred().mul_(-reference.coefficient)
    difference.add_(centred, alpha=task.coefficient)
    small = product(difference, centred.mT)
    add_product_(numerator, small, centred, task.scale)
    numerator.add_(difference, alpha=task.ridge)
