# SPDX-License-Identifier: Apache-2.0
"""mergekit parameters whose errors name the parameter, the value and what is allowed.

mergekit validates every value while it plans a merge, before a tensor is read.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Annotated, Any, get_args

from mergekit.merge_methods.base import ParameterScope, ParameterSpec
from pydantic import AfterValidator, BaseModel, ValidationError

from mergekit_ace.algebra.records import AceOptions, Layout, NonNegative, RelativeLayout
from mergekit_ace.coefficients.file import load_coefficients


@dataclass(frozen=True)
class NamedParameter(ParameterSpec):
    """A mergekit parameter that explains itself when its value is wrong.

    Attributes:
        allowed: what a value may be, in words.
        method: the merge method that has it.
    """

    allowed: str = ""
    method: str = "ace"

    def validate(self, value: Any) -> Any:
        """`value` as its type.

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


def _writable(path: str) -> str:
    """A report that cannot be written should be known before hours of merging, not after."""
    target = os.path.abspath(os.path.expanduser(path))
    folder = os.path.dirname(target)
    if not path or os.path.isdir(target):
        raise ValueError("this is not the name of a file")
    if not os.path.isdir(folder):
        raise ValueError(f"there is no folder {folder}")
    if not os.access(target if os.path.exists(target) else folder, os.W_OK):
        raise ValueError("no permission to write there")
    return target


ReportPath = Annotated[str, AfterValidator(_writable)]


def _loadable(path: str) -> str:
    """A file that cannot be used should be known before anything is merged."""
    load_coefficients(path)
    return path


CoefficientPath = Annotated[str, AfterValidator(_loadable)]

# The option's name in mergekit, where it differs from ours.
OPTION_NAMES = {"lambda": "scale"}

_ALLOWED = {
    "lambda": "a finite number",
    "epsilon": "a number, 0 or greater",
    "heterogeneity_threshold": "a number, 0 or greater",
    "structural_prior": "true or false",
    "centred": "true or false",
    "rank_fraction": "a number from 0 to 1",
}


def option(model: type[BaseModel], name: str, field: str, method: str) -> NamedParameter:
    """A shared parameter for a field of typed options, with its type, range and default.

    Args:
        model: the options.
        name: in mergekit.
        field: in the options.
        method: the merge method.
    """
    info = model.model_fields[field]
    value_type = info.annotation
    for constraint in info.metadata:
        value_type = Annotated[value_type, constraint]  # type: ignore[valid-type]
    return NamedParameter(
        name,
        value_type,
        ParameterScope.SHARED,
        default=info.default,
        allowed=_ALLOWED.get(name) or _one_of(value_type),
        method=method,
    )


def _one_of(literal: Any) -> str:
    return "one of " + ", ".join(get_args(literal))


OPTION_PARAMETERS: tuple[NamedParameter, ...] = tuple(
    option(AceOptions, name, OPTION_NAMES.get(name, name), "ace")
    for name in (
        "lambda",
        "epsilon",
        "epsilon_scale",
        "heterogeneity",
        "heterogeneity_threshold",
        "adaptive_normalization",
        "structural_prior",
        "spectral_refinement",
        "rank_fraction",
        "compute_dtype",
    )
)


def ace_options(parameters: Mapping[str, Any]) -> AceOptions:
    """The options among the resolved parameters of a tensor."""
    return AceOptions(
        **{OPTION_NAMES.get(p.name, p.name): parameters[p.name] for p in OPTION_PARAMETERS}
    )


def of_method(parameter: NamedParameter, method: str) -> NamedParameter:
    """The same parameter of another method."""
    return replace(parameter, method=method)


WEIGHT = NamedParameter(
    "weight",
    NonNegative,
    ParameterScope.NON_BASE,
    default=1.0,
    allowed="a number, 0 or greater (0 leaves the expert out)",
)
LAYOUT = NamedParameter(
    "layout", Layout, ParameterScope.SHARED, default="auto", allowed=_one_of(Layout)
)
RELATIVE_LAYOUT = replace(LAYOUT, value_type=RelativeLayout, allowed=_one_of(RelativeLayout))
COEFFICIENTS = NamedParameter(
    "coefficients",
    CoefficientPath | None,
    ParameterScope.SHARED,
    default=None,
    allowed="the path of a coefficients.safetensors that `mergekit-ace train` wrote",
)
TASK = NamedParameter(
    "task",
    str | None,
    ParameterScope.NON_BASE,
    default=None,
    allowed="the name that the expert has in the coefficient file",
)
REPORT = NamedParameter(
    "report",
    ReportPath | None,
    ParameterScope.SHARED,
    default=None,
    allowed="the path of a file in an existing folder that you may write to",
)
