# SPDX-License-Identifier: Apache-2.0
"""`merge_method: ace_relative`."""

from __future__ import annotations

from dataclasses import replace

from mergekit_ace.algebra.records import RelativeLayout
from mergekit_ace.algebra.relative import RelativeOptions, merge_tensor_relative
from mergekit_ace.methods.ace import ACE_CITATION, RidgeMethod, ridge_parameters
from mergekit_ace.methods.base import method_spec
from mergekit_ace.methods.parameters import LAYOUT

RELATIVE_LAYOUT = replace(
    LAYOUT,
    value_type=RelativeLayout,
    description=f"{LAYOUT.description} table merges rows that are looked up, as of embeddings.",
)


class RelativeAceMerge(RidgeMethod):
    """ACE's ridge regression with the sum of relative errors as its objective; ours."""

    spec = method_spec(
        "ace_relative",
        "ACE-Merging with relative errors",
        "https://arxiv.org/abs/2603.02945",
        ridge_parameters(RelativeOptions, RELATIVE_LAYOUT),
    )
    summary = (
        "Minimises the sum of the tasks' relative errors by the closed form of ACE-Merging, and "
        "merges embeddings row by row unless they are also the head; ours, not the paper's."
    )
    citations = (ACE_CITATION,)
    own_rule = "merged by the closed form of relative errors"
    options_class = RelativeOptions
    merge_versions = staticmethod(merge_tensor_relative)

    def extra_operations(self, rows: int, columns: int, experts: int, refined: bool) -> float:
        """Return those of the ‖G_t‖ of all experts."""
        small, large = sorted((rows, columns))
        return float(experts * small**2 * large)
