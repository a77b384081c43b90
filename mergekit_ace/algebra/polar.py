# SPDX-License-Identifier: Apache-2.0
"""The orthonormal factor of a matrix: U Vᵀ of A = U diag(σ) Vᵀ."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from mergekit_ace.algebra.linalg import product
from mergekit_ace.algebra.spectrum import DEFAULT_TOLERANCE, singular_directions


def polar_factor(
    matrix: Tensor, floor: float = 0.0, tolerance: float = DEFAULT_TOLERANCE
) -> Tensor:
    """Return U Vᵀ of A = U diag(σ) Vᵀ: the nearest matrix with orthonormal rows, or columns.

    Directions that rounding cannot tell from zero are left out of it, where a full decomposition
    would return arbitrary vectors.

    Args:
        matrix: A, (o, i), float64, or float32 where `tolerance` allows for it; finite.
        floor: singular values that are no larger count as rounding, see `noise_edge`.
        tolerance: the relative error that is allowed, in the Frobenius norm.

    Returns:
        (o, i), in the dtype of the matrix.
    """
    directions = singular_directions(matrix, floor=floor, tolerance=tolerance)
    return product(directions.left, directions.right.mT)


def nearest_orthonormal(columns: Sequence[Tensor], tolerance: float = DEFAULT_TOLERANCE) -> Tensor:
    """Return the matrix with orthonormal columns that is nearest to some columns side by side.

    Columns that repeat others have none (Procrustes, see `polar_factor`).

    Args:
        columns: matrices (n, k_t).
        tolerance: see `polar_factor`.

    Returns:
        (n, Σ k_t).
    """
    return polar_factor(torch.cat(list(columns), dim=1), tolerance=tolerance)
