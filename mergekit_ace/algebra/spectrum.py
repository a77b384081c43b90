# SPDX-License-Identifier: Apache-2.0
"""Leading singular directions of a matrix: all of them exactly, some of the Gram matrix, or a few.

* `singular_directions` decomposes by a Gram matrix where all directions that are wanted can be told
  from its rounding, else in float64 by a full decomposition.
* `leading_eigenpairs` takes a share of the eigenpairs of a Gram matrix (for the refinement).
* `leading_directions` finds a few without decomposing a large matrix, in the span of a random block
  and of its products with the Gram matrix (block Krylov; Musco & Musco 2015).
  `torch.svd_lowrank` keeps the last product only, and needs three times as many.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from scipy.linalg import LinAlgError, eigh
from torch import Tensor

from mergekit_ace.algebra.linalg import add_gram, product, rounding

EPS64 = torch.finfo(torch.float64).eps
# Up to this side a decomposition in float64 takes milliseconds.
SMALL_SIDE = 256
# Eigenvalues of a Gram matrix in float64 above this share of the largest one have directions that
# are right to 1e-8.
RESOLVED = 1e-8
# From this share of the eigenpairs on, all of them take no longer.
MOST_PAIRS = 0.4
# What the rounding of a Gram matrix and of its eigenvectors amounts to in an entry, in roundoffs of
# ‖AAᵀ‖/m, for nearly all matrices; the refinement goes by residuals, which tell it for all.
GRAM_NOISE = 40
# Width of the random block, and after how many products with it convergence is looked at.
BLOCK = 32
CHECK_EVERY = 2
# Directions with smaller cosines than this are orthogonal once these are taken out.
ORTHOGONAL = 1e-3
# Entries between these bounds have squares, and sums of them, well inside of float32's range.
PLAIN_ENTRIES = (1e-12, 1e12)


@dataclass(frozen=True)
class Directions:
    """Leading singular triplets of a matrix (o, i), the largest first.

    Attributes:
        left: U, (o, k).
        values: σ, (k,), float64.
        right: V, (i, k).
        rest: an orthonormal basis of all that is orthogonal to U, (o, o − k), where that is known.
    """

    left: Tensor
    values: Tensor
    right: Tensor
    rest: Tensor | None = None

    @property
    def matrix(self) -> Tensor:
        """U diag(σ) Vᵀ, (o, i)."""
        return product(self.left * self.values.to(self.left), self.right.mT)

    def to(self, dtype: torch.dtype) -> Directions:
        """Return them with vectors of another dtype."""
        rest = None if self.rest is None else self.rest.to(dtype)
        return Directions(self.left.to(dtype), self.values, self.right.to(dtype), rest)

    def leading(self, rank: int) -> Directions:
        """Return the first `rank` of them, or all."""
        return Directions(self.left[:, :rank], self.values[:rank], self.right[:, :rank])


def singular_directions(
    matrix: Tensor, rank: int | None = None, floor: float = 0.0, tolerance: float = 0.0
) -> Directions:
    """Return the leading singular triplets of a matrix, as many as it has.

    They are the first `rank` of ``torch.linalg.svd(matrix, full_matrices=False)``, but for values
    that rounding cannot tell from zero: these have no directions, and are left out.

    Args:
        matrix: (o, i), float64, or float32 where `tolerance` allows for it; finite.
        rank: how many at most; all of them by default.
        floor: what is no larger is left out as well, see `noise_edge`.
        tolerance: relative error of U_k V_kᵀ up to which float32 is enough.

    Returns:
        Them, σ in float64, U and V in the dtype of the matrix.
    """
    count = min(matrix.shape) if rank is None else min(rank, *matrix.shape)
    if count and min(matrix.shape) > SMALL_SIDE:
        for dtype in dict.fromkeys((matrix.dtype, torch.float64)):
            found = _directions_by_gram(matrix.to(dtype), count, floor, tolerance)
            if found is not None:
                return found.to(matrix.dtype)
    left, values, right = torch.linalg.svd(matrix.double(), full_matrices=False)
    floor = max(floor, max(matrix.shape) * EPS64 * float(values[0]) if len(values) else 0.0)
    kept = int((values > floor).sum())
    found = Directions(left, values, right.mT).leading(kept if rank is None else min(rank, kept))
    return found.to(matrix.dtype)


def noise_edge(energy: float, shape: Sequence[int]) -> float:
    """Return what the singular values of noise alone do not exceed, but for chance.

    Independent entries of standard deviation s have none above s (√o + √i) in a large matrix.

    Args:
        energy: ‖N‖² of the noise, o·i·s².
        shape: (o, i).
    """
    rows, columns = shape
    return (energy / (rows * columns)) ** 0.5 * (rows**0.5 + columns**0.5)


def _directions_by_gram(
    matrix: Tensor, count: int, floor: float, tolerance: float
) -> Directions | None:
    """Return leading singular triplets by the smaller Gram matrix; None if it has too few digits.

    Args:
        matrix: (o, i), float32 or float64.
        count: how many, at least one.
        floor: of the singular values.
        tolerance: see `singular_directions`; in float64, directions are always right to 1e-8.
    """
    wide = matrix.shape[0] <= matrix.shape[1]
    rows = matrix if wide else matrix.mT
    side, length = rows.shape
    if matrix.dtype == torch.float32 and count > MOST_PAIRS * side and length < 2 * side:
        return None  # the weak directions of a nearly square matrix need more digits
    gram = add_gram(matrix.new_zeros(len(rows), len(rows)), rows)
    energy = float(gram.diagonal().sum(dtype=torch.float64))
    squares, short, rest = _largest_pairs(gram, count)
    if matrix.dtype == torch.float32:
        if not _gram_blur(squares, count, energy, gram) <= tolerance:
            return None
    elif not max(float(squares[-count]), floor**2) > RESOLVED * float(squares[-1]):
        return None
    kept = int((squares[-count:] > floor**2).sum())
    if kept < count:
        rest = None
    short = short[:, len(squares) - kept :].flip(1)
    long = product(rows.mT, short)
    values = torch.linalg.vector_norm(long, dim=0, dtype=torch.float64)
    long /= values.to(long)
    return Directions(short, values, long, rest) if wide else Directions(long, values, short)


def _largest_pairs(gram: Tensor, count: int) -> tuple[Tensor, Tensor, Tensor | None]:
    """Return at least the `count` largest eigenvalues, in float64, their vectors, and the others.

    Both are ascending. What is left of the vectors is None unless all were computed.
    """
    size = len(gram)
    if count <= MOST_PAIRS * size:
        values, vectors = leading_eigenpairs(gram, min(count + 1, size))
        return values.double(), vectors, None
    values, vectors = _all_eigenpairs(gram)
    return values.double(), vectors, vectors[:, : size - count]


def _all_eigenpairs(matrix: Tensor) -> tuple[Tensor, Tensor]:
    """Return all eigenvalues, ascending, (m,), and eigenvectors, by divide and conquer.

    Arguments as of `leading_eigenpairs`. On a CPU torch would leave it to MKL.
    """
    if matrix.device.type != "cpu":
        return torch.linalg.eigh(matrix)
    given = matrix.numpy().T
    try:
        values, vectors = eigh(
            given, lower=False, overwrite_a=True, check_finite=False, driver="evd"
        )
    except LinAlgError as error:
        raise torch.linalg.LinAlgError(str(error)) from error
    return torch.from_numpy(values), torch.from_numpy(vectors)


def _gram_blur(squares: Tensor, count: int, energy: float, gram: Tensor) -> float:
    """Estimate the relative error of U_k V_kᵀ, to first order, from the rounding of A Aᵀ.

    Weak directions turn, and the last one mixes with the first one that is left out.

    Args:
        squares: the largest eigenvalues, ascending; at least k + 1 unless there are no more.
        count: k.
        energy: ‖A‖_F².
        gram: A Aᵀ, (m, m).
    """
    strong, side = squares[-count:], len(gram)
    weakest = float(strong[0])
    if not weakest > 0:
        return math.inf
    rest = max(0.0, energy - float(squares.clamp(min=0).sum()))
    size = math.sqrt(float(squares.square().sum()) + max(float(squares[0]), 0.0) * rest)
    entry = GRAM_NOISE * rounding(gram.dtype) * size / side
    turned = entry**2 * side * float(strong.pow(-2).mean())
    if len(squares) == count:
        return turned**0.5
    gap = weakest - float(squares[-count - 1])
    return (turned + 2 / count * (min(1.0, entry / gap) ** 2 if gap > 0 else 1.0)) ** 0.5


def leading_eigenpairs(matrix: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Return the largest eigenvalues, ascending, (count,), and their eigenvectors, (m, count).

    On a CPU it takes the memory of the eigenvectors, not the three matrices of torch's
    divide and conquer.

    Args:
        matrix: (m, m), symmetric and contiguous; its lower triangle is read; may be overwritten.
        count: how many, 1 ≤ count ≤ m.

    Raises:
        torch.linalg.LinAlgError: no convergence.
    """
    if matrix.device.type != "cpu":
        values, vectors = torch.linalg.eigh(matrix)
        return values[-count:], vectors[:, -count:]
    size = len(matrix)
    try:
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


def leading_directions(matrix: Tensor, count: int, tolerance: float = 1e-3) -> Directions:
    """Return the `count` largest singular triplets.

    Args:
        matrix: (o, i), finite.
        count: 1 ≤ k ≤ min(o, i).
        tolerance: relative error that the sum of their squares may have, about; small matrices are
            decomposed.

    Directions that the matrix does not have are arbitrary orthonormal ones.
    """
    low, high = torch.aminmax(matrix)
    largest = max(-float(low), float(high))
    scale = 1.0 if largest == 0 or PLAIN_ENTRIES[0] < largest < PLAIN_ENTRIES[1] else largest
    if min(matrix.shape) <= SMALL_SIDE:
        left, values, right = torch.linalg.svd(matrix.double() / scale, full_matrices=False)
        return Directions(left[:, :count], values[:count] * scale, right[:count].mT)
    if not matrix.is_floating_point() or matrix.dtype.itemsize < 4:
        matrix = matrix.float()
    matrix = matrix if scale == 1 else matrix / scale
    turned = matrix.shape[0] > matrix.shape[1]
    wide = matrix.mT if turned else matrix
    squares, short = _krylov(wide, count, tolerance)
    values = squares.clamp(min=0).sqrt().double() * scale
    long = torch.linalg.qr(product(wide.mT, short)).Q
    left, right = (long, short) if turned else (short, long)
    return Directions(left, values, right)


def _krylov(wide: Tensor, count: int, tolerance: float) -> tuple[Tensor, Tensor]:
    """Return the largest eigenvalues, (k,), and eigenvectors, (m, k), of F Fᵀ for F, (m, n)."""
    side = len(wide)
    least, most = BLOCK * (2 + math.ceil(count / BLOCK)), side // BLOCK * BLOCK
    # Rows of these are the span's directions and their images.
    basis, images = wide.new_empty(0, side), wide.new_empty(0, side)
    generator = torch.Generator("cpu").manual_seed(0)  # none of the global random numbers
    start = torch.randn(side, BLOCK, generator=generator, device="cpu")
    new, before = _orthonormal(start.to(wide)), 0.0
    while True:
        basis = torch.cat([basis, new.mT])
        images = torch.cat([images, product(wide, product(wide.mT, new)).mT])
        full = len(basis) >= most
        if full or (len(basis) >= least and len(basis) % (CHECK_EVERY * BLOCK) == 0):
            small = product(basis, images.mT).double()
            values, rotation = torch.linalg.eigh((small + small.mT) / 2)
            energy = float(values[-count:].sum())
            if full or energy - before <= tolerance * energy:  # the next blocks find less
                vectors = product(basis.mT, rotation.flip(1)[:, :count].to(wide))
                return values.flip(0)[:count], vectors
            before = energy
        new = _orthogonal(images[-BLOCK:].mT, basis)


def _orthogonal(columns: Tensor, known: Tensor) -> Tensor:
    """Return an orthonormal basis of what the columns, (m, n), add to the span of rows of `known`.

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
    """Return an orthonormal basis of the span of the columns, (m, n), m ≥ n."""
    exact = columns.double()
    exact = exact / torch.linalg.vector_norm(exact, dim=0).clamp(min=1e-300)
    factor, failed = torch.linalg.cholesky_ex(exact.mT @ exact)
    # What is lost grows with the inverse square of the diagonal, small for dependent columns.
    if int(failed) or float(factor.diagonal().min()) < 1e-4:
        return torch.linalg.qr(columns).Q
    basis = torch.linalg.solve_triangular(factor, exact.mT, upper=False).mT
    return basis.to(columns.dtype)
