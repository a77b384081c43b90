# SPDX-License-Identifier: Apache-2.0
"""Task vectors Δ_t = W_t − W0: which of them take part in a merge, and what every method shares.

A stored tensor is merged matrix by matrix (`by_layout`), by the formula of a method where at least
two experts changed a matrix; by the mean of the task vectors otherwise.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import reduce
from typing import Any, TypeVar

import torch
from torch import Tensor

from mergekit_ace.algebra.layouts import as_matrices, from_matrices
from mergekit_ace.algebra.linalg import as_rows, blocks, squared_norm
from mergekit_ace.algebra.low_rank import CoreSpace
from mergekit_ace.algebra.records import FixedLayout, MatrixRecord, TensorRecord
from mergekit_ace.algebra.rounding_noise import changed_share

T = TypeVar("T")


def task_vector(expert: Tensor, base: Tensor, dtype: torch.dtype) -> Tensor:
    """Form Δ = W − W0 in `dtype`.

    Two bfloat16 tensors are first widened: their difference rarely fits bfloat16's eight bits.

    Args:
        expert: W, any shape.
        base: W0, the shape of `expert`.
        dtype: at least as wide as the tensors' own.
    """
    return expert.to(dtype, copy=True).sub_(base)  # base is widened entry by entry


@dataclass(frozen=True)
class Moments:
    """What is measured of a task vector before anything is decided.

    Attributes:
        tau: τ = ‖Δ‖_F² (Eq. 43).
        size: ‖W‖_F².
        mean: μ, the means over Δ's first axis, float64; of a matrix (o, i): its column means, (i,).
    """

    tau: float
    size: float
    mean: Tensor


def measure(expert: Tensor, base: Tensor, dtype: torch.dtype) -> Moments:
    """Measure τ and μ of one task vector, in one sweep over blocks of its first axis.

    Args:
        expert, base: W and W0, of one shape.
        dtype: in which W − W0 is formed.
    """
    rows, versions = as_rows(base), as_rows(expert)
    tau, size = [], []
    total = torch.zeros(rows.shape[1], dtype=torch.float64, device=base.device)
    room = None
    for block in blocks(*rows.shape, rows.device):
        if room is None:  # the first block is the largest; fresh memory would cost page by page
            room = torch.empty_like(rows[block], dtype=dtype)
        delta = room[: block.stop - block.start].copy_(versions[block])
        size.append(squared_norm(delta))
        tau.append(squared_norm(delta.sub_(rows[block])))
        for part in delta.split(1024):  # short sums in float32, long ones in float64
            total += part.sum(dim=0)
    mean = total.div_(max(1, len(rows))).reshape(base.shape[1:])
    return Moments(math.fsum(tau), math.fsum(size), mean)


def measure_changes(
    base: Tensor, experts: Sequence[Tensor], dtype: torch.dtype
) -> tuple[tuple[Moments, ...], tuple[float, ...]]:
    """Return the moments of every task vector, and s_t of every expert, see `changed_share`.

    Args:
        base, experts: W0 and the W_t, of one shape.
        dtype: in which W − W0 is formed, unless the base is wider.
    """
    dtype = torch.promote_types(dtype, base.dtype)
    moments = tuple(measure(expert, base, dtype) for expert in experts)
    measured = zip(experts, moments, strict=True)
    return moments, tuple(changed_share(expert, base, m.tau, m.size) for expert, m in measured)


@dataclass(frozen=True)
class ActiveExperts:
    """The experts that take part in one matrix: those with positive weight that changed it.

    An expert that left a tensor as it was, but for the rounding of its checkpoint, says nothing
    about it. Kept in, it would make log τ_t meaningless, and in the heterogeneous branch its ridge
    ε/tr(G_t) would swallow all others.

    Attributes:
        experts: weights W_t of the active experts, each shaped as the base.
        weights: w_t, rescaled to mean 1 over the active experts.
        moments: τ_t and μ_t of the active experts.
        coefficients: λ_t of the active experts, by which their components of a merge are
            multiplied; 1 unless learned.
        all_tau: τ_t of *all* experts given, in their order; 0 where unchanged.
        changed: s_t of all experts given, see `changed_share`.
        positions: where the active ones stand among those given.
        dtype: in which task vectors are formed.
        space: of which the matrices are cores; None for matrices that stand for themselves.
    """

    experts: tuple[Tensor, ...]
    weights: tuple[float, ...]
    coefficients: tuple[float, ...]
    moments: tuple[Moments, ...]
    all_tau: tuple[float, ...]
    changed: tuple[float, ...]
    positions: tuple[int, ...]
    dtype: torch.dtype
    space: CoreSpace | None = None

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of a task vector; of the matrix that it stands for, if it is a core."""
        return self.space.shape if self.space else tuple(self.experts[0].shape)

    @property
    def tau(self) -> tuple[float, ...]:
        """τ_t of the active experts."""
        return tuple(moments.tau for moments in self.moments)

    def record(self, rule: str, **fields: Any) -> MatrixRecord:
        """Return the record of a merge of these experts by a rule."""
        weight = self.spread(self.weights, 0.0)
        return MatrixRecord(rule, weight, self.all_tau, self.changed, **fields)

    def spread(self, values: Sequence[T], absent: T) -> tuple[T, ...]:
        """Return values of the active experts at their places among all experts given."""
        spread = [absent] * len(self.all_tau)
        for position, value in zip(self.positions, values, strict=True):
            spread[position] = value
        return tuple(spread)


def check_versions(
    base: Tensor,
    experts: Sequence[Tensor],
    weights: Sequence[float],
    coefficients: Sequence[float] | None = None,
    components: int = 0,
) -> None:
    """Refuse what is no set of versions of one tensor.

    Args:
        base, experts, weights, coefficients: see `merge_tensor`.
        components: how many coefficients there have to be.

    Raises:
        TypeError: something is no tensor.
        ValueError: there is no expert, a shape or the number of weights or coefficients differs,
            a weight is negative, or one of them is not finite.
    """
    if len(experts) == 0:
        raise ValueError("there is no expert; give at least one")
    named = {"the base": base} | {f"expert {t}": expert for t, expert in enumerate(experts)}
    for name, version in named.items():
        if not isinstance(version, Tensor):
            raise TypeError(f"{name} is a {type(version).__name__}; give a torch.Tensor")
        if version.shape != base.shape:
            shapes = f"{tuple(version.shape)}, but the base {tuple(base.shape)}"
            raise ValueError(f"{name} has the shape {shapes}; merge versions of one tensor")
    if len(weights) != len(experts):
        raise ValueError(f"there are {len(weights)} weights for {len(experts)} experts")
    if not all(0 <= weight < math.inf for weight in weights):
        raise ValueError(f"weights are finite, 0 or greater, but these are {list(weights)}")
    if coefficients is None:
        return
    if len(coefficients) != components:
        raise ValueError(
            f"there are {len(coefficients)} coefficients for {components} components: one for "
            "every expert, and with `ace` a last one for the refinement"
        )
    if not all(map(math.isfinite, coefficients)):
        raise ValueError(f"coefficients are finite, but these are {list(coefficients)}")


def select_active(
    base: Tensor,
    experts: Sequence[Tensor],
    weights: Sequence[float],
    dtype: torch.dtype,
    coefficients: Sequence[float] | None = None,
    space: CoreSpace | None = None,
) -> ActiveExperts:
    """Measure τ_t and keep the experts that have something to say.

    Args:
        base: W0, finite, any shape.
        experts: W_t, finite, shaped as `base`.
        weights: w_t ≥ 0, one per expert.
        dtype: where the task vectors are formed, unless the tensors are wider themselves.
        coefficients: λ_t, one per expert; 1 by default.
        space: of which the tensors are cores, if they are.

    Raises:
        ValueError: an expert or the base contains NaN or Inf.
        OverflowError: the squared norm of a task vector does not fit `dtype`'s or float64's range.
    """
    dtype = torch.promote_types(dtype, base.dtype)
    moments, changed = measure_changes(base, experts, dtype)
    tau = tuple(m.tau for m in moments)
    for position, value in enumerate(tau):
        if not value < float("inf"):
            if not (experts[position].isfinite().all() and base.isfinite().all()):
                raise ValueError(f"expert {position} or the base contains NaN or Inf")
            raise OverflowError(
                f"the task vector of expert {position} overflows {dtype}"
                + ("; compute_dtype: float64 has room for it" if dtype == torch.float32 else "")
            )
    used = zip(weights, changed, strict=True)
    positions = tuple(t for t, (w, s) in enumerate(used) if w > 0 and s > 0)
    # Dividing by the largest first keeps the sum of very large or very small weights in range.
    top = max((weights[p] for p in positions), default=1.0)
    share = [weights[p] / top for p in positions]
    mean = sum(share) / len(share) if share else 1.0
    return ActiveExperts(
        experts=tuple(experts[p] for p in positions),
        weights=tuple(s / mean for s in share),
        coefficients=tuple(coefficients[p] if coefficients else 1.0 for p in positions),
        moments=tuple(moments[p] for p in positions),
        all_tau=tau,
        changed=changed,
        positions=positions,
        dtype=dtype,
        space=space,
    )


@dataclass(frozen=True)
class Heterogeneity:
    """Statistics of log τ_t over the active experts.

    Attributes:
        gamma: Var_t[log τ_t] / (mean_t log τ_t)², Eq. 7. It depends on the unit of the weights and
            diverges where the τ_t lie around 1; infinite where their mean log is exactly 0.
        log_variance: Var_t[log τ_t] alone, the same in every unit.

    Both use the sample variance (divisor T − 1); the paper does not say which, its authors'
    implementation does.
    """

    gamma: float
    log_variance: float


def measure_heterogeneity(tau: Sequence[float]) -> Heterogeneity:
    """Return both statistics for τ_t > 0 of at least two experts."""
    logs = [math.log(value) for value in tau]
    mean = math.fsum(logs) / len(logs)
    variance = math.fsum((value - mean) ** 2 for value in logs) / (len(logs) - 1)
    if variance == 0:
        return Heterogeneity(gamma=0.0, log_variance=0.0)
    square = mean * mean
    return Heterogeneity(gamma=variance / square if square > 0 else math.inf, log_variance=variance)


def clamp_to_versions(merged: Tensor, versions: Sequence[Tensor]) -> Tensor:
    """Return a merge whose entries lie between the smallest and the largest of all models.

    Args:
        merged: of any rule.
        versions: what it was merged from, the base's among them.
    """
    low, high = (reduce(f, versions) for f in (torch.minimum, torch.maximum))
    return torch.clamp(merged, low.to(merged.dtype), high.to(merged.dtype))


def merge_mean(base: Tensor, active: ActiveExperts, scale: float) -> tuple[Tensor, MatrixRecord]:
    """Return W0 + λ · Σ_t λ_t w_t Δ_t / Σ_t w_t, the rule for all that is not a matrix.

    Where nobody changed the tensor it is `base` itself, uncast. Where one expert did, it is
    W0 + λ λ_t Δ: with one task the minimiser of Eq. 2 is that expert, whatever its covariance.

    Args:
        base: W0, any shape.
        active: the experts.
        scale: λ.
    """
    if not active.experts:
        return base, active.record("base")
    rule = "single" if len(active.experts) == 1 else "mean"
    shares = [
        scale * coefficient * weight / len(active.weights)
        for weight, coefficient in zip(active.weights, active.coefficients, strict=True)
    ]
    if shares == [1]:  # W0 + (W − W0) may round; W itself is exact
        return active.experts[0].to(active.dtype), active.record(rule)
    merged = base.to(active.dtype, copy=True)
    for expert, share in zip(active.experts, shares, strict=True):
        merged.add_(task_vector(expert, base, active.dtype), alpha=share)
    return merged, active.record(rule)


# From W0 and the W_t, or from W0 and those of them that take part, to the merge and its record.
MatrixRule = Callable[[Tensor, Sequence[Tensor]], tuple[Tensor, MatrixRecord]]
Formula = Callable[[Tensor, ActiveExperts], tuple[Tensor, MatrixRecord]]
Selection = Callable[[Tensor, Sequence[Tensor]], ActiveExperts]


def by_layout(
    base: Tensor,
    experts: Sequence[Tensor],
    layout: FixedLayout,
    select: Selection,
    scale: float,
    formula: Formula,
    *,
    entrywise: bool = False,
) -> tuple[Tensor, TensorRecord]:
    """Merge the versions of one stored tensor, each of its matrices by a formula.

    Args:
        base, experts: W0 and the W_t, of one shape.
        layout: one that fits the tensor, see `resolve_layout`.
        select: from versions to the experts that take part.
        scale: λ, where no formula is needed: one expert, one row, or no matrix at all.
        formula: for a matrix, (o, i), that at least two experts changed.
        entrywise: whether the formula is for what is no matrix, too.

    All of that is applied by `merge_by_change`.
    """
    has_matrices = layout != "mean" and base.numel() > 0

    def rule(base: Tensor, experts: Sequence[Tensor]) -> tuple[Tensor, MatrixRecord]:
        active = select(base, experts)
        # One row is its own column mean: a vector in the shape of a matrix.
        if len(active.experts) < 2 or not (entrywise or (has_matrices and active.shape[0] > 1)):
            return merge_mean(base, active, scale)
        return formula(base, active)

    if not has_matrices:
        merged, record = merge_by_change(base, experts, rule)
        return merged, TensorRecord(tuple(base.shape), "mean", (record,))
    views = [as_matrices(tensor, layout) for tensor in (base, *experts)]
    parts, records = [], []
    for matrices in zip(*views, strict=True):
        part, record = merge_by_change(matrices[0], matrices[1:], rule)
        parts.append(part)
        records.append(record)
    merged = base
    if any(record.rule != "base" for record in records):
        merged = from_matrices(parts, base.shape, layout)
    return merged, TensorRecord(tuple(base.shape), layout, tuple(records))


def merge_by_change(
    base: Tensor, experts: Sequence[Tensor], rule: MatrixRule
) -> tuple[Tensor, MatrixRecord]:
    """Merge the versions of one matrix such that no expert enters or leaves with a jump.

    Every rule leaves out the experts with s_t = 0 (see `select_active`) and takes all others for
    whole, so that at s_t = 0 it jumps. With the s_t in descending order, s_(1) ≥ s_(2) ≥ …, the
    result here is

        Σ_k (s_(k) − s_(k+1)) merge(the experts with s_t ≥ s_(k)) + (1 − s_(1)) W0,

    the Lovász extension (Choquet integral) of the merge as a function of sets of experts. It is
    continuous in the s_t, and one merge unless some lie strictly between 0 and 1.

    Args:
        base, experts: W0 and the W_t, of one shape.
        rule: to the merged tensor, and a record with weights and s_t.

    Returns:
        The merged tensor, and the record of the merge of all experts with s_t > 0.
    """
    merged, record = rule(base, experts)
    (first, _), *others = nested_sets(record.changed, record.weight) or [(1.0, ())]
    if first == 1:
        return merged, record
    total = base.to(merged.dtype).mul(1 - first).add_(merged, alpha=first)
    for share, kept in others:
        chosen = [expert if k else base for expert, k in zip(experts, kept, strict=True)]
        total.add_(rule(base, chosen)[0].to(total.dtype).sub(base), alpha=share)
    return total, record


def nested_sets(
    changed: Sequence[float], weights: Sequence[float]
) -> list[tuple[float, tuple[bool, ...]]]:
    """Return the sets of experts that `merge_by_change` merges, and the share of each merge.

    Args:
        changed: s_t.
        weights: w_t; experts of weight 0 make no set of their own.

    Returns:
        Shares, of sum max s_t, with whether each expert belongs to the set; the largest set first,
        none at all where nobody has changed anything.
    """
    levels = sorted({s for s, w in zip(changed, weights, strict=True) if s > 0 and w != 0})
    below = [0.0, *levels]
    return [
        (level - lower, tuple(s >= level for s in changed))
        for lower, level in zip(below, levels, strict=False)
    ]
