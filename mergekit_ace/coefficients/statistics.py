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

import numpy as np
import torch
from scipy.sparse.linalg import LinearOperator, svds
from torch import Tensor

Statistic = Literal["mean", "variance", "magnitude", "singular_values"]
STATISTICS: tuple[Statistic, ...] = ("mean", "variance", "magnitude", "singular_values")

# Up to this many rows or columns a full decomposition of the Gram matrix is the quicker way.
SMALL = 512


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
            known = moments.singular[:rank]
            values += [*known, *[0.0] * (rank - len(known))]
        else:
            values.append(getattr(moments, statistic))
    return values


def leading_singular_values(tensor: Tensor, rank: int) -> tuple[float, ...]:
    """The `rank` largest singular values of a tensor as a matrix, descending.

    Never by a full decomposition of a large matrix: where both sides exceed `SMALL`, by ARPACK's
    Lanczos iteration, which touches the matrix only through products with vectors.

    Args:
        tensor: (o, i), or (o, …) read as (o, rest); a vector is one row. Finite.
        rank: how many; there are fewer where a side is shorter than that.
    """
    matrix = tensor.reshape(1, -1) if tensor.ndim < 2 else tensor.flatten(start_dim=1)
    short = min(matrix.shape)
    rank = min(rank, short)
    if rank == 0 or not matrix.any():
        return (0.0,) * rank
    matrix = matrix.detach().to(torch.promote_types(matrix.dtype, torch.float32))
    # Squares of very small or large entries would leave the range of float32.
    scale = float(matrix.abs().max())
    if short <= SMALL:
        wide = matrix if matrix.shape[0] <= matrix.shape[1] else matrix.mT
        gram = torch.zeros(short, short, dtype=torch.float64, device=wide.device)
        for block in wide.split(2**12, dim=1):  # no float64 copy of the whole
            rows = block.double() / scale
            gram.addmm_(rows, rows.mT)
        squares = torch.linalg.eigvalsh(gram)[-rank:].flip(0)
        return tuple(scale * math.sqrt(max(square, 0.0)) for square in squares.tolist())
    values = svds(
        _operator(matrix / scale),
        k=rank,
        tol=1e-3,  # squared by scipy; the error of a singular value is of that order
        v0=np.ones(short, dtype=_numpy_dtype(matrix)) / math.sqrt(short),
        return_singular_vectors=False,
    )
    return tuple(scale * float(value) for value in sorted(values, reverse=True))


def _operator(matrix: Tensor) -> LinearOperator:
    """The matrix as scipy's operator; its products run where the matrix lies."""

    def product(left: Tensor):
        def apply(vector: np.ndarray) -> np.ndarray:
            right = torch.from_numpy(np.ascontiguousarray(vector.reshape(-1))).to(left.device)
            return (left @ right).cpu().numpy()

        return apply

    dtype = _numpy_dtype(matrix)
    return LinearOperator(
        tuple(matrix.shape), matvec=product(matrix), rmatvec=product(matrix.mT), dtype=dtype
    )


def _numpy_dtype(matrix: Tensor) -> type:
    return np.float64 if matrix.dtype == torch.float64 else np.float32


def _centred_sums(tensor: Tensor) -> tuple[float, float]:
    """Mean and Σ (x − mean)², summed in float64 over blocks, so that no float64 copy exists."""
    flat = tensor.detach().reshape(-1)
    blocks = flat.split(2**20)
    mean = sum(float(block.sum(dtype=torch.float64)) for block in blocks) / flat.numel()
    spread = sum(float((block.double() - mean).square().sum()) for block in blocks)
    return mean, spread
