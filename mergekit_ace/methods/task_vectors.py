# SPDX-License-Identifier: Apache-2.0
"""What all merge methods here share: one tensor at a time, checked before and after."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Hashable, Mapping, Sequence
from typing import Any

import torch
from mergekit.merge_methods.base import (
    BasePolicy,
    GroupMergeMethod,
    InputContract,
    MergeMethodSpec,
    OptionalTensorPolicy,
    ParameterSpec,
    TensorGroup,
)
from torch import Tensor

from mergekit_ace.algebra.records import FixedLayout
from mergekit_ace.methods.architecture import is_transposed, stored_layout
from mergekit_ace.methods.inputs import (
    check_finite,
    check_models,
    check_shapes_in_memory,
    describe,
    is_finite,
)
from mergekit_ace.methods.shapes import check_shapes


def method_spec(
    name: str, pretty_name: str, url: str, parameters: Sequence[ParameterSpec]
) -> MergeMethodSpec:
    """Of a method that needs a base model and at least one expert.

    Args:
        name: as in ``merge_method:``.
        pretty_name, url: for the model card.
        parameters: of the method.
    """
    return MergeMethodSpec(
        name=name,
        pretty_name=pretty_name,
        reference_url=url,
        parameters=tuple(parameters),
        contract=InputContract(base=BasePolicy.REQUIRED, min_non_base=1),
        optional_tensor_policy=OptionalTensorPolicy.PASSTHROUGH_BASE_SINGLETON,
    )


class TaskVectorMethod(GroupMergeMethod):
    """A merge method on the differences between experts and their base.

    Nothing outlives a tensor but strings (which weights are transposed, what the headers say), so a
    checkpoint of any size merges shard by shard, and threads may merge tensors side by side.

    Attributes:
        remedy: what else helps against a result that is too large for its dtype.
        layouts: whether tensors are read as matrices, by the parameter ``layout``.
        tables: whether embeddings are read as tables of rows, if ``layout`` does not say.
    """

    remedy = ""
    layouts = True
    tables = False

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
            check_shapes(group_name, experts, base_id, method=self.spec.name)
            if self.layouts:
                is_transposed(base_id, group_name)  # mergekit plans on the main thread: see there

    def __call__(self, groups: Sequence[TensorGroup], /, **options: Any) -> tuple[Tensor, ...]:
        """Merge tensors in memory; mergekit's entry point for them, with its arguments."""
        for group in groups:
            check_shapes_in_memory(self.spec.name, group)
        return super().__call__(groups, **options)

    @torch.no_grad()
    def merge_group(self, group: TensorGroup, /, **parameters: Any) -> Tensor:
        """Merge one tensor; the result has the dtype of the inputs."""
        assert group.base is not None  # the contract requires it
        check_finite(self.spec.name, group)
        merged = self.merge(group, parameters).to(group.base.tensor.dtype)
        if not is_finite(merged):
            raise ValueError(
                f"{self.spec.name}: {describe(group.metadata.name)} came out too large for "
                f"{merged.dtype}. Use a dtype with more range (dtype: bfloat16 or float32)"
                f"{self.remedy}."
            )
        return merged

    @abstractmethod
    def merge(self, group: TensorGroup, parameters: Mapping[str, Any]) -> Tensor:
        """The merged tensor, in any dtype.

        Args:
            group: the versions of one tensor: finite, with a base, of one shape.
            parameters: resolved; those of experts by model.
        """

    def layout(self, group: TensorGroup, parameters: Mapping[str, Any]) -> FixedLayout:
        """How the tensor is read."""
        base, name = group.base, group.metadata.name
        assert base is not None
        ndim = base.tensor.ndim
        return stored_layout(parameters["layout"], base.id, name, ndim, tables=self.tables)
