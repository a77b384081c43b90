# SPDX-License-Identifier: Apache-2.0
"""`merge_method: consensus_ta`: Wang et al., "Localizing Task Information", ICML 2024."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any

import torch
from mergekit.merge_methods.base import TensorGroup
from pydantic import Field
from torch import Tensor

from mergekit_ace.algebra.records import NonNegative, Number
from mergekit_ace.algebra.task_vectors import merge_trivial, select_active, task_vector
from mergekit_ace.methods.peers.decomposed import parameter
from mergekit_ace.methods.task_vectors import TaskVectorMethod, method_spec


def merge_by_consensus(
    base: Tensor,
    experts: Sequence[Tensor],
    scale: float,
    mask_threshold: float,
    least: int,
    dtype: torch.dtype,
) -> Tensor:
    """W0 + λ · M ⊙ Σ_t Δ_t, M the entries that at least `least` experts' TALL masks select.

    Expert t's mask holds the entries with |Δ_t| > mask_threshold · |Σ_s Δ_s − Δ_t|: those that
    the sum of all task vectors leaves near to what that expert wants (the paper's Eq. 5).

    Args:
        base: W0, any shape.
        experts: W_t, shaped as `base`.
        scale: λ.
        mask_threshold: the paper's λ_t, the same for all experts; larger selects less.
        least: 2 drops what nobody needs and what one expert alone does.
        dtype: in which task vectors are formed.
    """
    total = torch.zeros_like(base, dtype=dtype)
    for expert in experts:
        total.add_(task_vector(expert, base, dtype))
    votes = torch.zeros_like(base, dtype=torch.int16)
    for expert in experts:
        delta = task_vector(expert, base, dtype)
        votes += delta.abs() > (total - delta).abs_().mul_(mask_threshold)
    return total.mul_(votes >= least).mul_(scale).add_(base)


NAME = "consensus_ta"


class Method(TaskVectorMethod):
    """Consensus Task Arithmetic, entry by entry of every tensor.

    The paper tunes λ, and the threshold of the masks among 0.2, 0.3, … 0.6, on validation data;
    the defaults are what is used for task arithmetic without any, and the middle. As in `ace`, an
    expert that alone changed a tensor is what comes out.
    """

    layouts = False
    spec = method_spec(
        NAME,
        "Consensus Task Arithmetic",
        "https://arxiv.org/abs/2405.07813",
        (
            parameter(NAME, "lambda", Number, 0.4, "a finite number"),
            parameter(NAME, "mask_threshold", NonNegative, 0.4, "a number, 0 or greater"),
            parameter(
                NAME,
                "consensus",
                Annotated[int, Field(ge=0, strict=True)],
                2,
                "how many experts, a whole number",
            ),
        ),
    )

    def merge(self, group: TensorGroup, parameters: Mapping[str, Any]) -> Tensor:
        assert group.base is not None  # the contract requires it
        base, experts = group.base.tensor, [entry.tensor for entry in group.non_base]
        scale = parameters["lambda"]
        active = select_active(base, experts, [1.0] * len(experts), torch.float32)
        trivial = merge_trivial(base, active, scale)
        if trivial is not None:
            return trivial[0]
        threshold, least = parameters["mask_threshold"], parameters["consensus"]
        return merge_by_consensus(base, active.experts, scale, threshold, least, active.dtype)
