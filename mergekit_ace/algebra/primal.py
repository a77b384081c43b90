# SPDX-License-Identifier: Apache-2.0
"""The closed form through the (i, i) system A = Σ_t (S_t + ε_t I), in two ways.

With the reference r (see `Covariances`) and the numerator B = Σ_{t≠r} (C_t − C_r)(S_t + ε_t I),

    Y = Σ_t C_t (S_t + ε_t I) A⁻¹ = C_r + B A⁻¹.

``primal`` solves that for Y. Or, since the mixing matrices W_t = (S_t + ε_t I) A⁻¹ sum to the
identity,

    Y = Σ_t C_t W_t = C_r + Σ_{t≠r} (C_t − C_r) W_t.

There, all that has o rows is formed, multiplied and forgotten in blocks. A is summed up and
factored, and the W_t are solved for, in float64, which is cheap for (i, i) matrices. ``tall`` keeps
all S_t, ``lean`` one, whatever T is, and forms the others once for A and once more when their turn
comes. All else follows from Y − C_r:

    X = Y − (Y 1) qᵀ,        qᵀ = cᵀA⁻¹ / (1 + cᵀA⁻¹1)        (see `prior_row`)
    R = Σ_t Δ_t (S_t − S̄) = (Y − C̄) A − Σ_t (ε_t − ε̄/T) C_t − ρ C̄ + 1 aᵀ,   F = R + X
    a = Σ_t S_t μ_t − (S + ρ I) μ̄ = Σ_{t≠r} S_t (μ_t − μ_r) + S (μ_r − μ̄) − ρ μ̄

with C̄ and μ̄ the means over the T tasks, and T S̄ = S + ρ I: ρ is ε̄ where the refinement's S̄ holds
the ridges, else 0. Since Y A is the numerator of Eq. 14, the residual takes
one product whatever T is, and what a weak direction of A magnified in Y, A makes small again.
"""

from __future__ import annotations

import torch
from torch import Tensor

from mergekit_ace.algebra.conditioning import factorize_within, inverse_norm
from mergekit_ace.algebra.covariance import Covariances, Solution, Task
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
from mergekit_ace.algebra.records import IllConditionedError
from mergekit_ace.algebra.ridge_floor import raise_ridge
from mergekit_ace.algebra.task_vectors import squared_norm

# Beyond these, even a Cholesky factor is noise; mixing matrices are solved for in float64.
CONDITION_LIMIT = {torch.float32: 5e4, torch.float64: 1e13}
MIXING_LIMIT = {torch.float32: 1e7, torch.float64: 1e13}


def solve_primal(
    covariances: Covariances, *, prior: bool, refined: bool, floor: bool = False
) -> Solution:
    """Solve the (i, i) system for X, and with `refined` for F.

    Needs memory for one (i, i) matrix beside X, or two for a tall one, and for F.

    Args:
        covariances: the estimates of at least one task.
        prior: whether the structural prior enters.
        refined: whether F is wanted.
        floor: whether the ridge is raised where X would be amplified, see `raise_ridge`.

    Raises:
        IllConditionedError: A has no factor, a condition number beyond `CONDITION_LIMIT`, or the
            error by `_error` is beyond `Covariances.tolerance`.
    """
    total, numerator, turned = _sum_up(covariances)
    covariances = raise_ridge(covariances, total, bound=floor)
    _add_ridge(covariances, numerator)
    common = total.mean(dim=0) / covariances.mean_tau if prior else None
    total.diagonal().add_(covariances.ridge)
    centre = residual_row(covariances, total, turned) if refined else None
    diagonal = total.diagonal().clone()
    lower, condition = factorize_within(total, CONDITION_LIMIT[total.dtype])
    growth = squared_norm(numerator) ** 0.5 * inverse_norm(lower)
    row = None if common is None else prior_row(lower, common)
    solve_(numerator, lower)
    residual = None if centre is None else (restore_(lower, diagonal), centre)
    target, cancelled = complete_(covariances, numerator, row, residual)
    unit = rounding(numerator.dtype)
    error = _error(growth / covariances.size(numerator), unit)
    if error > covariances.tolerance(condition):
        raise IllConditionedError(condition, error)
    return Solution(numerator, target, condition, error + unit * cancelled, covariances)


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
    """Return S, (i, i), and over the t ≠ r Σ (C_t − C_r) S_t, (o, i), and Σ S_t (μ_t − μ_r), (i,).

    The second is the numerator B but for its ridges, see `_add_ridge`.
    """
    rows, columns = covariances.shape
    total = covariances.new(columns, columns)
    numerator, turned = covariances.new(rows, columns), covariances.new(columns)
    reference = covariances.reference_task
    squares = covariances.is_measured or through_gram(rows, columns)
    gram = covariances.new(columns, columns) if squares else None
    covariances.add_estimate(total, reference)
    for task in covariances.others:
        if gram is None:
            _add_through_rows(total, numerator, turned, task, reference)
        else:
            covariances.add_estimate(gram.zero_(), task)
            total.add_(gram)
            turned.addmv_(mirror(gram), task.mean - reference.mean)
            for block in covariances.row_blocks():
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


def _add_ridge(covariances: Covariances, numerator: Tensor) -> None:
    """Add Σ_{t≠r} ε_t (C_t − C_r) to the numerator, (o, i)."""
    for block in covariances.row_blocks():
        first = covariances.reference_block(block)
        for task in covariances.others:
            moved = covariances.difference(task, block, first)
            numerator[block].add_(moved, alpha=task.ridge)


def solve_tall(
    covariances: Covariances, *, prior: bool, refined: bool, floor: bool = False
) -> Solution:
    """Solve by mixing matrices, all kept at once, for X, and with `refined` for F.

    Needs memory for T − 1 (i, i) matrices, and one in float64, beside X; then, with `refined`, for
    the latter and F.

    Args:
        covariances: the estimates of at least one task.
        prior: whether the structural prior enters.
        refined: whether F is wanted.
        floor: whether the ridge is raised where X would be amplified, see `raise_ridge`.

    Raises:
        IllConditionedError: A has no factor, a condition number beyond `MIXING_LIMIT`, or the
            error by `_mixing_error` is beyond `Covariances.tolerance`.
    """
    kept = len(covariances.tasks) - 1
    return _solve_by_mixing(covariances, prior, refined, floor, kept)


def solve_lean(
    covariances: Covariances, *, prior: bool, refined: bool, floor: bool = False
) -> Solution:
    """Solve as `solve_tall` with memory for one (i, i) matrix in the place of T − 1."""
    return _solve_by_mixing(covariances, prior, refined, floor, kept=1)


def _solve_by_mixing(
    covariances: Covariances, prior: bool, refined: bool, floor: bool, kept: int
) -> Solution:
    split = max(0, len(covariances.tasks) - 1 - kept)
    total, matrices = _covariances(covariances, split)
    covariances = raise_ridge(covariances, total, bound=floor)
    reference, others = covariances.reference_task, covariances.others
    forgotten, remembered = others[:split], others[split:]
    common = total.mean(dim=0) / covariances.mean_tau if prior else None
    total.diagonal().add_(covariances.ridge)
    diagonal, dtype = total.diagonal().clone(), reference.mean.dtype
    lower, condition, error = _factorize(total, covariances)
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
    target, cancelled = complete_(covariances, merged, row, residual)
    error += rounding(dtype) * cancelled
    return Solution(merged, target, condition, error, covariances)


def _covariances(covariances: Covariances, split: int) -> tuple[Tensor, list[Tensor]]:
    """Return S in float64, and the S_t, (i, i), of all but the first `split` tasks t ≠ r."""
    others = covariances.others
    forgotten, remembered = [covariances.reference_task, *others[:split]], others[split:]
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
    for block in blocks(*total.shape, total.device):
        total[block, : block.stop].add_(part[block, : block.stop])


def _factorize(system: Tensor, covariances: Covariances) -> tuple[Tensor, float, float]:
    """Return the factor of A, A's condition number, and the estimated error of X.

    Args:
        system: A, (i, i), in float64; overwritten.
        covariances: the estimates.

    Raises:
        IllConditionedError: see `solve_tall`.
    """
    dtype = covariances.tasks[0].mean.dtype
    size = squared_norm(system) ** 0.5
    lower, condition = factorize_within(system, MIXING_LIMIT[dtype])
    error = _mixing_error(size * inverse_norm(lower), len(lower), rounding(dtype))
    if error > covariances.tolerance(condition):
        raise IllConditionedError(condition, error)
    return lower, condition, error


def _mixing_error(growth: float, columns: int, unit: float) -> float:
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
    for block in blocks(*matrix.shape, matrix.device):
        part = matrix[block]
        part.copy_(solve_(part.to(lower.dtype), lower))


def _add_products(
    covariances: Covariances, total: Tensor, tasks: list[Task], matrices: list[Tensor]
) -> None:
    """Add Σ (C_t − C_r) W_t, (o, i)."""
    for block in covariances.row_blocks():
        first = covariances.reference_block(block)
        for task, matrix in zip(tasks, matrices, strict=True):
            add_product_(total[block], covariances.difference(task, block, first), matrix)


def prior_row(lower: Tensor, prior: Tensor) -> Tensor:
    """Return q, (i,), with B (A + 1 cᵀ)⁻¹ = Y − (Y 1) qᵀ for Y = B A⁻¹ (Sherman and Morrison).

    c is the mean row of Σ S_t, which commutes with A: 1 + cᵀA⁻¹1 is never below 1.

    Args:
        lower: the Cholesky factor of A, (i, i).
        prior: c, (i,).
    """
    inverse_ones, inverse_prior = solve_(torch.stack([torch.ones_like(prior), prior]), lower)
    return inverse_prior / (1 + prior @ inverse_ones)


def complete_(
    covariances: Covariances,
    merged: Tensor,
    prior: Tensor | None,
    residual: tuple[Tensor, Tensor] | None,
) -> tuple[Tensor | None, float]:
    """Write X over Y − C_r, in blocks of rows, and return F.

    Args:
        covariances: the estimates.
        merged: Y − C_r, (o, i); overwritten by X.
        prior: q, (i,); None without a structural prior.
        residual: A, (i, i), and a, (i,); None where F is not wanted.

    Returns:
        F, (o, i), where it is wanted, and what its relative error is beyond that of X, in
        roundoffs: what the ridges add to (Y − C̄) A falls away again in R, up to the rounding errors
        of Y.
    """
    count = len(covariances.tasks)
    shared = (covariances.ridge - covariances.mean_ridge) / count
    target = None if residual is None else torch.empty_like(merged)
    energy = 0.0  # ‖Y − C̄‖²
    for block in covariances.row_blocks():
        part = merged[block]
        first = covariances.reference_block(block)
        if target is not None and residual is not None:
            system, row = residual
            beyond = covariances.buffer("beyond", *part.shape).copy_(part)  # Y − C̄
            rest = torch.sub(row, first, alpha=covariances.mean_ridge, out=target[block])
            for task in covariances.others:
                moved = covariances.difference(task, block, first)
                beyond.sub_(moved, alpha=1 / count)
                rest.sub_(moved, alpha=task.ridge - shared)
            energy += squared_norm(beyond)
            add_product_(rest, beyond, system)
        part.add_(first)
        if prior is not None:
            part.addr_(part.sum(dim=1), prior, alpha=-1)
        if target is not None:
            target[block].mul_(covariances.covariance_unit).add_(part)
    cancelled = 4 * count * shared * covariances.covariance_unit * energy**0.5
    return target, cancelled / covariances.size(merged) if energy else 0.0


def residual_row(covariances: Covariances, system: Tensor, turned: Tensor) -> Tensor:
    """Return a, (i,), from A and Σ_{t≠r} S_t (μ_t − μ_r).

    A (μ_r − μ̄) has ε̄ (μ_r − μ̄) where S (μ_r − μ̄) has none.
    """
    mean, beyond = covariances.mean, covariances.reference_task.mean - covariances.mean
    turned = turned + system @ beyond - covariances.ridge * beyond
    return turned - covariances.mean_ridge * mean
