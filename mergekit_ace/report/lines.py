# SPDX-License-Identifier: Apache-2.0
"""`report.jsonl`: a line per tensor, as `inspect` writes it; a merge's `report` has part of it."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from mergekit_ace.algebra.inspection import MatrixInspection, TensorInspection
from mergekit_ace.methods.report import finite, record_fields, versions
from mergekit_ace.report.errors import ReportError

Line = dict[str, Any]


def inspection_line(
    name: str, models: Sequence[str], inspection: TensorInspection, seconds: float
) -> Line:
    """The line of one tensor: the fields of a merge's report, and what only a look can tell.

    Lists over experts are in the order of ``models``. Beside `MatrixRecord`'s fields there are
    those of `Comparison`, ``relative_size`` (‖Δ_t‖/‖W0‖, None where W0 = 0), and for a matrix those
    of `Subspaces` and `MergedSpectrum` under ``subspaces`` and ``spectrum``. A stack of matrices
    has a list ``matrices``.
    """
    comparison = inspection.comparison
    base = comparison.base_norm
    line: Line = {
        "tensor": name,
        "shape": list(inspection.shape),
        "layout": inspection.layout,
        "models": list(models),
        "seconds": round(seconds, 6),
        "versions": versions(),
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
    """The lines of a report, the last one of each tensor; numbers that JSON lacks as floats.

    Raises:
        ReportError: the file is missing, empty, or no report.
    """
    try:
        texts = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ReportError(f"{path} cannot be read: {error}") from error
    lines: dict[str | None, Line] = {}
    for number, text in enumerate(texts, start=1):
        try:
            line = json.loads(text)
            lines[line["tensor"]] = _checked(line)
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ReportError(
                f"line {number} of {path} is not the line of a report; give the file that "
                "`report:` of a merge, or `mergekit-ace inspect`, wrote"
            ) from error
    if not lines:
        raise ReportError(f"{path} has no lines: no tensor was merged")
    return list(lines.values())


def matrices_of(line: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """What a line says of its matrices, one or more."""
    return line.get("matrices", [line])


def complete_lines(path: Path) -> int:
    """Cut an unfinished last line off, which a killed process left; how many lines remain."""
    if not path.exists():
        return 0
    with open(path, "r+b") as file:
        content = file.read()
        end = content.rfind(b"\n") + 1
        if end != len(content):
            file.truncate(end)
            os.fsync(file.fileno())
    return content.count(b"\n")


def _checked(line: Line) -> Line:
    """The line with an infinite γ as a number, once it has what every line has."""
    for matrix in matrices_of(line) if "skipped" not in line else ():
        if matrix["rule"] == "ace":
            if not {"statistic", "threshold", "condition"} <= matrix.keys():
                raise KeyError("written by another version")
            matrix["gamma"] = float(matrix["gamma"])  # type: ignore[index]
    return line
