# SPDX-License-Identifier: Apache-2.0
"""`merge_method: regmean`: Jin et al., "Dataless Knowledge Fusion", ICLR 2023."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from mergekit_ace.algebra.forms import COSTS, choose_forms
from mergekit_ace.algebra.regression import RegressionOptions, merge_tensor_by_regression
from mergekit_ace.methods.architecture import is_table
from mergekit_ace.methods.base import (
    Citation,
    Merged,
    TaskVectorMethod,
    Work,
    matrices_in,
    method_spec,
)
from mergekit_ace.methods.inputs import TensorSettings
from mergekit_ace.methods.measured_lookup import required_lookup
from mergekit_ace.methods.parameters import (
    LAYOUT,
    STATISTICS,
    TASK,
    WEIGHT,
    option_parameters,
    options_from,
)


class RegMeanMerge(TaskVectorMethod):
    """RegMean: linear layers by regression on their measured inputs, all others averaged."""

    spec = method_spec(
        "regmean",
        "RegMean",
        "https://arxiv.org/abs/2212.09849",
        (STATISTICS, WEIGHT, *option_parameters(RegressionOptions), LAYOUT, TASK),
    )
    summary = (
        "Merges every linear layer by the regression onto the experts' outputs on their own "
        "samples, whose covariances `mergekit-ace statistics` has measured; all others, "
        "embeddings among them, are averaged."
    )
    citations = (
        Citation(
            key="jin2023regmean",
            authors="Jin, Xisen and Ren, Xiang and Preotiuc-Pietro, Daniel and Cheng, Pengxiang",
            title="Dataless Knowledge Fusion by Merging Weights of Language Models",
            year=2023,
            arxiv="2212.09849",
            booktitle="International Conference on Learning Representations",
        ),
    )
    own_rule = "merged by the regression on measured inputs"
    ill_conditioned = "Raise `epsilon`, or lower `off_diagonal`."

    def leaves_span(self, parameters: Mapping[str, Any]) -> str:
        return "measured covariances of inputs are not of low rank"

    def check_settings(self, settings: TensorSettings) -> None:
        required_lookup(self.spec.name, settings, "covariances")

    def merge(self, tensors: Sequence[Tensor], settings: TensorSettings) -> Merged:
        averaged = is_table(settings.base, settings.name)  # also where it is the head as well
        return merge_tensor_by_regression(
            tensors[0],
            tensors[1:],
            settings.weights,
            options_from(RegressionOptions, settings.parameters),
            "mean" if averaged else settings.layout,
            required_lookup(self.spec.name, settings, "covariances").inputs(tensors[0].shape),
            least_memory=settings.least_memory,
            observe=settings.observe,
        )

    def work(self, settings: TensorSettings, shape: Sequence[int], experts: int) -> Work:
        found = matrices_in(shape, settings.layout)
        if found is None or experts < 2:
            return super().work(settings, shape, experts)
        count, *matrix = found
        form = choose_forms(*matrix, experts, refined=False, measured=True)[0]
        cost = COSTS[form](*matrix, experts, False)
        operations, moved = count * cost.operations, count * cost.bytes
        return Work((operations,) * 2, (moved,) * 2, int(cost.memory), form=(form,) * 2)
