# SPDX-License-Identifier: Apache-2.0
"""Covariance estimates of the tasks, summed over experts (step 2 of ACE-Merging, Eqs. 5-10).

With C_t the column-centred task vector and G_t = C_tᵀC_t, the estimate is S_t = s_t G_t, where
s_t = w_t, or w_t / tr(G_t) when normalised. The sums that the closed form and the refinement need
are collected in one pass over the experts, one centred task vector at a time:

    S = Σ S_t,  H = Σ C_t S_t,  E = Σ ε_t C_t,  D = Σ Δ_t,  m = Σ S_t μ_t,  ε̄ = Σ ε_t

C_t S_t goes through the smaller of C_tᵀC_t and C_t C_tᵀ.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import torch
from torch import Tensor

from mergekit_ace.algebra.options import AceOptions
from mergekit_ace.algebra.task_vectors import ActiveExperts, squared_norm, task_vector


@dataclass
class CovarianceSums:
    """The sums of one matrix over its experts, in units of `unit` for the weights.

    Task vectors are divided by `unit`, a power of two near their root mean square entry, so that
    their third powers in H stay in range; a result X of these sums is X·unit in the base's unit.

    Attributes:
        covariance: S, (i, i).
        product: H, (o, i).
        ridged: E, (o, i).
        total: D, (o, i); only where the refinement needs it.
        mean_product: m, (i,); only where the refinement needs it.
        unit: the scale that the task vectors were divided by.
        covariance_unit: what S_t and ε̄ are measured in: unit², or 1 where S_t is normalised.
        ridge: ε̄, so that A = S + ε̄ I.
        epsilon: ε_t per expert as Eqs. 9-10 define it, in the base's unit; 0 for one left out.
        tasks: how many experts entered the sums.
    """

    covariance: Tensor
    product: Tensor
    ridged: Tensor
    total: Tensor | None
    mean_product: Tensor | None
    unit: float
    covariance_unit: float
    ridge: float = 0.0
    epsilon: list[float] = field(default_factory=list)
    tasks: int = 0


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
        delta = task_vector(expert, base, active.dtype).to(dtype).div_(sums.unit)
        mean = delta.mean(dim=0)
        centred = delta.sub_(mean)
        trace = squared_norm(centred)  # tr(G_t) without forming G_t; in units of unit²
        if normalized and trace <= noise * tau / sums.unit**2:
            sums.epsilon.append(0.0)
            continue
        scale = weight / trace if normalized else weight
        ridge = weight * _ridge(options, trace, base.shape[1], sums.unit, normalized)
        _add_task(sums, centred, mean, scale, ridge)
        sums.epsilon.append(ridge * sums.covariance_unit)
    return sums


def _empty_sums(
    base: Tensor, active: ActiveExperts, normalized: bool, refined: bool, dtype: torch.dtype
) -> CovarianceSums:
    rows, columns = base.shape
    new = {"dtype": dtype, "device": base.device}
    unit = _unit(active, rows * columns)
    return CovarianceSums(
        covariance=torch.zeros(columns, columns, **new),
        product=torch.zeros(rows, columns, **new),
        ridged=torch.zeros(rows, columns, **new),
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


def _add_task(
    sums: CovarianceSums, centred: Tensor, mean: Tensor, scale: float, ridge: float
) -> None:
    """Add one expert's C_t, (o, i), to the sums."""
    rows, columns = centred.shape
    if rows < columns:
        sums.product.addmm_(centred @ centred.mT, centred, alpha=scale)
        sums.covariance.addmm_(centred.mT, centred, alpha=scale)
    else:
        gram = centred.mT @ centred
        sums.product.addmm_(centred, gram, alpha=scale)
        sums.covariance.add_(gram, alpha=scale)
    sums.ridged.add_(centred, alpha=ridge)
    if sums.total is not None and sums.mean_product is not None:
        sums.total.add_(centred).add_(mean)
        sums.mean_product.add_(centred.mT @ (centred @ mean), alpha=scale)
    sums.ridge += ridge
    sums.tasks += 1
