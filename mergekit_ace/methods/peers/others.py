# SPDX-License-Identifier: Apache-2.0
"""Methods entry by entry, `consensus_ta` and `lines`, and by samples, `regmean` and `fisher`."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from mergekit_ace.algebra.linalg import as_rows, blocks
from mergekit_ace.algebra.ridge import MeasuredInputs, Regression, merge_by_ridge
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
    merge_entries,
    merge_mean,
    select_active,
    task_vector,
)
from mergekit_ace.methods.ace import RidgeMethod
from mergekit_ace.methods.architecture import is_table, tensor_names
from mergekit_ace.methods.base import (
    Merged,
    TaskVectorMethod,
    TensorSettings,
    cited,
    describe,
    method_spec,
)
from mergekit_ace.methods.coefficients import MeasuredLookup
from mergekit_ace.methods.parameters import LAMBDA, LAYOUT, STATISTICS, TASK, WEIGHT, shared
from mergekit_ace.naming import layer_of, stack_size

LEAST_RIDGE = 1e-6  # in mean eigenvalues


class ConsensusMerge(TaskVectorMethod):
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
    citations = cited("wang2024localizing")
    own_rule = "merged in the entries that enough experts ask for"

    def leaves_span(self, parameters: Mapping[str, Any]) -> str:
        return "it selects entries"

    def check_settings(self, settings: TensorSettings) -> None:
        count, least = len(settings.experts), settings.parameters["consensus"]
        if 1 < count < least:  # a single expert is what comes out
            raise ValueError(
                f"{self.spec.name}: consensus is {least}, but {describe(settings.name)} has "
                f"{count} experts, so that nothing of them would be merged; write at most {count}"
            )

    def merge(self, tensors: Sequence[Tensor], settings: TensorSettings) -> Merged:
        names = ("lambda", "mask_threshold", "consensus")
        scale, threshold, least = (settings.parameters[name] for name in names)
        base, *experts = tensors
        select = partial(select_active, weights=[1.0] * len(experts), dtype=torch.float32)

        def formula(base: Tensor, active: ActiveExperts) -> tuple[Tensor, MatrixRecord]:
            total = torch.zeros_like(base, dtype=active.dtype)
            for expert in active.experts:
                total += task_vector(expert, base, active.dtype)
            votes = torch.zeros_like(base, dtype=torch.int16)
            for expert in active.experts:
                delta = task_vector(expert, base, active.dtype)
                votes += delta.abs() > (total - delta).abs_().mul_(threshold)
            selected = votes >= least
            share = float(selected.count_nonzero()) / max(1, base.numel())
            record = active.record(self.spec.name, selected=share)
            return total.mul_(selected).mul_(scale).add_(base), record

        return by_layout(base, experts, "mean", select, scale, formula, entrywise=True)


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
    citations = cited("wang2025lines")
    own_rule = "merged with a coefficient by depth"

    def coefficients(self, settings: TensorSettings) -> Sequence[float]:
        """Return the same coefficient for every expert."""
        parameters, count, name = settings.parameters, len(settings.experts), settings.name or ""
        alpha = 1 / count if parameters["alpha"] is None else parameters["alpha"]
        layer, depth = layer_of(name), 0.0
        if layer is not None:
            layers = parameters["layers"] or stack_size(name, tensor_names(settings.base) or ())
            if layer >= layers:
                raise ValueError(
                    f"{self.spec.name}: {describe(name)} belongs to layer {layer} (counted from "
                    f"0) of {layers or 'an unknown number'}; set `layers` to the number of all"
                )
            depth = layer / (layers - 1) if layers > 1 else 1.0
        return [parameters["lambda"] * (alpha + parameters["beta"] * depth)] * count

    def merge(self, tensors: Sequence[Tensor], settings: TensorSettings) -> Merged:
        assert settings.coefficients is not None
        return merge_entries(tensors[0], tensors[1:], settings.coefficients, self.spec.name)


def measured_regression(
    active: ActiveExperts, inputs: MeasuredInputs, off_diagonal: float, epsilon: float
) -> Regression:
    """Return RegMean's regression of the experts that were measured, of mean eigenvalue 1.

    W0 + (Σ_t w_t Δ_t M_t)(Σ_t w_t M_t)⁻¹ is the closed form of ACE-Merging with S_t = w_t M_t.
    Departures: a ridge of at least 1e-6 mean eigenvalues, so that inputs that are 0 in all samples
    get the mean of the Δ_t, and an expert that left a matrix as it was takes no part in it.
    """
    found = {t: inputs.covariance(position) for t, position in enumerate(active.positions)}
    known = {t: own for t, own in found.items() if own is not None}
    total = math.fsum(active.weights[t] * own.trace for t, own in known.items())
    columns, ridge = active.shape[1], max(epsilon, LEAST_RIDGE)
    scaled = [
        (replace(own, off_diagonal=off_diagonal), active.weights[t] * columns / total)
        for t, own in known.items()
    ]
    return Regression(
        experts=tuple(known),
        scales=[0.0] * len(known),
        ridges=[ridge * active.weights[t] * own.trace / total for t, own in known.items()],
        measured=dict(enumerate(scaled)),
    )


class RegMeanMerge(RidgeMethod):
    """RegMean: linear layers by regression on their measured inputs, all others averaged."""

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
    citations = cited("jin2023regmean")
    own_rule = "merged by the regression on measured inputs"
    ill_conditioned = "Raise `epsilon`, or lower `off_diagonal`."
    whole = False

    def layout(self, settings: TensorSettings, ndim: int) -> FixedLayout:
        """Return how a tensor is read: tables are averaged, also where they are the head."""
        table = is_table(settings.base, settings.name)
        return "mean" if table else super().layout(settings, ndim)

    def lookup(self, settings: TensorSettings) -> MeasuredLookup:
        path = settings.parameters["statistics"]
        return MeasuredLookup(self.spec.name, settings, path, "covariances")

    def merge(self, tensors: Sequence[Tensor], settings: TensorSettings) -> Merged:
        names = ("lambda", "off_diagonal", "epsilon")
        scale, off_diagonal, epsilon = (settings.parameters[name] for name in names)
        base, *experts = tensors
        inputs = self.lookup(settings).inputs(base.shape)
        select = partial(select_active, weights=settings.weights, dtype=torch.float32)

        def formula(base: Tensor, active: ActiveExperts) -> tuple[Tensor, MatrixRecord]:
            if not any(map(inputs.covariance, active.positions)):  # nothing was measured
                return merge_mean(base, active, scale)
            regression = measured_regression(active, inputs, off_diagonal, epsilon)
            return merge_by_ridge(base, active, regression, scale, rule=self.spec.name)

        return by_layout(base, experts, settings.layout, select, scale, formula)


def merge_by_fisher(
    base: Tensor, active: ActiveExperts, fisher: Sequence[Tensor], floor: float
) -> Tensor:
    """Return Σ_t w_t (F_t + δ) Δ_t / Σ_t w_t (F_t + δ), entry by entry (the paper's Eq. 4).

    δ is `floor` mean entries of the F_t (departure: the authors add 1e-6 in the unit of F_t).
    """
    count = max(1, base.numel() * len(fisher))
    level = floor * math.fsum(float(part.sum(dtype=torch.float64)) for part in fisher) / count
    level = level or 1.0  # all F_t are zero: any level makes it the mean
    merged = torch.empty_like(base, dtype=active.dtype, memory_format=torch.contiguous_format)
    origin, out = as_rows(base), as_rows(merged)
    versions = [(as_rows(w), as_rows(f)) for w, f in zip(active.experts, fisher, strict=True)]
    for block in blocks(len(origin), origin.shape[1], base.device):
        numerator = torch.zeros_like(origin[block], dtype=torch.float64)
        total = torch.zeros_like(numerator)
        for (expert, information), weight in zip(versions, active.weights, strict=True):
            counted = information[block].to(total, copy=True).add_(level).mul_(weight)
            numerator.addcmul_(counted, task_vector(expert[block], origin[block], total.dtype))
            total.add_(counted)
        out[block] = numerator.div_(total).to(active.dtype)
    return merged


class FisherMerge(TaskVectorMethod):
    """Fisher merging: every entry is a mean of the experts', weighted by Fisher information."""

    level = shared("fisher_floor", Positive, 1e-6, "Added to the information, in its mean entries.")
    spec = method_spec(
        "fisher",
        "Fisher merging",
        "https://arxiv.org/abs/2111.09832",
        (STATISTICS, WEIGHT, LAMBDA, level, TASK),
    )
    summary = "Averages the experts entry by entry, weighted by Fisher information on samples."
    citations = cited("matena2022fisher")
    own_rule = "averaged by their Fisher information"

    def leaves_span(self, parameters: Mapping[str, Any]) -> str:
        return "it weighs entries"

    def check_settings(self, settings: TensorSettings) -> None:
        self.lookup(settings)

    def lookup(self, settings: TensorSettings) -> MeasuredLookup:
        """Return what was measured of a tensor."""
        return MeasuredLookup(self.spec.name, settings, settings.parameters["statistics"], "fisher")

    def merge(self, tensors: Sequence[Tensor], settings: TensorSettings) -> Merged:
        scale, floor = (settings.parameters[name] for name in ("lambda", "fisher_floor"))
        base, *experts = tensors
        fisher = self.lookup(settings).fisher(base.shape)
        select = partial(select_active, weights=settings.weights, dtype=torch.float32)

        def formula(base: Tensor, active: ActiveExperts) -> tuple[Tensor, MatrixRecord]:
            if fisher is None:
                return merge_mean(base, active, scale)
            own = [fisher[position] for position in active.positions]
            record = active.record(self.spec.name)
            return merge_by_fisher(base, active, own, floor).mul_(scale).add_(base), record

        return by_layout(base, experts, "mean", select, scale, formula, entrywise=True)
