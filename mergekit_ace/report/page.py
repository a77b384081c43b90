# SPDX-License-Identifier: Apache-2.0
"""`report.html`: one file with everything in it, that opens without a network."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any

import click
from jinja2 import Environment, StrictUndefined
from plotly.io import to_json
from plotly.offline import get_plotlyjs

from mergekit_ace.files import write_text
from mergekit_ace.report.figures import draw_pictures
from mergekit_ace.report.jsonl import Line, ReportError, read_lines
from mergekit_ace.report.measured_agreement import own_cosines
from mergekit_ace.report.summary import summarize
from mergekit_ace.report.tables import Report, Row


@dataclass(frozen=True)
class Cell:
    """What a cell shows, and the number that it is sorted by; text is sorted as text."""

    text: str
    value: float | None = None


@dataclass(frozen=True)
class Column:
    """A column of the table."""

    title: str
    help: str
    cell: Callable[[Row], Cell]
    textual: bool = False


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
        rows=[[column.cell(row) for column in columns] for row in report.rows],
        plotly=get_plotlyjs(),
        figures=_inside_script(figures),
    )


def _inside_script(value: Any) -> str:
    """Return JSON in which nothing can be taken for HTML; `json.dumps` leaves only ASCII."""
    text = json.dumps(value, separators=(",", ":"))
    for character in "<>&":
        text = text.replace(character, f"\\u{ord(character):04x}")
    return text


def _number(value: float | None) -> Cell:
    if value is None:
        return Cell("")
    if not math.isfinite(value):
        return Cell("∞", 1e308)
    return Cell(f"{value:.3g}", value)


def _share(value: float | None) -> Cell:
    return Cell("") if value is None else Cell(f"{value:.1%}", value)


def _rounding(row: Row) -> Cell:
    pairs = zip(row.matrix.get("noise", ()), row.matrix["tau"], strict=False)
    return _share(max((min(1.0, noise / tau) for noise, tau in pairs if tau), default=None))


def _ridge(row: Row) -> Cell:
    cell = _number(row.matrix.get("ridge"))
    return Cell(f"{cell.text}, raised", cell.value) if row.matrix.get("raised") else cell


def _mean_agreement(row: Row) -> Cell:
    values = own_cosines(row) if "agreement" in row.matrix else []
    return _number(math.fsum(values) / len(values) if values else None)


def _largest_cosine(row: Row) -> Cell:
    rows = row.line.get("cosine", ())
    pairs = [rows[a][b] for a in range(len(rows)) for b in range(a)]
    return _number(max((value for value in pairs if value is not None), default=None))


def _shape(row: Row) -> Cell:
    lengths = row.line["shape"]
    return Cell(" × ".join(map(str, lengths)) or "scalar", float(math.prod(lengths)))


def _branch(row: Row) -> Cell:
    words = {True: "heterogeneous", False: "homogeneous", None: ""}
    return Cell(words[row.matrix.get("heterogeneous")])


def _columns(report: Report) -> list[Column]:
    """Return the columns for which the report has the numbers."""

    def has(key: str) -> bool:
        return any(key in row.matrix for row in report.rows)

    def number(key: str) -> Callable[[Row], Cell]:
        return lambda row: _number(row.matrix.get(key))

    def tau(t: int) -> Callable[[Row], Cell]:
        return lambda row: _number(report.spread(row.line, row.matrix["tau"])[t])

    def largest(key: str) -> Callable[[Row], Cell]:
        return lambda row: _share(
            max((value for value in row.line.get(key, ()) if value is not None), default=None)
        )

    def energy(key: str) -> Callable[[Row], Cell]:
        return lambda row: _share((row.matrix.get("spectrum") or {}).get(key))

    solved, ridge, seen = bool(report.solved), has("ridge"), bool(report.looked_at)
    # whether it is shown, its heading and what that means, its cells, whether they are words
    table = (
        (True, "tensor", "Name, as it is written", lambda row: Cell(row.label)),
        (True, "shape", "As stored; sorted by entries", _shape),
        (True, "rule", "How the tensor is merged", lambda row: Cell(row.matrix["rule"]), True),
        (solved, "branch", "What step 1 of ACE decides", _branch, True),
        (
            has("form"), "form", "How it is computed",
            lambda row: Cell(row.matrix.get("form") or ""), True,
        ),
        (solved, "γ", "Heterogeneity, Eq. 7", number("gamma")),
        (solved, "var log τ", "Variance of log τ, which has no unit", number("log_variance")),
        (has("condition"), "condition", "Estimated condition number of A", number("condition")),
        (
            ridge, "T·o/i", "Rows of all experts over columns",
            lambda row: _number(row.rows_per_column),
        ),
        (ridge, "ridge", "ε̄ in mean eigenvalues of Σ S_t, as used", _ridge),
        (ridge, "amplification", "‖X‖² / Σ ‖Δ_t‖² of the closed form", number("amplification")),
        (
            has("noise"), "rounding",
            "Largest share of τ that is the rounding of the checkpoints, over the experts",
            _rounding,
        ),
        *(
            (True, f"τ {name}", f"Squared norm of the task vector of {name}", tau(t))
            for t, name in enumerate(report.experts)
        ),
        (
            has("agreement"), "agreement",
            "Mean cosine of ΔᵀΔ and what was measured, over the experts", _mean_agreement,
        ),
        (seen, "largest ‖Δ‖/‖W0‖", "Largest over the experts", largest("relative_size")),
        (seen, "unchanged", "Largest share of entries that an expert left", largest("unchanged")),
        (seen, "largest cosine", "Between two experts", _largest_cosine),
        (seen, "top 5 % before", "Share of energy before the refinement", energy("share_before")),
        (seen, "top 5 % after", "Share of energy after the refinement", energy("share_after")),
    )  # fmt: skip
    return [Column(*column) for shown, *column in table if shown]
