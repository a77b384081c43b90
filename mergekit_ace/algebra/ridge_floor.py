# SPDX-License-Identifier: Apache-2.0
"""A floor for the ridge: what the spectrum asks for, and what keeps X from being amplified. Ours.

A ridge damps directions of S = Σ S_t with eigenvalues below it. Where real models are stored in
float32, no rounding noise hides their weak directions, all over. How many mean eigenvalues of S are
the right ridge depends on how fast its spectrum falls. So ε̄ is at least `SPECTRAL_RIDGE` times the
mean of the eigenvalues weighted by themselves, ‖S‖_F² / tr(S), which counts those that matter. A
covariance that was measured is no noise in its weak directions, and its largest eigenvalues stand
out far more: where one is mixed in, the plain mean tr(S) / i takes the place of the weighted one.

The rows of all task vectors are the equations that X is fitted to, T·o for i unknowns a row. Where
they just determine it (T·o = i, as in keys and values of models with grouped heads), the smallest
eigenvalues of S touch zero, and with a small ridge ‖X‖ peaks: the interpolation threshold.
Experts that are orthogonal to one another give ‖X‖² = Σ_t ‖Δ_t‖², experts that agree less. What is
far above that fits noise; so the ridge ε̄ is raised until

    ‖X‖² ≤ max(LIMIT · T (Π_t ‖Δ_t‖²)^(1/T), max_t ‖Δ_t‖²),

LIMIT · Σ_t ‖Δ_t‖² for experts of one strength. With the sum in its place, experts weaker than the
strongest would have no say, and its noise may be far larger than all that they have learned. A
refinement adds up to ‖X‖ once more, so that where one follows a quarter of it is the bound.

No factorisation is needed to find the latter. With D̄ = Σ_t ε_t C_t / ε̄, which stays as it is when
all ε_t grow alike,

    X = D̄ + E (S + ε̄ I)⁻¹,   E = Σ_t (C_t − D̄) S_t,

and ‖X‖² is the mean of ‖Xᵀz‖² over random signs z. Lanczos' algorithm from Eᵀz replaces S by a
small tridiagonal matrix, with which ‖Xᵀz‖² is at hand for every ε̄. With an eigenvalue prescribed at
0, below all those of S, it errs upwards (Gauss-Radau; Golub and Meurant, "Matrices, moments and
quadrature", 2010), so that the ridge is never too small. The same holds in the dual form, with
M = [√s_t C_t]_t and K = M Mᵀ:

    Xᵀz = D̄ᵀz + Mᵀ (K + ε̄ I)⁻¹ g,   g = [√s_t C_t (C_t − D̄)ᵀ z]_t,   Eᵀz = Mᵀ g.

The structural prior, of rank one, is left out of all that, and coefficients count as 1.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import TypeVar

import torch
from torch import Tensor

from mergekit_ace.algebra.covariance import Covariances
from mergekit_ace.algebra.linalg import mirror, product
from mergekit_ace.algebra.records import IllConditionedError
from mergekit_ace.algebra.task_vectors import squared_norm

# It damps the weak directions of real models; a larger one also damps directions that experts of
# small models need.
SPECTRAL_RIDGE = 5e-3
# Orthogonal experts have 1, experts that agree less. A limit near 1 would also bound merges that do
# not fit noise.
LIMIT = 2.5
# Times the limit: an X that is within it is not worth a second solve.
TOLERATED = 1.2
# Between these T·o/i a matrix counts as near the threshold.
NEAR_THRESHOLD = (0.8, 1.25)
# Rows z.
PROBES = 24
# Steps of Lanczos' algorithm after which the ridge is looked at, and at most in all; and how far
# it then may be from an estimate that is too small.
CHECKED, MOST_STEPS = (6, 12, 24, 48), 96
SURE = 1.05
PRECISION = 1.01  # of the ridge
Solved = TypeVar("Solved")
PRESCRIBED = 1e-10  # of the largest eigenvalue: what rounding leaves of 0
SPENT = 1e-6  # of the largest eigenvalue: what rounding leaves is no direction


def rows_per_column(rows: int, columns: int, experts: int) -> float:
    """Return T·o/i, equations per unknown of a row of X: 1 at the interpolation threshold.

    Args:
        rows, columns: o and i, as the layout reads the matrix.
        experts: T, how many are in use.
    """
    return experts * rows / columns


def is_near_threshold(ratio: float | None) -> bool:
    """Return whether T·o/i is so close to 1 that a small ridge may amplify X; None is not."""
    return ratio is not None and NEAR_THRESHOLD[0] <= ratio <= NEAR_THRESHOLD[1]


def amplification(merged: Tensor, covariances: Covariances) -> float:
    """Return ‖X‖² / Σ_t ‖Δ_t‖²: 1 for experts orthogonal to one another, 1/T where they agree.

    Args:
        merged: X, (o, i), in units.
        covariances: of the experts.
    """
    return squared_norm(merged) / covariances.energy


def solve_within_bound(
    covariances: Covariances,
    solve: Callable[[bool], Solved],
    merged: Callable[[Solved], Tensor],
) -> Solved:
    """Solve for an X that is not amplified, with as little work as that takes.

    The bound of a merge that is refined is so much lower that nearly every one needs more ridge,
    which is looked for at once. Few others do: they are solved without, and looked at.

    Args:
        covariances: what is solved.
        solve: solves it, told whether to raise the ridge where X would be amplified.
        merged: returns X, (o, i), of what that returns.
    """
    if covariances.ridge == 0:  # it is not raised: no S_t has a trace
        return solve(False)
    if not covariances.refined:
        with suppress(IllConditionedError):  # more ridge is a remedy for that, too
            solution = solve(False)
            if squared_norm(merged(solution)) <= TOLERATED * largest_energy(covariances):
                return solution
            del solution  # its memory is needed
    return solve(True)


def largest_energy(covariances: Covariances) -> float:
    """Return what ‖X‖² may be, in units of unit².

    With ``refinement_mean: ridged`` more ridge turns the refinement against the experts: the bound
    is the loosest, LIMIT · Σ_t ‖Δ_t‖².
    """
    if covariances.ridged_mean:
        return LIMIT * covariances.energy
    taus = covariances.taus
    typical = math.exp(math.fsum(map(math.log, taus)) / len(taus))
    largest = max(*taus, LIMIT * len(taus) * typical)
    return largest / 4 if covariances.refined else largest


def raise_ridge(
    covariances: Covariances, system: Tensor, *, bound: bool, dual: bool = False
) -> Covariances:
    """Return the estimates with the ridge that the spectrum and a bound on ‖X‖ ask for.

    Args:
        covariances: the estimates; without `floored` the spectrum asks for nothing.
        system: S, (i, i); with `dual` [C_s C_tᵀ]_st, (N, N). Both triangles are read.
        bound: whether ‖X‖² is kept to `largest_energy`.
        dual: which of the two the system is.
    """
    if covariances.ridge == 0 or covariances.trace == 0:  # nothing to raise: S is 0
        return covariances
    if covariances.floored:
        covariances = _follow_spectrum(covariances, _energy(covariances, system, dual))
    return _keep_to_bound(covariances, system, dual) if bound else covariances


def _energy(covariances: Covariances, system: Tensor, dual: bool) -> float:
    """Return ‖S‖_F²; where a measurement is mixed in, that of a flat spectrum."""
    if covariances.is_measured:
        return covariances.trace**2 / covariances.whole_shape[1]
    if not dual:
        return squared_norm(system)
    rows = covariances.shape[0]
    scaled = [
        first.scale * second.scale * squared_norm(part)
        for first, band in zip(covariances.tasks, system.split(rows), strict=True)
        for second, part in zip(covariances.tasks, band.split(rows, dim=1), strict=True)
    ]
    return math.fsum(scaled)


def _follow_spectrum(covariances: Covariances, energy: float) -> Covariances:
    """Return the estimates with ε̄ at least a share of ‖S‖_F² / tr(S), given ‖S‖_F²."""
    least = SPECTRAL_RIDGE * energy / covariances.trace
    if covariances.ridge >= least:
        return covariances
    return replace(covariances.times_ridge(least / covariances.ridge), raised=True)


def _keep_to_bound(covariances: Covariances, system: Tensor, dual: bool) -> Covariances:
    """Return the estimates with the smallest ridge, from the given one up, that keeps to a bound.

    The bound is that of `largest_energy`; arguments as of `raise_ridge`.
    """
    bound = largest_energy(covariances)
    for upper, lower in _probes(covariances.unweighted(), system, dual):
        ridge = _least_ridge(upper, covariances.ridge, bound)
        if ridge <= SURE * _least_ridge(lower, covariances.ridge, bound):
            break
    if ridge == covariances.ridge:
        return covariances
    return replace(covariances.times_ridge(ridge / covariances.ridge), raised=True, bounded=True)


def _least_ridge(probes: _Probes, ridge: float, bound: float) -> float:
    """Return the least ridge, from the given one up, at which ‖X‖² is within a bound."""
    low = high = ridge
    while probes.squared_norm(high) > bound and high < probes.largest:
        low, high = high, 4 * high
    while high > PRECISION * low:
        middle = math.sqrt(low * high)
        low, high = (middle, high) if probes.squared_norm(middle) > bound else (low, middle)
    return high


@dataclass(frozen=True)
class _Probes:
    """‖Xᵀz‖² as a function of the ridge, for p rows z.

    Attributes:
        share: what ‖Xᵀz‖² counts in ‖X‖²: 1/p, or 1 where the z are all rows of the identity.
        mean: ‖D̄ᵀz‖², (p,).
        start: length of what Lanczos' algorithm starts from, (p,).
        along: D̄ᵀz, in the dual form M D̄ᵀz, in terms of the eigenvectors, (p, k).
        values: eigenvalues of the tridiagonal matrices, (p, k).
        first: first entries of their eigenvectors, (p, k).
        dual: whether squares are those of Mᵀ times it.
    """

    share: float
    mean: Tensor
    start: Tensor
    along: Tensor
    values: Tensor
    first: Tensor
    dual: bool

    @property
    def largest(self) -> float:
        """The largest eigenvalue of S, about."""
        return float(self.values.max())

    def squared_norm(self, ridge: float) -> float:
        """Estimate ‖X‖² at a ridge."""
        known = self.values > PRESCRIBED * self.largest
        values = self.values
        if self.dual:  # λ/(λ + ε̄)² is largest at λ = ε̄, and 0 at the eigenvalue that is prescribed
            values = values.where(known, ridge)
        solved = self.start[:, None] * self.first / (values + ridge)
        along = solved * self.along
        parts = 2 * along.where(known, along.abs()) + solved.square() * (values if self.dual else 1)
        return self.share * float((self.mean + parts.sum(dim=1)).sum())


def _probes(
    covariances: Covariances, system: Tensor, dual: bool
) -> Iterator[tuple[_Probes, _Probes]]:
    """Iterate over ever better estimates, one too large and one too small, or both exact."""
    signs = _signs(covariances.whole_shape[0]).to(covariances.tasks[0].mean)
    exact = len(signs) <= PROBES
    if covariances.space:  # Xᵀz is V times that of the core and Uᵀz
        signs = covariances.space.left.mT @ signs
    means, start, along = _right_hand_sides(covariances, signs, dual)
    roots = None
    if dual:
        scales = [task.scale**0.5 for task in covariances.tasks]
        roots = system.new_tensor(scales).repeat_interleave(covariances.shape[0])
    start, along = (part.mT.to(system.dtype).contiguous() for part in (start, along))
    mean, length = means.square().sum(dim=0).double().cpu(), start.norm(dim=1).double().cpu()
    for basis, matrix in _tridiagonalise(system, start, roots):
        found = (basis @ along[:, :, None]).mT.double().cpu()

        def read(matrix: Tensor, found: Tensor = found) -> _Probes:
            values, vectors = torch.linalg.eigh(matrix)
            return _Probes(
                share=1 if exact else 1 / PROBES,
                mean=mean,
                start=length,
                along=(found @ vectors).squeeze(1),
                values=values.clamp(min=0),
                first=vectors[:, 0, :],
                dual=dual,
            )

        ends = matrix.shape[1] == len(system)
        yield read(matrix if ends else _with_eigenvalue_zero(matrix)), read(matrix)


def _signs(rows: int) -> Tensor:
    """Return the rows z as columns, (o, p): random signs, or the identity, which is exact."""
    if rows <= PROBES:
        return torch.eye(rows, device="cpu")
    generator = torch.Generator("cpu").manual_seed(0)  # none of the global random numbers
    return torch.randint(0, 2, (rows, PROBES), generator=generator, device="cpu") * 2.0 - 1


def _right_hand_sides(
    covariances: Covariances, signs: Tensor, dual: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Return D̄ᵀz, (i, p), then Eᵀz and D̄ᵀz, (i, p), or in the dual form g and M D̄ᵀz, (N, p)."""
    columns, count = covariances.shape[1], signs.shape[1]
    own = [covariances.new(columns, count) for _ in covariances.tasks]
    for part, _, block, centred in _sweep(covariances, own):
        part.addmm_(centred.mT, signs[block])
    means = covariances.new(columns, count)
    for task, part in zip(covariances.tasks, own, strict=True):
        means.add_(part, alpha=task.ridge / covariances.ridge)
    start, turned = covariances.new(columns, count), []
    if covariances.is_measured:
        for task, part in zip(covariances.tasks, own, strict=True):
            estimate = mirror(covariances.add_estimate(covariances.new(columns, columns), task))
            start.addmm_(estimate, part - means)
        return means, start, means
    for part, scale, _, centred in _sweep(covariances, own):
        found = centred @ torch.cat([part - means, means], dim=1)
        if dual:
            turned.append(found.mul_(scale**0.5))
        else:
            start.addmm_(centred.mT, found[:, :count], alpha=scale)
    if dual:
        start, along = torch.cat(turned).split(count, dim=1)
        return means, start, along
    return means, start, means


def _sweep(
    covariances: Covariances, parts: Sequence[Tensor]
) -> Iterator[tuple[Tensor, float, slice, Tensor]]:
    """Iterate over blocks of rows of all C_t, each with its task's part and s_t."""
    for task, part in zip(covariances.tasks, parts, strict=True):
        for block in covariances.row_blocks():
            room = covariances.buffer("task", block.stop - block.start, covariances.shape[1])
            yield part, task.scale, block, task.centred(block, out=room)


def _tridiagonalise(
    system: Tensor, start: Tensor, roots: Tensor | None
) -> Iterator[tuple[Tensor, Tensor]]:
    """Run Lanczos' algorithm from every row at once, with all vectors kept orthogonal.

    Args:
        system: symmetric, (m, m).
        start: (p, m).
        roots: (m,); what is reduced is the system with rows and columns multiplied by them.

    Yields:
        After the steps of `CHECKED`, and at the end, the bases, (p, k, m), and the tridiagonal
        matrices, (p, k, k), in float64 on the CPU; exact where k is m.
    """
    count, size = start.shape
    most = min(MOST_STEPS, size)
    basis = start.new_empty(count, most, size)
    matrix = start.new_zeros(count, most, most)  # there, so that no step waits for a GPU
    vector, largest = start, start.new_zeros(())
    for step in range(most):
        length = vector.norm(dim=1, keepdim=True)
        spent = (length <= SPENT * largest) | (length == 0)
        if step > 0:
            beyond = length.masked_fill(spent, 0).squeeze(1)
            matrix[:, step, step - 1] = matrix[:, step - 1, step] = beyond
        new = (vector / length).masked_fill(spent, 0)
        basis[:, step] = new
        known = basis[:, : step + 1]
        if step in CHECKED:
            yield known, matrix[:, : step + 1, : step + 1].double().cpu()
        vector = product(new, system) if roots is None else product(new * roots, system) * roots
        largest = torch.maximum(largest, vector.norm(dim=1).max())
        for _ in range(2):  # once is not enough in the presence of rounding
            along = known @ vector[:, :, None]
            vector = vector - (along.mT @ known).squeeze(1)
            matrix[:, step, step] += along[:, step, 0]
    yield basis, matrix.double().cpu()


def _with_eigenvalue_zero(matrix: Tensor) -> Tensor:
    """Return tridiagonal matrices, (p, k, k), with the last entry such that 0 is an eigenvalue."""
    changed = matrix.clone()
    values, vectors = torch.linalg.eigh(matrix[:, :-1, :-1])
    inverse = (vectors[:, -1].square() / values.clamp(min=1e-300)).sum(dim=1)
    changed[:, -1, -1] = matrix[:, -1, -2].square() * inverse
    return changed
