# SPDX-License-Identifier: Apache-2.0
"""`report.jsonl`: a line per tensor, as `inspect` writes it; a merge's `report` has part of it.

Fields that are not listed here are left alone: a later version may have more.
"""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter, ValidationError

from mergekit_ace.algebra.covariance_agreement import CovarianceAgreement
from mergekit_ace.algebra.inspection import (
    Comparison,
    MatrixInspection,
    MergedSpectrum,
    Subspaces,
    TensorInspection,
)
from mergekit_ace.algebra.records import MatrixRecord
from mergekit_ace.methods.parameters import TensorSettings
from mergekit_ace.methods.report_lines import finite, line_head, record_fields


class ReportError(ValueError):
    """Something in the config, the models or the folder is wrong; the message says what to do."""


@dataclass(frozen=True)
class MatrixLine(MatrixRecord):
    """What a line says of a matrix: the record of its merge, and what only `inspect` measures."""

    subspaces: Subspaces | None = None
    spectrum: MergedSpectrum | None = None
    agreement: CovarianceAgreement | None = None


@dataclass(frozen=True)
class Line:
    """One tensor in a report.

    Attributes:
        models: the experts; lists over experts are in their order.
        matrices: one, or one per stacked matrix; none of a tensor that was skipped.
        layout: how the tensor was read.
        coefficients: of the components, and of the refinement, where they are not all 1.
        relative_size: ‖Δ_t‖/‖W0‖, None where W0 is 0 or was not read.
        comparison: of all entries; None in the report of a merge.
        decisions_of: the method whose decisions are shown in the place of the merge's own.
        skipped: why the tensor was not compared; empty if it was.
    """

    tensor: str | None
    models: tuple[str, ...]
    matrices: tuple[MatrixLine, ...] = ()
    method: str = ""
    shape: tuple[int, ...] = ()
    layout: str = ""
    versions: dict[str, str] = field(default_factory=dict)
    coefficients: tuple[float, ...] | None = None
    relative_size: tuple[float | None, ...] | None = None
    comparison: Comparison | None = None
    decisions_of: str | None = None
    skipped: str = ""

    @property
    def name(self) -> str:
        """The name of the tensor as text."""
        return str(self.tensor)


_LINE = TypeAdapter(Line)
_COMPARED = ("norm", "base_norm", "unchanged", "cosine", "unit", "histogram")
# What `ace` decides with a statistic, and what comes with a ridge.
_DECIDED = (
    "gamma", "log_variance", "threshold", "heterogeneous", "normalized", "refined", "rank",
)  # fmt: skip
_WITH_RIDGE = ("ridge", "amplification")


def parse_line(content: Any) -> Line:
    """Return a line of a report from its JSON.

    In a file, the fields of a single matrix and those of `Comparison` stand beside the others.

    Raises:
        ValueError: naming the field that is missing, or holds something else.
    """
    if not isinstance(content, dict):
        raise ValueError(f"it holds {_shown(content)} instead of an object")
    nested: dict[str, Any] = {}
    if "skipped" not in content:
        nested["matrices"] = content.get("matrices", [content])
        for name in ("method", "shape", "layout"):
            if name not in content:
                raise ValueError(f"it lacks the field {name}")
    if any(name in content for name in _COMPARED):
        nested["comparison"] = content
    try:
        line = _LINE.validate_python({**content, **nested})
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(map(str, first["loc"])).removeprefix("comparison.")
        if "matrices" not in content:
            place = place.removeprefix("matrices.0.")
        if first["type"] == "missing":
            raise ValueError(f"it lacks the field {place}") from error
        raise ValueError(
            f"its field {place} holds {_shown(first['input'])}: {first['msg']}"
        ) from error
    _check_together(line)
    return line


def _check_together(line: Line) -> None:
    """Raise a `ValueError` unless every expert has its values, and what belongs together is there.

    All lists of these records are of the experts, but for those of spectra.
    """
    count = len(line.models)
    parts = [line, line.comparison]
    parts += [part for m in line.matrices for part in (m, m.subspaces, m.agreement)]
    for part in filter(None, parts):
        for name, values in vars(part).items():
            if not isinstance(values, tuple) or name in ("shape", "matrices"):
                continue
            tables = values if name in ("cosine", "inputs", "outputs") else ()
            few = len(values) < count if name == "coefficients" else len(values) != count
            if few or any(len(row) != count for row in tables):
                raise ValueError(
                    f"its field {name} holds {_shown(values)}: there should be a value for each of "
                    f"{count} experts"
                )
    for matrix in line.matrices:
        if len(line.shape) < 2 and (matrix.subspaces or matrix.agreement):
            raise ValueError(f"its field shape holds {_shown(line.shape)}: a matrix has two axes")
        needed = _DECIDED if matrix.statistic else ()
        needed += _WITH_RIDGE if any(getattr(matrix, n) is not None for n in _WITH_RIDGE) else ()
        for name in needed:
            if getattr(matrix, name) is None:
                raise ValueError(f"it lacks the field {name}")
    if line.comparison and line.relative_size is None:
        raise ValueError("it lacks the field relative_size")


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}…"


def inspection_line(
    method: str, settings: TensorSettings, inspection: TensorInspection, seconds: float
) -> dict[str, Any]:
    """Return the JSON of a line of `inspect`; see `Line`."""
    comparison = inspection.comparison
    base = comparison.base_norm
    line: dict[str, Any] = {
        **line_head(method, settings, inspection.shape, inspection.layout, seconds),
        "relative_size": [norm / base if base else None for norm in comparison.norm],
        **asdict(comparison),
    }
    matrices = [_matrix_fields(matrix) for matrix in inspection.matrices]
    if len(matrices) == 1:
        return finite({**line, **matrices[0]})
    return finite({**line, "matrices": matrices})


def _matrix_fields(matrix: MatrixInspection) -> dict[str, Any]:
    looked_at = {"subspaces": matrix.subspaces, "spectrum": matrix.spectrum}
    found = {name: asdict(part) for name, part in looked_at.items() if part is not None}
    return {**record_fields(matrix.record), **found}


def read_lines(path: Path) -> list[Line]:
    """Return the last line of each tensor in a report, and all lines of tensors without a name.

    Raises:
        ReportError: the file is missing, empty, or no report of one merge; the message names the
            line and the field.
    """
    try:
        texts = path.read_text(encoding="utf-8-sig").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise ReportError(f"{path} cannot be read: {error}") from error
    lines: dict[str | int, Line] = {}
    for number, text in enumerate(texts, start=1):
        if not text.strip():
            continue
        try:
            line = parse_line(json.loads(text))
        except (ValueError, RecursionError) as error:
            wrong = str(error)
            if isinstance(error, json.JSONDecodeError | RecursionError):
                cut = number == len(texts)  # each line ends in a line break
                wrong = "it was cut off" if cut else f"it is not JSON ({error})"
            raise ReportError(
                f"line {number} of {path} is not the line of a report: {wrong}; remove it, or give "
                "the file that `report:` of a merge, or `mergekit-ace inspect`, wrote"
            ) from error
        lines[number if line.tensor is None else line.tensor] = line
    if not lines:
        raise ReportError(
            f"{path} has no lines: no tensor was merged; give the report of a finished merge"
        )
    methods = sorted({line.method for line in lines.values() if line.method})
    if len(methods) > 1:
        raise ReportError(
            f"{path} holds lines of several merges, by {' and '.join(methods)}; keep those of one"
        )
    return list(lines.values())


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
