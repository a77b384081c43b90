# SPDX-License-Identifier: Apache-2.0
"""`merge_method: lines`: Wang et al., "LiNeS: Post-training Layer Scaling", ICLR 2025."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

from mergekit.merge_methods.base import TensorGroup
from pydantic import Field
from torch import Tensor

from mergekit_ace.algebra.records import Number
from mergekit_ace.algebra.task_vectors import merge_linear
from mergekit_ace.methods.inputs import describe
from mergekit_ace.methods.peers.decomposed import parameter
from mergekit_ace.methods.shapes import tensor_names
from mergekit_ace.methods.task_vectors import TaskVectorMethod, method_spec
from mergekit_ace.naming import layer_of, stack_size


def layer_coefficient(layer: int | None, layers: int, alpha: float, beta: float) -> float:
    """α + β·l/(L − 1): what the sum of the task vectors is multiplied by (the paper's Eq. 2).

    Args:
        layer: l, from 0; None outside of blocks, where the coefficient is α.
        layers: L; a single one counts as the deepest.
        alpha: in the first layer.
        beta: how much more in the last one.
    """
    if layer is None:
        return alpha
    return alpha + beta * (layer / (layers - 1) if layers > 1 else 1.0)


NAME = "lines"


class Method(TaskVectorMethod):
    """LiNeS on task arithmetic: coefficients that rise linearly with depth.

    The paper's α is one over the number of experts, and its β is tuned as the coefficient of task
    arithmetic is; the default is what is used for that without data.
    """

    layouts = False
    spec = method_spec(
        NAME,
        "LiNeS",
        "https://arxiv.org/abs/2410.17146",
        (
            parameter(NAME, "lambda", Number, 1.0, "a finite number"),
            parameter(NAME, "alpha", Number | None, None, "a finite number"),
            parameter(NAME, "beta", Number, 0.4, "a finite number"),
            parameter(
                NAME,
                "layers",
                Annotated[int, Field(ge=1, strict=True)] | None,
                None,
                "how many layers the model has, a whole number above 0",
            ),
        ),
    )

    def merge(self, group: TensorGroup, parameters: Mapping[str, Any]) -> Tensor:
        base, experts = group.base, group.non_base
        assert base is not None  # the contract requires it
        name, alpha = group.metadata.name, parameters["alpha"]
        layer = layer_of(name) if name else None
        layers = 1
        if layer is not None:
            known = tensor_names(base.id)
            layers = parameters["layers"] or (stack_size(name, known) if known else 0)
            if layer >= layers:
                raise ValueError(
                    f"{NAME}: {describe(name)} belongs to layer {layer}, but how many layers there "
                    "are is not known here: set `layers`."
                )
        alpha = 1 / len(experts) if alpha is None else alpha
        share = parameters["lambda"] * layer_coefficient(layer, layers, alpha, parameters["beta"])
        tensors = [entry.tensor for entry in experts]
        return merge_linear(base.tensor, tensors, [share] * len(tensors))
