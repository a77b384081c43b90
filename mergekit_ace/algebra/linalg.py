# SPDX-License-Identifier: Apache-2.0
"""Products, factors, eigenvectors and singular directions of matrices, on any device.

On a CPU they are NumPy's and SciPy's: torch's MKL is slow on processors of other makers.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import numpy as np
import scipy.linalg
import torch
from threadpoolctl import ThreadpoolController
from torch import Tensor

# Entries that are worked on at once where a tensor need not exist twice: 4 MiB in float32, which
# stay in a CPU's cache; more on a GPU, which waits for every block.
BLOCK_ENTRIES = 2**20
GPU_BLOCK = 2**25
# Singular values below this share of the largest are lost in a Gram matrix.
WEAKEST = {torch.float64: 1e-7, torch.float32: 1e-3}


def blocks(length: int, width: int, device: torch.device) -> Iterator[slice]:
    """Iterate over slices of 0…length of items with `width` entries, as large as suits a device."""
    entries = BLOCK_ENTRIES if device.type == "cpu" else GPU_BLOCK
    step = max(1, entries // max(1, width))
    for start in range(0, length, step):
        yield slice(start, min(start + step, length))


def largest_size(tensor: Tensor) -> float:
    """Return max |x| over the entries; 0 without any, NaN or Inf where there is one."""
    if tensor.numel() == 0:
        return 0.0
    return float(torch.stack(torch.aminmax(tensor)).abs().max())  # both are NaN if an entry is


def as_vector(numbers: Sequence[float] | Sequence[Sequence[float]], like: Tensor) -> Tensor:
    """Return numbers in the dtype of a tensor, where that is; nobody waits for a GPU's copy."""
    if not like.is_cuda:
        return like.new_tensor(numbers)
    pinned = torch.tensor(numbers, dtype=like.dtype, device="cpu", pin_memory=True)
    return pinned.to(like.device, non_blocking=True)


def as_rows(tensor: Tensor) -> Tensor:
    """Return a tensor of any shape as a matrix whose rows run over its first axis."""
    return tensor.reshape(*(tensor.shape or [1]), 1).flatten(1)


def product(left: Tensor, right: Tensor) -> Tensor:
    """Return L R, (…, m, n), of L, (…, m, k), and R, (…, k, n), of one dtype and any strides."""
    if left.device.type != "cpu":
        return left @ right
    return torch.from_numpy(np.matmul(left.detach().numpy(), right.detach().numpy()))


def add_product_(total: Tensor, left: Tensor, right: Tensor) -> Tensor:
    """Add L R to a matrix, (m, n), in place; arguments as of `product`."""
    if total.device.type != "cpu":
        return total.addmm_(left, right)
    return total.add_(product(left, right))


def gram(factor: Tensor) -> Tensor:
    """Return F Fᵀ, (n, n), of F, (n, k)."""
    return product(factor, factor.mT)


def _load_library(device: torch.device) -> None:
    """Let torch load a GPU's decompositions: several threads that begin with one fail."""
    with _LOCK:
        if device.type not in _LOADED:
            torch.linalg.cholesky_ex(torch.eye(1, device=device))
            _LOADED.add(device.type)


def factorize(matrix: Tensor) -> tuple[Tensor, Tensor]:
    """Return the Cholesky factor of a symmetric matrix, (n, n), and 0 if it has one.

    On a CPU the matrix is overwritten.
    """
    if matrix.device.type != "cpu":
        _load_library(matrix.device)
        return torch.linalg.cholesky_ex(matrix)
    (potrf,) = scipy.linalg.get_lapack_funcs(["potrf"], [matrix.numpy()])
    lower, info = potrf(matrix.numpy().T, lower=1, overwrite_a=1, clean=1)
    return torch.from_numpy(lower), torch.tensor(info, device="cpu")


def solve(rows: Tensor, lower: Tensor) -> Tensor:
    """Return rows, (m, n), contiguous and overwritten on a CPU, times (L Lᵀ)⁻¹ of a factor L."""
    if rows.device.type != "cpu":
        return torch.cholesky_solve(rows.mT, lower).mT
    system = (lower.numpy(), True)
    solved = scipy.linalg.cho_solve(system, rows.numpy().T, overwrite_b=True, check_finite=False)
    return torch.from_numpy(solved.T)


def leading_eigenpairs(matrix: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Return the k ≥ 1 largest eigenvalues of a symmetric matrix, in order, and vectors, (n, k)."""
    if matrix.device.type != "cpu":
        _load_library(matrix.device)
        values, vectors = torch.linalg.eigh(matrix)
    else:
        values, vectors = map(torch.from_numpy, np.linalg.eigh(matrix.numpy()))
    return values.flip(0)[:count], vectors.flip(1)[:, :count]


def leading_directions(
    matrix: Tensor, count: int, floor: float = 0.0
) -> tuple[Tensor, Tensor, Tensor]:
    """Return at most `count` of the largest singular triplets that a matrix, (o, i), has.

    They are U, (o, k), σ, (k,), and V, (i, k), in float64. With A Aᵀ = P diag(σ²) Pᵀ they are
    (p, σ, Aᵀp/σ) (Golub and Van Loan, §8.6). Singular values up to `floor` are rounding, as those
    below `WEAKEST` of the largest are.
    """
    turned = matrix.shape[0] > matrix.shape[1]
    wide = matrix.mT if turned else matrix
    side, length = wide.shape
    short = torch.zeros(side, 0, dtype=torch.float64, device=wide.device)
    long, values = short.new_zeros(length, 0), short.new_zeros(0)
    # Squares of the tiniest and the largest entries leave the range of float64.
    scale = largest_size(matrix)
    if count and scale:
        parts = list(blocks(length, side, wide.device))
        squares = torch.zeros(side, side, dtype=torch.float64, device=wide.device)
        for columns in parts:
            squares += gram(wide[:, columns].double() / scale)
        short = leading_eigenpairs(squares, min(count, side))[1].contiguous()
        long = torch.cat([product((wide[:, c].double() / scale).mT, short) for c in parts])
        values = torch.linalg.vector_norm(long, dim=0)
        kept = values > max(floor / scale, WEAKEST[torch.float64] * float(values.max()))
        short, values = short[:, kept], values[kept]
        long, values = long[:, kept] / values, values * scale
    return (long, values, short) if turned else (short, values, long)


def orthogonal_factor(matrix: Tensor) -> Tensor:
    """Return U Vᵀ of A = U diag(σ) Vᵀ: the nearest matrix with orthonormal rows or columns."""
    left, _, right = leading_directions(matrix, min(matrix.shape))
    return left @ right.mT


# --multi-gpu merges tensors side by side, and the switches of torch and of the BLAS are global.
_LOCK = threading.Lock()
# What has a switch of its own for float32 products; before torch 2.9 there is one for all.
_BACKENDS: list[Any] = []
if hasattr(torch.backends.mkldnn, "fp32_precision"):
    _BACKENDS += [torch.backends.cuda.matmul, torch.backends.mkldnn.matmul]  # pyright: ignore
_threads = functools.cache(ThreadpoolController)  # which takes long to find all libraries
_users = 0
_LOADED: set[str] = set()
_restore = ExitStack()


@contextmanager
def full_precision() -> Iterator[None]:
    """Let float32 products have float32 factors, and SciPy's BLAS as many threads as torch.

    The ten bits of TF32, which a caller may allow for training, cannot invert a covariance.
    """
    global _users
    with _LOCK:
        _users += 1
        if _users == 1:
            _exchange_settings()
    try:
        yield
    finally:
        with _LOCK:
            _users -= 1
            if _users == 0:
                _restore.close()


def _exchange_settings() -> None:
    """Set what `full_precision` promises, and let `_restore` put back what was set before."""
    limit = _threads().limit(limits=torch.get_num_threads(), user_api="blas")
    _restore.callback(limit.restore_original_limits)
    if not _BACKENDS:
        _restore.callback(torch.set_float32_matmul_precision, torch.get_float32_matmul_precision())
        torch.set_float32_matmul_precision("highest")
    for backend in _BACKENDS:
        _restore.callback(setattr, backend, "fp32_precision", backend.fp32_precision)
        backend.fp32_precision = "ieee"
