# SPDX-License-Identifier: Apache-2.0
"""Truncated singular value decompositions and nearest orthonormal matrices, in float64."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

EPS = torch.finfo(torch.float64).eps


@dataclass(frozen=True)
class Directions:
    """Leading singular triplets of a matrix (o, i), the largest first.

    Attributes:
        left: U, (o, k).
        values: σ, (k,).
        right: V, (i, k).
    """

    left: Tensor
    values: Tensor
    right: Tensor

    @property
    def matrix(self) -> Tensor:
        """U diag(σ) Vᵀ, (o, i)."""
        return (self.left * self.values) @ self.right.mT

    def leading(self, rank: int) -> Directions:
        """The first `rank` of them, or all."""
        return Directions(self.left[:, :rank], self.values[:rank], self.right[:, :rank])


def leading_directions(matrix: Tensor, rank: int | None = None) -> Directions:
    """The leading singular triplets of a matrix, as many as it has.

    The first `rank` of ``torch.linalg.svd(matrix, full_matrices=False)``, but for values that
    rounding cannot tell from zero: they have no directions, and are left out.

    Args:
        matrix: (o, i), float64, finite.
        rank: how many at most; all of them by default.
    """
    left, values, right = torch.linalg.svd(matrix, full_matrices=False)
    floor = max(matrix.shape) * EPS * float(values[0]) if len(values) else 0.0
    kept = int((values > floor).sum())
    return Directions(left, values, right.mT).leading(kept if rank is None else min(rank, kept))


def nearest_orthonormal(columns: Sequence[Tensor]) -> Tensor:
    """P Qᵀ for the concatenation of `columns` = P diag(σ) Qᵀ, its polar factor.

    The closest matrix with orthonormal columns in the Frobenius norm (Procrustes). Columns that
    repeat others have none: what σ ≈ 0 stands for is left out of P Qᵀ, where a full decomposition
    would return arbitrary vectors.

    Args:
        columns: matrices (n, k_t) in float64.

    Returns:
        (n, Σ k_t).
    """
    matrix = torch.cat(list(columns), dim=1)
    directions = leading_directions(matrix)
    return directions.left @ directions.right.mT
