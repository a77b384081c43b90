# SPDX-License-Identifier: Apache-2.0
"""A floor for the ridge: how far the closed form may amplify what the experts hold. Ours.

The rows of all task vectors are the equations that X is fitted to, T·o for i unknowns a row. Where
they just determine it (T·o = i, as in keys and values of models with grouped heads), the smallest
eigenvalues of S = Σ S_t touch zero, and with a small ridge ‖X‖ peaks: the interpolation threshold.
Experts that are orthogonal to one another give ‖X‖² = Σ_t ‖Δ_t‖², experts that agree less. What is
far above that fits noise; so the ridge ε̄ is raised until

    ‖X‖² ≤ LIMIT · Σ_t ‖Δ_t‖².

No factorisation is needed to find it. With D̄ = Σ_t ε_t C_t / ε̄, which stays as it is when all ε_t
grow alike,

    X = D̄ + E (S + ε̄ I)⁻¹,   E = Σ_t (C_t − D̄) S_t,

and ‖X‖² is the mean of ‖Xᵀz‖² over random signs z. Lanczos' algorithm from Eᵀz replaces S by a
small tridiagonal matrix, with which ‖Xᵀz‖² is at hand for every ε̄ (Golub and Meurant, "Matrices,
moments and quadrature", 2010). The same holds in the dual form, with M = [√s_t C_t]_t, K = M Mᵀ:

    Xᵀz = D̄ᵀz + Mᵀ (K + ε̄ I)⁻¹ g,   g = [√s_t C_t (C_t − D̄)ᵀ z]_t,   Eᵀz = Mᵀ g.

The structural prior, of rank one, is left out of all that, and coefficients count as 1.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from mergekit_ace.algebra.covariance import Covariances
from mergekit_ace.algebra.linalg import blocks
from mergekit_ace.algebra.task_vectors import squared_norm

# On SmolLM2 1 to 2 keep most of the experts' gains, on dictionary families with grouped heads 2 to
# 3; examples/benchmark/epsilons.py.
LIMIT = 2.0
# Rows z, and steps of Lanczos' algorithm.
PROBES, STEPS = 16, 40
PRECISION = 1.01  # of the ridge
SPENT = 1e-6  # of the largest eigenvalue: what rounding leaves is no direction


def amplification(merged: Tensor, covariances: Covariances) -> float:
    """Return ‖X‖² / Σ_t ‖Δ_t‖²: 1 for experts orthogonal to one another, 1/T where they agree.

    Args:
        merged: X, (o, i), in units.
        covariances: of the experts.
    """
    return squared_norm(merged) / covariances.energy


def apply_floor(covariances: Covariances, system: Tensor, *, dual: bool = False) -> Covariances:
    """Return the estimates with the smallest ridge, from the given one up, that keeps to `LIMIT`.

    Args:
        covariances: with ε̄ > 0.
        system: S, (i, i); with `dual` [C_s C_tᵀ]_st, (N, N). Both triangles are read.
        dual: which of the two it is.
    """
    probes = _probe(covariances.unweighted(), system, dual)
    bound = LIMIT * covariances.energy
    low = high = covariances.ridge
    while probes.squared_norm(high) > bound and high < probes.largest:
        low, high = high, 4 * high
    while high > PRECISION * low:
        middle = math.sqrt(low * high)
        low, high = (middle, high) if probes.squared_norm(middle) > bound else (low, middle)
    return (
        covariances
        if high == covariances.ridge
        else covariances.times_ridge(high / covariances.ridge)
    )


@dataclass(frozen=True)
class _Probes:
    """‖Xᵀz‖² as a function of the ridge, for p rows z.

    Attributes:
        mean: ‖D̄ᵀz‖², (p,).
        start: length of what Lanczos' algorithm starts from, (p,).
        along: D̄ᵀz, in the dual form M D̄ᵀz, in terms of the eigenvectors, (p, k).
        values: eigenvalues of the tridiagonal matrices, (p, k).
        first: first entries of their eigenvectors, (p, k).
        metric: of squares in that basis, (p, k): 1, or in the dual form the eigenvalues.
    """

    mean: Tensor
    start: Tensor
    along: Tensor
    values: Tensor
    first: Tensor
    metric: Tensor

    @property
    def largest(self) -> float:
        """The largest eigenvalue of S, about."""
        return float(self.values.max())

    def squared_norm(self, ridge: float) -> float:
        """Estimate ‖X‖² at a ridge."""
        solved = self.start[:, None] * self.first / (self.values + ridge)
        parts = 2 * solved * self.along + solved.square() * self.metric
        return float((self.mean + parts.sum(dim=1)).mean())


def _probe(covariances: Covariances, system: Tensor, dual: bool) -> _Probes:
    means, start, along = _right_hand_sides(covariances, system.dtype, dual)
    roots = None
    if dual:
        scales = [task.scale**0.5 for task in covariances.tasks]
        roots = system.new_tensor(scales).repeat_interleave(covariances.shape[0])[:, None]
    basis, matrix = _tridiagonalise(system, start, roots)
    values, vectors = torch.linalg.eigh(matrix)
    values = values.clamp(min=0)
    along = torch.einsum("kmp,mp->pk", basis, along).double().cpu()
    return _Probes(
        mean=means.square().sum(dim=0).double().cpu(),
        start=start.norm(dim=0).double().cpu(),
        along=(along[:, :, None] * vectors).sum(dim=1),
        values=values,
        first=vectors[:, 0, :],
        metric=values if dual else torch.ones_like(values),
    )


def _right_hand_sides(
    covariances: Covariances, dtype: torch.dtype, dual: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Return D̄ᵀz, (i, p), then Eᵀz and D̄ᵀz, (i, p), or in the dual form g and M D̄ᵀz, (N, p)."""
    rows, columns = covariances.shape
    generator = torch.Generator("cpu").manual_seed(0)  # none of the global random numbers
    signs = torch.randint(0, 2, (rows, PROBES), generator=generator, device="cpu") * 2 - 1
    signs = signs.to(covariances.tasks[0].mean)
    own = [covariances.new(columns, PROBES) for _ in covariances.tasks]
    for part, _, block, centred in _sweep(covariances, own):
        part.addmm_(centred.mT, signs[block])
    means = covariances.new(columns, PROBES)
    for task, part in zip(covariances.tasks, own, strict=True):
        means.add_(part, alpha=task.ridge / covariances.ridge)
    start, turned = covariances.new(columns, PROBES), []
    for part, scale, _, centred in _sweep(covariances, own):
        found = centred @ torch.cat([part - means, means], dim=1)
        if dual:
            turned.append(found.mul_(scale**0.5))
        else:
            start.addmm_(centred.mT, found[:, :PROBES], alpha=scale)
    if dual:
        start, along = torch.cat(turned).split(PROBES, dim=1)
        return means, start, along
    return means, start.to(dtype), means.to(dtype)


def _sweep(
    covariances: Covariances, parts: Sequence[Tensor]
) -> Iterator[tuple[Tensor, float, slice, Tensor]]:
    """Iterate over blocks of rows of all C_t, each with its task's part and s_t."""
    rows, columns = covariances.shape
    for task, part in zip(covariances.tasks, parts, strict=True):
        for block in blocks(rows, columns):
            room = covariances.buffer("task", block.stop - block.start, columns)
            yield part, task.scale, block, task.centred(block, out=room)


def _tridiagonalise(system: Tensor, start: Tensor, roots: Tensor | None) -> tuple[Tensor, Tensor]:
    """Run Lanczos' algorithm for all columns at once, every vector kept orthogonal.

    Args:
        system: symmetric, (m, m).
        start: (m, p).
        roots: (m, 1); what is reduced is the system with rows and columns multiplied by them.

    Returns:
        The bases, (k, m, p), and the tridiagonal matrices, (p, k, k), in float64 on the CPU.
    """
    size, count = start.shape
    steps = min(STEPS, size)
    basis = start.new_zeros(steps, size, count)
    matrix = torch.zeros(count, steps, steps, dtype=torch.float64)
    vector, largest = start, 0.0
    for step in range(steps):
        length = vector.norm(dim=0)
        spent = length <= SPENT * largest
        if step > 0:
            matrix[:, step, step - 1] = matrix[:, step - 1, step] = length.masked_fill(spent, 0)
        basis[step] = (vector / length).masked_fill(spent | (length == 0), 0)
        vector = basis[step] if roots is None else basis[step] * roots
        vector = system @ vector
        vector = vector if roots is None else vector * roots
        largest = max(largest, float(vector.norm(dim=0).max()))
        known = basis[: step + 1]
        for _ in range(2):  # once is not enough in the presence of rounding
            along = (known * vector).sum(dim=1)
            vector = vector - (known * along[:, None]).sum(dim=0)
            matrix[:, step, step] += along[step].cpu()
    return basis, matrix
