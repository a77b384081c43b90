# SPDX-License-Identifier: Apache-2.0
"""`merge_method: ace`."""

from __future__ import annotations

from mergekit_ace.algebra.adaptive import merge_tensor
from mergekit_ace.algebra.records import AceOptions
from mergekit_ace.methods.base import Citation, method_spec
from mergekit_ace.methods.parameters import (
    COEFFICIENTS,
    LAYOUT,
    TASK,
    WEIGHT,
    option_parameters,
)
from mergekit_ace.methods.ridge import RidgeMethod

ACE_CITATION = Citation(
    key="xu2026ace",
    authors="Xu, Bo and Wu, Haotian and Lin, Hehai and Huang, Weiquan and Zhu, Beier and Shu, Yao "
    "and Qin, Chengwei",
    title="{ACE-Merging}: Data-Free Model Merging with Adaptive Covariance Estimation",
    year=2026,
    arxiv="2603.02945",
    booktitle="Proceedings of the IEEE/CVF Conference on Computer Vision and Pattern Recognition",
)


class AceMerge(RidgeMethod):
    """ACE-Merging (Xu et al., CVPR 2026) for one tensor at a time."""

    spec = method_spec(
        "ace",
        "ACE-Merging",
        "https://arxiv.org/abs/2603.02945",
        (WEIGHT, *option_parameters(AceOptions), LAYOUT, COEFFICIENTS, TASK),
    )
    summary = (
        "Merges every matrix by one ridge regression in closed form, with covariances of the "
        "layers' inputs that are estimated from the task vectors; no data is needed."
    )
    citations = (ACE_CITATION,)
    own_rule = "merged by the closed form"
    options_class = AceOptions
    merge_versions = staticmethod(merge_tensor)
    refines = True
    ill_conditioned = (
        "Raise `epsilon` for this tensor (by a filter) or for all; task vectors that are large, or "
        "of low rank, against a tiny epsilon are the usual cause, and epsilon_scale: relative "
        "adapts it to their size."
    )

    def extra_operations(self, rows: int, columns: int, experts: int, refined: bool) -> float:
        """Return those of the Gram matrix of F and its decomposition, about 9 m³ in all."""
        small, large = sorted((rows, columns))
        return small**2 * large + 9.0 * small**3 if refined else 0.0
