# SPDX-License-Identifier: Apache-2.0
"""ACE-Merging of one matrix: Xu et al., CVPR 2026, arXiv 2603.02945, Algorithm 1.

task vectors -> heterogeneity -> covariance sums -> closed form -> spectrum -> added to the base.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from mergekit_ace.algebra.closed_form import (
    IllConditionedError,
    factorize,
    solve,
    structural_prior,
)
from mergekit_ace.algebra.covariance import add_ridge_terms, sum_covariances
from mergekit_ace.algebra.heterogeneity import Heterogeneity, measure_heterogeneity
from mergekit_ace.algebra.mean import merge_mean, merge_trivial
from mergekit_ace.algebra.options import AceOptions
from mergekit_ace.algebra.records import MatrixRecord
from mergekit_ace.algebra.spectrum import (
    WeakDirectionsError,
    covariance_residual,
    isotropic_component,
)
from mergekit_ace.algebra.task_vectors import ActiveExperts, select_active

# Below this much work (multiplications of one Gram product) float64 costs milliseconds on anything.
SMALL_SYSTEM = 2**29


@dataclass(frozen=True)
class _Plan:
    """Step 1's decisions for one matrix."""

    statistics: Heterogeneity
    heterogeneous: bool
    normalized: bool
    rank: int  # of the refinement; 0: none


def merge_matrix(
    base: Tensor,
    experts: Sequence[Tensor],
    weights: Sequence[float] | None = None,
    options: AceOptions | None = None,
) -> tuple[Tensor, MatrixRecord]:
    """Merge the versions of one matrix.

    Args:
        base: W0, (o, i), any floating dtype, finite. The layer computes W0 @ x.
        experts: W_t, each (o, i), finite.
        weights: w_t ≥ 0, one per expert; only their ratios matter; 0 leaves an expert out.
        options: see `AceOptions`.

    Returns:
        W0 + λ X, (o, i), in the compute dtype or wider (the base itself, uncast, where no expert
        changed it), and the record of what was done.

    Raises:
        IllConditionedError: A cannot be factored, even in float64; raise ``epsilon``.
        OverflowError: a task vector overflows the compute dtype.
    """
    options = options or AceOptions()
    weights = weights if weights is not None else [1.0] * len(experts)
    active = select_active(base, experts, weights, options.dtype)
    trivial = merge_trivial(base, active, options.scale)
    if trivial is not None:
        return trivial
    if base.shape[0] == 1:  # one row is its own column mean: a vector in the shape of a matrix
        return merge_mean(base, active, options.scale)
    plan = _plan(active, base.shape, options)
    small = math.prod(base.shape) * base.shape[1] <= SMALL_SYSTEM
    if active.dtype == torch.float32 and not small:
        try:
            return _merge(base, active, options, plan, torch.float32)
        except (IllConditionedError, WeakDirectionsError):
            pass  # float64 has nine digits more
    return _merge(base, active, options, plan, torch.float64)


def _plan(active: ActiveExperts, shape: Sequence[int], options: AceOptions) -> _Plan:
    statistics = measure_heterogeneity(active.tau)
    value = statistics.gamma if options.heterogeneity == "gamma" else statistics.log_variance
    heterogeneous = value > options.heterogeneity_threshold
    switch = {"auto": heterogeneous, "always": True, "never": False}
    rank = int(options.rank_fraction * min(shape))
    return _Plan(
        statistics=statistics,
        heterogeneous=heterogeneous,
        normalized=switch[options.adaptive_normalization],
        rank=rank if switch[options.spectral_refinement] else 0,
    )


def _float32_error(condition: float) -> float:
    """Relative error of a float32 F = R + X, as seen: a few roundings, and those of the solve."""
    return 3e-7 + 1e-7 * condition


def _merge(
    base: Tensor, active: ActiveExperts, options: AceOptions, plan: _Plan, dtype: torch.dtype
) -> tuple[Tensor, MatrixRecord]:
    """Steps 2 to 6 with sums, factor and solve in `dtype`."""
    sums = sum_covariances(
        base, active, options, normalized=plan.normalized, refined=plan.rank > 0, dtype=dtype
    )
    if sums.tasks == 0:  # every expert moved all its rows alike
        return merge_mean(base, active, options.scale)
    prior = None
    if options.structural_prior:
        mean_tau = math.fsum(active.tau) / len(active.tau) if plan.normalized else None
        prior = structural_prior(sums.covariance, mean_tau)
    residual = covariance_residual(sums) if plan.rank > 0 else None
    factor = factorize(sums.covariance, sums.ridge)
    merged = solve(factor, add_ridge_terms(sums, base, active), prior)
    sigma_iso = None
    if residual is not None:
        error = _float32_error(factor.condition) if dtype == torch.float32 else 0.0
        component, strength = isotropic_component(residual.add_(merged), plan.rank, error)
        merged.add_(component)
        sigma_iso = strength * sums.unit
    record = MatrixRecord(
        rule="ace",
        weight=active.spread(active.weights, 0.0),
        tau=active.all_tau,
        gamma=plan.statistics.gamma,
        log_variance=plan.statistics.log_variance,
        heterogeneous=plan.heterogeneous,
        normalized=plan.normalized,
        refined=plan.rank > 0,
        epsilon=active.spread(sums.epsilon, None),
        rank=plan.rank,
        sigma_iso=sigma_iso,
        condition=factor.condition,
        precision=str(dtype).removeprefix("torch."),
    )
    return merged.mul_(options.scale * sums.unit).add_(base), record
