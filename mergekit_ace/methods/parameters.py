# SPDX-License-Identifier: Apache-2.0
"""Parameters of merge methods: declared once, with a type that says what is allowed.

mergekit validates every value while it plans a merge, before a tensor is read.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal, get_type_hints

from mergekit.merge_methods.base import ParameterScope
from pydantic import AfterValidator, BaseModel, Field

from mergekit_ace.algebra.task_vectors import Factor, Fraction, Layout, NonNegative, Side
from mergekit_ace.files.statistics import load_statistics
from mergekit_ace.methods.base import NamedParameter, shared
from mergekit_ace.methods.coefficients import load_coefficients


def per_expert(name: str, value_type: Any, default: Any, description: str) -> NamedParameter:
    """Declare a parameter that every expert has for itself, under `models:`."""
    return NamedParameter(name, value_type, ParameterScope.NON_BASE, default, description)


def option_parameters(model: type[BaseModel]) -> tuple[NamedParameter, ...]:
    """Return the fields of typed options as parameters, under their aliases."""
    types = get_type_hints(model, include_extras=True)
    return tuple(
        shared(info.alias or field, types[field], info.default, info.description or "")
        for field, info in model.model_fields.items()
    )


# That a file can be loaded is known once the config is read, before anything is merged.
CoefficientPath = Annotated[
    str,
    AfterValidator(lambda path: load_coefficients(path) and path),
    Field(description="the path of a coefficients.safetensors that `mergekit-ace train` wrote"),
]
StatisticsPath = Annotated[
    str,
    AfterValidator(lambda path: load_statistics(path) and path),
    Field(description="the path of a statistics.json that `mergekit-ace statistics` wrote"),
]
TaskName = Annotated[
    str, Field(description="the name that the expert has in the file of coefficients or statistics")
]

LAMBDA = shared("lambda", Factor, 1.0, "Scale λ; the result is W0 + λ X.")
WEIGHT = per_expert(
    "weight", NonNegative, 1.0, "How much the expert counts; only ratios matter; 0 leaves it out."
)
LAYOUT = shared(
    "layout",
    Layout,
    "auto",
    "How the tensor is read as matrices; mean averages it. auto asks the architecture of the base.",
)
SIDE = shared(
    "side",
    Literal["auto", Side],
    "auto",
    "Whose covariances are estimated: a layer's inputs, by ΔᵀΔ as in the paper, or the gradients "
    "at its outputs, by ΔΔᵀ. auto: outputs if all experts are LoRA adapters and neither "
    "coefficients nor covariances are given, else inputs. Embeddings always use inputs.",
)
COEFFICIENTS = shared(
    "coefficients", CoefficientPath | None, None, "The file with learned coefficients."
)
TASK = per_expert(
    "task", TaskName | None, None, "Needed where the file knows the expert by another path."
)
STATISTICS = shared(
    "statistics", StatisticsPath | None, None, "What `mergekit-ace statistics` measured; required."
)
COVARIANCES = shared(
    "covariances",
    StatisticsPath | None,
    None,
    "Covariances that `mergekit-ace statistics` measured on samples; they replace a share of the "
    "estimates. Tensors without a measurement keep their estimate.",
)
MIX = shared("mix", Fraction, 0.25, "Share of the measured covariance; 0 is the estimate alone.")
INPUTS = (COEFFICIENTS, COVARIANCES, MIX, TASK)  # what files know of the inputs of a matrix
