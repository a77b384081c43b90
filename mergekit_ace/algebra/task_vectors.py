# SPDX-License-Identifier: Apache-2.0
"""Task vectors Δ_t = W_t − W0, and which experts take part in a merge."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import Tensor

from mergekit_ace.algebra.blocks import blocks

T = TypeVar("T")


def task_vector(expert: Tensor, base: Tensor, dtype: torch.dtype) -> Tensor:
    """Δ = W − W0, subtracted in `dtype`.

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
        mean: μ, the means over Δ's first axis, float64; of a matrix (o, i): its column means, (i,).
    """

    tau: float
    mean: Tensor


def measure(expert: Tensor, base: Tensor, dtype: torch.dtype) -> Moments:
    """τ and μ of one task vector, in one sweep over blocks of its first axis.

    Args:
        expert, base: W and W0, of one shape.
        dtype: in which W − W0 is formed.
    """
    rows = base.reshape((*base.shape[:1], math.prod(base.shape[1:])) if base.ndim else (1, 1))
    versions = expert.reshape(rows.shape)
    tau = []
    total = torch.zeros(rows.shape[1], dtype=torch.float64, device=base.device)
    room = None
    for block in blocks(*rows.shape):
        if room is None:  # the first block is the largest; fresh memory would cost page by page
            room = torch.empty_like(rows[block], dtype=dtype)
        delta = room[: block.stop - block.start].copy_(versions[block]).sub_(rows[block])
        tau.append(squared_norm(delta))
        for part in delta.split(1024):  # short sums in float32, long ones in float64
            total += part.sum(dim=0)
    return Moments(math.fsum(tau), total.div_(max(1, len(rows))).reshape(base.shape[1:]))


def squared_norm(tensor: Tensor) -> float:
    """‖X‖_F² of a tensor of any shape and size of entries.

    Row by row in the tensor's own dtype, summed in float64: thirty times as fast as float64
    throughout, which is taken where squares leave the range of float32.
    """
    if tensor.ndim > 1 and tensor.dtype == torch.float32:
        rows = torch.linalg.vector_norm(tensor, dim=-1)
        total = float(rows.double().square().sum())
        if 1e-25 < total < 1e35 or not tensor.any():
            return total
    return float(torch.linalg.vector_norm(tensor, dtype=torch.float64)) ** 2


@dataclass(frozen=True)
class ActiveExperts:
    """The experts that take part in one matrix: those with positive weight that changed it.

    An expert that left a tensor as it was says nothing about it. Kept in, it would make log τ_t
    meaningless, and in the heterogeneous branch its ridge ε/tr(G_t) would swallow all others.

    Attributes:
        experts: weights W_t of the active experts, each shaped as the base.
        weights: w_t, rescaled to mean 1 over the active experts.
        moments: τ_t and μ_t of the active experts.
        coefficients: λ_t of the active experts, by which their components of a merge are
            multiplied; 1 unless learned.
        all_tau: τ_t of *all* experts given, in their order; 0 where unchanged.
        positions: where the active ones stand among those given.
        dtype: in which task vectors are formed.
    """

    experts: tuple[Tensor, ...]
    weights: tuple[float, ...]
    coefficients: tuple[float, ...]
    moments: tuple[Moments, ...]
    all_tau: tuple[float, ...]
    positions: tuple[int, ...]
    dtype: torch.dtype

    @property
    def tau(self) -> tuple[float, ...]:
        """τ_t of the active experts."""
        return tuple(moments.tau for moments in self.moments)

    def spread(self, values: Sequence[T], absent: T) -> tuple[T, ...]:
        """`values` of the active experts at their places among all experts given."""
        spread = [absent] * len(self.all_tau)
        for position, value in zip(self.positions, values, strict=True):
            spread[position] = value
        return tuple(spread)


def select_active(
    base: Tensor,
    experts: Sequence[Tensor],
    weights: Sequence[float],
    dtype: torch.dtype,
    coefficients: Sequence[float] | None = None,
) -> ActiveExperts:
    """Measure τ_t and keep the experts that have something to say.

    Args:
        base: W0, finite, any shape.
        experts: W_t, finite, shaped as `base`.
        weights: w_t ≥ 0, one per expert.
        dtype: where the task vectors are formed, unless the tensors are wider themselves.
        coefficients: λ_t, one per expert; 1 by default.

    Raises:
        OverflowError: the squared norm of a task vector does not fit `dtype`'s or float64's range.
    """
    dtype = torch.promote_types(dtype, base.dtype)
    moments = [measure(expert, base, dtype) for expert in experts]
    tau = tuple(m.tau for m in moments)
    for position, value in enumerate(tau):
        if not value < float("inf"):
            raise OverflowError(
                f"the task vector of expert {position} overflows {dtype}"
                + ("; compute_dtype: float64 has room for it" if dtype == torch.float32 else "")
            )
    changed = zip(weights, tau, strict=True)
    positions = tuple(t for t, (w, v) in enumerate(changed) if w > 0 and v > 0)
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
        positions=positions,
        dtype=dtype,
    )
