# SPDX-License-Identifier: Apache-2.0
"""Large matrix products, by the library that is fastest on the processor at hand (`processor`).

Where that is not MKL, float32 is multiplied by oneDNN. It sums longer runs of products before it
adds them up, and its rounding errors are larger. They need not be: `careful` products are handed
over in short runs, which takes a quarter longer, but still less time than by MKL.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator

import torch
from torch import Tensor

from mergekit_ace.algebra.blocks import BLOCK_ENTRIES
from mergekit_ace.algebra.processor import avoids_mkl

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
