# SPDX-License-Identifier: Apache-2.0
"""`merge_method: ace`."""

from __future__ import annotations

import time
from collections.abc import Hashable, Sequence
from typing import Any

import torch
from mergekit.merge_methods.base import (
    BasePolicy,
    GroupMergeMethod,
    InputContract,
    MergeMethodSpec,
    OptionalTensorPolicy,
    TensorGroup,
)
from torch import Tensor

from mergekit_ace.algebra.closed_form import IllConditionedError
from mergekit_ace.algebra.layouts import resolve_layout
from mergekit_ace.algebra.options import AceOptions
from mergekit_ace.algebra.records import TensorRecord
from mergekit_ace.methods.architecture import is_transposed
from mergekit_ace.methods.parameters import (
    LAYOUT,
    OPTION_NAMES,
    OPTION_PARAMETERS,
    REPORT,
    WEIGHT,
)
from mergekit_ace.methods.report import append_report
from mergekit_ace.methods.shapes import check_shapes, shape_mismatch
from mergekit_ace.methods.sparing import merge_sparingly


class AceMerge(GroupMergeMethod):
    """ACE-Merging (Xu et al., CVPR 2026, arXiv 2603.02945) for one tensor at a time.

    Nothing outlives a tensor but strings (which weights are transposed, what the headers say), so a
    checkpoint of any size merges shard by shard, and threads may merge tensors side by side.
    """

    spec = MergeMethodSpec(
        name="ace",
        pretty_name="ACE-Merging",
        reference_url="https://arxiv.org/abs/2603.02945",
        parameters=(WEIGHT, *OPTION_PARAMETERS, LAYOUT, REPORT),
        contract=InputContract(base=BasePolicy.REQUIRED, min_non_base=1),
        optional_tensor_policy=OptionalTensorPolicy.PASSTHROUGH_BASE_SINGLETON,
    )

    def validate_inputs(
        self,
        input_ids: Sequence[Hashable],
        base_id: Hashable | None = None,
        *,
        group_name: str | None = None,
    ) -> None:
        """mergekit's structural check, with errors that say what to write instead."""
        where = f" (for {group_name})" if group_name else ""
        experts = [model for model in input_ids if model != base_id]
        if base_id is None:
            raise ValueError(
                f"ace: there is no base model{where}. ACE-Merging works on the differences between "
                "experts and the model they were fine-tuned from. Add to the config a line\n"
                "    base_model: NAME_OR_PATH_OF_THAT_MODEL\n"
                "(in Python: base_index=, or base=)."
            )
        if base_id not in input_ids and ".slices[" in (group_name or ""):
            raise ValueError(
                f"ace: the base model {base_id} is not among the sources{where}. List it in every "
                "slice, with its layer_range, beside the experts."
            )
        if base_id not in input_ids:
            raise ValueError(
                f"ace: the base model {base_id} has no tensor{where}, but an expert has. Save both "
                "with the same heads, tied or untied, or take the tensor out of the expert."
            )
        if not experts:
            raise ValueError(
                f"ace: there is no expert besides the base model {base_id}{where}. List at least "
                "one fine-tuned model under models:."
            )
        super().validate_inputs(input_ids, base_id, group_name=group_name)
        if group_name is not None:
            check_shapes(group_name, experts, base_id)
            is_transposed(base_id, group_name)  # mergekit plans on the main thread: see there

    def __call__(self, groups: Sequence[TensorGroup], /, **options: Any) -> tuple[Tensor, ...]:
        """Merge tensors in memory; mergekit's entry point for them, with its arguments."""
        for group in groups:
            _check_shapes_in_memory(group)
        return super().__call__(groups, **options)

    @torch.no_grad()
    def merge_group(self, group: TensorGroup, /, **parameters: Any) -> Tensor:
        """Merge one tensor; the result has the dtype of the inputs."""
        start = time.perf_counter()
        base, experts = group.base, group.non_base
        assert base is not None  # the contract requires it
        name = group.metadata.name
        _check_finite(group)
        weights = parameters["weight"]
        try:
            merged, record = merge_sparingly(
                base.tensor,
                [expert.tensor for expert in experts],
                [weights[expert.id] for expert in experts],
                _options(parameters),
                resolve_layout(
                    parameters["layout"],
                    name,
                    base.tensor.ndim,
                    transposed=is_transposed(base.id, name),
                ),
                _tensor(name),
            )
        except (IllConditionedError, OverflowError, torch.linalg.LinAlgError) as error:
            raise ValueError(_explain(error, name, [str(e.id) for e in experts])) from error
        if not _is_finite(merged):
            raise ValueError(
                f"ace: {_tensor(name)} came out too large for {merged.dtype}. Use a dtype with "
                "more range (dtype: bfloat16 or float32), a smaller lambda or a larger epsilon."
            )
        if parameters["report"] is not None:
            _report(parameters["report"], group, record, time.perf_counter() - start)
        return merged


def _options(parameters: dict[str, Any]) -> AceOptions:
    return AceOptions(
        **{OPTION_NAMES.get(p.name, p.name): parameters[p.name] for p in OPTION_PARAMETERS}
    )


def _check_shapes_in_memory(group: TensorGroup) -> None:
    """Like `check_shapes`, for tensors that have no header."""
    base = group.base
    for entry in group.non_base if base is not None else ():
        shape, expected = tuple(entry.tensor.shape), tuple(base.tensor.shape)
        if shape != expected:
            message = shape_mismatch(group.metadata.name, entry.id, shape, base.id, expected)
            raise ValueError(f"ace: {message}")


def _check_finite(group: TensorGroup) -> None:
    """Raise before anything is computed from NaN or Inf, naming the tensor and the model."""
    for entry in group.entries:
        if not _is_finite(entry.tensor):
            raise ValueError(
                f"ace: {_tensor(group.metadata.name)} of model {entry.id} contains NaN or Inf. "
                "The checkpoint is damaged, or its dtype overflowed: check it, or leave the "
                "model out."
            )


def _is_finite(tensor: Tensor) -> bool:
    if tensor.numel() == 0:
        return True
    smallest, largest = torch.aminmax(tensor)  # both are NaN if any entry is
    return bool(torch.isfinite(smallest) and torch.isfinite(largest))


def _tensor(name: str | None) -> str:
    return f"tensor {name}" if name else "a tensor"


def _explain(error: Exception, name: str | None, experts: Sequence[str]) -> str:
    if isinstance(error, IllConditionedError):
        return (
            f"ace: {_tensor(name)} cannot be merged: {error}, too much to be solved even in "
            "float64. Raise `epsilon` for this tensor (by a filter) or for all; task vectors that "
            "are large, or of low rank, against a tiny epsilon are the usual cause, and "
            "epsilon_scale: relative adapts it to their size."
        )
    listed = ", ".join(f"{position}: {model}" for position, model in enumerate(experts))
    return f"ace: {_tensor(name)} cannot be merged: {error} (experts: {listed})."


def _report(path: str, group: TensorGroup, record: TensorRecord, seconds: float) -> None:
    models = [str(entry.id) for entry in group.non_base]
    append_report(path, group.metadata.name, models, record, seconds)
