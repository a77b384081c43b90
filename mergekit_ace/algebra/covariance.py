# SPDX-License-Identifier: Apache-2.0
"""Covariance estimates of the tasks, summed over experts (step 2 of ACE-Merging, Eqs. 5-10).

With C_t the column-centred task vector and G_t = C_tᵀC_t, the estimate is S_t = s_t G_t, where
s_t = w_t, or w_t / tr(G_t) when normalised. The sums that the closed form and the refinement need
are collected in one pass over the experts, one centred task vector at a time:

    S = Σ S_t,  H = Σ C_t S_t,  D = Σ Δ_t,  m = Σ S_t μ_t,  ε̄ = Σ ε_t

C_t S_t goes through the smaller of C_tᵀC_t and C_t C_tᵀ, and tall matrices through blocks of rows.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import torch
from torch import Tensor

from mergekit_ace.algebra.centred import CentredTaskVector
from mergekit_ace.algebra.options import AceOptions
from mergekit_ace.algebra.task_vectors import ActiveExperts, squared_norm


@dataclass
class CovarianceSums:
    """The sums of one matrix over its experts, in units of `unit` for the weights.

    Task vectors are divided by `unit`, a power of two near their root mean square entry, so that
    their third powers in H stay in range; a result X of these sums is X·unit in the base's unit.

    Attributes:
        covariance: S, (i, i).
        product: H, (o, i).
        total: D, (o, i); only where the refinement needs it.
        mean_product: m, (i,); only where the refinement needs it.
        unit: the scale that the task vectors were divided by.
        covariance_unit: what S_t and ε_t are measured in: unit², or 1 where S_t is normalised.
        ridges: ε_t per expert; 0 for one left out.
        tasks: how many experts entered the sums.
    """

    covariance: Tensor
    product: Tensor
    total: Tensor | None
    mean_product: Tensor | None
    unit: float
    covariance_unit: float
    ridges: list[float] = field(default_factory=list)
    tasks: int = 0

    @property
    def ridge(self) -> float:
        """ε̄ = Σ ε_t, so that A = S + ε̄ I."""
        return math.fsum(self.ridges)

    @property
    def epsilon(self) -> tuple[float, ...]:
        """ε_t per expert as Eqs. 9-10 define it, in the base's unit."""
        return tuple(ridge * self.covariance_unit for ridge in self.ridges)


def sum_covariances(
    base: Tensor,
    active: ActiveExperts,
    options: AceOptions,
    *,
    normalized: bool,
    refined: bool,
    dtype: torch.dtype,
) -> CovarianceSums:
    """Collect the sums over the active experts of one matrix.

    Args:
        base: W0, (o, i).
        active: the experts W_t, each (o, i), with their weights and τ_t.
        options: ε and its scale.
        normalized: divide S_t and ε_t by tr(G_t), Eqs. 8 and 10.
        refined: collect D and m too.
        dtype: of the products and sums; at least as wide as ``active.dtype``.

    An expert whose rows all moved alike has C_t = 0. Nothing can be normalised by its trace, so
    with `normalized` it is left out (departure: the paper divides by zero there).
    """
    sums = _empty_sums(base, active, normalized, refined, dtype)
    noise = (8 * torch.finfo(active.dtype).eps) ** 2
    for expert, weight, tau in zip(active.experts, active.weights, active.tau, strict=True):
        task = CentredTaskVector(expert, base, sums.unit, active.dtype, dtype)
        trace = math.fsum(squared_norm(block) for _, block in task.blocks())  # tr(G_t), unit²
        if normalized and trace <= noise * tau / sums.unit**2:
            sums.ridges.append(0.0)
            continue
        scale = weight / trace if normalized else weight
        sums.ridges.append(weight * _ridge(options, trace, base.shape[1], sums.unit, normalized))
        _add_task(sums, task, scale)
    return sums


def add_ridge_terms(sums: CovarianceSums, base: Tensor, active: ActiveExperts) -> Tensor:
    """The numerator of Eq. 14, B = Σ_t C_t (S_t + ε_t I) = H + Σ ε_t C_t, (o, i), in H's place."""
    for expert, ridge in zip(active.experts, sums.ridges, strict=True):
        if ridge > 0:
            task = CentredTaskVector(expert, base, sums.unit, active.dtype, sums.product.dtype)
            for rows, centred in task.blocks():
                sums.product[rows].add_(centred, alpha=ridge)
    return sums.product


def _empty_sums(
    base: Tensor, active: ActiveExperts, normalized: bool, refined: bool, dtype: torch.dtype
) -> CovarianceSums:
    rows, columns = base.shape
    new = {"dtype": dtype, "device": base.device}
    unit = _unit(active, rows * columns)
    return CovarianceSums(
        covariance=torch.zeros(columns, columns, **new),
        product=torch.zeros(rows, columns, **new),
        total=torch.zeros(rows, columns, **new) if refined else None,
        mean_product=torch.zeros(columns, **new) if refined else None,
        unit=unit,
        covariance_unit=1.0 if normalized else unit**2,
    )


def _unit(active: ActiveExperts, entries: int) -> float:
    """The power of two nearest to the root mean square entry: dividing by it rounds nothing."""
    total = math.log2(math.fsum(active.tau))
    return 2.0 ** round((total - math.log2(len(active.experts) * entries)) / 2)


def _ridge(options: AceOptions, trace: float, columns: int, unit: float, normalized: bool) -> float:
    """ε_t before the weight, for a trace in units of unit² (Eqs. 9-10)."""
    if options.epsilon_scale == "relative":  # ε times the mean eigenvalue tr(S_t)/i
        return options.epsilon * (1.0 if normalized else trace) / columns
    return options.epsilon / unit**2 / (trace if normalized else 1.0)


def _add_task(sums: CovarianceSums, task: CentredTaskVector, scale: float) -> None:
    """Add one expert to S and H, and where they are collected to D and m."""
    if task.tall:
        gram = torch.zeros_like(sums.covariance)
        for _, centred in task.blocks():
            gram.addmm_(centred.mT, centred)
        sums.covariance.add_(gram, alpha=scale)
        for block, centred in task.blocks():
            sums.product[block].addmm_(centred, gram, alpha=scale)
    else:  # C_t (C_tᵀ C_t) = (C_t C_tᵀ) C_t, through the smaller square
        ((_, centred),) = task.blocks()
        sums.product.addmm_(centred @ centred.mT, centred, alpha=scale)
        sums.covariance.addmm_(centred.mT, centred, alpha=scale)
    if sums.total is not None and sums.mean_product is not None:
        for block, centred in task.blocks():
            sums.total[block].add_(centred).add_(task.mean)
            sums.mean_product.add_(centred.mT @ (centred @ task.mean), alpha=scale)
    sums.tasks += 1
