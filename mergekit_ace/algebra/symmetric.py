# SPDX-License-Identifier: Apache-2.0
"""Symmetric products and Cholesky factors in place, at half the work of general products.

A symmetric matrix is kept by its lower triangle. Halving it again and again leaves squares below
the diagonal, which are plain matrix products, and small squares on it. Neither a copy nor a
workspace of the matrix's size is needed, and nearly all work runs at the speed of large products.
"""

from __future__ import annotations

import torch
from torch import Tensor

from mergekit_ace.algebra.blocks import blocks

# Squares on the diagonal that are no longer halved: large enough for full speed. Held against
# sizes from 64 to 512, at 2048 and 6144 rows.
PRODUCT_SIZE = 256
FACTOR_SIZE = 256


def add_gram(total: Tensor, factor: Tensor, alpha: float = 1.0) -> Tensor:
    """total += α·F Fᵀ, in the lower triangle.

    Args:
        total: (n, n), overwritten and returned. Above the diagonal it is undefined afterwards,
            until `mirror` fills it in.
        factor: F, (n, k).
        alpha: α.
    """
    middle = len(total) // 2
    if len(total) <= PRODUCT_SIZE:
        return total.addmm_(factor, factor.mT, alpha=alpha)
    upper, lower = factor[:middle], factor[middle:]
    add_gram(total[:middle, :middle], upper, alpha)
    add_gram(total[middle:, middle:], lower, alpha)
    total[middle:, :middle].addmm_(lower, upper.mT, alpha=alpha)
    return total


def mirror(matrix: Tensor) -> Tensor:
    """Copy the lower triangle above the diagonal, in place."""
    middle = len(matrix) // 2
    if len(matrix) <= PRODUCT_SIZE:
        matrix.tril_()
        return matrix.add_(matrix.tril(-1).mT)
    matrix[:middle, middle:] = matrix[middle:, :middle].mT
    mirror(matrix[:middle, :middle])
    mirror(matrix[middle:, middle:])
    return matrix


def narrow_(matrix: Tensor, dtype: torch.dtype) -> Tensor:
    """A matrix in a narrower dtype, or in its own, in its own memory: `matrix` is lost.

    Args:
        matrix: (m, n), contiguous.
        dtype: of at most the bytes of the matrix's.
    """
    if matrix.dtype == dtype:
        return matrix
    narrow = matrix.view(-1).view(dtype)[: matrix.numel()].view(matrix.shape)
    for block in blocks(*matrix.shape):  # no row is written to before it was read
        narrow[block] = matrix[block].to(dtype)
    return narrow


def cholesky_(matrix: Tensor) -> bool:
    """Overwrite a symmetric positive definite matrix by its lower Cholesky factor.

    Equivalent to ``matrix.copy_(torch.linalg.cholesky(matrix))``.

    Args:
        matrix: (n, n), of which the lower triangle is read.

    Returns:
        Whether there is a factor; where not, `matrix` is lost nevertheless.
    """
    middle = len(matrix) // 2
    if len(matrix) <= FACTOR_SIZE:
        factor, info = torch.linalg.cholesky_ex(matrix)
        matrix.copy_(factor)
        return int(info) == 0
    first, corner = matrix[:middle, :middle], matrix[middle:, :middle]
    if not cholesky_(first):
        return False
    _divide_(corner, first)
    matrix[:middle, middle:] = 0
    return cholesky_(add_gram(matrix[middle:, middle:], corner, -1.0))


def _divide_(rows: Tensor, lower: Tensor) -> None:
    """rows ← rows L⁻ᵀ, in place, without the copies that a solve makes of parts of a matrix."""
    middle = len(lower) // 2
    if len(lower) <= FACTOR_SIZE:
        rows.copy_(torch.linalg.solve_triangular(lower.mT, rows, upper=True, left=False))
        return
    first, second = rows[:, :middle], rows[:, middle:]
    _divide_(first, lower[:middle, :middle])
    second.addmm_(first, lower[middle:, :middle].mT, alpha=-1)
    _divide_(second, lower[middle:, middle:])


def solve_(rows: Tensor, lower: Tensor) -> Tensor:
    """rows ← rows (L Lᵀ)⁻¹, in place.

    Equivalent to ``rows.copy_(torch.cholesky_solve(rows.mT, lower).mT)``, which copies L first, to
    another memory layout: for a block of rows that takes as long as the solve.

    Args:
        rows: (m, n), contiguous; overwritten and returned.
        lower: L, (n, n), of which the lower triangle is read.
    """
    solve = torch.linalg.solve_triangular
    solve(lower.mT, rows, upper=True, left=False, out=rows)
    return solve(lower, rows, upper=False, left=False, out=rows)
