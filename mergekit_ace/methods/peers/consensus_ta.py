# SPDX-License-Identifier: Apache-2.0
"""`merge_method: consensus_ta`: Wang et al., "Localizing Task Information", ICML 2024."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Annotated, Any

import torch
from pydantic import Field
from torch import Tensor

from mergekit_ace.algebra.records import MatrixRecord, NonNegative
from mergekit_ace.algebra.task_vectors import ActiveExperts, by_layout, select_active, task_vector
from mergekit_ace.methods.base import Citation, Merged, TaskVectorMethod, method_spec
from mergekit_ace.methods.inputs import TensorSettings, describe
from mergekit_ace.methods.parameters import LAMBDA, shared


@dataclass(frozen=True)
class ConsensusRecord(MatrixRecord):
    """What was done to one tensor.

    Attributes:
        selected: share of the entries that enough experts ask for, 0 to 1.
    """

    selected: float | None = None


def merge_by_consensus(
    base: Tensor,
    experts: Sequence[Tensor],
    scale: float,
    mask_threshold: float,
    least: int,
    dtype: torch.dtype,
) -> tuple[Tensor, float]:
    """Return W0 + λ · M ⊙ Σ_t Δ_t, M what at least `least` experts' TALL masks select.

    Expert t's mask holds the entries with |Δ_t| > mask_threshold · |Σ_s Δ_s − Δ_t|: those that
    the sum of all task vectors leaves near to what that expert wants (the paper's Eq. 5).

    Args:
        base: W0, any shape.
        experts: W_t, shaped as `base`.
        scale: λ.
        mask_threshold: the paper's λ_t, the same for all experts; larger selects less.
        least: 2 drops what nobody needs and what one expert alone does.
        dtype: in which task vectors are formed.

    Returns:
        The merged tensor, and the share of its entries that are selected, 0 to 1.
    """
    total = torch.zeros_like(base, dtype=dtype)
    for expert in experts:
        total.add_(task_vector(expert, base, dtype))
    votes = torch.zeros_like(base, dtype=torch.int16)
    for expert in experts:
        delta = task_vector(expert, base, dtype)
        votes += delta.abs() > (total - delta).abs_().mul_(mask_threshold)
    selected = votes >= least
    share = float(selected.count_nonzero()) / max(1, base.numel())
    return total.mul_(selected).mul_(scale).add_(base), share


class ConsensusMerge(TaskVectorMethod):
    """Consensus Task Arithmetic, entry by entry of every tensor.

    The paper tunes λ, and the threshold of the masks among 0.2, 0.3, … 0.6, on validation data;
    the defaults are what is used for task arithmetic without any, and the middle. As in `ace`, an
    expert that alone changed a tensor is what comes out.
    """

    spec = method_spec(
        "consensus_ta",
        "Consensus Task Arithmetic",
        "https://arxiv.org/abs/2405.07813",
        (
            replace(LAMBDA, default=0.4),
            shared(
                "mask_threshold",
                NonNegative,
                0.4,
                "How large an expert's change must be against that of all others to count.",
            ),
            shared(
                "consensus",
                Annotated[int, Field(ge=1, strict=True)],
                2,
                "How many experts must ask for an entry; at most as many as there are.",
            ),
        ),
    )
    summary = "Adds the task vectors in those entries that at least two experts ask for."
    citations = (
        Citation(
            key="wang2024localizing",
            authors="Wang, Ke and Dimitriadis, Nikolaos and Ortiz-Jiménez, Guillermo and "
            "Fleuret, François and Frossard, Pascal",
            title="Localizing Task Information for Improved Model Merging and Compression",
            year=2024,
            arxiv="2405.07813",
            booktitle="International Conference on Machine Learning",
        ),
    )
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
            merged, selected = merge_by_consensus(
                base, active.experts, scale, threshold, least, active.dtype
            )
            record = asdict(active.record(self.spec.name))
            return merged, ConsensusRecord(**record, selected=selected)

        return by_layout(base, experts, "mean", select, scale, formula, entrywise=True)
