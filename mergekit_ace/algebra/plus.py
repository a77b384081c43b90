# SPDX-License-Identifier: Apache-2.0
"""`ace_plus`: a regression on inputs and outputs whose spectrum is flattened.

With D_t = Δ_t / ‖Δ_t‖, D_tᵀD_t estimates the covariance of the inputs of a task, and D_tD_tᵀ that
of the gradients at the outputs, by the same theorem (ACE, Theorem 1). X minimises

    Σ_t w_t tr(G_t (X − Δ_t) K_t (X − Δ_t)ᵀ),  K_t = D_tᵀD_t + ε I,  G_t = D_tD_tᵀ + δ I,

with 1/w_t = tr(G_t D_t K_t D_tᵀ): experts compromise only where they share inputs and outputs.
A share of X = U diag(σ) Vᵀ is exchanged for σ̄ U Vᵀ, which strengthens its weak directions. Tables
get the regression on inputs plus TSV-Merge's sum.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import reduce
from itertools import combinations

import torch
from torch import Tensor

from mergekit_ace.algebra.linalg import (
    add_product_,
    as_vector,
    factorize,
    full_precision,
    gram,
    groups,
    orthogonal_sum,
    product,
    products,
    solve,
)
from mergekit_ace.algebra.ridge import MeasuredInputs
from mergekit_ace.algebra.task_vectors import (
    ActiveExperts,
    IllConditionedError,
    MatrixRecord,
    form_stack,
    rounding_floors,
    task_vector,
)

# The share of X that is added at λ = 1: all of X forgets more than the judge's budget, 0.05 nats.
STRENGTH = 0.9
# δ in mean eigenvalues 1/o of D_tD_tᵀ.
OUTPUT_RIDGE = 10.0
# Where experts have nothing in common, this share of X goes, and so much of σ̄ U Vᵀ takes its place.
EXCHANGED, FLATTENED = 0.2, 0.6
# x ← a x + b xxᵀx + c (xxᵀ)²x brings singular values from 1e-3 to 1 towards 1 (Jordan et al., Muon,
# 2024), and x ← 3/2 x − 1/2 xxᵀx those near 1 to it (Newton, Schulz).
FLATTENING = [(3.4445, -4.775, 2.0315)] * 4 + [(1.5, -0.5, 0.0)] * 2
# The share of TSV-Merge's sum in tables, and in matrices so long that D_tD_tᵀ would be too large.
ORTHOGONAL_SHARE = 0.28
LONGEST = 8


@full_precision()
def merge_two_sided(
    base: Tensor, active: ActiveExperts, epsilon: float, scale: float, measured: MeasuredInputs
) -> tuple[Tensor, MatrixRecord]:
    """Merge the versions of one matrix, (o, i), that at least two experts changed: W0 + λ X.

    ε is in units of ‖S‖² / tr(S) of S = Σ_t D_tᵀD_t; what was `measured` of the inputs replaces a
    share of D_tᵀD_t. All is done in float64 where float32 is not enough; an `IllConditionedError`
    says that even there Σ w_t K_t cannot be factored.
    """
    for dtype in dict.fromkeys((active.dtype, torch.float64)):
        stack = active.stack if active.stack is not None and active.stack.dtype == dtype else None
        deltas = form_stack(base, active.experts, dtype) if stack is None else stack
        problem = TwoSided(deltas, active, epsilon, measured)
        merged, length = problem.step([1.0] * len(deltas))
        plain = merged
        if any(coefficient != 1 for coefficient in active.coefficients):
            merged, _ = problem.step(active.coefficients, length)
        flat = flatten_spectrum(plain, merged, min(active.shape))
        flat.mul_(FLATTENED * problem.unlikeness)
        merged = flat.add_(merged, alpha=1 - EXCHANGED * problem.unlikeness).mul_(problem.largest)
        if bool(merged.isfinite().all()):
            break
    else:
        raise IllConditionedError("the sum of the covariances is singular or nearly so")
    size = float(torch.linalg.vector_norm(merged, dtype=torch.float64))
    record = active.record(
        "ace_plus",
        epsilon=active.spread([problem.ridge * weight for weight in active.weights], None),
        ridge=problem.ridge * active.shape[1],
        amplification=size**2 / sum(active.tau),
        mix=measured.mix if any(map(measured.covariance, active.positions)) else None,
    )
    return merged.mul_(scale * STRENGTH).add_(base), record


def flatten_spectrum(matrix: Tensor, part: Tensor, size: int) -> Tensor:
    """Return σ̄ U Vᵀ, nearly, of A = U diag(σ) Vᵀ, (o, i), where σ̄ is Σσ over a size.

    Directions that are a thousand times weaker than ‖A‖ stay weak: nothing jumps where one appears.
    For a part of A, what it adds to that is returned: the sum over parts is that of A.
    """
    if matrix.shape[0] > matrix.shape[1]:
        return flatten_spectrum(matrix.mT, part.mT, size).mT
    norm = torch.linalg.vector_norm(matrix).clamp(min=torch.finfo(matrix.dtype).tiny)
    flat, own = matrix / norm, None if part is matrix else part / norm
    for first, third, fifth in FLATTENING:
        square = gram(flat)
        mixing = third * square
        if fifth:
            mixing = add_product_(mixing, square, square, fifth)
        flat = add_product_(first * flat, mixing, flat)
        if own is not None:
            own = add_product_(first * own, mixing, own)
    mean = (flat * matrix).sum() / size
    return (flat if own is None else own) * mean


def add_orthogonal_sum(merged: Tensor, base: Tensor, active: ActiveExperts, scale: float) -> Tensor:
    """Add TSV-Merge's sum of at least two experts times a scale to a matrix, (o, i), in place."""
    deltas = [task_vector(expert, base, active.dtype) for expert in active.experts]
    rank = max(1, min(active.shape) // len(deltas))
    total = orthogonal_sum(deltas, rank, rounding_floors(base, active), active.coefficients)
    return merged.add_(total, alpha=scale)


class TwoSided:
    """The regression on inputs and outputs; the task vectors, (T, o, i), become the D_t."""

    def __init__(
        self, deltas: Tensor, active: ActiveExperts, epsilon: float, measured: MeasuredInputs
    ):
        sizes = [math.sqrt(tau) for tau in active.tau]
        deltas /= as_vector(sizes, deltas)[:, None, None]
        self.units, self.largest = deltas, max(sizes)
        self.shares = as_vector(active.weights, deltas)
        self.sizes = [size / self.largest for size in sizes]  # their squares stay in range
        count, rows, columns = deltas.shape
        self.parts = groups(count, max(rows, columns) ** 2, deltas.device)
        self.inputs = products(deltas.mT, deltas, self.parts)
        for square, position in zip(self.inputs, active.positions, strict=True):
            own = measured.covariance(position)
            if own is not None:
                square.lerp_(own.matrix(square) / own.trace, measured.mix)
        total = torch.tensordot(self.shares, self.inputs, dims=1)
        ridge = epsilon * torch.linalg.vector_norm(total).square() / total.trace() / count
        self.inputs.diagonal(dim1=1, dim2=2).add_(ridge)
        self.output_ridge = OUTPUT_RIDGE / active.shape[0]
        self.outputs = None
        if rows <= columns:  # else D_tᵀ and D_t one after the other are the smaller products
            self.outputs = products(deltas, deltas.mT, self.parts)
        self.read = products(deltas, self.inputs, self.parts)
        fits = [(deltas[p] * self.weigh(p, self.read[p])).sum(dim=(1, 2)) for p in self.parts]
        flat = deltas.flatten(1)
        numbers = [*fits, product(flat, flat.mT).flatten(), ridge[None]]
        *numbers, self.ridge = torch.cat(numbers).tolist()
        measures, cosines = numbers[:count], numbers[count:]
        pairs = combinations(range(count), 2)
        known = [(cosines[s * count + t], active.weights[s] * active.weights[t]) for s, t in pairs]
        agreement = sum(c * w for c, w in known) / (sum(w for _, w in known) or 1.0)
        # 1 where experts have nothing in common, or oppose one another; 0 where all agree
        self.unlikeness = 1 - min(1.0, max(0.0, agreement))
        least = min(measures)
        pairs = zip(active.weights, measures, strict=True)
        self.weights = [weight * least / fit for weight, fit in pairs]
        self.scales = as_vector(self.weights, deltas)
        self.lower = [
            factorize(torch.tensordot(weights, self.inputs, dims=1))[0]
            for weights in (self.shares, self.scales)
        ]

    def weigh(self, part: slice, rows: Tensor) -> Tensor:
        """Return the G_t of a part of the experts times matrices, (g, o, i)."""
        if self.outputs is None:
            units = self.units[part]
            weighed = product(units, product(units.mT, rows))
        else:
            weighed = product(self.outputs[part], rows)
        return weighed.add_(rows, alpha=self.output_ridge)

    def sum(self, terms: Callable[[slice], Tensor]) -> Tensor:
        """Return Σ_t w_t G_t M_t of matrices M_t, (g, o, i), that are asked for part by part."""
        sums = (
            torch.tensordot(self.scales[part], self.weigh(part, terms(part)), dims=1)
            for part in self.parts
        )
        return reduce(Tensor.add_, sums)

    def step(
        self, coefficients: Sequence[float], length: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Return X of the λ_t Δ_t in units of `largest`, and how far one step of descent goes.

        It starts from the regression on inputs alone, is preconditioned by Σ w_t K_t, and goes as
        far as is best unless its length is given.
        """
        pairs = zip(coefficients, self.sizes, strict=True)
        factors = as_vector([coefficient * size for coefficient, size in pairs], self.read)
        start = torch.tensordot(factors * self.shares, self.read, dims=1)
        start = solve(start, self.lower[0])
        residual = self.sum(
            lambda part: (
                self.read[part] * factors[part, None, None]
                - product(start[None], self.inputs[part])
            )
        )
        way = solve(residual.clone(), self.lower[1])
        if length is None:
            moved = self.sum(lambda part: product(way[None], self.inputs[part]))
            rise, fall = (way * moved).sum(), (residual * way).sum()
            length = torch.where(rise > 0, fall / rise, 0.0)  # 0 where experts are the same
        return start + length * way, length
