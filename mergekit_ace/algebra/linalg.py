# SPDX-License-Identifier: Apache-2.0
"""Products, Cholesky factors and eigenvectors of large matrices on whatever device they are.

On a CPU they are NumPy's and SciPy's: torch leaves a CPU to MKL, which takes up to twice as long on
other makers' processors, and NumPy halves the work of a product of a matrix with its own transpose.
"""

from __future__ import annotations

import functools
import math
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import scipy.linalg
import torch
from threadpoolctl import ThreadpoolController
from torch import Tensor

# Entries that are worked on at once where a tensor need not exist twice: 4 MiB in float32, which
# stay in a CPU's cache; on a GPU, which has done a smaller block before it hears of the next, 128.
BLOCK_ENTRIES = 2**20
GPU_BLOCK = 2**25
# Entries of all task vectors of a matrix that are in memory at once: 1 GiB in float32.
LARGEST_STACK = 2**28
CPU = torch.device("cpu")


def blocks(
    length: int, width: int, device: torch.device = CPU, *, entries: int | None = None
) -> Iterator[slice]:
    """Iterate over slices of 0…length, so that a large matrix never exists twice.

    Args:
        length: how many items.
        width: entries of one.
        device: that works on the blocks.
        entries: of a block; by default what suits the device.
    """
    if entries is None:
        entries = BLOCK_ENTRIES if device.type == "cpu" else GPU_BLOCK
    step = max(1, entries // max(1, width))
    for start in range(0, length, step):
        yield slice(start, min(start + step, length))


def as_rows(tensor: Tensor) -> Tensor:
    """Return a tensor of any shape as a matrix whose rows run over its first axis."""
    return tensor.reshape(
        (*tensor.shape[:1], math.prod(tensor.shape[1:])) if tensor.ndim else (1, 1)
    )


def squared_norm(tensor: Tensor) -> float:
    """Return ‖X‖_F² of a tensor of any shape and size of entries.

    Row by row in the tensor's own dtype, and in float64 where squares leave the range of float32.
    """
    if tensor.ndim > 1 and tensor.dtype == torch.float32:
        rows = torch.linalg.vector_norm(tensor, dim=-1)
        total = float(rows.double().square().sum())
        if 1e-25 < total < 1e35 or not tensor.any():
            return total
    return float(torch.linalg.vector_norm(tensor, dtype=torch.float64)) ** 2


def product(left: Tensor, right: Tensor) -> Tensor:
    """Return L R, (m, n).

    Args:
        left: L, (m, k), any strides.
        right: R, (k, n), of the same dtype. Lᵀ itself costs half on a CPU.
    """
    if left.device.type != "cpu":
        return left @ right
    return torch.from_numpy(np.matmul(left.detach().numpy(), right.detach().numpy()))


def add_product_(total: Tensor, left: Tensor, right: Tensor, alpha: float = 1.0) -> Tensor:
    """Add α L R to a matrix, (m, n), in place; arguments as of `product`."""
    if total.device.type != "cpu":
        return total.addmm_(left, right, alpha=alpha)
    return total.add_(product(left, right), alpha=alpha)


def gram(factor: Tensor) -> Tensor:
    """Return F Fᵀ, (n, n), of F, (n, k)."""
    return product(factor, factor.mT)


def factorize(matrix: Tensor) -> tuple[Tensor, Tensor]:
    """Return the Cholesky factor of a symmetric positive definite matrix, and whether there is one.

    Args:
        matrix: (n, n), contiguous; overwritten on a CPU.

    Returns:
        L, (n, n), and a number on its device: 0 where L Lᵀ is the matrix.
    """
    if matrix.device.type != "cpu":
        return torch.linalg.cholesky_ex(matrix)
    (potrf,) = scipy.linalg.get_lapack_funcs(["potrf"], [matrix.numpy()])
    lower, info = potrf(matrix.numpy().T, lower=1, overwrite_a=1, clean=1)
    return torch.from_numpy(lower), torch.tensor(info, device="cpu")


def solve(rows: Tensor, lower: Tensor) -> Tensor:
    """Return rows times (L Lᵀ)⁻¹.

    Args:
        rows: (m, n), contiguous; overwritten on a CPU.
        lower: L, (n, n), from `factorize`.
    """
    if rows.device.type != "cpu":
        return torch.cholesky_solve(rows.mT, lower).mT
    if not rows.numel():
        return rows
    given = (lower.numpy(), True), rows.numpy().T
    found = scipy.linalg.cho_solve(*given, overwrite_b=True, check_finite=False)
    return torch.from_numpy(found.T)


def leading_eigenpairs(matrix: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Return the largest eigenvalues, (k,), and their eigenvectors, (n, k), the largest first.

    Args:
        matrix: symmetric, (n, n).
        count: 1 ≤ k ≤ n.
    """
    if matrix.device.type != "cpu":
        values, vectors = torch.linalg.eigh(matrix)
        return values.flip(0)[:count], vectors.flip(1)[:, :count]
    size = len(matrix)
    chosen = None if 2 * count > size else (size - count, size - 1)
    found = scipy.linalg.eigh(
        matrix.numpy(), subset_by_index=chosen, driver="evr" if chosen else "evd",
        check_finite=False,
    )  # fmt: skip
    values, vectors = (torch.from_numpy(np.ascontiguousarray(part)) for part in found)
    return values.flip(0)[:count], vectors.flip(1)[:, :count]


def orthonormal(columns: Tensor) -> Tensor:
    """Return an orthonormal basis of columns, (n, r) or (E, n, r)."""
    return torch.linalg.qr(columns).Q


# Of all threads that merge: --multi-gpu merges tensors side by side, and the switches are global.
_LOCK = threading.Lock()
_users = 0
_saved: list[str] = []
_limit: Any = None


@contextmanager
def full_precision() -> Iterator[None]:
    """Let float32 products have float32 factors, and SciPy's BLAS as many threads as torch.

    torch may round the factors of a float32 product to TF32 on a GPU, or to bfloat16 on a CPU,
    where the caller allowed that for training. Ten or seven bits are not enough to invert a
    covariance. Afterwards the caller's settings are back.
    """
    global _users, _saved, _limit
    with _LOCK:
        if _users == 0:
            _saved = _get_precision()
            _set_precision(["highest"] if len(_saved) == 1 else ["ieee"] * len(_saved))
            _limit = _controller().limit(limits=torch.get_num_threads(), user_api="blas")
        _users += 1
    try:
        yield
    finally:
        with _LOCK:
            _users -= 1
            if _users == 0:
                _set_precision(_saved)
                _limit.restore_original_limits()


@functools.cache
def _controller() -> ThreadpoolController:
    return ThreadpoolController()


def _backends() -> list:
    backends = [torch.backends.cuda.matmul, torch.backends.mkldnn]
    if not all(hasattr(backend, "fp32_precision") for backend in backends):
        return []  # before torch 2.9 there is one switch for all
    return [torch.backends.cuda.matmul, torch.backends.mkldnn.matmul]  # pyright: ignore


def _get_precision() -> list[str]:
    backends = _backends()
    if not backends:
        return [torch.get_float32_matmul_precision()]
    return [backend.fp32_precision for backend in backends]


def _set_precision(values: list[str]) -> None:
    backends = _backends()
    if not backends:
        torch.set_float32_matmul_precision(values[0])
    for backend, value in zip(backends, values, strict=False):
        backend.fp32_precision = value
