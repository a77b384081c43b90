# SPDX-License-Identifier: Apache-2.0
"""Means weighted by what was measured on samples: `fisher`."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Annotated, Any

import torch
from pydantic import Field
from torch import Tensor

from mergekit_ace.algebra.linalg import as_rows, blocks
from mergekit_ace.algebra.records import MatrixRecord, Number
from mergekit_ace.algebra.task_vectors import ActiveExperts, by_layout, merge_mean, select_active
from mergekit_ace.methods.base import Merged, TaskVectorMethod, cited, method_spec
from mergekit_ace.methods.measured_lookup import required_lookup
from mergekit_ace.methods.parameters import LAMBDA, STATISTICS, TASK, WEIGHT, TensorSettings, shared


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
    for block in blocks(*rows[0].shape, base.device):
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
            record = active.record(self.spec.name, precision="float64")
            return merged.mul_(scale).add_(base), record

        return by_layout(base, experts, "mean", select, scale, formula, entrywise=True)
