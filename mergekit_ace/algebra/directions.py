# SPDX-License-Identifier: Apache-2.0
"""Singular directions of a matrix, by the eigenvectors of its smaller Gram matrix in float64.

With A Aᵀ = P diag(σ²) Pᵀ, A has the singular triplets (p, σ, Aᵀp/σ) (Golub and Van Loan, Matrix
Computations, §8.6). A Gram matrix squares the condition number of A, so that directions below 1e-7
of the strongest are rounding, and left out.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from mergekit_ace.algebra.linalg import blocks, gram, leading_eigenpairs, product

# The root of float64's precision, with room for sums: weaker directions are lost in a Gram matrix.
WEAKEST = 1e-7


@dataclass(frozen=True)
class Directions:
    """Leading singular triplets of a matrix (o, i), the largest first, float64.

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


def leading_directions(matrix: Tensor, count: int, floor: float = 0.0) -> Directions:
    """Return the largest singular triplets that a matrix has.

    Args:
        matrix: (o, i), finite, any floating dtype.
        count: how many at most; 0 or greater.
        floor: singular values that are no larger count as rounding, as those do that lie below
            `WEAKEST` of the largest.

    Memory: the float64 Gram matrix of the smaller side and its eigenvectors, beside the result.
    """
    turned = matrix.shape[0] > matrix.shape[1]
    wide = matrix.mT if turned else matrix
    side, length = wide.shape
    count = min(count, side)
    short = torch.zeros(side, 0, dtype=torch.float64, device=wide.device)
    long, values = short.new_zeros(length, 0), short.new_zeros(0)
    # Squares of the tiniest and the largest entries leave the range of float64.
    scale = float(torch.stack(torch.aminmax(matrix)).abs().max()) if matrix.numel() else 0.0
    if count and scale:
        parts = list(blocks(length, side, wide.device))
        squares = torch.zeros(side, side, dtype=torch.float64, device=wide.device)
        for columns in parts:
            squares += gram(wide[:, columns].double() / scale)
        short = leading_eigenpairs(squares, count)[1].contiguous()
        images = [product((wide[:, columns].double() / scale).mT, short) for columns in parts]
        long = torch.cat(images)
        values = torch.linalg.vector_norm(long, dim=0)
        kept = values > max(floor / scale, WEAKEST * float(values.max()))
        short, values = short[:, kept], values[kept]
        long, values = long[:, kept] / values, values * scale
    left, right = (long, short) if turned else (short, long)
    return Directions(left, values, right)


def orthogonal_factor(matrix: Tensor) -> Tensor:
    """Return U Vᵀ of A = U diag(σ) Vᵀ, (o, i): the nearest matrix with orthonormal rows or columns.

    That is the solution of the orthogonal Procrustes problem (Golub and Van Loan, §6.4.1).
    Directions that A does not have add nothing, see `leading_directions`.
    """
    found = leading_directions(matrix, min(matrix.shape))
    return found.left @ found.right.mT
