# SPDX-License-Identifier: Apache-2.0
"""Random families of matrices with the properties that merging turns on."""

from __future__ import annotations

import torch
from torch import Tensor

from mergekit_ace import MatrixRecord, merge_tensor
from mergekit_ace.algebra.low_rank import LowRank


def family(
    rng: torch.Generator,
    rows: int,
    columns: int,
    experts: int,
    *,
    scales: list[float] | None = None,
    rank: int = 4,
    noise: float = 0.1,
) -> tuple[Tensor, list[Tensor]]:
    """A base and experts whose task vectors are low-rank plus noise, with a mean of their own."""
    base = torch.randn(rows, columns, generator=rng)
    members = []
    for t in range(experts):
        left = torch.randn(rows, rank, generator=rng)
        right = torch.randn(rank, columns, generator=rng)
        delta = left @ right / rank**0.5 + noise * torch.randn(rows, columns, generator=rng)
        delta += 0.2 * torch.randn(columns, generator=rng)
        scale = scales[t] if scales else 1.0
        members.append(base + 0.01 * scale * delta)
    return base, members


def merge_matrix(
    base: Tensor, experts: list[Tensor], weights=None, options=None, coefficients=None, **more
) -> tuple[Tensor, MatrixRecord]:
    """The merge of one matrix by `ace`, or by other options, and the record of it."""
    merged, record = merge_tensor(base, experts, weights, options, "matrix", coefficients, **more)
    return merged, record.matrices[0]


def dense(delta: LowRank) -> Tensor:
    """A task vector of low rank, in the shape of the stored tensor."""
    return (delta.left @ delta.right).reshape(delta.shape)


def deltas_of(base: Tensor, experts: list[Tensor]) -> list[Tensor]:
    """The task vectors in float64."""
    return [expert.double() - base.double() for expert in experts]


HETEROGENEOUS = [0.1, 1.0, 10.0]
REFINED = {"adaptive_normalization": "always", "spectral_refinement": "always"}
