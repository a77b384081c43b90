# SPDX-License-Identifier: Apache-2.0
"""Parameters of merge methods: declared once, with a type that says what is allowed.

mergekit validates every value while it plans a merge, before a tensor is read.
"""

from __future__ import annotations

import os
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from types import NoneType
from typing import Annotated, Any, Literal, TypeVar, get_args, get_origin

from annotated_types import Ge, Gt, Le
from mergekit.merge_methods.base import ParameterScope, ParameterSpec, TensorGroup
from pydantic import AfterValidator, BaseModel, ValidationError
from pydantic.fields import FieldInfo

from mergekit_ace.algebra.low_rank import CoreSpace
from mergekit_ace.algebra.task_vectors import (
    Factor,
    FixedLayout,
    Fraction,
    Layout,
    NonNegative,
    Side,
)

Options = TypeVar("Options", bound=BaseModel)
# Those that name files whose content goes into the result, and in which experts have names.
FILE_PARAMETERS = ("coefficients", "learner", "statistics", "covariances")


@dataclass(frozen=True)
class NamedParameter(ParameterSpec):
    """A mergekit parameter that explains itself when its value is wrong.

    Attributes:
        method: the merge method that has it.
    """

    method: str = ""

    @property
    def allowed(self) -> str:
        """What a value may be, in words."""
        return describe_type(self.value_type)

    def validate(self, value: Any) -> Any:
        """Return `value` as its type.

        Raises:
            ValueError: naming the parameter, the value and what is allowed.
        """
        try:
            return super().validate(value)
        except ValidationError as error:
            detail = error.errors()[0]
            cause = detail.get("ctx", {}).get("error")
            reason = f" ({cause})" if cause else ""
            raise ValueError(
                f"{self.method}: parameter {self.name!r} is {value!r}{reason}; "
                f"allowed: {self.allowed}"
            ) from None


@dataclass(frozen=True)
class Meaning:
    """Part of an annotation: what a value of the type is, where no range can tell."""

    words: str


def describe_type(value_type: Any) -> str:
    """Return in words what a value of a type may be, such as "a number, 0 or greater"."""
    if NoneType in get_args(value_type):
        value_type = next(part for part in get_args(value_type) if part is not NoneType)
    if get_origin(value_type) is Literal:
        return "one of " + ", ".join(get_args(value_type))
    info = FieldInfo.from_annotation(value_type)
    for part in info.metadata:
        if isinstance(part, Meaning):
            return part.words
    if info.annotation is bool:
        return "true or false"
    if info.annotation not in (int, float):
        return "text"
    low: Any = next((part.ge for part in info.metadata if isinstance(part, Ge)), None)
    above: Any = next((part.gt for part in info.metadata if isinstance(part, Gt)), None)
    high: Any = next((part.le for part in info.metadata if isinstance(part, Le)), None)
    number = "a whole number" if info.annotation is int else "a number"
    limit = f", and at most {_plain(high)}" if high is not None else ""
    if low is not None and high is not None and high == -low:
        return f"a finite number, at most {_plain(high)} in size"
    if low is not None and high is not None and high <= 1:
        return f"{number} from {_plain(low)} to {_plain(high)}"
    if low is not None:
        return f"{number}, {low} or greater{limit}"
    if above is not None:
        return f"{number} above {above}{limit}"
    return number if info.annotation is int else "a finite number"


def _plain(limit: float) -> str:
    """Return a limit as people write it: 1e15, not 1000000000000000.0 nor 1e+15."""
    return f"{limit:g}".replace("e+", "e")


def shared(name: str, value_type: Any, default: Any, description: str) -> NamedParameter:
    """Declare a parameter of whole tensors; `description` is its line in the reference."""
    return NamedParameter(name, value_type, ParameterScope.SHARED, default, description)


def per_expert(name: str, value_type: Any, default: Any, description: str) -> NamedParameter:
    """Declare a parameter that every expert has for itself, under `models:`."""
    return NamedParameter(name, value_type, ParameterScope.NON_BASE, default, description)


def option_parameters(model: type[BaseModel]) -> tuple[NamedParameter, ...]:
    """Return the fields of typed options as parameters, under their aliases."""
    parameters = []
    for field, info in model.model_fields.items():
        value_type: Any = info.annotation
        for constraint in info.metadata:
            value_type = Annotated[value_type, constraint]
        assert info.description is not None, field
        parameters.append(shared(info.alias or field, value_type, info.default, info.description))
    return tuple(parameters)


def options_from(model: type[Options], parameters: Mapping[str, Any]) -> Options:
    """Return the options among the resolved parameters of a tensor."""
    names = {info.alias or field for field, info in model.model_fields.items()}
    return model.model_validate({name: parameters[name] for name in names})


_REPORT_START = b'{"tensor":'


def _writable(path: str) -> str:
    """Check that a report can be written: better known before hours of merging than after.

    Lines are appended, so a file that is there has to be a report: no model, no config.
    """
    target = os.path.abspath(os.path.expanduser(path))
    folder = os.path.dirname(target)
    if not path or os.path.isdir(target):
        raise ValueError("this is not the name of a file")
    if not os.path.isdir(folder):
        raise ValueError(f"there is no folder {folder}")
    if not os.access(target if os.path.exists(target) else folder, os.W_OK):
        raise ValueError("no permission to write there")
    if os.path.isfile(target) and not _is_report(target):
        raise ValueError("this file is no report, and lines would be appended to it")
    return target


def _is_report(path: str) -> bool:
    """Tell whether a file is empty or begins as a report does, of which a kill may have cut off."""
    with open(path, "rb") as file:
        return _REPORT_START.startswith(file.read(len(_REPORT_START)))


def _has_coefficients(path: str) -> str:
    """Check that a file can be loaded, before anything is merged."""
    from mergekit_ace.methods.coefficients import load_coefficients  # few merges need it

    load_coefficients(path)
    return path


def _has_statistics(path: str) -> str:
    from mergekit_ace.files.statistics import load_statistics

    load_statistics(path)
    return path


ReportPath = Annotated[
    str,
    AfterValidator(_writable),
    Meaning("the path of a file in an existing folder that you may write to"),
]
CoefficientPath = Annotated[
    str,
    AfterValidator(_has_coefficients),
    Meaning("the path of a coefficients.safetensors that `mergekit-ace train` wrote"),
]
StatisticsPath = Annotated[
    str,
    AfterValidator(_has_statistics),
    Meaning("the path of a statistics.json that `mergekit-ace statistics` wrote"),
]
TaskName = Annotated[
    str, Meaning("the name that the expert has in the file of coefficients or statistics")
]

LAMBDA = shared("lambda", Factor, 1.0, "Scale λ; the result is W0 + λ X.")
WEIGHT = per_expert(
    "weight",
    NonNegative,
    1.0,
    "How much the expert counts; only ratios matter, and 0 leaves it out.",
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
    "task",
    TaskName | None,
    None,
    "Needed where the file knows the expert by another path.",
)
STATISTICS = shared(
    "statistics",
    StatisticsPath | None,
    None,
    "What `mergekit-ace statistics` measured on samples; required.",
)
COVARIANCES = shared(
    "covariances",
    StatisticsPath | None,
    None,
    "Covariances that `mergekit-ace statistics` measured on samples; they replace a share of the "
    "estimates. Tensors without a measurement keep their estimate.",
)
MIX = shared(
    "mix",
    Fraction,
    0.25,
    "Share of the measured covariance: 0 is the estimate alone, 1 the measurement alone.",
)
REPORT = shared(
    "report",
    ReportPath | None,
    None,
    "The merge appends a JSON line per tensor to it.",
)


@dataclass(frozen=True)
class TensorSettings:
    """One tensor of a merge: of which models, and with which parameters.

    Attributes:
        name: of the tensor; None for one in memory without a name.
        base, experts: the models, as mergekit refers to them.
        parameters: resolved, by name; those of experts by model.
        layout: how the tensor is read; ``mean`` where it is no matrix, or none is needed.
        coefficients: that its merge uses; None where it has none.
        recorded: whether somebody will read the record of the merge.
        space: of which the tensors are cores, where all task vectors are of low rank.
    """

    name: str | None
    base: Hashable
    experts: tuple[Hashable, ...]
    parameters: Mapping[str, Any]
    layout: FixedLayout = "mean"
    coefficients: Sequence[float] | None = None
    recorded: bool = False
    space: CoreSpace | None = None

    @classmethod
    def of(cls, group: TensorGroup, parameters: Mapping[str, Any]) -> TensorSettings:
        """Return those of a group with its resolved parameters."""
        assert group.base is not None  # the contract of our methods requires it
        experts = tuple(expert.id for expert in group.non_base)
        recorded = parameters.get("report") is not None
        return cls(group.metadata.name, group.base.id, experts, parameters, recorded=recorded)

    @property
    def models(self) -> list[str]:
        """Names of the experts."""
        return [str(expert) for expert in self.experts]

    @property
    def weights(self) -> list[float]:
        """w_t of the experts; 1 for methods without weights."""
        return self.of_experts("weight", 1.0)

    def of_experts(self, name: str, default: Any) -> list[Any]:
        """Return a parameter of every expert; `default` where the method has none."""
        own = self.parameters.get(name)
        return [default if own is None else own[expert] for expert in self.experts]
