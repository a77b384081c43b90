# SPDX-License-Identifier: Apache-2.0
"""Singular directions of a matrix, by the eigenvectors of its smaller Gram matrix in float64.

With A Aᵀ = P diag(σ²) Pᵀ, A has the singular triplets (p, σ, Aᵀp/σ) (Golub and Van Loan, Matrix
Computations, §8.6). A Gram matrix squares the condition number of A. What that costs weak
directions is estimated, and where it shows the matrix itself is decomposed.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from mergekit_ace.algebra.linalg import blocks, gram, leading_eigenpairs, product

EPS64 = torch.finfo(torch.float64).eps
# Up to this side the matrix itself is decomposed, in milliseconds.
SMALL_SIDE = 256
# Weaker directions than this share of the strongest are made orthogonal to the others by QR.
WEAK = 1e-4
# The relative error of U Vᵀ from which on the matrix itself is decomposed.
LARGEST_ERROR = 1e-8


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

    def leading(self, count: int) -> Directions:
        """Return the first `count` of them, or all."""
        return Directions(self.left[:, :count], self.values[:count], self.right[:, :count])

    def above(self, floor: float) -> Directions:
        """Return those with σ above a floor that rounding has no share in: max(o, i) eps σ_1."""
        size = max(len(self.left), len(self.right))
        kept = self.values > max(floor, size * EPS64 * float(self.values[:1].sum()))
        return Directions(self.left[:, kept], self.values[kept], self.right[:, kept])


def leading_directions(matrix: Tensor, count: int) -> Directions:
    """Return the `count` largest singular triplets.

    U diag(σ) Vᵀ has float64's digits. Directions that the matrix does not have are arbitrary
    orthonormal ones, with σ = 0 but for rounding; of weak ones see `present_directions`.

    Args:
        matrix: (o, i), finite, any floating dtype, with at least one entry.
        count: 1 ≤ k ≤ min(o, i).

    Memory: the float64 Gram matrix of the smaller side and its eigenvectors, beside the result.
    """
    if min(matrix.shape) <= SMALL_SIDE:
        return _decompose(matrix).leading(count)
    low, high = torch.aminmax(matrix)
    scale = max(-float(low), float(high)) or 1.0  # the fourth powers of entries may be out of range
    turned = matrix.shape[0] > matrix.shape[1]
    wide = matrix.mT if turned else matrix
    side, length = wide.shape
    parts = list(blocks(length, side, wide.device))
    squares = torch.zeros(side, side, dtype=torch.float64, device=wide.device)
    for columns in parts:
        squares += gram(wide[:, columns].double() / scale)
    short = leading_eigenpairs(squares, count)[1].contiguous()
    images = [product((wide[:, columns].double() / scale).mT, short) for columns in parts]
    long = torch.cat(images)
    values = torch.linalg.vector_norm(long, dim=0)
    if float(values.min()) > WEAK * float(values[0]):
        long /= values
    else:
        long, triangle = torch.linalg.qr(long)
        values = triangle.diagonal().abs()
        long *= torch.where(triangle.diagonal() < 0, -1.0, 1.0)
    left, right = (long, short) if turned else (short, long)
    return Directions(left, values * scale, right)


def present_directions(matrix: Tensor, count: int | None = None, floor: float = 0.0) -> Directions:
    """Return the leading singular triplets that a matrix has, none of them weighted by its σ.

    Args:
        matrix: (o, i), finite, with at least one entry.
        count: how many at most, at least 1; all by default.
        floor: singular values that are no larger count as rounding, as those do that float64
            cannot tell from zero, see `Directions.above`.

    Returns:
        At most `count`; U Vᵀ has a relative error of about `LARGEST_ERROR` at most.
    """
    count = min(matrix.shape) if count is None else min(count, *matrix.shape)
    found = leading_directions(matrix, count).above(floor)
    # A Gram matrix is wrong by eps σ_1², which turns directions by that over the σ² of both.
    ratio = found.values[:1] / found.values
    if min(matrix.shape) > SMALL_SIDE and EPS64 * float(ratio.square().mean()) > LARGEST_ERROR:
        found = _decompose(matrix).leading(count).above(floor)
    return found


def orthogonal_factor(matrix: Tensor) -> Tensor:
    """Return U Vᵀ of A = U diag(σ) Vᵀ, (o, i): the nearest matrix with orthonormal rows or columns.

    That is the solution of the orthogonal Procrustes problem (Golub and Van Loan, §6.4.1).
    Directions that A does not have add nothing, see `present_directions`.
    """
    found = present_directions(matrix)
    return found.left @ found.right.mT


def _decompose(matrix: Tensor) -> Directions:
    """Return all min(o, i) singular triplets."""
    left, values, right = torch.linalg.svd(matrix.double(), full_matrices=False)
    return Directions(left, values, right.mT)
