# SPDX-License-Identifier: Apache-2.0
"""Leading singular directions of a matrix from the eigenpairs of its smaller Gram matrix.

With A Aᵀ = P diag(σ²) Pᵀ, A has the singular triplets (p, Aᵀp/σ, σ). A Gram matrix squares the
condition number of A; how much of U_k V_kᵀ that spoils is told by `estimate_blur`.
"""

from __future__ import annotations

import math

import torch
from scipy.linalg import LinAlgError, eigh_tridiagonal, get_lapack_funcs, lapack
from torch import Tensor

from mergekit_ace.algebra.linalg import add_gram, blocks, mirror


def on_shorter_side(matrix: Tensor) -> Tensor:
    """Return a matrix, or its transpose if that has fewer rows."""
    return matrix if matrix.shape[0] <= matrix.shape[1] else matrix.mT


def smaller_gram(matrix: Tensor, dtype: torch.dtype = torch.float64) -> Tensor:
    """Return A Aᵀ, or AᵀA if that is smaller, (m, m); only the lower triangle is filled."""
    rows = on_shorter_side(matrix)
    side, length = rows.shape
    gram = torch.zeros(side, side, dtype=dtype, device=rows.device)
    for columns in blocks(length, side, rows.device):
        add_gram(gram, rows[:, columns].to(dtype))
    return gram


def leading_eigenpairs(gram: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Return the largest eigenvalues, the largest first, and their eigenvectors.

    On a CPU the matrix is reduced to a tridiagonal one, which is decomposed by divide and conquer,
    and only the eigenvectors that are wanted are brought back. LAPACK's own drivers take up to
    twice as long: they bring back all, or orthogonalise a share one by one.

    Args:
        gram: (m, m), symmetric and contiguous; its lower triangle is read; overwritten.
        count: how many, 1 ≤ count ≤ m.

    Returns:
        Eigenvalues, (count,), float64, and eigenvectors, (m, count), in the dtype of the matrix.

    Raises:
        torch.linalg.LinAlgError: no convergence.
    """
    if gram.device.type != "cpu" or not hasattr(lapack, "dstevd"):  # which SciPy has from 1.16 on
        values, vectors = torch.linalg.eigh(gram)
        return values[-count:].flip(0).double(), vectors[:, -count:].flip(1)
    size = len(gram)
    sytrd, query, ormqr = get_lapack_funcs(
        ("sytrd", "sytrd_lwork", "ormqr"), dtype=gram.numpy().dtype
    )
    room = int(query(size, lower=1)[0])
    reflectors, diagonal, beside, scales, _ = sytrd(
        mirror(gram).numpy().T, lower=1, lwork=room, overwrite_a=1
    )
    assert reflectors.ctypes.data == gram.data_ptr()
    try:
        values, vectors = eigh_tridiagonal(
            diagonal, beside, check_finite=False, lapack_driver="stevd"
        )
    except LinAlgError as error:  # as torch calls it
        raise torch.linalg.LinAlgError(str(error)) from error
    values = torch.from_numpy(values[-count:]).flip(0).double()
    rows = torch.from_numpy(vectors[:, -count:].T).flip(0)
    del vectors  # its memory is needed
    if size > 1:
        # Reflectors begin one place below the diagonal, and leave the first entry as it is.
        flat = gram.view(-1)[1 : 1 + size * (size - 1)].view(size - 1, size)
        rest = rows[:, 1:].contiguous()
        ormqr(
            "L", "N", flat.numpy().T, scales, rest.numpy().T,
            lwork=64 * (count + 65), overwrite_c=1,
        )  # fmt: skip
        rows[:, 1:] = rest
    return values, rows.mT


def estimate_blur(
    sigma: Tensor,
    rank: int,
    shape: tuple[int, ...],
    error: float | Tensor,
    exchanged: float | None = None,
) -> float:
    """Estimate the relative error of U_k V_kᵀ when A has the error ‖δA‖_F = `error`.

    To first order, noise of standard deviation s in the entries moves U_k V_kᵀ, whose norm is √k,
    by s·√((m + n) Σ_{j≤k} 1/σ_j² + 2/(σ_k − σ_{k+1})²): weak directions turn, and the last one
    mixes with the first one that is left out, until it is exchanged for that.

    Args:
        sigma: the largest singular values, the largest first; at least k + 1 of them unless there
            are no more.
        rank: k.
        shape: of A, or of its transpose.
        error: of A; or of A as it shows in every one of the directions, shaped as `sigma`.
        exchanged: the part of it that comes from the cut at k, where that was measured.
    """
    rows, columns = shape
    sigma = sigma.cpu()  # numbers are wanted in any case
    noise = torch.as_tensor(error).cpu().expand_as(sigma) / (rows * columns) ** 0.5
    turned = (rows + columns) * float((noise / sigma)[:rank].square().mean())
    if exchanged is None:
        gap = float(sigma[rank - 1] - sigma[rank]) if rank < len(sigma) else math.inf
        angle = min(1.0, float(noise[rank - 1]) / gap) if gap > 0 else 1.0
        exchanged = (2 / rank) ** 0.5 * angle
    return (turned + exchanged**2) ** 0.5
