# SPDX-License-Identifier: Apache-2.0
"""Methods that read what was measured on samples: `regmean` and `fisher`.

RegMean (Jin et al., "Dataless Knowledge Fusion by Merging Weights of Language Models", ICLR 2023,
arXiv 2212.09849) is the regression onto the experts' outputs on their own inputs. With G_t =
X_tᵀX_t/n_t of the inputs X_t, (n_t, i), its entries off the diagonal multiplied by α, the merge
minimises Σ_t w_t ‖(W − W_t) X_tᵀ‖²/n_t:

    W = (Σ_t w_t W_t G_t)(Σ_t w_t G_t)⁻¹ = W0 + (Σ_t w_t Δ_t G_t)(Σ_t w_t G_t)⁻¹,

the closed form of ACE-Merging without its prior, with S_t = w_t G_t. Departures: a ridge of at
least 1e-6 mean eigenvalues, so that inputs that are 0 in all samples get the mean of the Δ_t; and
an expert that left a matrix as it was takes no part in it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Annotated, Any

import torch
from pydantic import BaseModel, ConfigDict, Field
from torch import Tensor

from mergekit_ace.algebra.linalg import as_rows, blocks
from mergekit_ace.algebra.low_rank import CoreSpace
from mergekit_ace.algebra.measured import MeasuredInputs
from mergekit_ace.algebra.ridge import Regression, merge_by_ridge
from mergekit_ace.algebra.task_vectors import (
    ActiveExperts,
    Factor,
    FixedLayout,
    Fraction,
    MatrixRecord,
    Number,
    Ridge,
    TensorRecord,
    by_layout,
    merge_mean,
    select_active,
)
from mergekit_ace.methods.ace import RidgeMethod
from mergekit_ace.methods.architecture import is_table
from mergekit_ace.methods.base import Merged, TaskVectorMethod, cited, method_spec
from mergekit_ace.methods.measured_lookup import MeasuredLookup, required_lookup
from mergekit_ace.methods.parameters import (
    LAMBDA,
    LAYOUT,
    STATISTICS,
    TASK,
    WEIGHT,
    TensorSettings,
    option_parameters,
    shared,
)

LEAST_RIDGE = 1e-6  # in mean eigenvalues


class RegressionOptions(BaseModel):
    """What may be chosen per tensor; see `AceOptions`."""

    model_config = ConfigDict(frozen=True, extra="forbid", populate_by_name=True)

    scale: Factor = Field(1.0, alias="lambda", description="Scale λ; the result is W0 + λ X.")
    off_diagonal: Fraction = Field(
        0.9,
        description="α, by which entries of X_tᵀX_t off its diagonal are multiplied; the paper's "
        "is 0.9, and 0.1 for T5.",
    )
    epsilon: Ridge = Field(
        0.0,
        description="A ridge beside α, or instead of it with off_diagonal: 1, in mean eigenvalues "
        "of X_tᵀX_t; never below 1e-6.",
    )


def merge_tensor_by_regression(
    base: Tensor,
    experts: Sequence[Tensor],
    weights: Sequence[float],
    options: RegressionOptions,
    layout: FixedLayout,
    coefficients: Sequence[float] | None = None,
    *,
    space: CoreSpace | None = None,
    measured: MeasuredInputs | None = None,
) -> tuple[Tensor, TensorRecord]:
    """Merge the versions of one stored tensor; arguments and result as of `merge_tensor`.

    A matrix of whose inputs nothing was measured gets the mean of the task vectors, as vectors do.
    """
    select = partial(
        select_active, weights=weights, dtype=torch.float32, coefficients=coefficients, space=space
    )
    formula = partial(
        merge_by_regression,
        options=options,
        measured=measured or MeasuredInputs(),
    )
    return by_layout(base, experts, layout, select, options.scale, formula)


def merge_by_regression(
    base: Tensor,
    active: ActiveExperts,
    options: RegressionOptions,
    measured: MeasuredInputs,
) -> tuple[Tensor, MatrixRecord]:
    """Merge one matrix that at least two experts changed; arguments as of `merge_tensor`."""
    if measured.of(active.positions) is None:
        return merge_mean(base, active, options.scale)
    problem = _problem(active, options, measured)
    return merge_by_ridge(base, active, problem, options.scale, rule="regmean")


def _problem(
    active: ActiveExperts, options: RegressionOptions, measured: MeasuredInputs
) -> Regression:
    """Return the regression by w_t G_t of the experts that were measured, of mean eigenvalue 1."""
    found = {t: measured.covariance(position) for t, position in enumerate(active.positions)}
    known = {t: own for t, own in found.items() if own is not None}
    total = math.fsum(active.weights[t] * own.trace for t, own in known.items())
    epsilon, columns = max(options.epsilon, LEAST_RIDGE), active.shape[1]
    return Regression(
        experts=tuple(known),
        scales=[0.0] * len(known),
        ridges=[epsilon * active.weights[t] * own.trace / total for t, own in known.items()],
        measured={
            place: (
                replace(own, off_diagonal=options.off_diagonal),
                active.weights[t] * columns / total,
            )
            for place, (t, own) in enumerate(known.items())
        },
    )


class RegMeanMerge(RidgeMethod):
    """RegMean: linear layers by regression on their measured inputs, all others averaged."""

    spec = method_spec(
        "regmean",
        "RegMean",
        "https://arxiv.org/abs/2212.09849",
        (STATISTICS, WEIGHT, *option_parameters(RegressionOptions), LAYOUT, TASK),
    )
    summary = (
        "Fits every linear layer to the experts' outputs on their own samples, whose covariances "
        "`mergekit-ace statistics` has measured; averages all other tensors, embeddings included."
    )
    citations = cited("jin2023regmean")
    own_rule = "merged by the regression on measured inputs"
    ill_conditioned = "Raise `epsilon`, or lower `off_diagonal`."

    options_class = RegressionOptions
    merge_versions = staticmethod(merge_tensor_by_regression)
    whole = False

    def layout(self, settings: TensorSettings, ndim: int) -> FixedLayout:
        """Return how a tensor is read: tables are averaged, also where they are the head."""
        table = is_table(settings.base, settings.name)
        return "mean" if table else super().layout(settings, ndim)

    def lookup(self, settings: TensorSettings) -> MeasuredLookup:
        return required_lookup(self.spec.name, settings, "covariances")


def merge_by_fisher(
    base: Tensor,
    experts: Sequence[Tensor],
    fisher: Sequence[Tensor],
    weights: Sequence[float],
    floor: float,
    dtype: torch.dtype,
) -> Tensor:
    """Return Σ_t w_t (F_t + δ) Δ_t / Σ_t w_t (F_t + δ), entry by entry (the paper's Eq. 4).

    Args:
        base, experts: W0 and the W_t, of one shape.
        fisher: F_t ≥ 0, the diagonal of the Fisher information, shaped as the weights.
        weights: w_t > 0.
        floor: δ in mean entries of the F_t; where none of them has anything to say it makes the
            merge the mean (departure: the paper's authors add 1e-6 in the unit of F_t).
        dtype: of the result.
    """
    count = max(1, base.numel() * len(fisher))
    level = floor * math.fsum(float(part.sum(dtype=torch.float64)) for part in fisher) / count
    level = level or 1.0  # all F_t are zero: any level makes it the mean
    merged = torch.empty_like(base, dtype=dtype, memory_format=torch.contiguous_format)
    rows = [as_rows(tensor) for tensor in (base, merged)]
    versions = [(as_rows(w), as_rows(f)) for w, f in zip(experts, fisher, strict=True)]
    length, width = rows[0].shape
    for block in blocks(length, width, base.device):
        origin = rows[0][block].double()
        numerator, total = torch.zeros_like(origin), torch.zeros_like(origin)
        for (expert, information), weight in zip(versions, weights, strict=True):
            counted = information[block].to(origin, copy=True).add_(level).mul_(weight)
            numerator.addcmul_(counted, expert[block].double().sub_(origin))
            total.add_(counted)
        rows[1][block] = numerator.div_(total).to(dtype)
    return merged


class FisherMerge(TaskVectorMethod):
    """Fisher merging: every entry is a mean of the experts', weighted by Fisher information."""

    spec = method_spec(
        "fisher",
        "Fisher merging",
        "https://arxiv.org/abs/2111.09832",
        (
            STATISTICS,
            WEIGHT,
            LAMBDA,
            shared(
                "fisher_floor",
                Annotated[Number, Field(gt=0, le=1e6)],
                1e-6,
                "What is added to the Fisher information, in mean entries of that of the tensor.",
            ),
            TASK,
        ),
    )
    summary = (
        "Averages the experts entry by entry, weighted by the diagonal Fisher information that "
        "`mergekit-ace statistics` has measured on their samples."
    )
    citations = cited("matena2022fisher")
    own_rule = "averaged by their Fisher information"

    def leaves_span(self, parameters: Mapping[str, Any]) -> str:
        return "it weighs entries"

    def check_settings(self, settings: TensorSettings) -> None:
        required_lookup(self.spec.name, settings, "fisher")

    def merge(self, tensors: Sequence[Tensor], settings: TensorSettings) -> Merged:
        scale = settings.parameters["lambda"]
        fisher = required_lookup(self.spec.name, settings, "fisher").fisher(tensors[0].shape)

        base, *experts = tensors
        select = partial(select_active, weights=settings.weights, dtype=torch.float32)

        def formula(base: Tensor, active: ActiveExperts) -> tuple[Tensor, MatrixRecord]:
            if fisher is None:
                return merge_mean(base, active, scale)
            own = [fisher[position] for position in active.positions]
            floor = settings.parameters["fisher_floor"]
            merged = merge_by_fisher(base, active.experts, own, active.weights, floor, active.dtype)
            record = active.record(self.spec.name)
            return merged.mul_(scale).add_(base), record

        return by_layout(base, experts, "mean", select, scale, formula, entrywise=True)
