# SPDX-License-Identifier: Apache-2.0
"""`merge_method: ace_relative`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from mergekit_ace.algebra.records import FixedLayout, TensorRecord
from mergekit_ace.algebra.relative import RelativeOptions, merge_tensor_relative
from mergekit_ace.methods.parameters import (
    COEFFICIENTS,
    RELATIVE_LAYOUT,
    REPORT,
    TASK,
    WEIGHT,
    of_method,
    option,
)
from mergekit_ace.methods.ridge import RidgeMethod
from mergekit_ace.methods.task_vectors import method_spec

NAME = "ace_relative"
# The option's name in mergekit, and ours.
OPTIONS = {
    "lambda": "scale",
    "epsilon": "epsilon",
    "centred": "centred",
    "structural_prior": "structural_prior",
    "compute_dtype": "compute_dtype",
}


class RelativeAceMerge(RidgeMethod):
    """ACE's ridge regression with the sum of relative errors as its objective; ours."""

    tables = True
    spec = method_spec(
        NAME,
        "ACE-Merging with relative errors",
        "https://arxiv.org/abs/2603.02945",
        (
            of_method(WEIGHT, NAME),
            *(option(RelativeOptions, name, field, NAME) for name, field in OPTIONS.items()),
            of_method(RELATIVE_LAYOUT, NAME),
            of_method(COEFFICIENTS, NAME),
            of_method(TASK, NAME),
            of_method(REPORT, NAME),
        ),
    )

    def merge_tensors(
        self,
        tensors: Sequence[Tensor],
        weights: Sequence[float],
        options: RelativeOptions,
        layout: FixedLayout,
        coefficients: Sequence[float] | None,
        *,
        least_memory: bool,
    ) -> tuple[Tensor, TensorRecord]:
        return merge_tensor_relative(
            tensors[0],
            tensors[1:],
            weights,
            options,
            layout,
            coefficients,
            least_memory=least_memory,
        )

    def options(self, parameters: Mapping[str, Any]) -> RelativeOptions:
        return RelativeOptions(**{field: parameters[name] for name, field in OPTIONS.items()})
