# SPDX-License-Identifier: Apache-2.0
"""Symmetric products and Cholesky factors in place, at half the work of general products.

A symmetric matrix is kept by its lower triangle. Halving it again and again leaves squares below
the diagonal, which are plain matrix products, and small squares on it. Neither a copy nor a
workspace of the matrix's size is needed, and nearly all work runs at the speed of large products.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from mergekit_ace.algebra.blocks import blocks
from mergekit_ace.algebra.products import add_product_, runs, uses_onednn
from mergekit_ace.algebra.triangular import divide_

# Squares on the diagonal that are no longer halved: large enough for full speed. Held against
# sizes from 64 to 512, at 2048 and 6144 rows.
PRODUCT_SIZE = 256
ONEDNN_SIZE = 512  # of products by oneDNN, see `products`
FACTOR_SIZE = 256


def add_gram(total: Tensor, factor: Tensor, alpha: float = 1.0, *, careful: bool = False) -> Tensor:
    """total += α·F Fᵀ, in the lower triangle.

    Args:
        total: (n, n), overwritten and returned. Above the diagonal it is undefined afterwards,
            until `mirror` fills it in.
        factor: F, (n, k).
        alpha: α.
        careful: with rounding errors as small as MKL's, see `add_product_`.
    """
    if not uses_onednn(factor):
        return _add_gram(total, factor, alpha, PRODUCT_SIZE)
    if factor.is_contiguous() and not careful:
        return _add_gram(total, factor, alpha, ONEDNN_SIZE)
    parts = runs(factor.shape[1]) if careful else blocks(factor.shape[1], len(factor))
    for columns in parts:  # copied here, once, and not in every product
        _add_gram(total, factor[:, columns].contiguous(), alpha, ONEDNN_SIZE)
    return total


def _add_gram(total: Tensor, factor: Tensor, alpha: float, size: int) -> Tensor:
    middle = len(total) // 2
    if len(total) <= size:
        return add_product_(total, factor, factor.mT, alpha)
    upper, lower = factor[:middle], factor[middle:]
    _add_gram(total[:middle, :middle], upper, alpha, size)
    _add_gram(total[middle:, middle:], lower, alpha, size)
    add_product_(total[middle:, :middle], lower, upper.mT, alpha)
    return total


def mirror(matrix: Tensor) -> Tensor:
    """Copy the lower triangle above the diagonal, in place."""
    for start in range(0, len(matrix), PRODUCT_SIZE):
        rows = slice(start, start + PRODUCT_SIZE)
        square = matrix[rows, rows].tril_()
        square.add_(square.tril(-1).mT)
        matrix[:start, rows] = matrix[rows, :start].mT
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


def cholesky_(matrix: Tensor, *, careful: bool = False, keep: bool = False) -> bool:
    """Overwrite a symmetric positive definite matrix by its lower Cholesky factor.

    Equivalent to ``matrix.copy_(torch.linalg.cholesky(matrix))``.

    Args:
        matrix: (n, n), of which the lower triangle is read.
        careful: with rounding errors as small as MKL's, see `add_product_`.
        keep: leave what is above the `diagonal_squares` as it is, instead of writing zeros there.

    Returns:
        Whether there is a factor; where not, `matrix` is lost nevertheless.
    """
    middle = len(matrix) // 2
    if len(matrix) <= FACTOR_SIZE:
        factor, info = torch.linalg.cholesky_ex(matrix)
        matrix.copy_(factor)
        return int(info) == 0
    first, corner = matrix[:middle, :middle], matrix[middle:, :middle]
    if not cholesky_(first, careful=careful, keep=keep):
        return False
    divide_(corner, first, careful)
    if not keep:
        matrix[:middle, middle:] = 0
    rest = add_gram(matrix[middle:, middle:], corner, -1.0, careful=careful)
    return cholesky_(rest, careful=careful, keep=keep)


def diagonal_squares(matrix: Tensor) -> Iterator[Tensor]:
    """The squares on the diagonal of (n, n) all of which `cholesky_` overwrites: views, in order.

    With copies of them, a matrix that was symmetric can be recovered (`recover_`) from the rest of
    its upper triangle, while its factor lies in the lower one: two matrices in the memory of one.
    """
    middle = len(matrix) // 2
    if len(matrix) <= max(PRODUCT_SIZE, ONEDNN_SIZE, FACTOR_SIZE):
        yield matrix
        return
    yield from diagonal_squares(matrix[:middle, :middle])
    yield from diagonal_squares(matrix[middle:, middle:])


def recover_(factor: Tensor, squares: Sequence[Tensor]) -> Tensor:
    """The symmetric matrix that was factored with `keep`, in the place of its factor.

    Args:
        factor: (n, n), overwritten and returned; narrowed since, perhaps.
        squares: what the `diagonal_squares` were before.
    """
    for place, square in zip(diagonal_squares(factor), squares, strict=True):
        place.copy_(square)
    mirror(factor.mT)
    return factor
