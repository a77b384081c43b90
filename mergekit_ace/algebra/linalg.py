# SPDX-License-Identifier: Apache-2.0
"""Products, symmetric products, Cholesky factors and solves of large matrices, in place.

On a CPU all of them are SciPy's BLAS and LAPACK, elsewhere torch's. torch leaves a CPU's work to
MKL, which takes up to twice as long on other makers' processors, and neither factors in place nor
halves the work of a symmetric product.
"""

from __future__ import annotations

import functools
import math
import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager

import torch
from scipy.linalg import get_blas_funcs, get_lapack_funcs
from threadpoolctl import ThreadpoolController
from torch import Tensor

# 4 MiB in float32, at which products of blocks run at nine tenths of their speed, and 16 MiB; on a
# GPU, which has done a smaller block before it is told of the next, 32 MiB.
BLOCK_ENTRIES = 2**20
LARGEST_BLOCK = 4 * BLOCK_ENTRIES
GPU_BLOCK = 8 * BLOCK_ENTRIES
# Rows of a symmetric product that torch, which has none, forms at once up to the diagonal.
GRAM_ROWS = 512
CPU = torch.device("cpu")


def block_entries(entries: int) -> int:
    """Return how many entries of a matrix with so many are worked on at once: an eighth, or so."""
    return min(max(BLOCK_ENTRIES, entries // 8), LARGEST_BLOCK)


def blocks(
    length: int, width: int, device: torch.device = CPU, *, entries: int | None = None
) -> Iterator[slice]:
    """Iterate over slices of 0…length, so that a large matrix never exists twice.

    Args:
        length: how many items.
        width: entries of one.
        device: that works on the blocks.
        entries: of a block on a CPU; by default see `block_entries`.
    """
    if device.type != "cpu":
        entries = GPU_BLOCK
    elif entries is None:
        entries = block_entries(length * width)
    step = max(1, entries // max(1, width))
    for start in range(0, length, step):
        yield slice(start, min(start + step, length))


def as_rows(tensor: Tensor) -> Tensor:
    """Return a tensor of any shape as a matrix whose rows run over its first axis."""
    return tensor.reshape(
        (*tensor.shape[:1], math.prod(tensor.shape[1:])) if tensor.ndim else (1, 1)
    )


def rounding(dtype: torch.dtype) -> float:
    """Return the unit roundoff of a dtype, in which errors of products are measured.

    Over 256 to 8192 summands the relative error of a product of random matrices, in the Frobenius
    norm, is two to six units.
    """
    return torch.finfo(dtype).eps / 2


def squared_norm(tensor: Tensor) -> float:
    """Return ‖X‖_F² of a tensor of any shape and size of entries.

    Row by row in the tensor's own dtype, summed in float64: thirty times as fast as float64
    throughout, which is taken where squares leave the range of float32.
    """
    if tensor.ndim > 1 and tensor.dtype == torch.float32:
        rows = torch.linalg.vector_norm(tensor, dim=-1)
        total = float(rows.double().square().sum())
        if 1e-25 < total < 1e35 or not tensor.any():
            return total
    return float(torch.linalg.vector_norm(tensor, dtype=torch.float64)) ** 2


class Torch:
    """The operations below by torch, on whatever device the tensors are."""

    @staticmethod
    def add_product_(total: Tensor, left: Tensor, right: Tensor, alpha: float) -> None:
        total.addmm_(left, right, alpha=alpha)

    @staticmethod
    def set_product_(total: Tensor, left: Tensor, right: Tensor) -> None:
        total.copy_(left @ right)

    @staticmethod
    def add_gram(total: Tensor, factor: Tensor, alpha: float) -> None:
        for rows in blocks(len(total), 1, entries=GRAM_ROWS):
            total[rows, : rows.stop].addmm_(factor[rows], factor[: rows.stop].mT, alpha=alpha)

    @staticmethod
    def cholesky_(matrix: Tensor) -> bool:
        factor, info = torch.linalg.cholesky_ex(matrix)
        for rows in blocks(len(matrix), 1, entries=GRAM_ROWS):
            matrix[rows, : rows.start] = factor[rows, : rows.start]
            matrix[rows, rows] = factor[rows, rows].tril() + matrix[rows, rows].triu(1)
        return bool((info == 0) & factor.diagonal().isfinite().all())  # NaN is no pivot

    @staticmethod
    def solve_(rows: Tensor, lower: Tensor) -> None:
        solve = torch.linalg.solve_triangular
        solve(lower.mT, rows, upper=True, left=False, out=rows)
        solve(lower, rows, upper=False, left=False, out=rows)

    @staticmethod
    def orthonormal(columns: Tensor) -> Tensor:
        return torch.linalg.qr(columns).Q


class SciPy:
    """The operations below by SciPy's BLAS and LAPACK, on a CPU; no factor or result is empty."""

    @staticmethod
    def add_product_(total: Tensor, left: Tensor, right: Tensor, alpha: float) -> None:
        if total.is_contiguous() or total.mT.is_contiguous():
            _multiply(left, right, total, alpha, beta=1.0)
        else:
            total.add_(product(left, right), alpha=alpha)

    @staticmethod
    def set_product_(total: Tensor, left: Tensor, right: Tensor) -> None:
        if total.is_contiguous() or total.mT.is_contiguous():
            _multiply(left, right, total, 1.0, beta=0.0)
        else:
            total.copy_(product(left, right))

    @staticmethod
    def add_gram(total: Tensor, factor: Tensor, alpha: float) -> None:
        (syrk,) = _blas("syrk", total.dtype)
        given, transposed = _column_major(factor)
        out = _turned(total)
        made = syrk(alpha, given, beta=1.0, c=out, trans=transposed, lower=0, overwrite_c=1)
        assert made.ctypes.data == out.ctypes.data

    @staticmethod
    def cholesky_(matrix: Tensor) -> bool:
        (potrf,) = _lapack("potrf", matrix.dtype)
        out = _turned(matrix)
        made, info = potrf(out, lower=0, clean=0, overwrite_a=1)
        assert made.ctypes.data == out.ctypes.data
        return info == 0 and bool(matrix.diagonal().isfinite().all())  # NaN is no pivot

    @staticmethod
    def solve_(rows: Tensor, lower: Tensor) -> None:
        (potrs,) = _lapack("potrs", rows.dtype)
        out = _turned(rows)
        made, _ = potrs(_turned(lower), out, lower=0, overwrite_b=1)
        assert made.ctypes.data == out.ctypes.data

    @staticmethod
    def orthonormal(columns: Tensor) -> Tensor:
        (geqrf,), (orgqr,) = (_lapack(name, columns.dtype) for name in ("geqrf", "orgqr"))
        given = _turned(columns.mT.clone(memory_format=torch.contiguous_format))
        room = 64 * columns.shape[1]
        # Beside other work, two threads wait for each other, and may take eight times as long.
        with _LOCK, _controller().limit(limits=1, user_api="blas"):
            factored, scales, _, _ = geqrf(given, lwork=room, overwrite_a=1)
            basis, _, _ = orgqr(factored[:, : len(scales)], scales, lwork=room, overwrite_a=1)
        return torch.from_numpy(basis)


def library(*tensors: Tensor) -> type[SciPy] | type[Torch]:
    """Return who works on these tensors, all of one device."""
    on_cpu = tensors[0].device.type == "cpu"
    return SciPy if on_cpu and all(tensor.numel() for tensor in tensors) else Torch


def add_product_(total: Tensor, left: Tensor, right: Tensor, alpha: float = 1.0) -> Tensor:
    """Add α·L R to a matrix, in place.

    Equivalent to ``total.addmm_(left, right, alpha=alpha)``.

    Args:
        total: (m, n), overwritten and returned; any strides. With gaps between its rows and its
            columns, as in a part of a matrix, the product is formed beside it first.
        left: L, (m, k), any strides; what has gaps is copied.
        right: R, (k, n), of the same dtype.
        alpha: α.
    """
    library(total, left, right).add_product_(total, left, right, alpha)
    return total


def set_product_(total: Tensor, left: Tensor, right: Tensor) -> Tensor:
    """Write L R over a matrix; arguments as of `add_product_`."""
    library(total, left, right).set_product_(total, left, right)
    return total


def product(left: Tensor, right: Tensor) -> Tensor:
    """Return L R, (m, n), in memory of its own; arguments as of `add_product_`."""
    return set_product_(left.new_empty(left.shape[0], right.shape[1]), left, right)


def add_gram(total: Tensor, factor: Tensor, alpha: float = 1.0) -> Tensor:
    """Add α·F Fᵀ to the lower triangle of a matrix, in place, at half the work of a product.

    Args:
        total: (n, n), contiguous, overwritten and returned. What is above the diagonal may be
            anything afterwards, until `mirror` fills it in.
        factor: F, (n, k).
        alpha: α.
    """
    library(total, factor).add_gram(total, factor, alpha)
    return total


def mirror(matrix: Tensor) -> Tensor:
    """Copy the lower triangle above the diagonal, in place."""
    for rows in blocks(len(matrix), 1, entries=GRAM_ROWS):
        square = matrix[rows, rows].tril_()
        square.add_(square.tril(-1).mT)
        matrix[: rows.start, rows] = matrix[rows, : rows.start].mT
    return matrix


def cholesky_(matrix: Tensor) -> bool:
    """Overwrite the lower triangle of a symmetric positive definite matrix by its Cholesky factor.

    Equivalent to ``torch.linalg.cholesky(matrix)``, but that what is above the diagonal stays as it
    is: with a copy of the diagonal, the matrix can be had back (`restore_`).

    Args:
        matrix: (n, n), contiguous, of which the lower triangle is read.

    Returns:
        Whether there is a factor; where not, `matrix` is lost nevertheless.
    """
    return library(matrix).cholesky_(matrix)


def restore_(factor: Tensor, diagonal: Tensor) -> Tensor:
    """Return to a symmetric matrix that `cholesky_` has factored, in place.

    Args:
        factor: (n, n), with the matrix still above the diagonal; overwritten and returned.
        diagonal: of the matrix, (n,).
    """
    factor.diagonal().copy_(diagonal)
    mirror(factor.mT)
    return factor


def solve_(rows: Tensor, lower: Tensor) -> Tensor:
    """Multiply rows by (L Lᵀ)⁻¹ from the right, in place.

    Equivalent to ``rows.copy_(torch.cholesky_solve(rows.mT, lower).mT)``.

    Args:
        rows: (m, n), contiguous; overwritten and returned.
        lower: L, (n, n), contiguous, of which the lower triangle is read.
    """
    library(rows, lower).solve_(rows, lower)
    return rows


def orthonormal(columns: Tensor) -> Tensor:
    """Return an orthonormal basis of columns, (n, r) or (E, n, r): as torch.linalg.qr(…).Q."""
    if columns.ndim == 2:
        return library(columns).orthonormal(columns)
    return torch.stack([orthonormal(part) for part in columns])


@functools.cache
def _blas(name: str, dtype: torch.dtype) -> list:
    return get_blas_funcs([name], dtype=str(dtype).removeprefix("torch."))


@functools.cache
def _lapack(name: str, dtype: torch.dtype) -> list:
    return get_lapack_funcs([name], dtype=str(dtype).removeprefix("torch."))


def _turned(matrix: Tensor):
    """View a contiguous matrix (m, n) as Fortran has it: the transpose, (n, m), by columns."""
    return matrix.detach().numpy().T


def _column_major(matrix: Tensor) -> tuple:
    """Return memory that lies by columns, and whether it is the transpose of the matrix."""
    if matrix.mT.is_contiguous():
        return matrix.detach().numpy(), False
    return _turned(matrix.contiguous()), True


def _multiply(left: Tensor, right: Tensor, total: Tensor, alpha: float, beta: float) -> None:
    if not total.mT.is_contiguous():  # Fortran writes totalᵀ = Rᵀ Lᵀ
        left, right, total = right.mT, left.mT, total.mT
    (gemm,) = _blas("gemm", total.dtype)
    first, first_turned = _column_major(left)
    second, second_turned = _column_major(right)
    out = total.detach().numpy()
    made = gemm(
        alpha, first, second, beta=beta, c=out, overwrite_c=1,
        trans_a=first_turned, trans_b=second_turned,
    )  # fmt: skip
    assert made.ctypes.data == out.ctypes.data


# Of all threads that merge: --multi-gpu merges tensors side by side, and the switches are global.
_LOCK = threading.Lock()
_users = 0
_saved: list[str] = []
_limit: AbstractContextManager | None = None


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
                assert _limit is not None
                _limit.restore_original_limits()


@functools.cache
def _controller() -> ThreadpoolController:
    return ThreadpoolController()


def _backends() -> list:
    backends = [torch.backends.cuda.matmul, torch.backends.mkldnn]
    if not all(hasattr(backend, "fp32_precision") for backend in backends):
        return []  # before torch 2.9 there is one switch for all
    return [torch.backends.cuda.matmul, torch.backends.mkldnn.matmul]


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
