# SPDX-License-Identifier: Apache-2.0
"""`merge_method: lines`: Wang et al., "LiNeS: Post-training Layer Scaling", ICLR 2025."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated

from mergekit.merge_methods.base import TensorGroup
from pydantic import Field
from torch import Tensor

from mergekit_ace.algebra.linear import merge_entries
from mergekit_ace.algebra.records import Factor
from mergekit_ace.methods.base import Citation, Merged, TaskVectorMethod, method_spec
from mergekit_ace.methods.inputs import TensorSettings, describe
from mergekit_ace.methods.parameters import LAMBDA, shared
from mergekit_ace.methods.shapes import tensor_names
from mergekit_ace.naming import layer_of, stack_size


def layer_coefficient(layer: int | None, layers: int, alpha: float, beta: float) -> float:
    """Return α + β·l/(L − 1), by which the sum of the task vectors is multiplied (Eq. 2).

    Args:
        layer: l, from 0; None outside of blocks, where the coefficient is α.
        layers: L; a single one counts as the deepest.
        alpha: in the first layer.
        beta: how much more in the last one.
    """
    if layer is None:
        return alpha
    return alpha + beta * (layer / (layers - 1) if layers > 1 else 1.0)


class LinesMerge(TaskVectorMethod):
    """LiNeS on task arithmetic: coefficients that rise linearly with depth.

    The paper's α is one over the number of experts, and its β is tuned as the coefficient of task
    arithmetic is; the default is what is used for that without data.
    """

    spec = method_spec(
        "lines",
        "LiNeS",
        "https://arxiv.org/abs/2410.17146",
        (
            LAMBDA,
            shared(
                "alpha",
                Factor | None,
                None,
                "The coefficient in the first layer and outside of layers; 1/T by default.",
            ),
            shared("beta", Factor, 0.4, "How much larger the coefficient of the last layer is."),
            shared(
                "layers",
                Annotated[int, Field(ge=1, strict=True)] | None,
                None,
                "How many layers the model has, where that cannot be read from the base.",
            ),
        ),
    )
    summary = "Adds the task vectors with a coefficient that rises linearly with depth."
    citations = (
        Citation(
            key="wang2025lines",
            authors="Wang, Ke and Dimitriadis, Nikolaos and Favero, Alessandro and "
            "Ortiz-Jiménez, Guillermo and Fleuret, François and Frossard, Pascal",
            title="{LiNeS}: Post-training Layer Scaling Prevents Forgetting and Enhances Model "
            "Merging",
            year=2025,
            arxiv="2410.17146",
            booktitle="International Conference on Learning Representations",
        ),
    )
    own_rule = "merged with a coefficient by depth"

    def check_settings(self, settings: TensorSettings) -> None:
        self._position(settings)

    def _position(self, settings: TensorSettings) -> tuple[int | None, int]:
        """Return l, None outside of blocks, and L.

        Raises:
            ValueError: it is not known how many layers there are.
        """
        name, given = settings.name, settings.parameters["layers"]
        layer = layer_of(name) if name else None
        if layer is None:
            return None, 1
        known = tensor_names(settings.base)
        layers = given or (stack_size(name or "", known) if known else 0)
        if layer < layers:
            return layer, layers
        found = (
            f"and `layers` is {given}: leave it out, or count all"
            if given
            else ("but how many layers there are is not known here: set `layers`")
        )
        raise ValueError(
            f"{self.spec.name}: {describe(name)} belongs to layer {layer} (counted from 0), {found}"
        )

    def coefficients(self, settings: TensorSettings, group: TensorGroup | None) -> Sequence[float]:
        """Return λ (α + β·l/(L − 1)) for every expert."""
        parameters = settings.parameters
        layer, layers = self._position(settings)
        count, alpha = len(settings.experts), parameters["alpha"]
        alpha = 1 / count if alpha is None else alpha
        share = parameters["lambda"] * layer_coefficient(layer, layers, alpha, parameters["beta"])
        return [share] * count

    def merge(self, tensors: Sequence[Tensor], settings: TensorSettings) -> Merged:
        assert settings.coefficients is not None
        return merge_entries(tensors[0], tensors[1:], settings.coefficients, self.spec.name)
