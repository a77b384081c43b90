# SPDX-License-Identifier: Apache-2.0
"""Solves with Cholesky factors, in place.

A factor is halved again and again, as in `symmetric`, so that nearly all work becomes products of
squares, at their speed.
"""

from __future__ import annotations

import torch
from torch import Tensor

from mergekit_ace.algebra.products import add_product_, uses_onednn

# Factors that are no longer halved. Held against sizes from 64 to 512, at 2048 and 6144 rows.
LEAF = 256
# Rows from which a solve is faster by products of oneDNN, at 512 to 4096 columns.
MANY = 512


def solve_(rows: Tensor, lower: Tensor, *, careful: bool = False) -> Tensor:
    """rows ← rows (L Lᵀ)⁻¹, in place.

    Equivalent to ``rows.copy_(torch.cholesky_solve(rows.mT, lower).mT)``, which copies L first, to
    another memory layout: for a block of rows that takes as long as the solve.

    Args:
        rows: (m, n), contiguous, or its transpose is, which is the faster one where oneDNN
            multiplies: no parts of it have gaps. Overwritten and returned.
        lower: L, (n, n), of which the lower triangle is read.
        careful: with rounding errors as small as MKL's, see `add_product_`.
    """
    if len(rows) >= MANY and uses_onednn(rows):
        return _divide_back_(divide_(rows, lower, careful), lower, careful)
    solve = torch.linalg.solve_triangular
    solve(lower.mT, rows, upper=True, left=False, out=rows)
    return solve(lower, rows, upper=False, left=False, out=rows)


def divide_(rows: Tensor, lower: Tensor, careful: bool) -> Tensor:
    """rows ← rows L⁻ᵀ, in place, without the copies that a solve makes of parts of a matrix.

    Args:
        rows: (m, n), any strides; overwritten and returned.
        lower: L, (n, n), of which the lower triangle is read.
        careful: as in `solve_`.
    """
    middle = len(lower) // 2
    if len(lower) <= LEAF:
        return _divide_leaf_(rows, lower, transposed=True)
    first, second = rows[:, :middle], rows[:, middle:]
    divide_(first, lower[:middle, :middle], careful)
    add_product_(second, first, lower[middle:, :middle].mT, -1.0, careful=careful)
    divide_(second, lower[middle:, middle:], careful)
    return rows


def _divide_back_(rows: Tensor, lower: Tensor, careful: bool) -> Tensor:
    """rows ← rows L⁻¹, in place; arguments as of `divide_`."""
    middle = len(lower) // 2
    if len(lower) <= LEAF:
        return _divide_leaf_(rows, lower, transposed=False)
    first, second = rows[:, :middle], rows[:, middle:]
    _divide_back_(second, lower[middle:, middle:], careful)
    add_product_(first, second, lower[middle:, :middle], -1.0, careful=careful)
    _divide_back_(first, lower[:middle, :middle], careful)
    return rows


def _divide_leaf_(rows: Tensor, lower: Tensor, *, transposed: bool) -> Tensor:
    factor = lower.mT if transposed else lower
    solve = torch.linalg.solve_triangular
    if rows.mT.is_contiguous():
        return solve(factor, rows, upper=transposed, left=False, out=rows)
    dense = rows.contiguous()  # of rows with gaps torch makes slower copies
    return rows.copy_(solve(factor, dense, upper=transposed, left=False))
