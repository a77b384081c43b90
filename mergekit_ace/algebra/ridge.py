# SPDX-License-Identifier: Apache-2.0
"""The ridge regression that covariances of tasks define for one matrix: one solver for all.

With the centred task vectors C_t = Δ_t − 1μ_tᵀ, (o, i), and S_t = s_t C_tᵀC_t + m_t M_t,

    Y = [Σ_t λ_t C_t (S_t + ε_t I)] A⁻¹,  A = S + ε̄ I,  S = Σ_t S_t,  ε̄ = Σ_t ε_t    (ACE, Eq. 14)
    X = Y − (Y1) qᵀ,  q = A⁻¹c / (1 + cᵀA⁻¹1)    with the prior 1cᵀ (Eqs. 11-13; Sherman, Morrison)
    F = R + X,  R = Σ_t (Δ_t − Δ̄) S_t            for the refinement (Eqs. 15-16), Δ̄ the mean
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, reduce
from typing import Any

import numpy as np
import torch
from torch import Tensor

from mergekit_ace.algebra.linalg import (
    add_product_,
    as_vector,
    factorize,
    full_precision,
    gram,
    leading_eigenpairs,
    product,
    solve,
)
from mergekit_ace.algebra.plus import FLATTENING, flatten_spectrum, measure_unlikeness
from mergekit_ace.algebra.task_vectors import (
    ActiveExperts,
    IllConditionedError,
    MatrixRecord,
    form_stack,
)

# Entries of all task vectors of a matrix that are in memory at once: 1 GiB in float32.
LARGEST_STACK = 2**28
# A GPU works on the matrices of all experts by one command where they have at most so many entries.
GROUPED = 2**25
# The relative error of X that float32 may leave: storing X in bfloat16 costs a thousand times that.
TOLERANCE = 1e-4
SINGULAR = 1e-3  # an error that float64 leaves only where A is singular
# ‖X‖² / Σ_t w_t ‖Δ_t‖² above which the ridge may be raised; the sum of unlike experts has 1.
AMPLIFICATION = 0.95
LARGEST_LOSS = 1e6  # ‖Y‖ / ‖X‖ beyond which nobody asks: float32 is not enough, float64 still is
PROBED_ROWS = 8
# Root mean square entries of task vectors outside of these have third powers that float32 lacks.
FLOAT32_RANGE = (1e-9, 1e9)

# X; R, where it is refined; ε̄, tr(S) and what `_relative_error` takes, still on the device.
Solution = tuple[Tensor, Tensor | None, list[Tensor]]


def pack(matrix: Tensor) -> Tensor:
    """Return the lower triangle of a symmetric matrix row by row, as LAPACK packs it."""
    return torch.cat([matrix[row, : row + 1] for row in range(len(matrix))])


@dataclass(frozen=True)
class MeasuredCovariance:
    """M_t = X_tᵀX_t/n_t, (i, i), of one expert, finite, with a row of X_t per token."""

    packed: Tensor  # see `pack`; maybe on another device, maybe mapped from a file
    columns: int  # i
    off_diagonal: float = 1.0  # α, which entries off the diagonal are multiplied by, 0 to 1
    mix: float = 1.0  # share in the covariance of a merge, once both have one trace, 0 to 1

    @cached_property
    def trace(self) -> float:
        """tr(M_t)."""
        places = torch.arange(self.columns, device="cpu")
        return float(self.packed[places * (places + 3) // 2].double().sum())

    def matrix(self, like: Tensor) -> Tensor:
        """Return M_t, (i, i), in the dtype of a tensor, where that is."""
        lower = torch.zeros(self.columns, self.columns, dtype=like.dtype, device="cpu")
        rows = self.packed.to("cpu", like.dtype).split([*range(1, self.columns + 1)])
        for number, row in enumerate(rows):
            lower[number, : len(row)] = row
        full = (lower + lower.tril(-1).mT).mul_(self.off_diagonal)
        full.diagonal().copy_(lower.diagonal())
        return full.to(like.device)


@dataclass(frozen=True)
class Regression:
    """The ridge regression of one matrix; lists are in the order of `experts`."""

    experts: Sequence[int]  # which of the active experts take part, by their number among them
    scales: Sequence[float]  # s_t
    ridges: Sequence[float]  # ε_t; where the ridge follows the spectrum, in proportion to them
    spectral: float | None = None  # ε of ε̄ = ε ‖S‖_F² / tr(S); None where the ε_t are given
    # M_t and m_t by the place of an expert in `experts`
    measured: Mapping[int, tuple[MeasuredCovariance, float]] = field(default_factory=dict)
    mix: float | None = None  # what of the S_t was measured, for the record
    centred: bool = False  # whether the column means μ_t are taken out; else they are 0
    prior: float = 0.0  # what the mean row of S is divided by to give c (Eq. 13); 0: no prior
    ridged_mean: bool = False  # whether the mean of the estimates in R has the ridges (Eq. 15)
    rank: int = 0  # k of the refinement, 0 without
    refinement: float = 1.0  # its coefficient
    sizes: Sequence[float] = ()  # τ_t, where the spectrum of X is flattened, as of `ace_plus`
    flattening: tuple[float, float] = FLATTENING
    turned: bool = False  # whether by XXᵀ, which is smaller than XᵀX, of the matrix, not of a core

    def ridge(self, system: Tensor) -> tuple[Tensor, Tensor]:
        """Return ε̄ and the trace of S, or K, which has its trace and its norm."""
        trace = system.trace()
        if self.spectral is None:
            return torch.full_like(trace, sum(self.ridges)), trace
        return self.spectral * torch.linalg.vector_norm(system).square_() / trace, trace

    def shares(self) -> list[float]:
        """Return ε_t / ε̄; of no ridge at all, the same for all."""
        total = sum(self.ridges)
        return [ridge / total if total else 1 / len(self.ridges) for ridge in self.ridges]


class CentredVectors:
    """The centred task vectors of one matrix, (o, i), and their means μ_t, (T, i).

    `whole` is all C_t, (T, o, i); tall matrices that take more than `LARGEST_STACK` are formed in
    `blocks` of rows instead.
    """

    def __init__(self, base: Tensor, experts: Sequence[Tensor], dtype: torch.dtype, centred: bool):
        self._base, self._experts, self._dtype = base, experts, dtype
        self.shape = rows, columns = base.shape
        step = max(1, LARGEST_STACK // (len(experts) * columns))
        if columns > 2 * rows:
            step = rows
        self.blocks = [slice(start, start + step) for start in range(0, rows, step)]
        self.means = base.new_zeros(len(experts), columns, dtype=dtype)
        self.whole = form_stack(base, experts, dtype) if len(self.blocks) == 1 else None
        if centred:
            sums = reduce(Tensor.add_, (self.block(block).sum(dim=1) for block in self.blocks))
            self.means = sums / rows
            if self.whole is not None:
                self.whole -= self.means[:, None]

    def block(self, rows: slice | Tensor, part: slice = slice(None)) -> Tensor:
        """Return the C_t of some rows, and of some experts; a view where all are in memory."""
        if self.whole is not None:
            return self.whole[part, rows]
        chosen = [expert[rows] for expert in self._experts[part]]
        return form_stack(self._base[rows], chosen, self._dtype).sub_(self.means[part, None])


@full_precision()
def merge_by_ridge(
    base: Tensor, active: ActiveExperts, problem: Regression, scale: float, **known: Any
) -> tuple[Tensor, MatrixRecord]:
    """Merge the versions of one matrix, (o, i): W0 + λ (X + what the refinement adds).

    All is done in float32 at first. The error of Y is measured: what some rows of
    Σ_t (Y − λ_t C_t)(S_t + ε_t I) are instead of 0, times A⁻¹, is the error of these rows. Where
    it is too large, everything is done once more in float64, or an `IllConditionedError` raised.
    A ridge that follows the spectrum is raised where a weak expert would make X larger than all
    task vectors together; how much depends on the spread of log τ_t.
    `known` is what else the record says.
    """
    low, high = FLOAT32_RANGE
    typical = (max(active.tau) / base.numel()) ** 0.5
    narrow = active.dtype == torch.float32 and low < typical < high
    experts = [active.experts[t] for t in problem.experts]
    weights, tau = active.relative_weights, active.tau
    total = float(np.dot(weights, tau))
    spread = min(1.0, max(0.0, 2 * float(np.cov(np.log(tau), aweights=weights)) - 1))
    coefficients = [active.coefficients[t] for t in problem.experts]
    raised, dtype = problem, torch.float32 if narrow else torch.float64
    vectors = CentredVectors(base, experts, dtype, problem.centred)
    while True:
        merged, numbers = _closed_form(raised, vectors, coefficients)
        strength, whole, size, ridge, trace, *measured, failed = torch.stack(numbers).tolist()
        error = _relative_error(size, total**0.5, measured, dtype)
        excess = whole**2 / total / AMPLIFICATION
        if failed or not error <= (TOLERANCE if dtype == torch.float32 else SINGULAR):
            if dtype == torch.float64:
                raise IllConditionedError("the sum of the covariances is singular or nearly so")
            raised, dtype = problem, torch.float64
            vectors = CentredVectors(base, experts, dtype, problem.centred)
        elif raised is problem and problem.spectral and spread and excess > 1:
            raised = replace(problem, spectral=problem.spectral * excess ** (2 * spread))
        else:
            break
    if problem.rank:
        known |= {"refined": strength != 0, "sigma_iso": strength}
    ridges = problem.ridges
    if problem.spectral is not None:
        ridges = [ridge * share for share in problem.shares()]
    record = active.record(
        epsilon=active.spread(ridges, None) if len(ridges) == len(active.experts) else None,
        ridge=ridge * active.shape[1] / trace if trace else None,
        amplification=whole**2 / sum(active.tau),
        mix=problem.mix,
        **known,
    )
    return merged.mul_(scale).add_(base), record


def _closed_form(
    problem: Regression, vectors: CentredVectors, coefficients: Sequence[float]
) -> tuple[Tensor, list[Tensor]]:
    """Return X with its refinement, and σ_iso, ‖X‖ without and with λ_t, and further numbers."""
    rows, columns = vectors.shape
    dual = len(coefficients) * rows < columns and not problem.measured
    solver = _solve_dual if dual else _solve_primal
    component, strength = None, vectors.means.new_zeros(())
    ones = [1.0] * len(coefficients)
    whole, residual, numbers = solver(problem, vectors, ones)  # by which X is finished
    merged, sizes = whole, [torch.linalg.vector_norm(whole)] * 2
    if residual is not None:
        component, strength = _refine(problem, vectors, whole, residual.add_(whole))
    if coefficients != ones:
        merged, _, part = solver(replace(problem, rank=0), vectors, coefficients)
        sizes[1] = torch.linalg.vector_norm(merged)
        numbers = numbers if problem.rank or problem.sizes else part
    numbers = [strength.to(merged.dtype), *sizes, *numbers]
    if component is not None:
        merged.add_(component, alpha=problem.refinement)
    if problem.sizes:
        stacks = map(vectors.block, vectors.blocks)
        unlikeness = measure_unlikeness(stacks, problem.sizes, problem.shares())
        merged = flatten_spectrum(whole, merged, unlikeness, problem.turned, problem.flattening)
    return merged, numbers


def _add_prior_(merged: Tensor, common: Tensor) -> None:
    """Turn Y into X, given A⁻¹c, (i,)."""
    # c is the mean row of S, which commutes with A: cᵀA⁻¹1 ≥ 0
    merged.addr_(merged.sum(dim=1), common / (1 + common.sum()), alpha=-1)


def _solve_primal(
    problem: Regression, vectors: CentredVectors, coefficients: Sequence[float]
) -> Solution:
    """Solve in the i columns.

    As the mixing matrices (S_t + ε_t I) A⁻¹ sum to I, one expert r can be the origin, Y = λ_r C_r +
    Σ_{t≠r} (λ_t C_t − λ_r C_r)(S_t + ε_t I) A⁻¹: nothing is left to the solve where experts agree.
    """
    (rows, columns), means, shares = vectors.shape, vectors.means, problem.shares()
    origin = shares.index(min(shares))
    taken = [share * a for share, a in zip(shares, coefficients, strict=True)]
    taken[origin] -= coefficients[origin]  # Σ_t ε_t (λ_t C_t − λ_r C_r)
    factors, taken = as_vector([coefficients, taken], means)
    plain = set(coefficients) == {1.0}
    system, row = means.new_zeros(columns, columns), means.new_zeros(1, columns)
    merged = means.new_zeros(rows, columns)
    entries, count = columns * max(vectors.shape), len(shares)
    step = count if means.device.type != "cpu" and count * entries <= GROUPED else 1
    for start in range(0, count, step):
        part = slice(start, start + step)
        covariances = _covariances(problem, vectors, part)
        system += covariances[0] if len(covariances) == 1 else covariances.sum(dim=0)
        if problem.rank:
            _add_times_(row, (means - means.mean(dim=0))[part, None], covariances)
        if start == origin and len(covariances) == 1:  # its own part is 0
            continue
        for block in vectors.blocks:
            moved = vectors.block(block, part)
            first = vectors.block(block, slice(origin, origin + 1))
            if not plain:
                moved, first = moved * factors[part, None, None], first * coefficients[origin]
            _add_times_(merged[block], moved - first, covariances)
    (ridge, trace), residual = problem.ridge(system), None
    if problem.rank:  # with λ_t = 1: Σ_{t≠r} (C_t − C_r) S_t + (C_r − C̄) S + 1(Σ_t S_t (μ_t − μ̄))ᵀ
        residual = merged + row
        for block in vectors.blocks:
            stack = vectors.block(block)
            average = stack.mean(dim=0)
            add_product_(residual[block], stack[origin] - average, system)
            if problem.ridged_mean:
                residual[block].sub_((average + means.mean(dim=0)) * ridge)
    common = system.mean(dim=0)[None] / problem.prior if problem.prior else None
    system.diagonal().add_(ridge)
    lower, failed = factorize(system)
    for block in vectors.blocks:
        stack = vectors.block(block)
        merged[block].addcmul_(torch.tensordot(taken, stack, dims=1), ridge)
        solved, alpha = solve(merged[block], lower), coefficients[origin]
        torch.add(solved, stack[origin], alpha=alpha, out=merged[block])
    probed, wrong = _probe(problem, vectors, coefficients, merged, ridge)
    solved = solve(wrong if common is None else torch.cat([wrong, common]), lower)
    numbers = _error_numbers(solved[: len(wrong)], probed, merged, lower)
    if common is not None:
        _add_prior_(merged, solved[-1])
    return merged, residual, [ridge, trace, *numbers, failed.to(merged)]


def _covariances(problem: Regression, vectors: CentredVectors, part: slice) -> Tensor:
    """Return the S_t of some experts, (g, i, i)."""
    scales, columns = problem.scales[part], vectors.shape[1]
    if any(scales):
        stacks = (vectors.block(block, part) for block in vectors.blocks)
        found = reduce(Tensor.add_, (product(stack.mT, stack) for stack in stacks))
    else:
        found = vectors.means.new_zeros(len(scales), columns, columns)
    if set(scales) != {1.0}:
        found *= as_vector(scales, found)[:, None, None]
    for t in problem.measured.keys() & {*range(part.start, part.start + len(scales))}:
        known, share = problem.measured[t]
        found[t - part.start].add_(known.matrix(found), alpha=share)
    return found


def _add_times_(total: Tensor, rows: Tensor, matrices: Tensor) -> None:
    """Add Σ_t R_t M_t to a sum, (m, i), for rows R_t, (g, m, k), and as many M_t, (k, i)."""
    add_product_(total, rows.transpose(0, 1).flatten(1), matrices.flatten(0, 1))


def _solve_dual(
    problem: Regression, vectors: CentredVectors, coefficients: Sequence[float]
) -> Solution:
    """Solve where all task vectors together have N = T·o < i rows.

    With M = [√s_t C_t]_t, (N, i), and K = MMᵀ, M A⁻¹ is (K + ε̄ I)⁻¹ M and ε̄ A⁻¹ is
    I − Mᵀ(K + ε̄ I)⁻¹M, so that

        Y = D̄ + H (K + ε̄ I)⁻¹ M,  D̄ = Σ_t λ_t ε_t C_t / ε̄,
        H = [λ_t K_tt / √s_t]_t − Σ_r (λ_r ε_r / ε̄) K_r / √s_r,  K_r the rows of r in K.
    """
    whole, means = vectors.whole, vectors.means
    assert whole is not None
    if sum(problem.ridges) == 0 or problem.spectral == 0:
        raise IllConditionedError("without a ridge the sum of the covariances is singular")
    count, rows, columns = whole.shape
    roots = [scale**0.5 for scale in problem.scales]
    stack = whole if roots == [1.0] * count else whole * as_vector(roots, whole)[:, None, None]
    stack = stack.reshape(count * rows, columns)
    system = gram(stack)
    (ridge, trace), residual = problem.ridge(system), None

    def combine(given: Sequence[float], taken: Sequence[float]) -> Tensor:
        """Return [g_t K_tt / √s_t]_t − Σ_r a_r K_r / √s_r, (o, N)."""
        scaled = [-a / root for a, root in zip(taken, roots, strict=True)]
        bands = system.view(count, rows, count * rows)
        combined = torch.tensordot(as_vector(scaled, system), bands, dims=1)
        for t in range(count):
            own = slice(t * rows, (t + 1) * rows)
            combined[:, own].add_(system[own, own], alpha=given[t] / roots[t])
        return combined

    taken = [share * a for share, a in zip(problem.shares(), coefficients, strict=True)]
    combined = combine(coefficients, taken)
    if problem.rank:
        residual = combine([1.0] * count, [1 / count] * count)
        away = means - means.mean(dim=0)
        residual += (stack.view(count, rows, columns) @ away[:, :, None]).flatten()
        residual = product(residual, stack)
        if problem.ridged_mean:
            residual.sub_((whole.mean(dim=0) + means.mean(dim=0)).mul_(ridge))
    system.diagonal().add_(ridge)
    lower, failed = factorize(system)
    merged = product(solve(combined, lower), stack)
    merged.view(-1).addmv_(whole.flatten(1).mT, as_vector(taken, whole))
    probed, wrong = _probe(problem, vectors, coefficients, merged, ridge)
    sides = product(wrong, stack.mT)
    if problem.prior:
        sides = torch.cat([sides, stack.sum(dim=1)[None]])
    solved = product(solve(sides, lower), stack)
    left = (wrong - solved[: len(wrong)]) / ridge
    numbers = _error_numbers(left, probed, merged, lower)
    if problem.prior:
        _add_prior_(merged, solved[-1] / (columns * problem.prior))
    return merged, residual, [ridge, trace, *numbers, failed.to(merged)]


def _probe(
    problem: Regression,
    vectors: CentredVectors,
    coefficients: Sequence[float],
    merged: Tensor,
    ridge: Tensor,
) -> tuple[Tensor, Tensor]:
    """Return the largest rows of Y, and what Σ_t (Y − λ_t C_t)(S_t + ε_t I) leaves of 0 there."""
    sizes = torch.linalg.vector_norm(merged, dim=1)
    sampled = sizes.topk(min(PROBED_ROWS, len(sizes))).indices
    rows = merged[sampled]
    factors, shares, scales = as_vector([coefficients, problem.shares(), problem.scales], rows)
    away = torch.addcmul(rows, vectors.block(sampled), factors[:, None, None], value=-1)
    wrong = torch.tensordot(shares, away, dims=1) * ridge
    scaled = away if set(problem.scales) == {1.0} else away * scales[:, None, None]
    for block in vectors.blocks:
        stack = vectors.block(block)
        _add_times_(wrong, product(scaled, stack.mT), stack)
    for t, (known, share) in problem.measured.items():
        wrong.add_(product(away[t], known.matrix(wrong)), alpha=share)
    return rows, wrong


def _error_numbers(error: Tensor, rows: Tensor, merged: Tensor, lower: Tensor) -> list[Tensor]:
    """Return ‖error‖ of some rows of Y, ‖rows‖, ‖Y‖ and the range of a factor's diagonal."""
    sizes = (torch.linalg.vector_norm(tensor) for tensor in (error, rows, merged))
    return [*sizes, *torch.aminmax(lower.diagonal())]


def _relative_error(
    size: float, given: float, numbers: Sequence[float], dtype: torch.dtype
) -> float:
    """Return the relative error of X by `_error_numbers`; NaN of a singular A.

    `size` is ‖X‖, and `given` that of all task vectors together.
    """
    error, rows, whole, low, high = numbers
    # Where experts cancel one another Y is nothing but rounding, and no digit of it counts.
    rows = max(rows, 1e-6 * given)
    if not rows or not high > 0 or not (low / high) ** 2 > 64 * torch.finfo(dtype).eps:
        return math.nan
    loss = whole / size if size else LARGEST_LOSS  # of digits by the prior
    return error / rows * min(max(1.0, loss), LARGEST_LOSS)


def _refine(
    problem: Regression, vectors: CentredVectors, plain: Tensor, target: Tensor
) -> tuple[Tensor, Tensor]:
    """Return what the refinement adds to X, (o, i), and its strength σ_iso (Eqs. 17-19).

    With the eigenvectors P of the smaller Gram matrix of F, the target, U_k V_kᵀ is
    P_k diag(1/σ) P_kᵀ F, or its mirror image. Directions that float32 loses in F count in σ_iso
    and add nothing. But for `ridged_mean`, X keeps its size, and what points against the sum
    of the experts is left out (departures).
    """
    wide = target if target.shape[0] <= target.shape[1] else target.mT
    squares = gram(wide.double()).nan_to_num_()  # eigh fails over NaN, which a singular A leaves
    values, directions = leading_eigenpairs(squares, min(problem.rank, len(squares)))
    sigma = values.clamp(min=0).sqrt()
    strength = sigma.sum() / problem.rank  # of a core, which may have fewer directions than k
    rounded = 32 * torch.finfo(torch.float32).eps * max(target.shape) ** 0.5
    scaled = directions * torch.where(sigma > rounded * sigma[:1], strength / sigma, 0)
    component = product(scaled.to(target.dtype), product(directions.mT.to(target.dtype), wide))
    component = component if wide is target else component.mT
    if problem.ridged_mean:
        return component, strength
    common = vectors.means.sum(dim=0)
    totals = ((rows, vectors.block(rows).sum(dim=0) + common) for rows in vectors.blocks)
    products = ((component[rows] * total).sum(dtype=torch.float64) for rows, total in totals)
    kept = (reduce(Tensor.add_, products) >= 0).to(plain.dtype)
    refined = plain + component
    least = torch.finfo(plain.dtype).tiny  # experts may cancel one another to the last bit
    refined *= torch.linalg.vector_norm(plain) / torch.linalg.vector_norm(refined).clamp(min=least)
    return refined.sub_(plain).mul_(kept), strength * kept
