# SPDX-License-Identifier: Apache-2.0
"""Leading eigenpairs of a symmetric matrix."""

from __future__ import annotations

import torch
from scipy.linalg import eigh
from torch import Tensor


def leading_eigenpairs(matrix: Tensor, count: int, *, lean: bool = False) -> tuple[Tensor, Tensor]:
    """The largest eigenvalues, ascending, (count,), and their eigenvectors, (m, count).

    Args:
        matrix: (m, m), symmetric, in float64; its lower triangle is read; may be overwritten.
        count: how many, 1 ≤ count ≤ m.
        lean: with the memory of the eigenvectors only, where divide and conquer takes three
            matrices: a third slower. On a CPU; elsewhere it changes nothing.
    """
    if lean and matrix.device.type == "cpu":
        size = len(matrix)
        values, vectors = eigh(
            matrix.numpy().T,  # in LAPACK's order of axes, so that no copy is made
            lower=False,
            overwrite_a=True,
            check_finite=False,
            driver="evr",
            subset_by_index=[size - count, size - 1],
        )
        return torch.from_numpy(values), torch.from_numpy(vectors)
    values, vectors = torch.linalg.eigh(matrix)
    return values[-count:], vectors[:, -count:]
