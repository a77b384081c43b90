# SPDX-License-Identifier: Apache-2.0
"""`report.jsonl`: a line per tensor, as `inspect` writes it; a merge's `report` has part of it."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from mergekit_ace.algebra.inspection import MatrixInspection, TensorInspection
from mergekit_ace.methods.inputs import TensorSettings
from mergekit_ace.methods.report_lines import finite, line_head, record_fields
from mergekit_ace.report.line_fields import NUMBER_OR_INF, OF_MATRICES, wrong_field

Line = dict[str, Any]


class ReportError(ValueError):
    """Something in the config, the models or the folder is wrong; the message says what to do."""


def inspection_line(
    method: str, settings: TensorSettings, inspection: TensorInspection, seconds: float
) -> Line:
    """Return the line of one tensor: that of a merge's report, and what only a look can tell.

    Lists over experts are in the order of ``models``. Beside `MatrixRecord`'s fields there are
    those of `Comparison`, ``relative_size`` (‖Δ_t‖/‖W0‖, None where W0 is 0 or was not read), and
    for a matrix those of `Subspaces` and `MergedSpectrum` under ``subspaces`` and ``spectrum``. A
    stack of matrices has a list ``matrices``.

    Args:
        method: of the config.
        settings: of the tensor.
        inspection: of the tensor.
        seconds: that it took.
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
            line = json.loads(text)
            wrong = wrong_field(line)
        except (ValueError, RecursionError) as error:
            cut = number == len(texts)  # each line ends in a line break
            wrong = "it was cut off" if cut else f"it is no JSON ({error})"
        if wrong:
            raise ReportError(
                f"line {number} of {path} is not the line of a report: {wrong}; remove it, or give "
                "the file that `report:` of a merge, or `mergekit-ace inspect`, wrote"
            )
        lines[line["tensor"]] = _with_infinities(line)
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


def _with_infinities(line: Line) -> Line:
    """Return the line with numbers for what `finite` has written as text."""
    for matrix in matrices_of(line):
        for name, kind in OF_MATRICES.items():
            if kind is NUMBER_OR_INF and name in matrix:
                matrix[name] = float(matrix[name])  # type: ignore[index]
    return line


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
