# SPDX-License-Identifier: Apache-2.0
"""`report.html`: one file with everything in it, that opens without a network."""

from __future__ import annotations

import html
from collections.abc import Sequence
from importlib.resources import files
from pathlib import Path
from typing import Any

import click
import numpy as np
import pandas as pd
import plotly.express as px
import plotly.graph_objects as go
from jinja2 import Environment, StrictUndefined

from mergekit_ace.files.saving import check_apart, write_text
from mergekit_ace.report.summary import Report, read_records, summarize

# Told apart on white and on black, and by most colour-blind readers.
COLORS = ("#3b82f6", "#f59e0b", "#10b981", "#e11d48", "#8b5cf6", "#06b6d4", "#a16207", "#ec4899")
TICKS = 12  # of the axis of layers
# How pictures look, light or dark.
LAYOUT = {
    "template": "plotly_white",
    "paper_bgcolor": "rgba(255,255,255,0)",
    "plot_bgcolor": "rgba(255,255,255,0)",
    "font": {"family": "system-ui, sans-serif", "size": 12},
    "margin": {"l": 64, "r": 24, "t": 48, "b": 80},
    "legend": {"orientation": "h", "y": -0.22, "yanchor": "top", "title": ""},
    "hovermode": "closest",
}


def write_page(report: Report, path: Path, subtitle: str) -> None:
    """Write the page of a report, whole or not at all; the subtitle says where it comes from."""
    template = files("mergekit_ace.report").joinpath("page.html.jinja").read_text("utf-8")
    environment = Environment(autoescape=True, undefined=StrictUndefined)
    plots = {
        name: figure.update_layout(LAYOUT).to_html(
            full_html=False,
            include_plotlyjs=name == "tau",  # the first one
            div_id=f"plot-{name}",
            config={"responsive": True, "displaylogo": False},
        )
        for name, figure in draw_pictures(report).items()
    }
    page = environment.from_string(template).render(
        report=report,
        subtitle=subtitle,
        sentences=summarize(report),
        plots=plots,
        table=_table(report),
    )
    write_text(path, page)


def show_report(lines: Path, out: Path) -> None:
    """`mergekit-ace report`: write a page from the JSON lines of a merge."""
    check_apart([str(lines)], [out])
    report = Report(read_records(lines))
    writer = "inspect" if len(report.looked_at) else "the merge"
    write_page(report, out, f"From {lines.name}, written by {writer}.")
    click.echo(str(out))


def _table(report: Report) -> pd.DataFrame:
    """Return the table of all matrices, without columns that are empty."""
    rows = report.matrices
    table = pd.DataFrame({
        "tensor": rows.label,
        "shape": [" × ".join(map(str, shape)) or "scalar" for shape in rows["shape"]],
        "rule": rows.rule,
        "heterogeneous": rows.heterogeneous.map({True: "yes", False: "no"}),
        "γ": rows.gamma,
        "var log τ": rows.log_variance,
        "ridge": rows.ridge,
        "amplification": rows.amplification,
        "largest ‖Δ‖/‖W0‖": rows.relative_size.map(_largest),
        "unchanged": rows.unchanged.map(_largest),
    })  # fmt: skip
    return table.dropna(axis="columns", how="all")


def _largest(values: Sequence[float | None] | None) -> float | None:
    return max((value for value in values or () if value is not None), default=None)


def draw_pictures(report: Report) -> dict[str, go.Figure]:
    """Draw all pictures for which the report has the numbers; the page's template explains them."""
    shares = report.shares
    pictures = {"tau": _by_depth(report, shares, "tau", "τ = ‖Δ‖² (squared units of the weights)")}
    if len(report.models) > 1 and report.looked_at:
        pictures["similarity"] = _similarity(report)
    if len(report.having("coefficients")):
        pictures["coefficients"] = _by_depth(report, shares, "weight", "λ (no unit)", log=False)
    return pictures


def _by_depth(report: Report, points: Any, value: str, unit: str, *, log: bool = True) -> go.Figure:
    """Draw a column of `Report.shares` over tensors in the order of their depth."""
    low = 0 if log else -np.inf  # a logarithmic axis has no place for 0
    points = points[(points[value] > low) & (points[value] < np.inf)]
    figure = px.scatter(
        points.assign(label=points.label.map(_text), expert=points.expert.map(_text)),
        x="row",
        y=value,
        color="expert",
        hover_name="label",
        log_y=log,
        color_discrete_sequence=COLORS,
        labels={"row": "layer (tensors from input to output)", value: unit},
        render_mode="svg",
    )
    layers = report.matrices.layer.dropna()
    starts = layers[layers != layers.shift()]
    shown = starts.iloc[evenly_spaced(len(starts), TICKS)]
    figure.update_traces(marker_symbol="circle-open")  # points of experts lie on one another
    figure.update_xaxes(tickvals=list(shown.index), ticktext=[*map(str, shown)], zeroline=False)
    return figure.update_yaxes(exponentformat="e", dtick=1) if log else figure


def _similarity(report: Report) -> go.Figure:
    names = [*map(_text, report.experts)]
    figure = px.imshow(
        report.cosines, x=names, y=names, zmin=-1, zmax=1, color_continuous_scale="RdBu_r",
        text_auto=".2f",  # pyright: ignore[reportArgumentType]
        labels={"x": "expert", "y": "expert"}, aspect="auto",
    )  # fmt: skip
    return figure.update_coloraxes(showscale=False)


def _text(name: object) -> str:
    """Return a name as plotly shows it: as text, though it reads a few elements of HTML."""
    return html.escape(str(name), quote=False)


def evenly_spaced(count: int, wanted: int) -> list[int]:
    """Return at most `wanted` of 0 … count − 1, the first and the last among them."""
    return np.linspace(0, count - 1, min(wanted, count)).round().astype(int).tolist()
