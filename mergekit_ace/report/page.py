# SPDX-License-Identifier: Apache-2.0
"""`report.html`: one file with everything in it, that opens without a network."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any

import click
from jinja2 import Environment, StrictUndefined
from plotly.io import to_json
from plotly.offline import get_plotlyjs

from mergekit_ace.files.saving import write_text
from mergekit_ace.report.figures import draw_pictures
from mergekit_ace.report.jsonl import Line, ReportError, read_lines
from mergekit_ace.report.summary import summarize
from mergekit_ace.report.tables import Report, Row

Value = float | str | None
# Fields of `MatrixLine` that are columns: their headings and what these mean.
_FIELDS = {
    "rule": ("rule", "How the tensor is merged"),
    "heterogeneous": ("heterogeneous", "What step 1 of ACE decides"),
    "form": ("form", "How it is computed"),
    "gamma": ("γ", "Heterogeneity, Eq. 7"),
    "log_variance": ("var log τ", "Variance of log τ, which has no unit"),
    "ridge": ("ridge", "ε̄ in mean eigenvalues of Σ S_t, as used"),
    "amplification": ("amplification", "‖X‖² / Σ ‖Δ_t‖² of the closed form"),
}


@dataclass(frozen=True)
class Column:
    """A column of the table.

    Attributes:
        help: what the heading means.
        cells: what each row shows, and the number that it is sorted by; None for text.
    """

    title: str
    help: str
    cells: list[tuple[str, float | None]]

    @property
    def textual(self) -> bool:
        """Whether it holds no numbers."""
        return all(number is None for _, number in self.cells)


def write_page(lines: Sequence[Line], path: Path, subtitle: str) -> None:
    """Write the page of a report, whole or not at all.

    Args:
        subtitle: where the report comes from.

    Raises:
        ReportError: no tensor could be compared.
        OSError: the page cannot be written.
    """
    report = Report(lines)
    if not report.lines:
        raise ReportError("no tensor could be compared: there is nothing to show")
    write_text(path, render(report, subtitle))


def show_report(lines: Path, out: Path) -> None:
    """`mergekit-ace report`: write a page from the JSON lines of a merge.

    Raises:
        ReportError: the file holds no lines of a report, or the page would replace it.
    """
    if out.exists() and out.samefile(lines):
        raise ReportError(f"the page would replace {lines}; name another file with --out")
    write_page(read_lines(lines), out, f"From {lines.name}, written by the merge.")
    click.echo(str(out))


def render(report: Report, subtitle: str) -> str:
    """Return the page as HTML."""
    template = files("mergekit_ace.report").joinpath("page.html.jinja").read_text("utf-8")
    environment = Environment(autoescape=True, undefined=StrictUndefined)
    pictures = draw_pictures(report)
    figures = {picture.name: json.loads(to_json(picture.figure)) for picture in pictures}
    columns = _columns(report)
    return environment.from_string(template).render(
        title=f"{report.title}: {', '.join(report.experts)}",
        subtitle=subtitle,
        about=report.about,
        citations=report.citations,
        sentences=summarize(report)["sentences"],
        pictures=pictures,
        columns=columns,
        rows=list(zip(*(column.cells for column in columns), strict=True)),
        plotly=get_plotlyjs(),
        figures=_inside_script(figures),
    )


def _inside_script(value: Any) -> str:
    """Return JSON in which nothing can be taken for HTML; `json.dumps` leaves only ASCII."""
    text = json.dumps(value, separators=(",", ":"))
    for character in "<>&":
        text = text.replace(character, f"\\u{ord(character):04x}")
    return text


def _columns(report: Report) -> list[Column]:
    """Return the columns for which the report has values."""

    def field(name: str) -> Callable[[Row], Value]:
        return lambda row: getattr(row.matrix, name)

    def tau(t: int) -> Callable[[Row], Value]:
        return lambda row: report.spread(row.line, row.matrix.tau)[t]

    columns: list[Column] = []

    def add(title: str, help: str, value: Callable[[Row], Value], *, share: bool = False) -> None:
        values = [value(row) for row in report.rows]
        if any(value is not None for value in values):
            columns.append(Column(title, help, [_cell(value, share) for value in values]))

    add("tensor", "Name, as it is written", lambda row: row.label)
    add("shape", "As stored", lambda row: " × ".join(map(str, row.line.shape)) or "scalar")
    for name, (title, meaning) in _FIELDS.items():
        add(title, meaning, field(name))
    add("T·o/i", "Rows of all experts over columns", lambda row: row.rows_per_column)
    for t, name in enumerate(report.experts):
        add(f"τ {name}", f"Squared norm of the task vector of {name}", tau(t))
    add("agreement", "Mean cosine of ΔᵀΔ and what was measured, over the experts", _agreement)
    add(
        "largest ‖Δ‖/‖W0‖", "Largest over the experts",
        lambda row: _largest(row.line.relative_size or ()), share=True,
    )  # fmt: skip
    add("unchanged", "Largest share of entries that an expert left", _unchanged, share=True)
    add("largest cosine", "Between two experts", _largest_cosine)
    for when in ("before", "after"):
        add(
            f"top 5 % {when}", f"Share of energy {when} the refinement",
            lambda row, name=f"share_{when}": getattr(row.matrix.spectrum, name, None), share=True,
        )  # fmt: skip
    return columns


def _cell(value: Value, share: bool) -> tuple[str, float | None]:
    """Return what a cell shows, and what it is sorted by."""
    if isinstance(value, bool):
        return ("yes" if value else "no"), None
    if value is None or isinstance(value, str):
        return value or "", None
    if not math.isfinite(value):
        return "∞", 1e308
    return (f"{value:.1%}" if share else f"{value:.3g}"), value


def _largest(values: Iterable[float | None]) -> float | None:
    return max((value for value in values if value is not None), default=None)


def _agreement(row: Row) -> Value:
    return math.fsum(row.own_cosines) / len(row.own_cosines) if row.own_cosines else None


def _unchanged(row: Row) -> Value:
    return _largest(row.line.comparison.unchanged) if row.line.comparison else None


def _largest_cosine(row: Row) -> Value:
    table = row.line.comparison.cosine if row.line.comparison else ()
    return _largest(table[a][b] for a in range(len(table)) for b in range(a))
