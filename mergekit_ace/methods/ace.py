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
from mergekit_ace.algebra.records import TensorRecord
from mergekit_ace.methods.architecture import is_transposed
from mergekit_ace.methods.inputs import (
    check_finite,
    check_models,
    check_shapes_in_memory,
    describe,
    is_finite,
)
from mergekit_ace.methods.parameters import (
    LAYOUT,
    OPTION_PARAMETERS,
    REPORT,
    WEIGHT,
    ace_options,
)
from mergekit_ace.methods.report import append_report
from mergekit_ace.methods.shapes import check_shapes
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
        experts = check_models(self.spec.name, input_ids, base_id, group_name)
        super().validate_inputs(input_ids, base_id, group_name=group_name)
        if group_name is not None:
            check_shapes(group_name, experts, base_id)
            is_transposed(base_id, group_name)  # mergekit plans on the main thread: see there

    def __call__(self, groups: Sequence[TensorGroup], /, **options: Any) -> tuple[Tensor, ...]:
        """Merge tensors in memory; mergekit's entry point for them, with its arguments."""
        for group in groups:
            check_shapes_in_memory(self.spec.name, group)
        return super().__call__(groups, **options)

    @torch.no_grad()
    def merge_group(self, group: TensorGroup, /, **parameters: Any) -> Tensor:
        """Merge one tensor; the result has the dtype of the inputs."""
        start = time.perf_counter()
        base, experts = group.base, group.non_base
        assert base is not None  # the contract requires it
        name = group.metadata.name
        check_finite(self.spec.name, group)
        weights = parameters["weight"]
        try:
            merged, record = merge_sparingly(
                base.tensor,
                [expert.tensor for expert in experts],
                [weights[expert.id] for expert in experts],
                ace_options(parameters),
                resolve_layout(
                    parameters["layout"],
                    name,
                    base.tensor.ndim,
                    transposed=is_transposed(base.id, name),
                ),
                describe(name),
            )
        except (IllConditionedError, OverflowError, torch.linalg.LinAlgError) as error:
            raise ValueError(_explain(error, name, [str(e.id) for e in experts])) from error
        if not is_finite(merged):
            raise ValueError(
                f"ace: {describe(name)} came out too large for {merged.dtype}. Use a dtype with "
                "more range (dtype: bfloat16 or float32), a smaller lambda or a larger epsilon."
            )
        if parameters["report"] is not None:
            _report(parameters["report"], group, record, time.perf_counter() - start)
        return merged


def _explain(error: Exception, name: str | None, experts: Sequence[str]) -> str:
    if isinstance(error, IllConditionedError):
        return (
            f"ace: {describe(name)} cannot be merged: {error}, too much to be solved even in "
            "float64. Raise `epsilon` for this tensor (by a filter) or for all; task vectors that "
            "are large, or of low rank, against a tiny epsilon are the usual cause, and "
            "epsilon_scale: relative adapts it to their size."
        )
    listed = ", ".join(f"{position}: {model}" for position, model in enumerate(experts))
    return f"ace: {describe(name)} cannot be merged: {error} (experts: {listed})."


def _report(path: str, group: TensorGroup, record: TensorRecord, seconds: float) -> None:
    models = [str(entry.id) for entry in group.non_base]
    append_report(path, group.metadata.name, models, record, seconds)
