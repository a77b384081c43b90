# SPDX-License-Identifier: Apache-2.0
"""Published merge methods that ACE-Merging is compared with.

`tsv_m`, `iso_c`, `iso_cts`, `cart`, `actmat` and `wudi` merge each matrix by a formula;
`consensus_ta` and `lines` work entry by entry; `regmean` and `fisher` need statistics of samples.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache, partial, reduce
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from mergekit_ace.algebra.linalg import (
    as_rows,
    full_precision,
    leading_directions,
    orthogonal_factor,
)
from mergekit_ace.algebra.plus import orthogonal_sum
from mergekit_ace.algebra.ridge import Regression, merge_by_ridge
from mergekit_ace.algebra.task_vectors import (
    ActiveExperts,
    Count,
    Factor,
    FixedLayout,
    Fraction,
    MatrixRecord,
    NonNegative,
    Positive,
    Ridge,
    by_layout,
    delta_blocks,
    rounding_floors,
    select_active,
    task_vector,
)
from mergekit_ace.files.statistics import Measure
from mergekit_ace.methods.base import (
    Merged,
    TaskVectorMethod,
    TensorSettings,
    describe,
    method_spec,
)
from mergekit_ace.methods.coefficients import MeasuredLookup
from mergekit_ace.methods.parameters import LAMBDA, LAYOUT, STATISTICS, TASK, WEIGHT, shared
from mergekit_ace.methods.storage import is_table, tensor_names
from mergekit_ace.naming import block_of, layer_of, stack_size

LEAST_RIDGE = 1e-6  # in mean eigenvalues
EPS64 = torch.finfo(torch.float64).eps
# What is outside of a subspace, in units of the task vector's norm, that rounding may have left.
OUTSIDE = 1e4 * EPS64

Solved = tuple[Tensor, MatrixRecord] | None  # W0 + λ X and its record; None asks for the mean


@dataclass(frozen=True)
class TaskMatrices:
    """One matrix, (o, i), o > 1, of the base, and of at least two experts that changed it."""

    base: Tensor
    active: ActiveExperts

    @cached_property
    def deltas(self) -> list[Tensor]:
        """Δ_t, (o, i), none of them zero, in float64; they may be overwritten."""
        return [task_vector(expert, self.base, torch.float64) for expert in self.active.experts]

    @property
    def size(self) -> int:
        """min(o, i) of the task vectors, also where the deltas are cores of them."""
        return min(self.active.shape)

    @property
    def floors(self) -> tuple[float, ...]:
        """What singular values of the rounding of W_t do not exceed."""
        return rounding_floors(self.active)

    def total(self) -> Tensor:
        """Return Σ_t Δ_t in new memory."""
        return reduce(Tensor.add_, self.deltas[1:], self.deltas[0].clone())


class FormulaMethod(TaskVectorMethod):
    """A method that merges matrices, or if it has no layouts all tensors, by one formula."""

    dtype: ClassVar[torch.dtype] = torch.float32  # of task vectors, at least

    @abstractmethod
    def formula(self, settings: TensorSettings, base: Tensor, active: ActiveExperts) -> Solved:
        """Return the merge of what at least two experts changed; None for their mean."""

    def merge(self, tensors: Sequence[Tensor], settings: TensorSettings) -> Merged:
        base, *experts = tensors
        weights, shape = settings.weights, settings.shape
        select = partial(select_active, weights=weights, dtype=self.dtype, shape=shape)
        scale = settings.parameters["lambda"] if self.scales_all else 1.0
        layout = settings.layout if self.layouts else "mean"
        given = select, scale, partial(self.formula, settings)
        return by_layout(base, experts, layout, *given, entrywise=not self.layouts)


class MatrixMethod(FormulaMethod):
    """A method that merges the task vectors of each matrix in float64."""

    entry = 8
    dtype = torch.float64
    products = 10.0  # decompositions of every expert and of them all

    @abstractmethod
    def combine(self, matrices: TaskMatrices, parameters: Mapping[str, Any]) -> Tensor:
        """Return the merged task vector of one matrix before λ, (o, i), float64, in new memory."""

    @full_precision()
    def formula(self, settings: TensorSettings, base: Tensor, active: ActiveExperts) -> Solved:
        merged = self.combine(TaskMatrices(base, active), settings.parameters)
        scale = settings.parameters["lambda"] if self.scales_all else 1.0
        return merged.mul_(scale).add_(base), active.record(self.spec.name)


class TsvMerge(MatrixMethod):
    """TSV-Merge: U⊥ diag(σ) V⊥ᵀ of the nearest orthonormal matrices to all leading U_t and V_t."""

    spec = method_spec("tsv_m", "TSV-Merge", "https://arxiv.org/abs/2412.00081", (LAMBDA, LAYOUT))
    summary = "Keeps each expert's leading singular directions, orthogonal to those of the others."
    whole = True

    def combine(self, matrices: TaskMatrices, parameters: Mapping[str, Any]) -> Tensor:
        return orthogonal_sum(matrices.base, matrices.active, self.dtype)


class IsoCMerge(MatrixMethod):
    """Iso-C: σ̄ U Vᵀ of Σ_t Δ_t = U diag(σ) Vᵀ, σ̄ the mean of all min(o, i) singular values."""

    spec = method_spec("iso_c", "Iso-C", "https://arxiv.org/abs/2502.04959", (LAMBDA, LAYOUT))
    summary = "Sums the task vectors, and makes all singular values of the sum equal."

    def combine(self, matrices: TaskMatrices, parameters: Mapping[str, Any]) -> Tensor:
        size = matrices.size
        floor = math.hypot(*matrices.floors)
        left, values, right = leading_directions(matrices.total(), size, floor)
        return (left @ right.mT).mul_(float(values.sum()) / size)


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

    def combine(self, matrices: TaskMatrices, parameters: Mapping[str, Any]) -> Tensor:
        count, size = len(matrices.deltas), matrices.size
        own = size - int(size * parameters["common_fraction"])
        each = min(round(own / count), size // count)  # so that all tasks get the same
        floor = math.hypot(*matrices.floors)
        parts = [leading_directions(matrices.total(), size - each * count, floor)]
        common, found, _ = parts[0]
        # by the Gram matrix, weak directions are known to a square of their share of the strongest
        lost = 64 * EPS64 * float(found[0] / found[-1]) ** 2 if len(found) else 0.0
        for delta, floor in zip(matrices.deltas, matrices.floors, strict=True):
            floor = max(floor, max(OUTSIDE, lost) * float(torch.linalg.vector_norm(delta)))
            delta -= common @ (common.mT @ delta)
            parts.append(leading_directions(delta, each, floor))
        (_, *lefts), values, rights = zip(*parts, strict=True)
        outer = orthogonal_factor(torch.cat(lefts, dim=1))  # orthogonal to the common ones
        left, right = torch.cat([common, outer], dim=1), torch.cat(rights, dim=1)
        strength = float(torch.cat(values).sum()) / size
        return (left @ orthogonal_factor(right).mT).mul_(strength)


class CartMerge(MatrixMethod):
    """CART: centred arithmetic with rank-reduced task vectors, Δ̄ + λ Σ_t SVD_k(Δ_t − Δ̄)."""

    scale = replace(LAMBDA, description="Scale λ of what is added to the average.")
    share = shared("rank_fraction", Fraction, 0.08, "Share of the directions kept of an expert.")
    spec = method_spec("cart", "CART", "https://arxiv.org/abs/2412.12153", (scale, LAYOUT, share))
    summary = "Takes the average of the experts, and adds what is left of each one at low rank."
    scales_all = False  # with λ = 0 it is the average of the experts

    def combine(self, matrices: TaskMatrices, parameters: Mapping[str, Any]) -> Tensor:
        fraction = parameters["rank_fraction"]
        rank = max(int(fraction * matrices.size), 1) if fraction > 0 else 0
        mean = matrices.total().div_(len(matrices.deltas))
        merged = mean.clone()
        for delta in matrices.deltas:
            left, values, right = leading_directions(delta.sub_(mean), rank)
            merged.add_((left * values) @ right.mT, alpha=parameters["lambda"])
        return merged


class ActMatMerge(MatrixMethod):
    """ACTMat: the regression on unscaled estimates of covariances, G_t = Δ_tᵀΔ_t, with no ridge."""

    spec = method_spec("actmat", "ACTMat", "https://arxiv.org/abs/2604.01329", (LAMBDA, LAYOUT))
    summary = "Solves `ace`'s regression on unscaled covariances, with no ridge."
    whole = True

    def combine(self, matrices: TaskMatrices, parameters: Mapping[str, Any]) -> Tensor:
        return solve_least(matrices.deltas, matrices.deltas)


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
    whole = True
    products = 2.0  # a step of adam; all of the closed form are few

    def combine(self, matrices: TaskMatrices, parameters: Mapping[str, Any]) -> Tensor:
        units = (delta / torch.linalg.vector_norm(delta) for delta in matrices.deltas)
        if parameters["solver"] == "exact":
            return solve_least(matrices.deltas, units)
        # as its authors do: from Σ_t Δ_t, at a constant rate, in float32, whose digits are enough
        merged, units = matrices.total().float(), [unit.float() for unit in units]
        deltas = [delta.float() for delta in matrices.deltas]
        adam = torch.optim.Adam([merged], lr=parameters["learning_rate"])
        for _ in range(parameters["steps"]):
            merged.grad = torch.zeros_like(merged)
            for delta, unit in zip(deltas, units, strict=True):
                merged.grad.add_(_through_the_smaller_square(merged - delta, unit), alpha=2)
            adam.step()
        return merged.double()

    def leaves_span(self, parameters: Mapping[str, Any]) -> str:
        adam = parameters.get("solver") == "adam"
        return "adam scales every entry by itself (`solver: exact` does not)" if adam else ""

    def operations(self, settings: TensorSettings, shape: Sequence[int], experts: int) -> float:
        steps = settings.parameters["steps"] if settings.parameters["solver"] == "adam" else 1
        return super().operations(settings, shape, experts) * steps


def solve_least(deltas: Sequence[Tensor], units: Iterable[Tensor]) -> Tensor:
    """Return the smallest minimum, (Σ_t Δ_t G_t)(Σ_t G_t)⁺, with G_t = U_tᵀU_t of `units`."""
    numerator = torch.zeros_like(deltas[0])
    gram = numerator.new_zeros(numerator.shape[1], numerator.shape[1])
    for delta, unit in zip(deltas, units, strict=True):
        numerator += _through_the_smaller_square(delta, unit)
        gram += unit.mT @ unit
    values, vectors = torch.linalg.eigh(gram)
    kept = values > len(gram) * EPS64 * values[-1]
    return ((numerator @ vectors[:, kept]) / values[kept]) @ vectors[:, kept].mT


def _through_the_smaller_square(left: Tensor, delta: Tensor) -> Tensor:
    """Return L Δᵀ Δ for L and Δ, (o, i): an (o, o) matrix of an embedding would fill the memory."""
    rows, columns = delta.shape
    return (left @ delta.mT) @ delta if rows < columns else left @ (delta.mT @ delta)


class ConsensusMerge(FormulaMethod):
    """Consensus Task Arithmetic, W0 + λ · M ⊙ Σ_t Δ_t, entry by entry of every tensor.

    Expert t's TALL mask holds the entries with |Δ_t| > mask_threshold · |Σ_s Δ_s − Δ_t| (Eq. 5),
    M those of at least `consensus` masks. The paper tunes λ and the threshold on validation data;
    the defaults are that of task arithmetic and the middle of its range.
    """

    scale = replace(LAMBDA, default=0.4)
    threshold = shared("mask_threshold", NonNegative, 0.4, "Least change, against all others.")
    consensus = shared("consensus", Count, 2, "How many experts must ask for an entry.")
    spec = method_spec(
        "consensus_ta",
        "Consensus Task Arithmetic",
        "https://arxiv.org/abs/2405.07813",
        (scale, threshold, consensus),
    )
    summary = "Adds the task vectors in those entries that at least two experts ask for."
    beyond_span = "it selects entries"

    def check_settings(self, settings: TensorSettings) -> None:
        count, least = len(settings.experts), settings.parameters["consensus"]
        if 1 < count < least:  # a single expert is what comes out
            raise ValueError(
                f"{self.spec.name}: consensus is {least}, but {describe(settings.name)} has "
                f"{count} experts, so that nothing of them would be merged; write at most {count}"
            )

    def formula(self, settings: TensorSettings, base: Tensor, active: ActiveExperts) -> Solved:
        names = ("lambda", "mask_threshold", "consensus")
        scale, threshold, least = (settings.parameters[name] for name in names)
        merged = base.to(active.dtype, copy=True, memory_format=torch.contiguous_format)
        for rows, stack in delta_blocks(base, active.experts, active.dtype):
            total = stack.sum(dim=0)
            votes = stack.abs() > (total - stack).abs_().mul_(threshold)
            chosen = votes.sum(dim=0) >= least
            as_rows(merged)[rows] += total.mul_(chosen).mul_(scale)
        return merged, active.record(self.spec.name)


class LinesMerge(TaskVectorMethod):
    """LiNeS on task arithmetic: coefficients λ (α + β·l/(L − 1)) that rise with depth (Eq. 2).

    l of L layers counts from 0; what is outside of layers gets λ α. The paper tunes β on validation
    data; the default is what is used for task arithmetic without data.
    """

    alpha = shared("alpha", Factor | None, None, "Of the first layer and outside; 1/T by default.")
    beta = shared("beta", Factor, 0.4, "How much more the last layer has.")
    layers = shared("layers", Count | None, None, "L, where it cannot be read from the base.")
    spec = method_spec(
        "lines", "LiNeS", "https://arxiv.org/abs/2410.17146", (LAMBDA, alpha, beta, layers)
    )
    summary = "Adds the task vectors with a coefficient that rises linearly with depth."

    def coefficients(self, settings: TensorSettings) -> Sequence[float]:
        """Return the same coefficient for every expert."""
        parameters, count, name = settings.parameters, len(settings.experts), settings.name or ""
        alpha = 1 / count if parameters["alpha"] is None else parameters["alpha"]
        layer, depth = layer_of(name), 0.0
        if layer is not None:
            layers = parameters["layers"] or _layers(settings.base, block_of(name))
            if layer >= layers:
                raise ValueError(
                    f"{self.spec.name}: {describe(name)} belongs to layer {layer} (counted from "
                    f"0) of {layers or 'an unknown number'}; set `layers` to the number of all"
                )
            depth = layer / (layers - 1) if layers > 1 else 1.0
        return [parameters["lambda"] * (alpha + parameters["beta"] * depth)] * count


@lru_cache  # which all tensors of a block ask
def _layers(base: Hashable, block: str) -> int:
    return stack_size(f"{block}.", tensor_names(base))


class MeasuredMethod(FormulaMethod):
    """A method that needs statistics of samples."""

    kind: ClassVar[Measure]

    def check_settings(self, settings: TensorSettings) -> None:
        self.lookup(settings)

    def lookup(self, settings: TensorSettings) -> MeasuredLookup:
        """Return what was measured of a tensor."""
        path = settings.parameters["statistics"]
        return MeasuredLookup(self.spec.name, settings, path, self.kind)


class RegMeanMerge(MeasuredMethod):
    """RegMean: linear layers by regression on their measured inputs, all others averaged.

    W0 + (Σ_t w_t Δ_t M_t)(Σ_t w_t M_t)⁻¹ is the closed form of ACE-Merging with S_t = w_t M_t, here
    of mean eigenvalue 1 together. Departures: a ridge of at least 1e-6 mean eigenvalues, so that
    inputs that are 0 in all samples get the mean of the Δ_t, and an expert that left a matrix as it
    was takes no part in it.
    """

    kind = "covariances"
    off_diagonal = shared(
        "off_diagonal", Fraction, 0.9, "α, the factor of X_tᵀX_t off its diagonal; 0.1 for T5."
    )
    ridge = shared(
        "epsilon", Ridge, 0.0, "A ridge beside α, in mean eigenvalues of X_tᵀX_t; at least 1e-6."
    )
    spec = method_spec(
        "regmean",
        "RegMean",
        "https://arxiv.org/abs/2212.09849",
        (STATISTICS, WEIGHT, LAMBDA, off_diagonal, ridge, LAYOUT, TASK),
    )
    summary = "Fits every linear layer to the experts' outputs on samples; averages all others."
    ill_conditioned = "Raise `epsilon`, or lower `off_diagonal`."
    products = 2.0  # the system and the numerator
    beyond_span = "measured covariances of inputs are not of low rank"

    def layout(self, settings: TensorSettings, ndim: int) -> FixedLayout:
        """Return how a tensor is read: tables are averaged, also where they are the head."""
        table = is_table(settings.base, settings.name)
        return "mean" if table else super().layout(settings, ndim)

    def formula(self, settings: TensorSettings, base: Tensor, active: ActiveExperts) -> Solved:
        names = ("lambda", "off_diagonal", "epsilon")
        scale, off_diagonal, epsilon = (settings.parameters[name] for name in names)
        stored = base.shape[::-1] if settings.layout == "transposed" else base.shape
        inputs = self.lookup(settings).inputs(stored)
        found = {t: inputs[place] for t, place in enumerate(active.positions) if inputs}
        known = {t: replace(c, off_diagonal=off_diagonal) for t, c in found.items() if c.trace}
        if not known:  # nothing was measured
            return None
        total = math.fsum(active.weights[t] * own.trace for t, own in known.items())
        scaled = [(own, active.weights[t] / total) for t, own in known.items()]
        problem = Regression(
            experts=tuple(known),
            scales=[0.0] * len(known),
            ridges=[max(epsilon, LEAST_RIDGE) * share * own.trace for own, share in scaled],
            measured={n: (own, share * base.shape[1]) for n, (own, share) in enumerate(scaled)},
        )
        return merge_by_ridge(base, active, problem, scale, rule=self.spec.name)


class FisherMerge(MeasuredMethod):
    """Fisher merging, Σ_t w_t (F_t + δ) Δ_t / Σ_t w_t (F_t + δ), entry by entry (Eq. 4).

    δ is `fisher_floor` mean entries of the F_t (departure: the authors add 1e-6 in their unit).
    """

    kind = "fisher"
    level = shared("fisher_floor", Positive, 1e-6, "Added to the information, in its mean entries.")
    spec = method_spec(
        "fisher",
        "Fisher merging",
        "https://arxiv.org/abs/2111.09832",
        (STATISTICS, WEIGHT, LAMBDA, level, TASK),
    )
    summary = "Averages the experts entry by entry, weighted by Fisher information on samples."
    beyond_span = "it weighs entries"

    def formula(self, settings: TensorSettings, base: Tensor, active: ActiveExperts) -> Solved:
        information = self.lookup(settings).fisher(base.shape)
        if information is None:
            return None
        scale, floor = (settings.parameters[name] for name in ("lambda", "fisher_floor"))
        fisher = [information[position] for position in active.positions]
        count = max(1, base.numel() * len(fisher))
        level = floor * math.fsum(float(part.sum(dtype=torch.float64)) for part in fisher) / count
        level = level or 1.0  # all F_t are zero: any level makes it the mean
        merged = torch.empty_like(base, dtype=active.dtype, memory_format=torch.contiguous_format)
        weights = torch.tensor(active.weights, dtype=torch.float64, device=base.device)
        for rows, stack in delta_blocks(base, active.experts, torch.float64):
            counted = torch.stack([as_rows(part)[rows] for part in fisher]).to(stack)
            counted.add_(level).mul_(weights[:, None, None])
            as_rows(merged)[rows] = stack.mul_(counted).sum(dim=0).div_(counted.sum(dim=0))
        return merged.mul_(scale).add_(base), active.record(self.spec.name)
