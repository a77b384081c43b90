# SPDX-License-Identifier: Apache-2.0
"""The files that a report consists of."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from mergekit_ace.files import write_text
from mergekit_ace.methods.report import finite
from mergekit_ace.report.errors import ReportError
from mergekit_ace.report.lines import Line
from mergekit_ace.report.page import render
from mergekit_ace.report.summary import summarize
from mergekit_ace.report.tables import Report


def write_summary(lines: Sequence[Line], path: Path) -> dict[str, Any]:
    """Write `summary.json`; its content."""
    summary = summarize(Report(lines))
    _write(path, json.dumps(finite(summary), indent=1, ensure_ascii=False) + "\n")
    return summary


def write_page(lines: Sequence[Line], path: Path, title: str, subtitle: str) -> None:
    """Write the HTML page, whole or not at all."""
    report = Report(lines)
    if not report.lines:
        raise ReportError("no tensor could be compared: there is nothing to show")
    _write(path, render(report, summarize(report)["sentences"], title, subtitle))


def _write(path: Path, text: str) -> None:
    try:
        write_text(path, text)
    except OSError as error:
        raise ReportError(f"{path} cannot be written: {error}") from error
