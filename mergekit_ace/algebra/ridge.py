# SPDX-License-Identifier: Apache-2.0
"""The ridge regression that covariances of tasks define for one matrix: one solver for all.

With the centred task vectors C_t = Δ_t − 1μ_tᵀ, (o, i), and S_t = s_t C_tᵀC_t + m_t M_t,

    Y = [Σ_t λ_t C_t (S_t + ε_t I)] A⁻¹,  A = S + ε̄ I,  S = Σ_t S_t,  ε̄ = Σ_t ε_t    (ACE, Eq. 14)
    X = Y − (Y1) qᵀ,  q = A⁻¹c / (1 + cᵀA⁻¹1)    with the prior 1cᵀ (Eqs. 11-13; Sherman, Morrison)
    F = R + X,  R = Σ_t (Δ_t − Δ̄) S_t            for the refinement (Eqs. 15-16), Δ̄ the mean

``primal`` solves for Y in the i columns. As the mixing matrices (S_t + ε_t I) A⁻¹ sum to I, one
expert r can be the origin, Y = λ_r C_r + Σ_{t≠r} (λ_t C_t − λ_r C_r)(S_t + ε_t I) A⁻¹: a product
less, and nothing is left to the solve where experts agree.

``dual`` serves where all task vectors together have N = T·o < i rows. With M = [√s_t C_t]_t,
(N, i), and K = MMᵀ, M A⁻¹ is (K + ε̄ I)⁻¹ M and ε̄ A⁻¹ is I − Mᵀ(K + ε̄ I)⁻¹M, so that

    Y = D̄ + H (K + ε̄ I)⁻¹ M,  D̄ = Σ_t λ_t ε_t C_t / ε̄,
    H = [λ_t K_tt / √s_t]_t − Σ_r (λ_r ε_r / ε̄) K_r / √s_r,  K_r the rows of r in K.

All of it is in the precision of the task vectors: float32 at first. How large the error of Y is, is
measured: Σ_t (Y − λ_t C_t)(S_t + ε_t I) is 0, and what some rows of it are instead, times A⁻¹, is
the error of these rows. Where it is too large, everything is done once more in float64.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from mergekit_ace.algebra.linalg import (
    LARGEST_STACK,
    add_product_,
    factorize,
    full_precision,
    gram,
    leading_eigenpairs,
    product,
    solve,
)
from mergekit_ace.algebra.measured import MeasuredCovariance
from mergekit_ace.algebra.records import IllConditionedError, MatrixRecord
from mergekit_ace.algebra.task_vectors import ActiveExperts, form_stack

# The relative error of X that float32 may leave: storing X in bfloat16 costs a thousand times that.
TOLERANCE = 1e-4
# An error that float64 leaves only where A is singular.
SINGULAR = 1e-3
PROBED_ROWS = 8
# Root mean square entries of task vectors outside of these have third powers that float32 lacks.
FLOAT32_RANGE = (1e-9, 1e9)
# Entries of all C_tᵀC_t that a GPU forms by one command; of more, each is work enough.
SMALL_SQUARES = 2**25
ALL = slice(None)


class TaskVectors:
    """The centred task vectors C_t of one matrix, all of them at once or in blocks of rows.

    Attributes:
        shape: (o, i).
        means: μ_t, (T, i); 0 where nothing is centred.
    """

    def __init__(
        self,
        base: Tensor,
        experts: Sequence[Tensor],
        dtype: torch.dtype,
        *,
        centred: bool,
        stack: Tensor | None = None,
    ):
        """Form W_t − W0 of matrices (o, i) in a dtype, or take them from a stack, (T, o, i)."""
        self._base, self._experts, self._dtype = base, experts, dtype
        self.shape: tuple[int, int] = (base.shape[0], base.shape[1])
        count, (rows, columns) = len(experts), self.shape
        self._step = max(1, LARGEST_STACK // max(1, count * columns))
        if count * rows < columns:  # the dual form needs all of them
            self._step = rows
        self.means = base.new_zeros(count, columns, dtype=dtype)
        whole = stack
        if whole is None and self._step >= rows:
            whole = self._form(ALL)
        if centred:
            parts = (self._form(block) for block in self.rows()) if whole is None else (whole,)
            self.means = sum((part.sum(dim=1) for part in parts), start=self.means).div_(rows)
            if whole is not None:
                whole -= self.means[:, None]
        self.whole = whole

    def rows(self) -> Iterator[slice]:
        """Iterate over the blocks of rows."""
        for start in range(0, self.shape[0], self._step):
            yield slice(start, min(start + self._step, self.shape[0]))

    def block(self, rows: slice, t: int) -> Tensor:
        """Return C_t of a block of rows, (rows, i)."""
        if self.whole is not None:
            return self.whole[t, rows]
        part = self._experts[t][rows].to(self._dtype, copy=True)
        return part.sub_(self._base[rows]).sub_(self.means[t])

    def combined(self, rows: slice, weights: Sequence[float]) -> Tensor:
        """Return Σ_t a_t C_t of a block of rows, in new memory."""
        if self.whole is not None:
            return torch.tensordot(self.whole.new_tensor(weights), self.whole[:, rows], dims=1)
        total = self.block(rows, 0) * weights[0]
        for t, weight in enumerate(weights[1:], 1):
            total.add_(self.block(rows, t), alpha=weight)
        return total

    def total(self, rows: slice) -> Tensor:
        """Return Σ_t Δ_t of a block of rows."""
        return self.combined(rows, [1.0] * len(self.means)) + self.means.sum(dim=0)

    def sample(self, step: int) -> Tensor:
        """Return every so many row of all C_t, (T, rows, i)."""
        if self.whole is not None:
            return self.whole[:, ::step]
        chosen = [one[::step] for one in self._experts]
        return form_stack(self._base[::step], chosen, self._dtype).sub_(self.means[:, None])

    def covariances(self) -> Callable[[int], Tensor]:
        """Return what gives C_tᵀC_t, (i, i), of an expert: small ones are formed all at once."""
        entries = len(self.means) * self.shape[1] ** 2
        if self.whole is None or self.whole.device.type == "cpu" or entries > SMALL_SQUARES:
            return self._covariance
        return list(self.whole.mT @ self.whole).__getitem__

    def _covariance(self, t: int) -> Tensor:
        first, *rest = (gram(self.block(rows, t).mT) for rows in self.rows())
        for part in rest:
            first += part
        return first

    def zeros(self, *shape: int) -> Tensor:
        """Return zeros of the dtype, on the device."""
        return self.means.new_zeros(*shape)

    def _form(self, rows: slice) -> Tensor:
        """Return the Δ_t of a block of rows, (T, rows, i)."""
        return form_stack(self._base[rows], [one[rows] for one in self._experts], self._dtype)


@dataclass(frozen=True)
class Estimate:
    """What one expert says of its inputs.

    Attributes:
        scale: s_t.
        ridge: ε_t; where the ridge follows the spectrum, its share of ε̄.
        coefficient: λ_t, by which its component of X is multiplied, its covariance not.
        measured: M_t; None where S_t is the estimate alone.
        measured_scale: m_t.
    """

    scale: float
    ridge: float
    coefficient: float = 1.0
    measured: MeasuredCovariance | None = None
    measured_scale: float = 0.0


@dataclass(frozen=True)
class Problem:
    """The regression of one matrix.

    Attributes:
        vectors: the task vectors.
        estimates: one for each.
        spectral: ε where the ridge follows the spectrum, ε̄ = ε ‖S‖_F² / tr(S); None where the ε_t
            are given.
        prior: what the mean row of S is divided by to give c (Eq. 13); 0 without a prior.
        refined: whether F is wanted.
        ridged_mean: whether the mean of the estimates in R holds the ridges, as in Eq. 15.
    """

    vectors: TaskVectors
    estimates: Sequence[Estimate]
    spectral: float | None = None
    prior: float = 0.0
    refined: bool = False
    ridged_mean: bool = False

    @property
    def coefficients(self) -> list[list[float]]:
        """The λ_t of every X that is needed: as given, and where those are not 1 for F, all 1."""
        ones = [1.0] * len(self.estimates)
        given = [estimate.coefficient for estimate in self.estimates]
        return [given, ones] if self.refined and given != ones else [given]

    @property
    def is_measured(self) -> bool:
        """Whether some S_t is not the estimate alone, and so not of the rank of its task vector."""
        return any(estimate.measured is not None for estimate in self.estimates)

    def ridge(self, system: Tensor) -> Tensor:
        """Return ε̄ from S, or from K, which has its trace and its norm; a tensor of one entry."""
        if self.spectral is None:
            return system.new_tensor(sum(estimate.ridge for estimate in self.estimates))
        return self.spectral * torch.linalg.vector_norm(system).square_() / system.trace()

    def shares(self) -> list[float]:
        """Return ε_t / ε̄."""
        total = sum(estimate.ridge for estimate in self.estimates)
        if total == 0 or self.spectral == 0:
            raise IllConditionedError("without a ridge the sum of the covariances is singular")
        return [estimate.ridge / total for estimate in self.estimates]


@dataclass(frozen=True)
class Solution:
    """The closed form of one matrix; numbers are tensors of one entry, still on the device.

    Attributes:
        merged: X, (o, i).
        plain: X with all λ_t at 1, where F was asked for; may be the same tensor.
        target: F, (o, i), with all λ_t at 1; None where it was not asked for.
        ridge: ε̄.
        trace: tr(S).
        error: the relative error of X, as some rows tell; NaN where a system has no factor.
    """

    merged: Tensor
    plain: Tensor
    target: Tensor | None
    ridge: Tensor
    trace: Tensor
    error: Tensor


def is_dual(problem: Problem) -> bool:
    """Tell whether the system of all rows is the smaller one, and holds all that A does."""
    rows, columns = problem.vectors.shape
    return len(problem.estimates) * rows < columns and not problem.is_measured


def solve_closed_form(problem: Problem) -> Solution:
    """Solve for X, and F, in the precision of the task vectors.

    Raises:
        IllConditionedError: there is no ridge, and the dual form needs one.
    """
    return _solve_dual(problem) if is_dual(problem) else _solve_primal(problem)


def _solve_primal(problem: Problem) -> Solution:
    vectors, ridges = problem.vectors, [estimate.ridge for estimate in problem.estimates]
    origin = ridges.index(min(ridges))
    sums, system, row, kept = _normal_equations(problem, origin)
    trace, ridge = system.trace(), problem.ridge(system)
    target = _primal_target(problem, sums[-1], system, row, origin) if problem.refined else None
    common = system.mean(dim=0)[None] / problem.prior if problem.prior else None
    system.diagonal().add_(ridge)
    lower, failed = factorize(system)
    found = []
    for total, given in zip(sums, problem.coefficients, strict=True):
        shares = [share * a for share, a in zip(ridges, given, strict=True)]
        shares[origin] -= given[origin] * sum(ridges)  # Σ_t ε_t (λ_t C_t − λ_r C_r)
        for block in vectors.rows():
            total[block].addcmul_(vectors.combined(block, shares), _factor(problem, ridge))
        merged = solve(total, lower)
        for block in vectors.rows():
            merged[block].add_(vectors.block(block, origin), alpha=given[origin])
        found.append(merged)
    del sums
    residual, size = _residual(problem, found[0], ridge, kept)
    probes = residual if common is None else torch.cat([residual, common])
    probes = solve(probes, lower)
    error = torch.linalg.vector_norm(probes[: len(residual)]) / size
    if common is not None:
        found = [_with_prior_(merged, probes[-1]) for merged in found]
    target = None if target is None else target.add_(found[-1])
    return Solution(found[0], found[-1], target, ridge, trace, _checked(error, lower, failed))


def _normal_equations(
    problem: Problem, origin: int
) -> tuple[list[Tensor], Tensor, Tensor, list[Tensor]]:
    """Return what the estimates sum up to, without their ridges.

    Args:
        problem: the regression.
        origin: r.

    Returns:
        Σ_{t≠r} (λ_t C_t − λ_r C_r) S_t, (o, i), for the λ_t of every X that is needed; S, (i, i);
        Σ_t S_t (μ_t − μ̄), (i,), for F; and the S_t themselves where covariances were measured.
    """
    vectors, (rows, columns) = problem.vectors, problem.vectors.shape
    # Of wide matrices (λ_t C_t − λ_r C_r) C_tᵀ is the smaller product.
    squares = None
    if columns <= 2 * rows or problem.is_measured:
        squares = vectors.covariances()
    sums = [vectors.zeros(rows, columns) for _ in problem.coefficients]
    system, row = vectors.zeros(columns, columns), vectors.zeros(columns)
    kept: list[Tensor] = []
    for t, estimate in enumerate(problem.estimates):
        factor, square = estimate.scale, None
        if squares is None:
            part = vectors.block(ALL, t)
            add_product_(system, part.mT, part, factor)
        else:
            square = squares(t) if factor else vectors.zeros(columns, columns)
            if problem.is_measured:
                square, factor = _with_measured(square.mul_(factor), estimate), 1.0
                kept.append(square)
            system.add_(square, alpha=factor)
        if problem.refined:
            away = vectors.means[t] - vectors.means.mean(dim=0)
            moved = part.mT @ (part @ away) if square is None else square @ away
            row.add_(moved, alpha=factor)
        for block in vectors.rows() if t != origin else ():
            own, first = vectors.block(block, t), vectors.block(block, origin)
            for total, given in zip(sums, problem.coefficients, strict=True):
                moved = _times(own, given[t]) - _times(first, given[origin])
                if square is None:
                    add_product_(total, product(moved, own.mT), own, factor)
                else:
                    add_product_(total[block], moved, square, factor)
    return sums, system, row, kept


def _primal_target(
    problem: Problem, total: Tensor, system: Tensor, row: Tensor, origin: int
) -> Tensor:
    """Return R, (o, i): Σ_t C_t S_t − C̄ S + 1(Σ_t S_t (μ_t − μ̄))ᵀ, from `_normal_equations`."""
    vectors, target = problem.vectors, total.clone()
    mean = [1 / len(problem.estimates)] * len(problem.estimates)
    for block in vectors.rows():
        average = vectors.combined(block, mean)
        add_product_(target[block], vectors.block(block, origin) - average, system)
        if problem.ridged_mean:
            target[block].sub_((average + vectors.means.mean(dim=0)) * problem.ridge(system))
    return target.add_(row)


def _factor(problem: Problem, ridge: Tensor) -> Tensor:
    """Return what a sum over the ridges of the estimates has to be multiplied by."""
    return torch.ones_like(ridge) if problem.spectral is None else ridge


def _with_measured(square: Tensor, estimate: Estimate) -> Tensor:
    if estimate.measured is not None:
        square.add_(estimate.measured.matrix(square), alpha=estimate.measured_scale)
    return square


def _times(matrix: Tensor, coefficient: float) -> Tensor:
    return matrix if coefficient == 1 else matrix * coefficient


def _residual(
    problem: Problem, merged: Tensor, ridge: Tensor, squares: Sequence[Tensor]
) -> tuple[Tensor, Tensor]:
    """Return Σ_t (Y − λ_t C_t)(S_t + ε_t I) of some rows, and ‖Y‖ there.

    Args:
        merged: Y, (o, i).
        ridge: ε̄.
        squares: the S_t, where covariances were measured.
    """
    vectors, factor = problem.vectors, _factor(problem, ridge)
    step = max(1, vectors.shape[0] // PROBED_ROWS)
    probed = merged[::step]
    own = vectors.sample(step)
    size = torch.linalg.vector_norm(own)
    given = own.new_tensor(problem.coefficients[0])[:, None, None]
    away = probed - own * given
    ridges = own.new_tensor([estimate.ridge for estimate in problem.estimates])
    residual = torch.tensordot(ridges, away, dims=1) * factor
    scales = own.new_tensor([estimate.scale for estimate in problem.estimates])[:, None, None]
    if squares:
        residual += (away @ torch.stack(list(squares))).sum(dim=0)
    elif vectors.whole is not None:
        residual += ((away * scales) @ vectors.whole.mT @ vectors.whole).sum(dim=0)
    else:
        for t, estimate in enumerate(problem.estimates):
            for rows in vectors.rows():
                part = vectors.block(rows, t)
                residual.addmm_(away[t] @ part.mT, part, alpha=estimate.scale)
    # Where experts cancel one another Y is nothing but rounding, and no digit of it counts.
    return residual, torch.maximum(torch.linalg.vector_norm(probed), 1e-6 * size)


def _solve_dual(problem: Problem) -> Solution:
    vectors, estimates, shares = problem.vectors, problem.estimates, problem.shares()
    rows, columns = vectors.shape
    count, whole = len(estimates), vectors.whole
    assert whole is not None
    roots = [estimate.scale**0.5 for estimate in estimates]
    stack = whole if roots == [1.0] * count else whole * whole.new_tensor(roots)[:, None, None]
    stack = stack.reshape(count * rows, columns)  # M
    system = gram(stack)  # K
    trace, ridge = system.trace(), problem.ridge(system)

    def combine(given: Sequence[float], taken: Sequence[float]) -> Tensor:
        """Return [g_t K_tt / √s_t]_t − Σ_r a_r K_r / √s_r, (o, N)."""
        scaled = [-a / root for a, root in zip(taken, roots, strict=True)]
        bands = system.view(count, rows, count * rows)
        combined = torch.tensordot(system.new_tensor(scaled), bands, dims=1)
        for t in range(count):
            own = slice(t * rows, (t + 1) * rows)
            combined[:, own].add_(system[own, own], alpha=given[t] / roots[t])
        return combined

    weights = [
        [a * share for a, share in zip(given, shares, strict=True)]
        for given in problem.coefficients
    ]
    pairs = list(zip(problem.coefficients, weights, strict=True))
    combined = [combine(given, taken) for given, taken in pairs]
    target = None
    if problem.refined:
        centre = vectors.means.mean(dim=0)
        target = combine([1.0] * count, [1 / count] * count)
        away = (stack.view(count, rows, columns) @ (vectors.means - centre)[:, :, None]).flatten()
        target = product(target.add_(away), stack)
        if problem.ridged_mean:
            target.sub_((whole.mean(dim=0) + centre).mul_(ridge))
    system.diagonal().add_(ridge)
    probed = combined[0][:: max(1, rows // PROBED_ROWS)].clone()
    lower, failed = factorize(system)
    found, solved = [], None
    for combination, (_, taken) in zip(combined, pairs, strict=True):
        mixing = solve(combination, lower)
        solved = mixing if solved is None else solved
        merged = product(mixing, stack)
        found.append(merged.add_(torch.tensordot(whole.new_tensor(taken), whole, dims=1)))
    assert solved is not None
    probes = solved[:: max(1, rows // PROBED_ROWS)]
    residual = probed - (probes @ stack) @ stack.mT - probes * ridge
    error = torch.linalg.vector_norm(solve(residual.contiguous(), lower) @ stack)
    size = torch.linalg.vector_norm(found[0][:: max(1, rows // PROBED_ROWS)])
    size = torch.maximum(size, torch.linalg.vector_norm(whole) * 1e-6)
    if problem.prior:
        common = solve(stack.sum(dim=1)[None], lower) @ stack
        common = common[0] / (columns * problem.prior)  # A⁻¹c
        found = [_with_prior_(merged, common) for merged in found]
    target = None if target is None else target.add_(found[-1])
    return Solution(
        found[0], found[-1], target, ridge, trace, _checked(error / size, lower, failed)
    )


def _with_prior_(merged: Tensor, inverse: Tensor) -> Tensor:
    """Write X over Y, with A⁻¹c; c is the mean row of S, which commutes with A: cᵀA⁻¹1 ≥ 0."""
    return merged.addr_(merged.sum(dim=1), inverse / (1 + inverse.sum()), alpha=-1)


def _checked(error: Tensor, lower: Tensor, failed: Tensor) -> Tensor:
    """Return an error, or NaN where a system has no factor, or one whose pivots are rounding."""
    low, high = torch.aminmax(lower.diagonal())
    regular = (low / high).square() > 64 * torch.finfo(lower.dtype).eps
    return torch.where(regular & (failed.to(error.device) == 0), error, torch.nan)


@dataclass(frozen=True)
class Component:
    """What the refinement adds to X (Eqs. 17-19).

    Attributes:
        matrix: σ_iso U_k V_kᵀ, (o, i).
        strength: σ_iso, a tensor of one entry.
    """

    matrix: Tensor
    strength: Tensor


def isotropic_component(target: Tensor, rank: int) -> Component:
    """Return the k leading singular directions of F, all with their mean strength.

    With the eigenvectors P of the smaller Gram matrix of F, U_k V_kᵀ is P_k diag(1/σ) P_kᵀ F, or
    its mirror image. The Gram matrix squares the condition number, so it is float64. Directions
    below the rounding error of F are not its own but noise: they count in σ_iso and add nothing.

    Args:
        target: F, (o, i).
        rank: k ≥ 1; of a core, which may have fewer directions, that of the matrix behind it.
    """
    wide = target if target.shape[0] <= target.shape[1] else target.mT
    squares = gram(wide.double())
    values, vectors = leading_eigenpairs(squares, min(rank, len(squares)))
    sigma = values.clamp(min=0).sqrt()
    strength = sigma.sum() / rank
    exact = (len(squares) * torch.finfo(torch.float64).eps) ** 0.5 / 2
    rounded = 32 * torch.finfo(target.dtype).eps * max(target.shape) ** 0.5
    least = max(exact, rounded) * sigma[:1]
    scaled = vectors * torch.where(sigma > least, strength / sigma, 0.0)
    vectors, scaled = vectors.to(target.dtype), scaled.to(target.dtype)
    matrix = product(scaled, product(vectors.mT, wide))
    return Component(matrix if wide is target else matrix.mT, strength)


def _guarded(problem: Problem, merged: Tensor, component: Component) -> Component:
    """Return what leaves X as large as it was, and nothing that points against the experts' sum.

    λ is the scale of a merge, not the refinement (departure). Estimates of experts that differ much
    in weight or strength can have an R that undoes what the experts share (departure).
    """
    vectors = problem.vectors
    parts = (component.matrix[rows] * vectors.total(rows) for rows in vectors.rows())
    along = torch.stack([part.sum(dtype=torch.float64) for part in parts]).sum()
    refined = merged + component.matrix
    least = torch.finfo(merged.dtype).tiny  # experts may cancel one another to the last bit
    size = torch.linalg.vector_norm(refined).clamp(min=least)
    refined *= torch.linalg.vector_norm(merged) / size
    kept = (along >= 0).to(merged.dtype)
    return Component(refined.sub_(merged).mul_(kept), component.strength * kept)


@full_precision()
def merge_by_ridge(
    base: Tensor,
    active: ActiveExperts,
    make_problem: Callable[[torch.dtype], Problem],
    scale: float,
    *,
    rank: int = 0,
    refinement: float = 1.0,
    **known: Any,
) -> tuple[Tensor, MatrixRecord]:
    """Merge the versions of one matrix: W0 + λ (X + what the refinement adds).

    Args:
        base: W0, (o, i), finite.
        active: at least two experts W_t, each (o, i), that changed it.
        make_problem: from the precision of the task vectors to the regression.
        scale: λ.
        rank: k of the refinement; 0 without.
        refinement: its coefficient.
        known: what else the record says.

    Returns:
        The merged matrix in the dtype of the task vectors or wider, and the record.

    Raises:
        IllConditionedError: A cannot be factored, even in float64.
    """
    low, high = FLOAT32_RANGE
    typical = (max(active.tau) / base.numel()) ** 0.5
    narrow = active.dtype == torch.float32 and low < typical < high
    for dtype in (torch.float32, torch.float64)[not narrow :]:
        problem = make_problem(dtype)
        solution = solve_closed_form(problem)
        merged = solution.merged
        component = None
        if rank and solution.target is not None:
            component = isotropic_component(solution.target, rank)
            if not problem.ridged_mean:
                component = _guarded(problem, solution.plain, component)
        strength = solution.ridge if component is None else component.strength.to(dtype)
        size = torch.linalg.vector_norm(merged)
        numbers = [solution.error, solution.ridge, solution.trace, size, strength]
        error, ridge, trace, size, strength = torch.stack(numbers).tolist()
        if error <= (TOLERANCE if dtype == torch.float32 else SINGULAR):
            break
    else:
        raise IllConditionedError("the sum of the covariances is singular or nearly so")
    if component is not None:
        merged.add_(component.matrix, alpha=refinement)
        known |= {"refined": strength != 0, "sigma_iso": strength}
    ridges = [estimate.ridge for estimate in problem.estimates]
    if problem.spectral is not None:
        ridges = [ridge * share / sum(ridges) for share in ridges]
    record = active.record(
        epsilon=active.spread(ridges, None) if len(ridges) == len(active.experts) else None,
        prior=problem.prior != 0,
        rank=rank if "refined" in known else None,
        ridge=ridge * active.shape[1] / trace if trace else None,
        amplification=size**2 / sum(active.tau),
        form="dual" if is_dual(problem) else "primal",
        precision=str(dtype).removeprefix("torch."),
        error=error,
        **known,
    )
    return merged.mul_(scale).add_(base), record
