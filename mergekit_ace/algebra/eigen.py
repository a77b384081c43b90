# SPDX-License-Identifier: Apache-2.0
"""Leading eigenpairs of a symmetric positive semidefinite matrix."""

from __future__ import annotations

import torch
from scipy.linalg import LinAlgError, eigh
from torch import Tensor

from mergekit_ace.algebra.linalg import avoids_mkl, mirror, threads_of_torch

# Directions tried for eigenvalues far above the rest, and iterations given to them: a tenth of what
# a decomposition in float32 takes at 2048 rows.
SPIKES = 64
ITERATIONS = 5


def leading_eigenpairs(matrix: Tensor, count: int, *, lean: bool = False) -> tuple[Tensor, Tensor]:
    """The largest eigenvalues, ascending, (count,), and their eigenvectors, (m, count).

    Args:
        matrix: (m, m), symmetric; its lower triangle is read; may be overwritten.
        count: how many, 1 ≤ count ≤ m.
        lean: with the memory of the eigenvectors only, where MKL's divide and conquer takes three
            matrices, and in float64 a third less time. On a CPU; elsewhere it changes nothing.
    """
    if avoids_mkl(matrix.device) or (lean and matrix.device.type == "cpu"):
        size = len(matrix)
        try:
            with threads_of_torch():
                values, vectors = eigh(
                    matrix.numpy().T,  # in LAPACK's order of axes, so that no copy is made
                    lower=False,
                    overwrite_a=True,
                    check_finite=False,
                    driver="evr",
                    subset_by_index=[size - count, size - 1],
                )
        except LinAlgError as error:  # as torch calls it
            raise torch.linalg.LinAlgError(str(error)) from error
        return torch.from_numpy(values), torch.from_numpy(vectors)
    values, vectors = torch.linalg.eigh(matrix)
    return values[-count:], vectors[:, -count:]


def deflate_(matrix: Tensor) -> tuple[Tensor, Tensor, float]:
    """Take the eigenvalues far above all others out of a matrix.

    What float32 rounds in a decomposition is measured by the largest eigenvalue, and magnified by
    how far that is above those wanted. A few far above all others are found by subspace iteration,
    to the precision of float64.

    Args:
        matrix: G, (m, m), in float64, positive semidefinite, its lower triangle; overwritten by
            G − Y diag(θ) Yᵀ, all of it.

    Returns:
        θ, (l,), ascending, and Y, (m, l), orthonormal; l ≤ `SPIKES`, often 0. And an estimate of
        the largest eigenvalue left.
    """
    size = len(mirror(matrix))
    count = min(SPIKES, size // 4)
    # named devices, because mergekit's --multi-gpu merges inside of `with torch.device(…)`
    generator = torch.Generator("cpu").manual_seed(0)
    start = torch.randn(size, count, generator=generator, dtype=torch.float64, device="cpu")
    basis = start.to(matrix.device)
    for _ in range(ITERATIONS):
        basis = torch.linalg.qr((basis.mT @ matrix).mT).Q  # in this order a third faster by MKL
    turned = (basis.mT @ matrix).mT
    values, rotation = torch.linalg.eigh(basis.mT @ turned)
    vectors = basis @ rotation
    residual = torch.linalg.vector_norm(turned @ rotation - vectors * values, dim=0)
    # A remaining angle α to a vector of eigenvalue θ would show as α √θ beside √λ.
    level = max(float(matrix.trace() - values.sum()), 0.0) / (size - count)
    angle = residual / (values - values[0])
    found = angle * values.clamp(min=0).sqrt() <= 1e-7 * level**0.5
    first = count - int(found.flip(0).long().cumprod(0).sum())
    largest = float(values[max(first - 1, 0)])
    values, vectors = values[first:], vectors[:, first:]
    matrix.addmm_(vectors * values, vectors.mT, alpha=-1)
    return values, vectors, largest
