# SPDX-License-Identifier: Apache-2.0
"""Task vectors Δ_t = W_t − W0 of one matrix.

Which experts take part, how much they differ in scale, and the rules that need no covariance.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import reduce
from typing import TypeVar

import torch
from torch import Tensor

from mergekit_ace.algebra.linalg import BLOCK_ENTRIES, as_rows, blocks, squared_norm
from mergekit_ace.algebra.low_rank import CoreSpace
from mergekit_ace.algebra.records import MatrixRecord, TensorRecord
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
    for block in blocks(*rows.shape):
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

    def spread(self, values: Sequence[T], absent: T) -> tuple[T, ...]:
        """Return values of the active experts at their places among all experts given."""
        spread = [absent] * len(self.all_tau)
        for position, value in zip(self.positions, values, strict=True):
            spread[position] = value
        return tuple(spread)


def check_versions(base: Tensor, experts: Sequence[Tensor], weights: Sequence[float]) -> None:
    """Refuse what is no set of versions of one tensor.

    Raises:
        TypeError: something is no tensor.
        ValueError: there is no expert, a shape or the number of weights differs, or a weight is
            negative or NaN.
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
    if not all(weight >= 0 for weight in weights):
        raise ValueError(f"weights are 0 or greater, but these are {list(weights)}")


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


def merge_entries(
    base: Tensor, experts: Sequence[Tensor], coefficients: Sequence[float], rule: str
) -> tuple[Tensor, TensorRecord]:
    """Return θ_0 + Σ_k s_k λ_k (θ_k − θ_0), which is what `merge_by_change` makes of a linear rule.

    Args:
        base, experts, coefficients: see `merge_linear`.
        rule: the name of the method, for the record.
    """
    record = record_of_entries(rule, base, experts)
    changed = record.matrices[0].changed
    own = [c * s for c, s in zip(coefficients, changed, strict=True)]
    return merge_linear(base, experts, own), record


def record_of_entries(rule: str, base: Tensor, experts: Sequence[Tensor]) -> TensorRecord:
    """Return the record of a merge entry by entry; its layout is that of what is no matrix."""
    moments, changed = measure_changes(base, experts, torch.float32)
    tau = tuple(m.tau for m in moments)
    record = MatrixRecord(rule, (1.0,) * len(tau), tau, changed)
    return TensorRecord(tuple(base.shape), "mean", (record,))


def clamp_to_versions(merged: Tensor, versions: Sequence[Tensor]) -> Tensor:
    """Return a merge whose entries lie between the smallest and the largest of all models.

    Args:
        merged: of any rule.
        versions: what it was merged from, the base's among them.
    """
    low, high = (reduce(f, versions) for f in (torch.minimum, torch.maximum))
    return torch.clamp(merged, low.to(merged.dtype), high.to(merged.dtype))


def merge_linear(base: Tensor, experts: Sequence[Tensor], coefficients: Sequence[float]) -> Tensor:
    """Return θ_0 + Σ_k λ_k (θ_k − θ_0) in float32, or in float64 where the tensors are.

    The task vectors are summed before the base is added, so that the sum is rounded by its own
    size. With all coefficients 0 the result is `base` itself, uncast; with a single one that is 1
    and no other, that expert to the bit.

    Args:
        base: θ_0, any shape.
        experts: θ_k, each shaped as `base`.
        coefficients: λ_k, any finite number, one per expert.
    """
    dtype = torch.promote_types(torch.float32, base.dtype)
    used = [(w, c) for w, c in zip(experts, coefficients, strict=True) if c != 0]
    if not used:
        return base
    if [c for _, c in used] == [1]:
        return used[0][0].to(dtype)
    merged = torch.empty_like(base, dtype=dtype, memory_format=torch.contiguous_format)
    rows = [as_rows(tensor) for tensor in (base, merged, *(expert for expert, _ in used))]
    # on a CPU what stays in a cache
    entries = BLOCK_ENTRIES // 4 if base.device.type == "cpu" else None
    for block in blocks(*rows[0].shape, entries):
        origin, out, *versions = (part[block] for part in rows)
        out.zero_()
        for version, (_, coefficient) in zip(versions, used, strict=True):
            out.add_(task_vector(version, origin, dtype), alpha=coefficient)
        out.add_(origin)
    return merged


def merge_trivial(
    base: Tensor, active: ActiveExperts, scale: float
) -> tuple[Tensor, MatrixRecord] | None:
    """Merge fewer than two active experts; return None where there are more.

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
    """Return W0 + λ · Σ_t λ_t w_t Δ_t / Σ_t w_t, the rule for all that is not a matrix.

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


def _record(rule: str, active: ActiveExperts) -> MatrixRecord:
    weight = active.spread(active.weights, 0.0)
    return MatrixRecord(rule, weight, active.all_tau, active.changed)
