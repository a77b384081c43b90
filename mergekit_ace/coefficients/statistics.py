# SPDX-License-Identifier: Apache-2.0
"""The statistics of weights from which StatsMerging predicts coefficients (Eqs. 1-3, A.3.1).

Mean, variance, magnitude (Frobenius norm) and the largest singular values of a tensor: linear
weights (o, i) as they are, kernels (o, …) as (o, rest), vectors as one row. What several tensors
have in common (a block, a whole model) is described by the statistics of all their entries together
and by the largest singular values that any of them has, which are those of the block-diagonal
matrix of them all.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from mergekit_ace.algebra.spectrum import leading_directions

Statistic = Literal["mean", "variance", "magnitude", "singular_values"]
# Relative error of the sum of squares of the leading singular values.
TOLERANCE = 1e-5
STATISTICS: tuple[Statistic, ...] = ("mean", "variance", "magnitude", "singular_values")


@dataclass(frozen=True)
class WeightMoments:
    """Moments of a tensor, from which those of several tensors together follow.

    Attributes:
        count: number of entries.
        mean: of the entries; 0 without entries.
        spread: Σ (x − mean)².
        singular: the largest singular values, descending; missing ones are left out.
    """

    count: int
    mean: float
    spread: float
    singular: tuple[float, ...]

    @property
    def variance(self) -> float:
        """Population variance of the entries."""
        return self.spread / self.count if self.count else 0.0

    @property
    def magnitude(self) -> float:
        """Frobenius norm, from Σ x² = Σ (x − mean)² + n mean²."""
        return math.sqrt(self.spread + self.count * self.mean**2)


def measure_moments(tensor: Tensor, rank: int) -> WeightMoments:
    """Measure the moments of one tensor.

    Args:
        tensor: any shape and floating dtype, finite.
        rank: r ≥ 0, how many singular values are wanted.

    Raises:
        ValueError: the tensor holds NaN or Inf.
    """
    if tensor.numel() == 0:
        return WeightMoments(0, 0.0, 0.0, ())
    mean, spread = _centred_sums(tensor)
    if not (math.isfinite(mean) and math.isfinite(spread)):
        raise ValueError("the tensor contains NaN or Inf")
    return WeightMoments(tensor.numel(), mean, spread, leading_singular_values(tensor, rank))


def combine(parts: Iterable[WeightMoments], rank: int) -> WeightMoments:
    """Combine moments of several tensors (Chan, Golub & LeVeque 1979, pairwise updating)."""
    total = WeightMoments(0, 0.0, 0.0, ())
    for part in parts:
        count = total.count + part.count
        if part.count == 0:
            continue
        step = part.mean - total.mean
        total = WeightMoments(
            count,
            total.mean + step * part.count / count,
            total.spread + part.spread + step**2 * total.count * part.count / count,
            tuple(sorted((*total.singular, *part.singular), reverse=True)[:rank]),
        )
    return total


def feature_names(statistics: Sequence[Statistic], rank: int) -> tuple[str, ...]:
    """Return the names of `features`, in their order: `mean`, …, `singular_value_1`, …"""
    names: list[str] = []
    for statistic in statistics:
        if statistic == "singular_values":
            names += [f"singular_value_{n + 1}" for n in range(rank)]
        else:
            names.append(statistic)
    return tuple(names)


def features(moments: WeightMoments, statistics: Sequence[Statistic], rank: int) -> list[float]:
    """Return the chosen statistics as F numbers; missing singular values are 0."""
    values: list[float] = []
    for statistic in statistics:
        if statistic == "singular_values":
            values += [*moments.singular, *[0.0] * rank][:rank]
        else:
            values.append(getattr(moments, statistic))
    return values


def leading_singular_values(tensor: Tensor, rank: int) -> tuple[float, ...]:
    """Return the `rank` largest singular values of a tensor as a matrix, descending.

    Args:
        tensor: (o, i), or (o, …) read as (o, rest); a vector is one row. Finite.
        rank: how many; there are fewer where a side is shorter than that.
    """
    matrix = tensor.detach()
    matrix = matrix.reshape(1, -1) if matrix.ndim < 2 else matrix.flatten(start_dim=1)
    rank = min(rank, *matrix.shape)
    if rank == 0:
        return ()
    return tuple(leading_directions(matrix, rank, TOLERANCE).values.tolist())


def _centred_sums(tensor: Tensor) -> tuple[float, float]:
    """Mean and Σ (x − mean)², summed in float64 over blocks, so that no float64 copy exists."""
    flat = tensor.detach().reshape(-1)
    blocks = flat.split(2**20)
    mean = sum(float(block.sum(dtype=torch.float64)) for block in blocks) / flat.numel()
    spread = sum(float((block.double() - mean).square().sum()) for block in blocks)
    return mean, spread
