# SPDX-License-Identifier: Apache-2.0
"""The inputs of a merge method: what is asked of them, and what a config says of one tensor."""

from __future__ import annotations

import math
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from mergekit.merge_methods.base import TensorGroup
from torch import Tensor

from mergekit_ace.algebra.low_rank import CoreSpace
from mergekit_ace.algebra.records import FixedLayout, Observer
from mergekit_ace.methods.shapes import shape_mismatch


@dataclass(frozen=True)
class TensorSettings:
    """One tensor of a merge: of which models, and with which parameters.

    Attributes:
        name: of the tensor; None for one in memory without a name.
        base, experts: the models, as mergekit refers to them.
        parameters: resolved, by name; those of experts by model.
        layout: how the tensor is read; ``mean`` where it is no matrix, or none is needed.
        coefficients: that its merge uses; None where it has none.
        recorded: whether somebody will read the record of the merge.
        space: of which the tensors are cores, where all task vectors are of low rank.
        observe: called with the merged task vector of a matrix, where the method can show it.
    """

    name: str | None
    base: Hashable
    experts: tuple[Hashable, ...]
    parameters: Mapping[str, Any]
    layout: FixedLayout = "mean"
    coefficients: Sequence[float] | None = None
    recorded: bool = False
    space: CoreSpace | None = None
    observe: Observer | None = None

    @classmethod
    def of(cls, group: TensorGroup, parameters: Mapping[str, Any]) -> TensorSettings:
        """Return those of a group with its resolved parameters."""
        assert group.base is not None  # the contract of our methods requires it
        experts = tuple(expert.id for expert in group.non_base)
        recorded = parameters.get("report") is not None
        return cls(group.metadata.name, group.base.id, experts, parameters, recorded=recorded)

    @property
    def models(self) -> list[str]:
        """Names of the experts."""
        return [str(expert) for expert in self.experts]

    @property
    def weights(self) -> list[float]:
        """w_t of the experts; 1 for methods without weights."""
        return self.of_experts("weight", 1.0)

    def of_experts(self, name: str, default: Any) -> list[Any]:
        """Return a parameter of every expert; `default` where the method has none."""
        own = self.parameters.get(name)
        return [default if own is None else own[expert] for expert in self.experts]


def check_models(
    method: str, input_ids: Sequence[Hashable], base_id: Hashable | None, group_name: str | None
) -> list[Hashable]:
    """Return the experts, once there is a base model among the inputs and at least one expert.

    Raises:
        ValueError: naming `method` and the line to add or change.
    """
    where = f" (for {group_name})" if group_name else ""
    experts = [model for model in input_ids if model != base_id]
    if base_id is None:
        raise ValueError(
            f"{method}: there is no base model{where}. The method works on the differences between "
            "experts and the model they were fine-tuned from. Add to the config a line\n"
            "    base_model: NAME_OR_PATH_OF_THAT_MODEL\n"
            "(in Python: base_index=, or base=)."
        )
    if base_id not in input_ids and ".slices[" in (group_name or ""):
        raise ValueError(
            f"{method}: the base model {base_id} is not among the sources{where}. List it in every "
            "slice, with its layer_range, beside the experts."
        )
    if base_id not in input_ids:
        raise ValueError(
            f"{method}: the base model {base_id} has no tensor{where}, but an expert has. Save "
            "both with the same heads, tied or untied, or take the tensor out of the expert."
        )
    if not experts:
        raise ValueError(
            f"{method}: there is no expert besides the base model {base_id}{where}. List at least "
            "one fine-tuned model under models:."
        )
    return experts


def check_shapes_in_memory(method: str, group: TensorGroup) -> None:
    """Do what `shapes.check_shapes` does, for tensors that have no header."""
    base = group.base
    for entry in group.non_base if base is not None else ():
        shape, expected = tuple(entry.tensor.shape), tuple(base.tensor.shape)
        if shape != expected:
            message = shape_mismatch(group.metadata.name, entry.id, shape, base.id, expected)
            raise ValueError(f"{method}: {message}")


def check_finite(method: str, group: TensorGroup) -> None:
    """Raise a `ValueError` where there is NaN or Inf, naming the tensor and the model."""
    for entry in group.entries:
        if not is_finite(entry.tensor):
            raise ValueError(
                f"{method}: {describe(group.metadata.name)} of model {entry.id} contains NaN or "
                "Inf. The checkpoint is damaged, or its dtype overflowed: check it, or leave the "
                "model out."
            )


def is_finite(tensor: Tensor) -> bool:
    """Return whether a tensor holds neither NaN nor Inf; without a copy of it."""
    return math.isfinite(largest_size(tensor))


def largest_size(tensor: Tensor) -> float:
    """Return max |x| over the entries; 0 without any, NaN or Inf where there is one."""
    if tensor.numel() == 0:
        return 0.0
    return float(torch.stack(torch.aminmax(tensor)).abs().max())  # both are NaN if an entry is


def describe(name: str | None) -> str:
    """Return a tensor in words."""
    return f"tensor {name}" if name else "a tensor"
