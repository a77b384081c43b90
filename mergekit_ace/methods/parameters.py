# SPDX-License-Identifier: Apache-2.0
"""Parameters of merge methods: declared once, with a type that says what is allowed.

mergekit validates every value while it plans a merge, before a tensor is read.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from types import NoneType
from typing import Annotated, Any, Literal, get_args, get_origin, get_type_hints

from mergekit.merge_methods.base import ParameterScope, ParameterSpec
from pydantic import AfterValidator, BaseModel, Field, ValidationError
from pydantic.fields import FieldInfo

from mergekit_ace.algebra.task_vectors import Factor, Fraction, Layout, NonNegative, Side
from mergekit_ace.files.statistics import load_statistics
from mergekit_ace.methods.coefficients import load_coefficients
from mergekit_ace.naming import FileError

# Those that name files whose content goes into the result, and in which experts have names.
FILE_PARAMETERS = ("coefficients", "learner", "statistics", "covariances")


@dataclass(frozen=True)
class NamedParameter(ParameterSpec):
    """A mergekit parameter that explains itself when its value is wrong."""

    method: str = ""  # that has it

    @property
    def allowed(self) -> str:
        """What a value may be, in words such as "a number, 0 or greater"."""
        return describe_type(self.value_type)

    def validate(self, value: Any) -> Any:
        """Return `value` as its type, or raise a `ValueError` that names what is allowed."""
        try:
            return super().validate(value)
        except (ValidationError, FileError) as error:
            cause = error
            if isinstance(error, ValidationError):
                cause = error.errors()[0].get("ctx", {}).get("error")
            reason = f" ({cause})" if cause else ""
            raise ValueError(
                f"{self.method}: parameter {self.name!r} is {value!r}{reason}; "
                f"allowed: {self.allowed}"
            ) from None


def describe_type(value_type: Any) -> str:
    """Return in words what a value of a type, which may be optional, is allowed to be."""
    if NoneType in get_args(value_type):
        value_type = next(part for part in get_args(value_type) if part is not NoneType)
    info = FieldInfo.from_annotation(value_type)
    if info.description:
        return info.description
    if get_origin(info.annotation) is Literal:
        return "one of " + ", ".join(get_args(info.annotation))
    words: dict[Any, str] = {bool: "true or false", int: "a whole number", float: "a number"}
    return words.get(info.annotation, "text")


def shared(name: str, value_type: Any, default: Any, description: str) -> NamedParameter:
    """Declare a parameter of whole tensors; `description` is its line in the reference."""
    return NamedParameter(name, value_type, ParameterScope.SHARED, default, description)


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


_REPORT_START = b'{"tensor":'


def _report_path(path: str) -> str:
    """Check, before hours of merging, that a path is of a report or of a file that can be one."""
    target = Path(path).expanduser().absolute()
    if target.is_dir():
        raise ValueError("this is not the name of a file")
    if not target.parent.is_dir():
        raise ValueError(f"there is no folder {target.parent}")
    if target.is_file():
        with target.open("rb") as file:
            if not _REPORT_START.startswith(file.read(len(_REPORT_START))):
                raise ValueError("this file is no report, and lines would be appended to it")
    return str(target)


def _loads(load: Any) -> AfterValidator:
    """Return a check that a file can be loaded, before anything is merged."""

    def check(path: str) -> str:
        load(path)
        return path

    return AfterValidator(check)


ReportPath = Annotated[
    str,
    AfterValidator(_report_path),
    Field(description="the path of a file in an existing folder that you may write to"),
]
CoefficientPath = Annotated[
    str,
    _loads(load_coefficients),
    Field(description="the path of a coefficients.safetensors that `mergekit-ace train` wrote"),
]
StatisticsPath = Annotated[
    str,
    _loads(load_statistics),
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
REPORT = shared(
    "report", ReportPath | None, None, "The merge appends a JSON line per tensor to it."
)
