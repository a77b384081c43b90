# SPDX-License-Identifier: Apache-2.0
"""Leading singular directions of a matrix: as exact as is wanted, or a few of a large one.

* `singular_directions` decomposes by a Gram matrix where that leaves the digits that are wanted,
  else in float64 by a full decomposition.
* `leading_directions` finds a few without decomposing a large matrix, in the span of a random block
  and of its products with the Gram matrix (block Krylov; Musco & Musco 2015).
  `torch.svd_lowrank` keeps the last product only, and needs three times as many.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from mergekit_ace.algebra.eigenpairs import (
    estimate_blur,
    leading_eigenpairs,
    on_shorter_side,
    smaller_gram,
)
from mergekit_ace.algebra.linalg import blocks, product
from mergekit_ace.algebra.records import hidden_error

EPS64 = torch.finfo(torch.float64).eps
# Up to this side a decomposition in float64 takes milliseconds.
SMALL_SIDE = 256
# Relative errors that are allowed by default: decompositions by Gram matrices leave as much.
DEFAULT_TOLERANCE = 1e-9
# How many eigenvectors are looked at to tell the error of all.
SAMPLE = 32
# How many on either side of a cut are told apart in float64.
NEAR = 8
# Errors in float32 may be so many times the estimate.
MARGIN = 4
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
        blur: the relative change of U Vᵀ by noise that the matrix is said to have, where estimated.
    """

    left: Tensor
    values: Tensor
    right: Tensor
    rest: Tensor | None = None
    blur: float = 0.0

    @property
    def matrix(self) -> Tensor:
        """U diag(σ) Vᵀ, (o, i)."""
        return product(self.left * self.values.to(self.left), self.right.mT)

    def to(self, dtype: torch.dtype) -> Directions:
        """Return them with vectors of another dtype."""
        rest = None if self.rest is None else self.rest.to(dtype)
        left, right = self.left.to(dtype), self.right.to(dtype)
        return Directions(left, self.values, right, rest, self.blur)

    def leading(self, rank: int) -> Directions:
        """Return the first `rank` of them, or all."""
        return Directions(self.left[:, :rank], self.values[:rank], self.right[:, :rank])


def singular_directions(
    matrix: Tensor,
    rank: int | None = None,
    floor: float = 0.0,
    tolerance: float = DEFAULT_TOLERANCE,
    noise: float = 0.0,
) -> Directions:
    """Return the leading singular triplets of a matrix, as many as it has.

    They are the first `rank` of ``torch.linalg.svd(matrix, full_matrices=False)``, but for values
    that rounding cannot tell from zero: these have no directions, and are left out.

    Args:
        matrix: (o, i), float64, or float32 where `tolerance` allows for it; finite.
        rank: how many at most; all of them by default.
        floor: what is no larger is left out as well, see `noise_edge`.
        tolerance: the relative error of U_k V_kᵀ that is allowed, in the Frobenius norm.
        noise: ‖N‖ of what else has rounded the matrix; what that hides in U_k V_kᵀ is allowed, too.

    Returns:
        Them, σ in float64, U and V in the dtype of the matrix.
    """
    count = min(matrix.shape) if rank is None else min(rank, *matrix.shape)
    if count and min(matrix.shape) > SMALL_SIDE:
        for dtype in dict.fromkeys((matrix.dtype, torch.float64)):
            found = _directions_by_gram(matrix.to(dtype), count, floor, tolerance, noise)
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
    matrix: Tensor, count: int, floor: float, tolerance: float, noise: float
) -> Directions | None:
    """Return leading singular triplets by the smaller Gram matrix; None if it has too few digits.

    Args:
        matrix: (o, i), float32 or float64.
        count: how many, at least one.
        floor, tolerance, noise: see `singular_directions`.
    """
    rows = on_shorter_side(matrix)
    side = len(rows)
    most = 2 * count > side
    gram = smaller_gram(matrix, matrix.dtype)
    squares, short = leading_eigenpairs(gram, side if most else count + NEAR)
    kept = int((squares[:count] > floor**2).sum())
    exchanged = _settle_cut(rows, squares, short, kept) if 0 < kept < len(squares) else 0.0
    sigma = squares.clamp(min=0).sqrt()
    short, rest = short[:, :kept], short[:, kept:] if most else None
    long = product(rows.mT, short)
    blur = estimate_blur(sigma, kept, rows.shape, noise) if kept and noise > 0 else 0.0
    if kept:
        allowed = max(tolerance, hidden_error(blur))
        error = _blur(rows, short, long, sigma, exchanged)
        if not MARGIN * error <= allowed:  # nor is NaN an answer
            return None
    values = torch.linalg.vector_norm(long, dim=0, dtype=torch.float64)
    long /= values.to(long)
    if rows is matrix:
        return Directions(short, values, long, rest, blur)
    return Directions(long, values, short, blur=blur)


def _settle_cut(rows: Tensor, squares: Tensor, vectors: Tensor, kept: int) -> float:
    """Tell the directions next to a cut apart, in place; return how much is exchanged across it.

    Divide and conquer may turn two neighbours by any angle that does not show in their residuals,
    and what a cut between them keeps is then arbitrary. So those that are next to it are found in
    the span of all of them, in float64.

    Args:
        rows: A, (m, n).
        squares: the largest eigenvalues of A Aᵀ, the largest first, float64.
        vectors: their eigenvectors, (m, k').
        kept: how many of them, k, are before the cut, 0 < k < k'.

    Returns:
        The relative error of U_k V_kᵀ that comes from couplings across the cut: of these directions
        with all others. Those with directions that are not known are taken to be random.
    """
    near = slice(max(0, kept - NEAR), kept + NEAR)
    parts = list(blocks(rows.shape[1], len(rows), rows.device))
    basis = torch.linalg.qr(vectors[:, near].double()).Q
    images = torch.cat([product(rows[:, columns].double().mT, basis) for columns in parts])
    values, rotation = torch.linalg.eigh(product(images.mT, images))
    values, rotation = values.flip(0), rotation.flip(1)
    basis, images = product(basis, rotation), product(images, rotation)
    residuals = basis * -values
    for columns in parts:
        residuals += product(rows[:, columns].double(), images[columns])
    squares[near], vectors[:, near] = values, basis.to(vectors)
    couplings = product(vectors.mT, residuals.to(vectors)).double().square()
    first = torch.arange(len(squares), device=squares.device) < kept
    across = first[:, None] != first[near]
    angles = (couplings / (squares[:, None] - squares[near]).square())[across].sum()
    others = (residuals.square().sum(dim=0) - couplings.sum(dim=0)).clamp(min=0)
    angles += (others / (values - squares[-1]).square())[first[near]].sum() * NEAR / len(rows)
    return (2 / kept * float(angles)) ** 0.5


def _blur(rows: Tensor, short: Tensor, long: Tensor, sigma: Tensor, exchanged: float) -> float:
    """Estimate the relative error of U_k V_kᵀ that eigenvectors p of A Aᵀ lead to.

    A residual ‖AAᵀp − σ²p‖ is that of an error of A with random entries of a standard deviation of
    ‖AAᵀp − σ²p‖ / (2σ√m). It is about the same for all p, so that some tell it.

    Args:
        rows: A, (m, n).
        short: the p, (m, k), k ≥ 1.
        long: the Aᵀp, (n, k).
        sigma: the σ, k of them or more, the largest first.
        exchanged: the part of it that comes from the cut at k.
    """
    count = short.shape[1]
    some = slice(None, None, math.ceil(count / SAMPLE))
    residuals = product(rows, long[:, some])
    residuals -= short[:, some] * sigma[:count][some].square().to(short)
    error = float(residuals.square().sum(dim=0).mean() * rows.shape[1]) ** 0.5 / 2
    return estimate_blur(sigma, count, rows.shape, error / sigma, exchanged)


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
