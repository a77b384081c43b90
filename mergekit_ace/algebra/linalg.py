# SPDX-License-Identifier: Apache-2.0
"""Products, symmetric products, Cholesky factors and solves of large matrices, in place."""

from __future__ import annotations

import functools
import platform
import threading
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

import torch
from threadpoolctl import ThreadpoolController
from torch import Tensor

# 4 MiB in float32, at which products of blocks run at nine tenths of their speed, and 16 MiB.
BLOCK_ENTRIES = 2**20
LARGEST = 4


def block_entries(entries: int) -> int:
    """Entries of a block of a matrix that has so many: an eighth, within bounds."""
    return min(max(BLOCK_ENTRIES, entries // 8), LARGEST * BLOCK_ENTRIES)


def blocks(length: int, width: int) -> Iterator[slice]:
    """Slices of 0…length, each of about `block_entries` entries.

    Args:
        length: how many items.
        width: entries of one.
    """
    step = max(1, block_entries(length * width) // max(1, width))
    for start in range(0, length, step):
        yield slice(start, min(start + step, length))


_LOCK = threading.Lock()  # the switches are global; --multi-gpu merges tensors side by side
_saved: list[str] = []
_users = 0


@contextmanager
def full_precision() -> Iterator[None]:
    """Within it, float32 products have float32 factors; afterwards the caller's setting is back."""
    global _users, _saved
    with _LOCK:
        if _users == 0:
            _saved = _get()
            _set(["highest"] if len(_saved) == 1 else ["ieee"] * len(_saved))
        _users += 1
    try:
        yield
    finally:
        with _LOCK:
            _users -= 1
            if _users == 0:
                _set(_saved)


def _backends() -> list:
    backends = [torch.backends.cuda.matmul, torch.backends.mkldnn]
    if not all(hasattr(backend, "fp32_precision") for backend in backends):
        return []  # before torch 2.9 there is one switch for all
    return [torch.backends.cuda.matmul, torch.backends.mkldnn.matmul]


def _get() -> list[str]:
    backends = _backends()
    if not backends:
        return [torch.get_float32_matmul_precision()]
    return [backend.fp32_precision for backend in backends]


def _set(values: list[str]) -> None:
    backends = _backends()
    if not backends:
        torch.set_float32_matmul_precision(values[0])
    for backend, value in zip(backends, values, strict=False):
        backend.fp32_precision = value


# As processors name their makers: AMD, and Hygon with the same cores.
_OTHERS = ("AuthenticAMD", "HygonGenuine")


def avoids_mkl(device: torch.device) -> bool:
    """Whether work on `device` is better left to other libraries than MKL."""
    return device.type == "cpu" and mkl_is_slow()


@functools.cache
def mkl_is_slow() -> bool:
    """Whether this is such a processor, and torch multiplies with MKL on it."""
    return (
        torch.backends.mkl.is_available()
        and torch.backends.cpu.get_cpu_capability() == "AVX512"
        and _maker() in _OTHERS
    )


def threads_of_torch() -> AbstractContextManager:
    """Within it, OpenBLAS takes as many threads as torch: it knows nothing of torch's setting."""
    return _controller().limit(limits=torch.get_num_threads(), user_api="blas")


@functools.cache
def _controller() -> ThreadpoolController:
    return ThreadpoolController()


def _maker() -> str:
    """Of the processor, as it says itself; empty where that is not known."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:  # Windows has it at the end of its description
        return platform.processor().rpartition(" ")[2]
    return next((line.split()[-1] for line in lines if line.startswith("vendor_id")), "")


# Rounding errors of a product by oneDNN in those of one by MKL, which are 2.4e-7 to 2.8e-7 of the
# Frobenius norm, over 512 to 8192 summands: 4.1e-7 to 5.8e-7, and 2.9e-7 in runs of 256.
# In whole solves the latter are up to 1.3 times as large as MKL's.
LOSS = 2.5
CAREFUL_LOSS = 1.4
RUN = 256
# Rows that are few enough to be added up again and again.
FEW = 64
# Operations from which oneDNN is the faster one.
LARGE = 2**25


def add_product_(
    total: Tensor, left: Tensor, right: Tensor, alpha: float = 1.0, *, careful: bool = False
) -> Tensor:
    """total += α·L R, in place.

    Working memory, where oneDNN multiplies: a few blocks (see `_tiles`).

    Args:
        total: (m, n), overwritten and returned; any strides.
        left: L, (m, k).
        right: R, (k, n), of the same dtype.
        alpha: α.
        careful: with rounding errors as small as MKL's.
    """
    if not _by_onednn(left, right):
        return total.addmm_(left, right, alpha=alpha)
    if _by_columns(total):
        add_product_(total.mT, right.mT, left.mT, alpha, careful=careful)
        return total
    for inner in runs(left.shape[1]) if careful else _parts(left, right):
        for rows, columns, part in _tiles(left[:, inner], right[inner]):
            total[rows, columns].add_(part, alpha=alpha)
    return total


def set_product_(total: Tensor, left: Tensor, right: Tensor) -> Tensor:
    """total ← L R, in place; arguments as of `add_product_`."""
    if not _by_onednn(left, right):
        return torch.mm(left, right, out=total)
    for rows, columns, part in _tiles(left, right):
        total[rows, columns] = part
    return total


def product(left: Tensor, right: Tensor, *, careful: bool = False) -> Tensor:
    """L R, (m, n), in memory of its own, by rows or columns; arguments as of `add_product_`."""
    if not _by_onednn(left, right):
        return left @ right
    if _by_columns(left) and (_by_columns(right) or right.numel() < left.numel()):
        return product(right.mT, left.mT, careful=careful).mT  # L would be copied
    total = left.new_zeros(left.shape[0], right.shape[1])
    return add_product_(total, left, right, careful=careful)


def rounding(like: Tensor, *, careful: bool = False) -> float:
    """The unit roundoff by which errors of products of matrices like this one are measured."""
    unit = torch.finfo(like.dtype).eps / 2
    if not uses_onednn(like):
        return unit
    return unit * (CAREFUL_LOSS if careful else LOSS)


def uses_onednn(like: Tensor) -> bool:
    """Whether large products of matrices like this one go to oneDNN."""
    return like.dtype == torch.float32 and avoids_mkl(like.device) and _onednn_works()


def _by_onednn(left: Tensor, right: Tensor) -> bool:
    return 2 * left.shape[0] * right.numel() >= LARGE and uses_onednn(left)


def _parts(left: Tensor, right: Tensor) -> list[slice]:
    """Slices of 0…k: of few rows with a large matrix, blocks of the latter that need no copies."""
    if len(left) > FEW or not right.is_contiguous():
        return [slice(None)]
    return list(_strips(*right.shape, 1))


def _by_columns(matrix: Tensor) -> bool:
    """Whether it lies in memory column by column; oneDNN's results come row by row."""
    return matrix.stride(0) == 1 != matrix.stride(1)


def runs(length: int) -> list[slice]:
    """Slices of 0…length that a careful product sums up by themselves."""
    return [slice(start, min(start + RUN, length)) for start in range(0, length, RUN)]


def _tiles(left: Tensor, right: Tensor) -> Iterator[tuple[slice, slice, Tensor]]:
    """The product in tiles, none of which needs more than a block of either factor or the result.

    What oneDNN copies for a product, into an order of its own or because of gaps between rows,
    would else be as large as the matrices, in fresh memory every time.
    """
    inner = left.shape[1]
    for columns in _strips(right.shape[1], inner, 64):
        part = _dense(right[:, columns])
        for rows in _strips(left.shape[0], max(inner, part.shape[1]), 32):
            yield rows, columns, _onednn(left[rows], part)


def _strips(length: int, width: int, step: int) -> Iterator[slice]:
    """Slices of 0…length, of one size but for the last, a multiple of `step`."""
    count = max(1, -(-length * width // BLOCK_ENTRIES))
    size = max(1, -(-length // (count * step))) * step
    for start in range(0, length, size):
        yield slice(start, min(start + size, length))


@functools.cache
def _onednn_works() -> bool:
    """Whether this version of torch multiplies in the way that `_onednn` asks for."""
    left, right = torch.eye(64, device="cpu"), torch.arange(4096.0, device="cpu").view(64, 64)
    try:
        return torch.equal(_onednn(left, right), right)
    except (AttributeError, RuntimeError, TypeError):
        return False


def _onednn(left: Tensor, right: Tensor) -> Tensor:
    """L R, as a layer of weight Rᵀ: the plain products of torch never go to oneDNN in float32."""
    layer = torch.ops.mkldnn._linear_pointwise
    return layer(_dense(left), _dense(right).mT, None, "none", [], "")


def _dense(matrix: Tensor) -> Tensor:
    """The matrix, copied if it has gaps, for which oneDNN has only its slow reference code."""
    if matrix.is_contiguous() or matrix.mT.is_contiguous():
        return matrix
    return matrix.contiguous()


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
