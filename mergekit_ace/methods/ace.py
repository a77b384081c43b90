# SPDX-License-Identifier: Apache-2.0
"""`merge_method: ace`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from mergekit_ace.algebra.adaptive import merge_tensor
from mergekit_ace.algebra.records import AceOptions, FixedLayout, TensorRecord
from mergekit_ace.methods.parameters import (
    COEFFICIENTS,
    LAYOUT,
    OPTION_PARAMETERS,
    REPORT,
    TASK,
    WEIGHT,
    ace_options,
)
from mergekit_ace.methods.ridge import RidgeMethod
from mergekit_ace.methods.task_vectors import method_spec


class AceMerge(RidgeMethod):
    """ACE-Merging (Xu et al., CVPR 2026, arXiv 2603.02945) for one tensor at a time."""

    spec = method_spec(
        "ace",
        "ACE-Merging",
        "https://arxiv.org/abs/2603.02945",
        (WEIGHT, *OPTION_PARAMETERS, LAYOUT, COEFFICIENTS, TASK, REPORT),
    )
    ill_conditioned = (
        "Raise `epsilon` for this tensor (by a filter) or for all; task vectors that are large, or "
        "of low rank, against a tiny epsilon are the usual cause, and epsilon_scale: relative "
        "adapts it to their size."
    )

    def merge_tensors(
        self,
        tensors: Sequence[Tensor],
        weights: Sequence[float],
        options: AceOptions,
        layout: FixedLayout,
        coefficients: Sequence[float] | None,
        *,
        least_memory: bool,
    ) -> tuple[Tensor, TensorRecord]:
        return merge_tensor(
            tensors[0],
            tensors[1:],
            weights,
            options,
            layout,
            coefficients,
            least_memory=least_memory,
        )

    def options(self, parameters: Mapping[str, Any]) -> AceOptions:
        return ace_options(parameters)
