# SPDX-License-Identifier: Apache-2.0
"""Methods that merge each matrix by a formula: `tsv_m`, `iso_c`, `iso_cts`, `cart`, `wudi`."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial, reduce
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from mergekit_ace.algebra.linalg import (
    full_precision,
    leading_directions,
    orthogonal_factor,
    orthogonal_sum,
)
from mergekit_ace.algebra.task_vectors import (
    ActiveExperts,
    Count,
    Fraction,
    MatrixRecord,
    Positive,
    by_layout,
    rounding_floors,
    select_active,
    task_vector,
)
from mergekit_ace.methods.base import (
    Merged,
    TaskVectorMethod,
    TensorSettings,
    Work,
    cited,
    method_spec,
)
from mergekit_ace.methods.parameters import LAMBDA, LAYOUT, shared

EPS64 = torch.finfo(torch.float64).eps
# What is outside of a subspace, in units of the task vector's norm, that rounding may have left.
OUTSIDE = 1e4 * EPS64


Combined = tuple[Tensor, int | None]  # X, and how many directions were kept of each expert


@dataclass(frozen=True)
class TaskMatrices:
    """The task vectors of at least two experts, of one matrix."""

    deltas: list[Tensor]  # Δ_t, (o, i), o > 1, none of them zero, float64; may be overwritten
    size: int  # min(o, i) of the task vectors, also where the deltas are cores of them
    floors: tuple[float, ...]  # what singular values of the rounding of W_t do not exceed

    def total(self) -> Tensor:
        """Return Σ_t Δ_t in new memory."""
        return reduce(Tensor.add_, self.deltas[1:], self.deltas[0].clone())


class MatrixMethod(TaskVectorMethod):
    """A method that merges the task vectors of each matrix by a formula of its own, in float64."""

    scales_all: ClassVar[bool] = True  # whether λ multiplies the whole merged task vector
    entry = 8
    products = 10.0  # decompositions of every expert and of them all

    @abstractmethod
    def combine(self, matrices: TaskMatrices, parameters: Mapping[str, Any]) -> Combined:
        """Return the merged task vector of one matrix before λ, (o, i), float64, in new memory."""

    def merge(self, tensors: Sequence[Tensor], settings: TensorSettings) -> Merged:
        base, *experts = tensors
        parameters, dtype = settings.parameters, torch.float64
        scale = parameters["lambda"] if self.scales_all else 1.0
        select = partial(select_active, weights=settings.weights, dtype=dtype, space=settings.space)

        @full_precision()
        def formula(base: Tensor, active: ActiveExperts) -> tuple[Tensor, MatrixRecord]:
            deltas = [task_vector(expert, base, dtype) for expert in active.experts]
            matrices = TaskMatrices(deltas, min(active.shape), rounding_floors(base, active))
            merged, rank = self.combine(matrices, parameters)
            return merged.mul_(scale).add_(base), active.record(self.spec.name, rank=rank)

        return by_layout(base, experts, settings.layout, select, scale, formula)


class TsvMerge(MatrixMethod):
    """TSV-Merge: U⊥ diag(σ) V⊥ᵀ of the nearest orthonormal matrices to all leading U_t and V_t."""

    spec = method_spec("tsv_m", "TSV-Merge", "https://arxiv.org/abs/2412.00081", (LAMBDA, LAYOUT))
    summary = "Keeps each expert's leading singular directions, orthogonal to those of the others."
    citations = cited("gargiulo2025tsv")
    own_rule = "merged from orthogonal singular directions"
    whole = True

    def combine(self, matrices: TaskMatrices, parameters: Mapping[str, Any]) -> Combined:
        count = len(matrices.deltas)
        rank = max(1, matrices.size // count)  # departure: the paper's share would be none
        return orthogonal_sum(matrices.deltas, rank, matrices.floors, [1.0] * count), rank


class IsoCMerge(MatrixMethod):
    """Iso-C: σ̄ U Vᵀ of Σ_t Δ_t = U diag(σ) Vᵀ, σ̄ the mean of all min(o, i) singular values."""

    spec = method_spec("iso_c", "Iso-C", "https://arxiv.org/abs/2502.04959", (LAMBDA, LAYOUT))
    summary = "Sums the task vectors, and makes all singular values of the sum equal."
    citations = cited("marczak2025isotropic")
    own_rule = "merged with equal singular values"

    def combine(self, matrices: TaskMatrices, parameters: Mapping[str, Any]) -> Combined:
        size = matrices.size
        found = leading_directions(matrices.total(), size, math.hypot(*matrices.floors))
        return (found.left @ found.right.mT).mul_(float(found.values.sum()) / size), None


class IsoCtsMerge(MatrixMethod):
    """Iso-CTS: isotropic merging in common and task-specific subspaces.

    Of r = min(o, i) directions each task contributes s leading ones of (I − U Uᵀ) Δ_t, U the common
    left ones, which are the other r − T·s and lead Σ_t Δ_t.
    """

    share = shared("common_fraction", Fraction, 0.8, "Share of the directions from the sum.")
    spec = method_spec(
        "iso_cts", "Iso-CTS", "https://arxiv.org/abs/2502.04959", (LAMBDA, LAYOUT, share)
    )
    summary = "Joins the leading directions of the sum and of each expert, all equally strong."
    citations = cited("marczak2025isotropic")
    own_rule = "merged with equal singular values in common and own directions"

    def combine(self, matrices: TaskMatrices, parameters: Mapping[str, Any]) -> Combined:
        count, size = len(matrices.deltas), matrices.size
        own = size - int(size * parameters["common_fraction"])
        each = min(round(own / count), size // count)  # so that all tasks get the same
        shared_size = size - each * count
        common = leading_directions(matrices.total(), shared_size, math.hypot(*matrices.floors))
        parts = []
        for delta, floor in zip(matrices.deltas, matrices.floors, strict=True):
            floor = max(floor, OUTSIDE * float(torch.linalg.vector_norm(delta)))
            delta -= common.left @ (common.left.mT @ delta)
            parts.append(leading_directions(delta, each, floor))
        outer = torch.cat([part.left for part in parts], dim=1)  # orthogonal to the common ones
        left = torch.cat([common.left, orthogonal_factor(outer)], dim=1)
        right = torch.cat([part.right for part in (common, *parts)], dim=1)
        strength = sum(float(part.values.sum()) for part in (common, *parts)) / size
        return (left @ orthogonal_factor(right).mT).mul_(strength), each


class CartMerge(MatrixMethod):
    """CART: centred arithmetic with rank-reduced task vectors, Δ̄ + λ Σ_t SVD_k(Δ_t − Δ̄)."""

    scale = replace(LAMBDA, description="Scale λ of what is added to the average.")
    share = shared("rank_fraction", Fraction, 0.08, "Share of the directions kept of an expert.")
    spec = method_spec("cart", "CART", "https://arxiv.org/abs/2412.12153", (scale, LAYOUT, share))
    summary = "Takes the average of the experts, and adds what is left of each one at low rank."
    citations = cited("choi2024cart")
    own_rule = "merged as the average and low-rank differences from it"
    scales_all = False

    def doubts(self, settings: TensorSettings) -> Iterator[tuple[str, str]]:
        return iter(())  # with λ = 0 it is the average of the experts

    def combine(self, matrices: TaskMatrices, parameters: Mapping[str, Any]) -> Combined:
        fraction = parameters["rank_fraction"]
        rank = max(int(fraction * matrices.size), 1) if fraction > 0 else 0
        mean = matrices.total().div_(len(matrices.deltas))
        merged = mean.clone()
        for delta in matrices.deltas:
            found = leading_directions(delta.sub_(mean), rank)
            merged.add_((found.left * found.values) @ found.right.mT, alpha=parameters["lambda"])
        return merged, rank


class WudiMerge(MatrixMethod):
    """WUDI-Merging, Σ_t ‖(X − Δ_t) Δ_tᵀ‖² / ‖Δ_t‖² at its least, by descent or exactly."""

    solver = shared("solver", Literal["adam", "exact"], "adam", "A descent, or the closed form.")
    steps = shared("steps", Count, 300, "Steps of adam.")
    rate = shared("learning_rate", Positive, 1e-5, "Of adam, in the unit of the weights.")
    spec = method_spec(
        "wudi",
        "WUDI-Merging",
        "https://arxiv.org/abs/2503.08099",
        (LAMBDA, LAYOUT, solver, steps, rate),
    )
    summary = "Minimises the interference of the task vectors with each other on their own rows."
    citations = cited("cheng2025wudi")
    own_rule = "merged with the least interference"
    whole = True
    products = 2.0  # a step of adam; all of the closed form are few

    def combine(self, matrices: TaskMatrices, parameters: Mapping[str, Any]) -> Combined:
        if parameters["solver"] == "exact":
            return minimise_exactly(matrices.deltas), None
        deltas = [delta.float() for delta in matrices.deltas]  # whose digits a descent needs
        steps, rate = parameters["steps"], parameters["learning_rate"]
        return minimise_by_adam(deltas, steps, rate).double(), None

    def leaves_span(self, parameters: Mapping[str, Any]) -> str:
        adam = parameters.get("solver") == "adam"
        return "adam scales every entry by itself (`solver: exact` does not)" if adam else ""

    def work(self, settings: TensorSettings, shape: Sequence[int], experts: int) -> Work:
        work, steps = super().work(settings, shape, experts), settings.parameters["steps"]
        adam = settings.parameters["solver"] == "adam"
        return replace(work, operations=work.operations * steps) if adam else work


def minimise_exactly(deltas: Sequence[Tensor]) -> Tensor:
    """Return the smallest minimum, (Σ_t Δ_t G_t)(Σ_t G_t)⁺, with G_t = Δ_tᵀΔ_t / ‖Δ_t‖²."""
    numerator = torch.zeros_like(deltas[0])
    gram = numerator.new_zeros(numerator.shape[1], numerator.shape[1])
    for delta in deltas:
        unit = delta / torch.linalg.vector_norm(delta)
        numerator += _through_the_smaller_square(delta, unit)
        gram += unit.mT @ unit
    values, vectors = torch.linalg.eigh(gram)
    kept = values > len(gram) * EPS64 * values[-1]
    return ((numerator @ vectors[:, kept]) / values[kept]) @ vectors[:, kept].mT


def _through_the_smaller_square(left: Tensor, delta: Tensor) -> Tensor:
    """Return L Δᵀ Δ for L and Δ, (o, i): an (o, o) matrix of an embedding would fill the memory."""
    rows, columns = delta.shape
    return (left @ delta.mT) @ delta if rows < columns else left @ (delta.mT @ delta)


def minimise_by_adam(deltas: Sequence[Tensor], steps: int, learning_rate: float) -> Tensor:
    """Descend on the loss of WUDI as its authors do: by Adam from Σ_t Δ_t, at a constant rate."""
    merged = torch.stack(list(deltas)).sum(dim=0)
    adam = torch.optim.Adam([merged], lr=learning_rate)
    units = [d / torch.linalg.vector_norm(d, dtype=torch.float64).to(d) for d in deltas]
    for _ in range(steps):
        merged.grad = torch.zeros_like(merged)
        for delta, unit in zip(deltas, units, strict=True):
            merged.grad.add_(_through_the_smaller_square(merged - delta, unit), alpha=2)
        adam.step()
    return merged
