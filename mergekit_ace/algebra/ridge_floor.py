# SPDX-License-Identifier: Apache-2.0
"""A floor for the ridge: how far the closed form may amplify what the experts hold. Ours.

The rows of all task vectors are the equations that X is fitted to, T·o for i unknowns a row. Where
they just determine it (T·o = i, as in keys and values of models with grouped heads), the smallest
eigenvalues of A = Σ S_t touch zero, and with a small ridge ‖X‖ peaks: the interpolation threshold.
Experts that are orthogonal to one another give ‖X‖² = Σ_t ‖Δ_t‖², experts that agree less. What is
far above that fits no expert; so the ridge ε̄ is raised until

    ‖X‖² ≤ LIMIT · Σ_t ‖Δ_t‖².

No factorisation is needed for it. With D̄ = Σ_t ε_t C_t / ε̄, which stays as it is when all ε_t grow
alike,

    X = D̄ + E (A + ε̄ I)⁻¹,   E = Σ_t (C_t − D̄) S_t,

and ‖X‖² = 𝔼 ‖Xᵀz‖² over random signs z. A run of Lanczos' algorithm from Eᵀz replaces A by a small
tridiagonal matrix, with which ‖Xᵀz‖² is at hand for every ε̄ (Golub and Meurant 2010, chapter 3).
The structural prior, of rank one, is left out of that.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from mergekit_ace.algebra.covariance import Covariances
from mergekit_ace.algebra.linalg import blocks
from mergekit_ace.algebra.task_vectors import squared_norm

LIMIT = 4.0
# Rows z, and steps of Lanczos' algorithm.
PROBES, STEPS = 8, 40
# An estimate is asked for only where X itself is about as large; the estimate decides.
WORTH_ESTIMATING = 0.7
PRECISION = 1.01  # of the ridge


def amplification(merged: Tensor, covariances: Covariances) -> float:
    """Return ‖X‖² / Σ_t ‖Δ_t‖²: 1 for experts orthogonal to one another, 1/T where they agree.

    Args:
        merged: X, (o, i), in units.
        covariances: of the experts.
    """
    return squared_norm(merged) / covariances.energy


def raise_ridge(covariances: Covariances) -> Covariances:
    """Return the estimates with the smallest ridge, from the given one up, that keeps to `LIMIT`.

    Args:
        covariances: with ε̄ > 0. Coefficients are taken for 1.
    """
    ridge = covariances.ridge
    probed = _probe(covariances.unweighted())
    bound = LIMIT * covariances.energy
    if probed.squared_norm(ridge) <= bound:
        return covariances
    low, high = ridge, 2 * ridge
    while probed.squared_norm(high) > bound and high < probed.largest * 1e6:
        low, high = high, 4 * high
    while high > PRECISION * low:
        middle = math.sqrt(low * high)
        low, high = (middle, high) if probed.squared_norm(middle) > bound else (low, middle)
    return covariances.times_ridge(high / ridge)


@dataclass(frozen=True)
class _Probes:
    """Xᵀz as a function of the ridge, for p rows z.

    Attributes:
        mean: ‖D̄ᵀz‖², (p,).
        start: ‖Eᵀz‖, (p,).
        values: eigenvalues of the tridiagonal matrices, (p, k).
        first: first entries of their eigenvectors, (p, k).
        along: D̄ᵀz in terms of the eigenvectors, (p, k).
    """

    mean: Tensor
    start: Tensor
    values: Tensor
    first: Tensor
    along: Tensor

    @property
    def largest(self) -> float:
        """The largest eigenvalue of A, about."""
        return float(self.values.max())

    def squared_norm(self, ridge: float) -> float:
        """Estimate ‖X‖² at a ridge."""
        solved = self.start[:, None] * self.first / (self.values.clamp(min=0) + ridge)
        parts = self.mean + 2 * (solved * self.along).sum(dim=1) + solved.square().sum(dim=1)
        return float(parts.mean())


def _probe(covariances: Covariances) -> _Probes:
    """Run Lanczos' algorithm from Eᵀz for all z at once, with every vector kept orthogonal."""
    rows, columns = covariances.shape
    generator = torch.Generator("cpu").manual_seed(0)  # none of the global random numbers
    signs = torch.randint(0, 2, (rows, PROBES), generator=generator, device="cpu") * 2 - 1
    means, own = _turned(covariances, signs.to(covariances.tasks[0].mean))
    vector = _apply(covariances, [part - means for part in own])
    start = vector.norm(dim=0)
    steps = min(STEPS, columns)
    basis = covariances.new(steps, columns, PROBES)
    matrix = torch.zeros(PROBES, steps, steps, dtype=torch.float64)
    length = start
    for step in range(steps):
        basis[step] = vector / length.clamp(min=1e-300)
        vector = _apply(covariances, [basis[step]] * len(covariances.tasks))
        for _ in range(2):  # once is not enough in the presence of rounding
            known = basis[: step + 1]
            along = (known * vector).sum(dim=1, keepdim=True)
            vector = vector - (known * along).sum(dim=0)
            matrix[:, step, step] += along[step, 0].double().cpu()
        length = vector.norm(dim=0)
        # what rounding leaves of a spent Krylov space is no direction
        length = torch.where(length > 1e-6 * start.new_tensor(1.0), length, 0 * length)
        if step + 1 < steps:
            matrix[:, step, step + 1] = matrix[:, step + 1, step] = length.double().cpu()
    values, vectors = torch.linalg.eigh(matrix)
    along = torch.einsum("kip,ip->pk", basis, means).double().cpu()
    return _Probes(
        mean=means.square().sum(dim=0).double().cpu(),
        start=start.double().cpu(),
        values=values,
        first=vectors[:, 0, :],
        along=(along[:, :, None] * vectors).sum(dim=1),
    )


def _turned(covariances: Covariances, signs: Tensor) -> tuple[Tensor, list[Tensor]]:
    """Return D̄ᵀz, (i, p), and C_tᵀz of every task."""
    rows, columns = covariances.shape
    own = []
    for task in covariances.tasks:
        part = covariances.new(columns, signs.shape[1])
        for block in blocks(rows, columns):
            room = covariances.buffer("task", block.stop - block.start, columns)
            part.addmm_(task.centred(block, out=room).mT, signs[block])
        own.append(part)
    mean = covariances.new(columns, signs.shape[1])
    for task, part in zip(covariances.tasks, own, strict=True):
        mean.add_(part, alpha=task.ridge / covariances.ridge)
    return mean, own


def _apply(covariances: Covariances, vectors: Sequence[Tensor]) -> Tensor:
    """Return Σ_t S_t v_t, (i, p), for a block v_t, (i, p), per task."""
    rows, columns = covariances.shape
    total = torch.zeros_like(vectors[0])
    for task, vector in zip(covariances.tasks, vectors, strict=True):
        for block in blocks(rows, columns):
            room = covariances.buffer("task", block.stop - block.start, columns)
            centred = task.centred(block, out=room)
            total.addmm_(centred.mT, centred @ vector, alpha=task.scale)
    return total
