# SPDX-License-Identifier: Apache-2.0
"""Methods that merge entry by entry: `consensus_ta` and `lines`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Annotated, Any

import torch
from mergekit.merge_methods.base import TensorGroup
from pydantic import Field
from torch import Tensor

from mergekit_ace.algebra.task_vectors import (
    ActiveExperts,
    Factor,
    MatrixRecord,
    NonNegative,
    by_layout,
    merge_entries,
    select_active,
    task_vector,
)
from mergekit_ace.methods.architecture import tensor_names
from mergekit_ace.methods.base import Merged, TaskVectorMethod, cited, describe, method_spec
from mergekit_ace.methods.parameters import LAMBDA, TensorSettings, shared
from mergekit_ace.naming import layer_of, stack_size

Count = Annotated[int, Field(ge=1, strict=True)]


class ConsensusMerge(TaskVectorMethod):
    """Consensus Task Arithmetic, W0 + λ · M ⊙ Σ_t Δ_t, entry by entry of every tensor.

    Expert t's TALL mask holds the entries with |Δ_t| > mask_threshold · |Σ_s Δ_s − Δ_t|: those that
    the sum of all task vectors leaves near to what that expert wants (the paper's Eq. 5). M holds
    the entries of at least `consensus` masks; 2 drops what one expert alone needs.

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
                Count,
                2,
                "How many experts must ask for an entry; at most as many as there are.",
            ),
        ),
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


def layer_coefficient(layer: int | None, layers: int, alpha: float, beta: float) -> float:
    """Return α + β·l/(L − 1), by which the sum of the task vectors is multiplied (Eq. 2).

    Args:
        layer: l, from 0; None outside of blocks, where the coefficient is α.
        layers: L; a single one counts as the deepest.
        alpha: in the first layer.
        beta: how much more in the last one.
    """
    if layer is None:
        return alpha
    return alpha + beta * (layer / (layers - 1) if layers > 1 else 1.0)


class LinesMerge(TaskVectorMethod):
    """LiNeS on task arithmetic: coefficients that rise linearly with depth.

    The paper's α is one over the number of experts, and its β is tuned as the coefficient of task
    arithmetic is; the default is what is used for that without data.
    """

    spec = method_spec(
        "lines",
        "LiNeS",
        "https://arxiv.org/abs/2410.17146",
        (
            LAMBDA,
            shared(
                "alpha",
                Factor | None,
                None,
                "The coefficient in the first layer and outside of layers; 1/T by default.",
            ),
            shared("beta", Factor, 0.4, "How much larger the coefficient of the last layer is."),
            shared(
                "layers",
                Count | None,
                None,
                "How many layers the model has, where that cannot be read from the base.",
            ),
        ),
    )
    summary = "Adds the task vectors with a coefficient that rises linearly with depth."
    citations = cited("wang2025lines")
    own_rule = "merged with a coefficient by depth"

    def check_settings(self, settings: TensorSettings) -> None:
        self._position(settings)

    def _position(self, settings: TensorSettings) -> tuple[int | None, int]:
        """Return l, None outside of blocks, and L.

        Raises:
            ValueError: it is not known how many layers there are.
        """
        name, given = settings.name, settings.parameters["layers"]
        layer = layer_of(name) if name else None
        if layer is None:
            return None, 1
        known = tensor_names(settings.base)
        layers = given or (stack_size(name or "", known) if known else 0)
        if layer < layers:
            return layer, layers
        found = (
            f"and `layers` is {given}: leave it out, or count all"
            if given
            else ("but how many layers there are is not known here: set `layers`")
        )
        raise ValueError(
            f"{self.spec.name}: {describe(name)} belongs to layer {layer} (counted from 0), {found}"
        )

    def coefficients(self, settings: TensorSettings, group: TensorGroup | None) -> Sequence[float]:
        """Return λ (α + β·l/(L − 1)) for every expert."""
        parameters = settings.parameters
        layer, layers = self._position(settings)
        count, alpha = len(settings.experts), parameters["alpha"]
        alpha = 1 / count if alpha is None else alpha
        share = parameters["lambda"] * layer_coefficient(layer, layers, alpha, parameters["beta"])
        return [share] * count

    def merge(self, tensors: Sequence[Tensor], settings: TensorSettings) -> Merged:
        assert settings.coefficients is not None
        return merge_entries(tensors[0], tensors[1:], settings.coefficients, self.spec.name)
