# SPDX-License-Identifier: Apache-2.0
"""The closed form through mixing matrices, one at a time: accurate, and lean whatever T is.

As in `tall`, Y = C_r + Σ_{t≠r} (C_t − C_r) W_t with W_t = (S_t + ε_t I) A⁻¹ solved in float64. But
no S_t is kept: each is formed once for A, and once more when its turn comes. In the residual

    R = Σ_{t≠r} (C_t − C_r) S_t − (C̄ − C_r) S − ε̄ C̄ + 1 aᵀ        (S, a: see `primal`)

what needs S goes first, so that S can make room for the factor of A.
"""

from __future__ import annotations

import torch
from torch import Tensor

from mergekit_ace.algebra.blocks import blocks
from mergekit_ace.algebra.closed_form import Solution, prior_row
from mergekit_ace.algebra.covariance import Covariances, Task
from mergekit_ace.algebra.primal import add_task_gram, difference, residual_row
from mergekit_ace.algebra.symmetric import mirror
from mergekit_ace.algebra.tall import factorize_exactly, mix_


def solve_lean(covariances: Covariances, *, prior: bool, refined: bool) -> Solution:
    """X, and with `refined` F.

    Needs memory for one (i, i) matrix, and one in float64, beside X and F.

    Args:
        covariances: the estimates of at least one task.
        prior: whether the structural prior enters.
        refined: whether F is wanted.

    Raises:
        IllConditionedError: as `solve_tall` does.
    """
    total = _covariance(covariances)
    target = _begin_residual(covariances, total) if refined else None
    row = residual_row(covariances, total, torch.zeros_like(covariances.mean))
    exact = total.double()
    del total
    common = exact.mean(dim=0) / covariances.mean_tau if prior else None
    lower, condition, error = factorize_exactly(exact, covariances)
    merged = covariances.new(*covariances.shape)
    reference = covariances.tasks[covariances.reference]
    matrix = covariances.new(*lower.shape)
    for task in covariances.tasks:
        if task is not reference:
            mirror(add_task_gram(covariances, matrix.zero_(), task))
            row.addmv_(matrix, task.mean - reference.mean)
            if target is not None:
                _add_products(covariances, target, task, matrix, covariances.covariance_unit)
            _add_products(covariances, merged, task, mix_(matrix, task.ridge, lower))
    shift = None if common is None else prior_row(lower, common).to(row)
    del exact, lower, matrix
    for block in blocks(*merged.shape):
        part = merged[block]
        part.add_(reference.centred(block, out=covariances.buffer("reference", *part.shape)))
        if shift is not None:
            part.addr_(part.sum(dim=1), shift, alpha=-1)
        if target is not None:
            target[block].add_(row, alpha=covariances.covariance_unit).add_(part)
    return Solution(merged, target, condition, error)


def _covariance(covariances: Covariances) -> Tensor:
    """S, (i, i)."""
    columns = covariances.shape[1]
    total = covariances.new(columns, columns)
    for task in covariances.tasks:
        add_task_gram(covariances, total, task)
    return mirror(total)


def _begin_residual(covariances: Covariances, total: Tensor) -> Tensor:
    """−(C̄ − C_r) S − ε̄ C̄, (o, i), in the unit of F."""
    reference = covariances.tasks[covariances.reference]
    residual = covariances.new(*covariances.shape)
    for block in blocks(*residual.shape):
        part = residual[block]
        shift = covariances.buffer("shift", *part.shape).zero_()
        for task in covariances.tasks:
            if task is not reference:
                shift.add_(difference(covariances, task, block), alpha=1 / len(covariances.tasks))
        part.addmm_(shift, total, alpha=-1).sub_(shift, alpha=covariances.ridge)
        first = reference.centred(block, out=covariances.buffer("reference", *part.shape))
        part.sub_(first, alpha=covariances.ridge).mul_(covariances.covariance_unit)
    return residual


def _add_products(
    covariances: Covariances, total: Tensor, task: Task, matrix: Tensor, alpha: float = 1.0
) -> None:
    """total += α (C_t − C_r) M, (o, i)."""
    for block in blocks(*total.shape):
        total[block].addmm_(difference(covariances, task, block), matrix, alpha=alpha)
