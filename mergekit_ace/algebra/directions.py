# SPDX-License-Identifier: Apache-2.0
"""The leading singular directions of a matrix, for looking at it.

Small matrices are decomposed in float64. Large ones are not decomposed at all: the span of a random
block and of its products with the Gram matrix holds the leading directions (block Krylov; Musco &
Musco 2015). What is wanted of them, shares of energy and overlaps of subspaces, needs three digits,
not seven; a merge never uses these. `torch.svd_lowrank` keeps the last product only, needs three
times as many for the same digits, and spends most of its time on QR decompositions.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from mergekit_ace.algebra.linalg import add_gram, blocks, mirror, product

# Up to this side a decomposition in float64 takes milliseconds.
SMALL = 256
# Width of the random block, and size of the span in directions wanted. Held against wider blocks
# and fewer products: half the time for the same digits.
BLOCK = 32
SPAN = 5
# Directions with smaller cosines than this are orthogonal once these are taken out.
ORTHOGONAL = 1e-3
# Entries between these bounds have squares, and sums of them, well inside of float32's range.
PLAIN = (1e-12, 1e12)


@dataclass(frozen=True)
class Spectrum:
    """The leading part of a matrix' spectrum.

    Attributes:
        values: σ_1 ≥ σ_2 ≥ …, (k,), float64.
        vectors: the singular vectors of the shorter side, (min(o, i), k).
        energy: ‖·‖_F², the sum of all σ².
    """

    values: Tensor
    vectors: Tensor
    energy: float

    @property
    def share(self) -> float:
        """Share of the energy in the leading values, 0 to 1."""
        return min(1.0, float(self.values.square().sum()) / self.energy) if self.energy else 0.0


def leading_spectrum(matrix: Tensor, count: int) -> Spectrum:
    """The `count` largest singular values, through the Gram matrix of the shorter side.

    Args:
        matrix: (o, i), finite.
        count: 1 ≤ count ≤ min(o, i).

    For matrices of independent random numbers, whose flat spectra are the hardest, the sum of
    squares came out at most 1 % too small; where singular values decay, 1e-6.
    """
    wide = matrix if matrix.shape[0] <= matrix.shape[1] else matrix.mT
    side, length = wide.shape
    small, scale = side <= SMALL, _scale(matrix)
    dtype = torch.float64 if small else matrix.dtype
    gram = torch.zeros(side, side, dtype=dtype, device=matrix.device)
    if wide.dtype == dtype and scale == 1:
        add_gram(gram, wide)
    else:
        for columns in blocks(length, side):
            add_gram(gram, wide[:, columns].to(dtype) / scale)
    mirror(gram)
    energy = float(gram.diagonal().double().sum()) * scale**2
    if small:
        squares, vectors = torch.linalg.eigh(gram)
        squares, vectors = squares.flip(0)[:count], vectors.flip(1)[:, :count]
    else:
        squares, vectors = _leading(lambda basis: product(gram, basis), gram, count)
    return Spectrum(squares.clamp(min=0).double().sqrt() * scale, vectors, energy)


def leading_directions(matrix: Tensor, count: int) -> tuple[Tensor, Tensor, Tensor]:
    """U (o, k), σ (k,) and V (i, k) of the `count` largest singular values.

    Args:
        matrix: (o, i), finite.
        count: 1 ≤ k ≤ min(o, i).

    For matrices of independent random numbers σ_1 came out at most 2 % too small; where
    singular values decay, 1e-6.
    """
    scale = _scale(matrix)
    if min(matrix.shape) <= SMALL:
        left, values, right = torch.linalg.svd(matrix.double() / scale, full_matrices=False)
        return left[:, :count], values[:count] * scale, right[:count].mT
    matrix = matrix if scale == 1 else matrix / scale
    turned = matrix.shape[0] > matrix.shape[1]
    wide = matrix.mT if turned else matrix
    squares, short = _leading(lambda basis: product(wide, product(wide.mT, basis)), wide, count)
    values = squares.clamp(min=0).sqrt()
    # Directions that the matrix does not have get an arbitrary orthonormal one on the other side.
    long = torch.linalg.qr(product(wide.mT, short)).Q
    left, right = (long, short) if turned else (short, long)
    return left, values.double() * scale, right


def _scale(matrix: Tensor) -> float:
    """What a matrix is divided by so that its squares stay in range; 1 for nearly all."""
    low, high = torch.aminmax(matrix)
    largest = max(-float(low), float(high))
    return 1.0 if largest == 0 or PLAIN[0] < largest < PLAIN[1] else largest


def _leading(apply: Callable[[Tensor], Tensor], like: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """The largest eigenvalues, (k,), and eigenvectors, (m, k), of a symmetric matrix ≥ 0.

    Args:
        apply: its product with an (m, n).
        like: a tensor of m rows, in the dtype and on the device of the work.
        count: k.
    """
    side, steps = len(like), 2 + math.ceil(SPAN * count / BLOCK)
    most = min(steps, side // BLOCK) * BLOCK
    # Rows of these are the span's directions and their images; room for all, so that none is copied
    # again when others join.
    basis, images = like.new_empty(most, side), like.new_empty(most, side)
    generator = torch.Generator("cpu").manual_seed(0)  # none of the global random numbers
    start = torch.randn(side, BLOCK, generator=generator, device="cpu")
    new = _orthonormal(start.to(like))
    for first in range(0, most, BLOCK):
        rows = slice(first, first + BLOCK)
        if first > 0:
            new = _orthogonal(images[first - BLOCK : first].mT, basis[:first])
        basis[rows] = new.mT
        images[rows] = apply(new).mT
    small = product(basis, images.mT).double()
    values, rotation = torch.linalg.eigh((small + small.mT) / 2)
    return values.flip(0)[:count], product(basis.mT, rotation.flip(1)[:, :count].to(like))


def _orthogonal(columns: Tensor, known: Tensor) -> Tensor:
    """An orthonormal basis of what the columns, (m, n), add to the span of the rows of `known`.

    Taken out again and again, brought to length in between: of a matrix of low rank nothing is left
    but rounding errors, which must not repeat a direction that is known already.
    """
    for turn in range(3):
        along = product(known, columns)
        columns = _orthonormal(columns - product(known.mT, along))
        if turn > 0 and float(along.abs().max()) < ORTHOGONAL:
            break
    return columns


def _orthonormal(columns: Tensor) -> Tensor:
    """An orthonormal basis of the span of the columns, (m, n), m ≥ n."""
    exact = columns.double()
    exact = exact / torch.linalg.vector_norm(exact, dim=0).clamp(min=1e-300)
    factor, failed = torch.linalg.cholesky_ex(exact.mT @ exact)
    # What is lost grows with the inverse square of the diagonal, small for dependent columns.
    if int(failed) or float(factor.diagonal().min()) < 1e-4:
        return torch.linalg.qr(columns).Q
    basis = torch.linalg.solve_triangular(factor, exact.mT, upper=False).mT
    return basis.to(columns.dtype)
