# SPDX-License-Identifier: Apache-2.0
"""The closed form through the (N, N) system of all rows of all task vectors, N = T·o.

Stack M = [√s_t C_t]_t, (N, i), so that A = MᵀM + ε̄ I. Then M A⁻¹ = K⁻¹ M with K = M Mᵀ + ε̄ I, and
every part of the merge is Q M for some Q of (o, N), or a row repeated: only products C_s C_tᵀ are
needed, and one product Q M at the end. With the reference r (see `Covariances`),

    Y = C_r + P K⁻¹ M,   P_t = √s_t (C_t − C_r) C_tᵀ + (ε_t/√s_t) I,   P_r = −((ε̄ − ε_r)/√s_r) I
    c = (1/i) Mᵀ(M 1),   A⁻¹c = (1/i) Mᵀ K⁻¹ (M 1)
    R = Σ_t s_t ((C_t − C̄) C_tᵀ + 1 (C_t (μ_t − μ̄))ᵀ) C_t − ρ (C̄ + 1 μ̄ᵀ)

with μ̄ the mean of the μ_t, and ρ = ε̄ where the refinement's S̄ holds the ridges, else 0. With
coefficients, Y starts from λ_r C_r, P_t has λ_t C_t − λ_r C_r and λ_t ε_t, and P_r is λ_r times as
large. Beside half the work where N < i, this form avoids a cancellation: weak directions of A are
never represented by differences of large numbers.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from mergekit_ace.algebra.conditioning import factorize, inverse_trace, largest_eigenvalue
from mergekit_ace.algebra.covariance import Covariances, Solution
from mergekit_ace.algebra.linalg import (
    add_gram,
    mirror,
    rounding,
    set_product_,
    solve_,
)
from mergekit_ace.algebra.records import IllConditionedError
from mergekit_ace.algebra.ridge_floor import raise_ridge
from mergekit_ace.algebra.task_vectors import squared_norm

CONDITION_LIMIT = {torch.float32: 1e7, torch.float64: 1e14}


def solve_dual(
    covariances: Covariances, *, prior: bool, refined: bool, floor: bool = False
) -> Solution:
    """Solve the (N, N) system for X, and with `refined` for F.

    Needs memory for an (N, N) and an (o, N) matrix beside X; with `refined` another (o, N), and F.

    Args:
        covariances: the estimates of at least one task.
        prior: whether the structural prior enters.
        refined: whether F is wanted.
        floor: whether the ridge is raised where X would be amplified, see `raise_ridge`.

    Raises:
        IllConditionedError: K has no factor, A a condition number beyond `CONDITION_LIMIT`, or the
            error by `_error` is beyond `Covariances.tolerance`.
    """
    if covariances.ridge == 0:
        raise IllConditionedError(math.inf)
    products, sides = _products(covariances)
    covariances = raise_ridge(covariances, mirror(products), bound=floor, dual=True)
    merged, target, condition, growth, spread = _coefficients(
        covariances, products, sides, prior, refined
    )
    merged, target = _expand(covariances, merged, target)
    size = covariances.size(merged)
    error = _error(growth / size, spread / size, condition, rounding(merged.dtype))
    if error > covariances.tolerance(condition):
        raise IllConditionedError(condition, error)
    return Solution(merged, target, condition, error, covariances)


def _error(growth: float, spread: float, condition: float, unit: float) -> float:
    """Estimate the relative error of X.

    A rounding error E of K moves X by P K⁻¹ E K⁻¹M. That is at most u ‖P K⁻¹‖ ‖K‖ ‖K⁻¹M‖, with
    ‖K⁻¹M‖ ≤ 1/(2√ε̄); and if the entries of E are independent, and N large, it is about
    ‖E‖_F/N ‖P K⁻¹‖_F ‖K⁻¹M‖_F, which is far less, the lesser part by which P is rounded included
    in √o. It tells where the form keeps its digits (task vectors of low rank, or nearly orthogonal)
    from where it does not (near-duplicates in different scales: P K⁻¹ grows).

    Args:
        growth: ‖P K⁻¹‖_F ‖M‖ / ‖X‖_F.
        spread: ‖K‖_F/N (‖P K⁻¹‖_F + √o) √tr(K⁻¹) / ‖X‖_F, of which the root is above ‖K⁻¹M‖_F.
        condition: of A.
        unit: roundoff of products and solve, see `rounding`.
    """
    return unit * (8 * growth + min(0.5 * growth * condition**0.5, 12 * spread))


def _coefficients(
    covariances: Covariances, products: Tensor, sides: Tensor, prior: bool, refined: bool
) -> tuple[Tensor, Tensor | None, float, float, float]:
    """Return X and F in terms of the C_t, (o, N) each, A's condition, growth and spread (`_error`).

    The latter two still times ‖X‖_F. The products are overwritten.
    """
    grid = _Grid(products, covariances.shape[0])
    left = _numerator(covariances, grid)
    residual = _residual(covariances, grid, sides) if refined else None
    _system(covariances, grid)
    size = grid.squared_norm() ** 0.5 / len(products)
    lower = factorize(products).tril_()
    # A has more columns than M has rows: its smallest eigenvalue is ε̄
    largest = largest_eigenvalue(lower, lower.mT)
    condition = largest / covariances.ridge
    if not condition <= CONDITION_LIMIT[lower.dtype]:  # NaN, too, is no answer
        raise IllConditionedError(condition)
    solve_(left, lower)
    norm = squared_norm(left) ** 0.5
    growth = norm * largest**0.5
    spread = size * (norm + len(left) ** 0.5) * inverse_trace(lower) ** 0.5
    _finish(covariances, lower, left, sides[:, 0] if prior else None)
    if residual is not None:
        residual.add_(left)
    return left, residual, condition, growth, spread


def _roots(covariances: Covariances) -> list[float]:
    """Return √s_t per task."""
    return [math.sqrt(task.scale) for task in covariances.tasks]


def _stack(covariances: Covariances, columns: slice) -> Tensor:
    """Return [C_t]_t in some columns, (N, n), in a buffer."""
    rows, _ = covariances.shape
    size = rows * len(covariances.tasks)
    stack = covariances.buffer("stack", size, columns.stop - columns.start)
    for t, task in enumerate(covariances.tasks):
        task.centred(columns=columns, out=stack[t * rows : (t + 1) * rows])
    return stack


def _products(covariances: Covariances) -> tuple[Tensor, Tensor]:
    """Return [C_s C_tᵀ]_{st}, (N, N), its lower triangle, and [C_s 1, C_s μ_1, …, C_s μ_T]_s."""
    size = covariances.shape[0] * len(covariances.tasks)
    means = [task.mean for task in covariances.tasks]
    vectors = torch.stack([torch.ones_like(means[0]), *means], dim=1)
    products, sides = covariances.new(size, size), covariances.new(size, vectors.shape[1])
    for block in covariances.column_blocks(size):
        stack = _stack(covariances, block)
        add_gram(products, stack)
        sides.addmm_(stack, vectors[block])
    return products, sides


class _Grid:
    """The T×T squares of an (N, N) matrix of which the lower triangle is valid."""

    def __init__(self, matrix: Tensor, rows: int):
        self._matrix, self._rows = matrix, rows
        self.count = len(matrix) // rows
        for t in range(self.count):
            mirror(self.stored(t, t))

    def own(self, t: int) -> slice:
        """The places of task t."""
        return slice(t * self._rows, (t + 1) * self._rows)

    def stored(self, s: int, t: int) -> Tensor:
        """Square (s, t), s ≥ t, itself."""
        return self._matrix[self.own(s), self.own(t)]

    def squared_norm(self) -> float:
        """‖·‖_F² of the whole matrix."""
        pairs = ((s, t) for s in range(self.count) for t in range(s + 1))
        return math.fsum((1 + (s > t)) * squared_norm(self.stored(s, t)) for s, t in pairs)

    def square(self, s: int, t: int) -> Tensor:
        """Square (s, t), to be read."""
        return self.stored(s, t) if s >= t else self.stored(t, s).mT


def _numerator(covariances: Covariances, grid: _Grid) -> Tensor:
    """Return P, (o, N)."""
    rows, _ = covariances.shape
    reference = covariances.reference
    left = covariances.new(rows, rows * grid.count)
    for t, (task, root) in enumerate(zip(covariances.tasks, _roots(covariances), strict=True)):
        part, ridge = left[:, grid.own(t)], task.coefficient * task.ridge
        first = covariances.reference_task.coefficient
        if t == reference:
            ridge -= first * covariances.ridge
        else:
            torch.mul(grid.square(t, t), task.coefficient, out=part)
            part.sub_(grid.square(reference, t), alpha=first).mul_(root)
        part.diagonal().add_(ridge / root)
    return left


def _residual(covariances: Covariances, grid: _Grid, sides: Tensor) -> Tensor:
    """Return R in terms of the C_t, (o, N), but for its part −ρ 1 μ̄ᵀ; in the unit of F."""
    rows, _ = covariances.shape
    left = covariances.new(rows, rows * grid.count)
    for t, task in enumerate(covariances.tasks):
        part = left[:, grid.own(t)].copy_(grid.square(t, t))
        for s in range(grid.count):
            part.sub_(grid.square(s, t), alpha=1 / grid.count)
        turned = sides[grid.own(t)]
        part.add_(turned[:, 1 + t] - turned[:, 1:].mean(dim=1)).mul_(task.scale)
        part.diagonal().sub_(covariances.mean_ridge / grid.count)
    return left.mul_(covariances.covariance_unit)


def _system(covariances: Covariances, grid: _Grid) -> None:
    """Write K over the products.

    Where they are centred, the rows of C_t sum to zero, so K is as small as the ridge along the
    indicator of every task, and M is zero there. K may be anything in these directions: it is given
    its mean eigenvalue.
    """
    rows, _ = covariances.shape
    roots = _roots(covariances)
    for s in range(grid.count):
        for t in range(s + 1):
            grid.stored(s, t).mul_(roots[s] * roots[t])
    squares = [grid.stored(t, t) for t in range(grid.count)]
    level = sum(float(square.trace()) for square in squares) / (rows * grid.count)
    for square in squares:
        if covariances.centred:
            square.add_(level / rows)
        square.diagonal().add_(covariances.ridge)


def _finish(covariances: Covariances, lower: Tensor, left: Tensor, ones: Tensor | None) -> None:
    """Write the coefficients of X over the C_t, (o, N), over P K⁻¹.

    Args:
        ones: [C_t 1]_t, (N,), for the structural prior.
    """
    rows, columns = covariances.shape
    scales = left.new_tensor(_roots(covariances)).repeat_interleave(rows)
    left.mul_(scales)
    first = covariances.reference * rows
    left[:, first : first + rows].diagonal().add_(covariances.reference_task.coefficient)
    if ones is None:
        return
    stacked = scales * ones  # M 1
    inverse = solve_(stacked[None].clone(), lower).squeeze(0)
    inverse.div_(columns * covariances.mean_tau)  # A⁻¹c = Mᵀ times it
    shift = (left @ ones) / (1 + stacked @ inverse)
    left.addr_(shift, scales * inverse, alpha=-1)


def _expand(
    covariances: Covariances, left: Tensor, target_left: Tensor | None
) -> tuple[Tensor, Tensor | None]:
    """Return X and F from their coefficients, in blocks of columns."""
    rows, columns = covariances.shape
    merged = covariances.new(rows, columns)
    target = covariances.new(rows, columns) if target_left is not None else None
    row = covariances.mean * (covariances.mean_ridge * covariances.covariance_unit)
    for block in covariances.column_blocks(left.shape[1]):
        stack = _stack(covariances, block)
        set_product_(merged[:, block], left, stack)
        if target is not None:
            set_product_(target[:, block], target_left, stack).sub_(row[block])
    return merged, target
