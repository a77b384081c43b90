# SPDX-License-Identifier: Apache-2.0
"""`merge_method: regmean`: Jin et al., "Dataless Knowledge Fusion", ICLR 2023."""

from __future__ import annotations

from mergekit_ace.algebra.records import FixedLayout
from mergekit_ace.algebra.regression import RegressionOptions, merge_tensor_by_regression
from mergekit_ace.methods.ace import RidgeMethod
from mergekit_ace.methods.architecture import is_table
from mergekit_ace.methods.base import cited, method_spec
from mergekit_ace.methods.measured_lookup import MeasuredLookup, required_lookup
from mergekit_ace.methods.parameters import (
    LAYOUT,
    STATISTICS,
    TASK,
    WEIGHT,
    TensorSettings,
    option_parameters,
)


class RegMeanMerge(RidgeMethod):
    """RegMean: linear layers by regression on their measured inputs, all others averaged."""

    spec = method_spec(
        "regmean",
        "RegMean",
        "https://arxiv.org/abs/2212.09849",
        (STATISTICS, WEIGHT, *option_parameters(RegressionOptions), LAYOUT, TASK),
    )
    summary = (
        "Fits every linear layer to the experts' outputs on their own samples, whose covariances "
        "`mergekit-ace statistics` has measured; averages all other tensors, embeddings included."
    )
    citations = cited("jin2023regmean")
    own_rule = "merged by the regression on measured inputs"
    ill_conditioned = "Raise `epsilon`, or lower `off_diagonal`."

    options_class = RegressionOptions
    merge_versions = staticmethod(merge_tensor_by_regression)
    whole = False

    def layout(self, settings: TensorSettings, ndim: int) -> FixedLayout:
        """Return how a tensor is read: tables are averaged, also where they are the head."""
        table = is_table(settings.base, settings.name)
        return "mean" if table else super().layout(settings, ndim)

    def lookup(self, settings: TensorSettings) -> MeasuredLookup:
        return required_lookup(self.spec.name, settings, "covariances")
