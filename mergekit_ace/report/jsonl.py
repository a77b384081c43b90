# SPDX-License-Identifier: Apache-2.0
"""`report.jsonl`: a line per tensor, as `inspect` writes it; a merge's `report` has part of it.

Fields that are not listed here are left alone: a later version may have more.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import (
    AfterValidator,
    BeforeValidator,
    ConfigDict,
    Field,
    TypeAdapter,
    ValidationError,
    ValidationInfo,
    with_config,
)
from typing_extensions import Required, TypedDict

from mergekit_ace.algebra.inspection import MatrixInspection, TensorInspection
from mergekit_ace.methods.inputs import TensorSettings
from mergekit_ace.methods.report_lines import finite, line_head, record_fields

Line = dict[str, Any]


class ReportError(ValueError):
    """Something in the config, the models or the folder is wrong; the message says what to do."""


def _one_each(values: list, info: ValidationInfo) -> list:
    if len(values) != info.context:
        raise ValueError(f"Input should have a value for each of {info.context} experts")
    return values


def _at_least_one_each(values: list, info: ValidationInfo) -> list:
    if len(values) < info.context:
        raise ValueError(f"Input should have at least {info.context} numbers")
    return values


def _from_text(value: Any) -> Any:
    """Return a number for what `finite` has written as text."""
    return float(value) if value in ("inf", "-inf") else value


def _no_nan(value: float) -> float:
    if math.isnan(value):
        raise ValueError("Input should be a number")
    return value


Each = AfterValidator(_one_each)
Count = Annotated[int, Field(ge=0)]
Number = Annotated[float, Field(allow_inf_nan=False)]
NumberOrInf = Annotated[float, BeforeValidator(_from_text), AfterValidator(_no_nan)]
PerExpert = Annotated[list[Number], Each]
PerExpertOrNone = Annotated[list[Number | None], Each]
Pairs = Annotated[list[PerExpertOrNone], Each]


def _line_kind(fields: dict[str, Any]) -> Any:
    """Return what checks an object: fields that it does not know are left alone."""
    kind = TypedDict("kind", fields, total=False)  # type: ignore[misc]
    return with_config(ConfigDict(extra="allow", strict=True))(kind)


SUBSPACES = {
    "size": Required[Count], "stable_rank": Required[PerExpertOrNone], "inputs": Required[Pairs],
    "outputs": Required[Pairs],
}  # fmt: skip
SPECTRUM = {
    "before": Required[list[Number]], "after": Required[list[Number]],
    "share_before": Required[Number], "share_after": Required[Number],
    "alignment": Required[list[Number] | None],
}  # fmt: skip
AGREEMENT = {
    "cosine": Required[Pairs], "size": Required[Count],
    "angles": Required[Annotated[list[list[Number] | None], Each]],
}  # fmt: skip
# Of a tensor, and of each of its matrices; a line has both where there is one matrix.
SHORT = {
    "tensor": Required[str | None], "models": Required[list[str]], "skipped": str, "method": str,
    "decisions_of": str,
}  # fmt: skip
OF_TENSORS = {
    **SHORT, "shape": Required[list[Count]], "layout": Required[str], "seconds": Number,
    "versions": dict, "coefficients": Annotated[list[Number], AfterValidator(_at_least_one_each)],
    "relative_size": PerExpertOrNone, "base_norm": Number | None, "norm": PerExpert,
    "unchanged": PerExpert, "cosine": Pairs, "unit": Number,
    "histogram": Annotated[list[list[Count]], Each],
}  # fmt: skip
OF_MATRICES = {
    "rule": Required[str], "weight": Required[PerExpert], "tau": Required[PerExpert],
    "changed": PerExpert, "noise": PerExpert, "gamma": NumberOrInf, "log_variance": NumberOrInf,
    "statistic": Literal["gamma", "log_variance"], "threshold": NumberOrInf,
    "heterogeneous": bool, "normalized": bool, "prior": bool, "refined": bool,
    "epsilon": PerExpertOrNone, "share": PerExpertOrNone, "ridge": NumberOrInf, "raised": bool,
    "amplification": NumberOrInf, "rank": Count, "sigma_iso": Number, "form": str,
    "condition": NumberOrInf, "precision": str, "mix": Number, "subspaces": _line_kind(SUBSPACES),
    "spectrum": _line_kind(SPECTRUM), "agreement": _line_kind(AGREEMENT),
}  # fmt: skip
_STACK = {**OF_TENSORS, "matrices": Required[list[_line_kind(OF_MATRICES)]]}
_SHORT_LINE, _STACK_LINE, _SINGLE_LINE = (
    TypeAdapter(_line_kind(fields)) for fields in (SHORT, _STACK, {**OF_TENSORS, **OF_MATRICES})
)

# Fields that come together: where one of the first is, all of the second are.
INSPECTED = ("relative_size", "base_norm", "norm", "unchanged", "cosine", "unit", "histogram")
DECIDED = (
    "statistic", "gamma", "log_variance", "threshold", "heterogeneous", "normalized", "refined",
    "epsilon", "condition",
)  # fmt: skip
TOGETHER = (
    (INSPECTED, INSPECTED),
    (("statistic", "heterogeneous", "refined"), DECIDED),
    (("refined",), ("rank",)),
    (("ridge", "amplification"), ("ridge", "amplification")),
)


def checked_line(line: Any) -> Line:
    """Return a line of a report, with numbers for what `finite` has written as text.

    Raises:
        ValueError: naming the field that is missing, or holds something else.
    """
    if not isinstance(line, dict):
        raise ValueError(f"it holds {_shown(line)} instead of an object")
    kind = _STACK_LINE if "matrices" in line else _SINGLE_LINE
    models = line.get("models")
    count = len(models) if isinstance(models, list) else 0
    try:
        found = (_SHORT_LINE if "skipped" in line else kind).validate_python(line, context=count)
    except ValidationError as error:
        first = error.errors()[0]
        place, what = ".".join(map(str, first["loc"])), first["msg"].removeprefix("Value error, ")
        if first["type"] == "missing":
            raise ValueError(f"it lacks the field {place}") from error
        raise ValueError(f"its field {place} holds {_shown(first['input'])}: {what}") from error
    for some, needed in TOGETHER if "skipped" not in line else ():
        for matrix in (found, *found.get("matrices", ())):
            lacking = next((name for name in needed if name not in matrix), None)
            if lacking and any(name in matrix for name in some):
                raise ValueError(f"it lacks the field {lacking}")
    return found


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}…"


def inspection_line(
    method: str, settings: TensorSettings, inspection: TensorInspection, seconds: float
) -> Line:
    """Return the line of one tensor: that of a merge's report, and what only a look can tell.

    Lists over experts are in the order of ``models``. Beside `MatrixRecord`'s fields there are
    those of `Comparison`, ``relative_size`` (‖Δ_t‖/‖W0‖, None where W0 is 0 or was not read), and
    for a matrix those of `Subspaces` and `MergedSpectrum` under ``subspaces`` and ``spectrum``. A
    stack of matrices has a list ``matrices``.
    """
    comparison = inspection.comparison
    base = comparison.base_norm
    line: Line = {
        **line_head(method, settings, inspection.shape, inspection.layout, seconds),
        "relative_size": [norm / base if base else None for norm in comparison.norm],
        **asdict(comparison),
    }
    matrices = [_matrix_fields(matrix) for matrix in inspection.matrices]
    if len(matrices) == 1:
        return finite({**line, **matrices[0]})
    return finite({**line, "matrices": matrices})


def _matrix_fields(matrix: MatrixInspection) -> Line:
    fields = record_fields(matrix.record)
    for name in ("subspaces", "spectrum"):
        part = getattr(matrix, name)
        if part is not None:
            fields[name] = asdict(part)
    return fields


def read_lines(path: Path) -> list[Line]:
    """Return the last line of each tensor in a report; numbers that JSON lacks as floats.

    Raises:
        ReportError: the file is missing, empty, or no report of one merge; the message names the
            line and the field.
    """
    try:
        texts = path.read_text(encoding="utf-8-sig").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise ReportError(f"{path} cannot be read: {error}") from error
    lines: dict[str | None, Line] = {}
    for number, text in enumerate(texts, start=1):
        if not text.strip():
            continue
        try:
            line = checked_line(json.loads(text))
        except (ValueError, RecursionError) as error:
            wrong = str(error)
            if isinstance(error, json.JSONDecodeError | RecursionError):
                cut = number == len(texts)  # each line ends in a line break
                wrong = "it was cut off" if cut else f"it is no JSON ({error})"
            raise ReportError(
                f"line {number} of {path} is not the line of a report: {wrong}; remove it, or give "
                "the file that `report:` of a merge, or `mergekit-ace inspect`, wrote"
            ) from error
        lines[line["tensor"]] = line
    if not lines:
        raise ReportError(
            f"{path} has no lines: no tensor was merged; give the report of a finished merge"
        )
    methods = sorted({line["method"] for line in lines.values() if "method" in line})
    if len(methods) > 1:
        raise ReportError(
            f"{path} holds lines of several merges, by {' and '.join(methods)}; keep those of one"
        )
    return list(lines.values())


def matrices_of(line: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """Return what a line says of its matrices, one or more."""
    return line.get("matrices", [line])


def complete_lines(path: Path) -> int:
    """Cut off an unfinished last line, which a killed process left; return how many remain."""
    if not path.exists():
        return 0
    with open(path, "r+b") as file:
        content = file.read()
        end = content.rfind(b"\n") + 1
        if end != len(content):
            file.truncate(end)
            os.fsync(file.fileno())
    return content.count(b"\n")
