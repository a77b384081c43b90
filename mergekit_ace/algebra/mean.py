# SPDX-License-Identifier: Apache-2.0
"""The rules that need no covariance: nobody, one expert, or the mean of the task vectors."""

from __future__ import annotations

from torch import Tensor

from mergekit_ace.algebra.records import MatrixRecord, Rule
from mergekit_ace.algebra.task_vectors import ActiveExperts, task_vector


def merge_trivial(
    base: Tensor, active: ActiveExperts, scale: float
) -> tuple[Tensor, MatrixRecord] | None:
    """The merge of fewer than two active experts; None where there are more.

    Where nobody changed the tensor it is `base` itself, uncast. Where one expert did, it is
    W0 + λ λ_t Δ: with one task the minimiser of Eq. 2 is that expert, whatever its covariance.
    """
    if not active.experts:
        return base, _record("base", active)
    if len(active.experts) > 1:
        return None
    (expert,) = active.experts
    scale = scale * active.coefficients[0]
    if scale == 1:  # W0 + (W − W0) may round; W itself is exact
        merged = expert.to(active.dtype)
    else:
        merged = base.to(active.dtype).add(task_vector(expert, base, active.dtype), alpha=scale)
    return merged, _record("single", active)


def merge_mean(base: Tensor, active: ActiveExperts, scale: float) -> tuple[Tensor, MatrixRecord]:
    """W0 + λ · Σ_t λ_t w_t Δ_t / Σ_t w_t, the rule for everything that is not a matrix.

    Args:
        base: W0, any shape.
        active: the experts; with fewer than two the rules of `merge_trivial` hold.
        scale: λ.
    """
    trivial = merge_trivial(base, active, scale)
    if trivial is not None:
        return trivial
    merged = base.to(active.dtype, copy=True)
    members = zip(active.experts, active.weights, active.coefficients, strict=True)
    for expert, weight, coefficient in members:
        share = scale * coefficient * weight / len(active.weights)
        merged.add_(task_vector(expert, base, active.dtype), alpha=share)
    return merged, _record("mean", active)


def _record(rule: Rule, active: ActiveExperts) -> MatrixRecord:
    return MatrixRecord(rule, active.spread(active.weights, 0.0), active.all_tau)
