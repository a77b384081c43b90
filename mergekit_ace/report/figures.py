# SPDX-License-Identifier: Apache-2.0
"""The pictures of a report, as plotly figures, each with what good looks like."""

from __future__ import annotations

import html
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import plotly.graph_objects as go

from mergekit_ace.algebra.inspection import BINS, REACH, evenly_spaced
from mergekit_ace.report.tables import Report, Row

# Told apart on white and on black, and by most colour-blind readers.
COLORS = ("#3b82f6", "#f59e0b", "#10b981", "#e11d48", "#8b5cf6", "#06b6d4", "#a16207", "#ec4899")
CHOICES = 12  # entries of a menu of tensors
LOGARITHMIC = {"type": "log", "exponentformat": "e", "dtick": 1}


@dataclass(frozen=True)
class Picture:
    """A figure and the words around it.

    Attributes:
        name: its anchor in the page.
        caption: how to read it, and what good looks like.
    """

    name: str
    title: str
    caption: str
    figure: go.Figure


def shown_text(name: object) -> str:
    """Return a name as plotly shows it: as text, though it reads a few elements of HTML."""
    return html.escape(str(name), quote=False)


def _names(report: Report) -> list[str]:
    return [shown_text(name) for name in report.experts]


def draw_pictures(report: Report) -> list[Picture]:
    """Draw all pictures for which the report has the numbers."""
    made = (maker(report) for maker in MAKERS)
    return [picture for picture in made if picture is not None]


def draw_strength(report: Report) -> Picture | None:
    """Draw how far each expert moved, if any did."""
    rows = [row for row in report.rows if any(row.matrix.tau)]
    return _by_depth(
        "tau",
        "How far each expert moved, by depth",
        "τ of every expert in every tensor, from input to output (Figs. 1 and 4–7 of ACE-Merging). "
        "Good: the experts' points lie within a factor of ten of each other. An expert far below "
        "the others is easily drowned; gaps are tensors that it left alone.",
        "τ = ‖Δ‖² (squared units of the weights)",
        rows,
        _per_expert(report, rows, lambda row: row.matrix.tau),
    )


def _relative(report: Report) -> Picture | None:
    rows = [
        row
        for row in report.rows
        if any(row.line.relative_size or ()) and len(row.line.matrices) == 1
    ]
    return _by_depth(
        "relative-size",
        "Size of the change against the base, by depth",
        "Good: below a few percent, as fine-tuning does. Near 1 the expert is another model, or "
        "was trained from another base.",
        "‖Δ‖ / ‖W0‖ (share of the base's norm)",
        rows,
        _per_expert(report, rows, lambda row: row.line.relative_size or ()),
    )


def draw_heterogeneity(report: Report) -> Picture | None:
    """Draw how much the experts differ in scale, if the method measures that."""
    rows = report.solved
    named = (("γ", "gamma"), ("variance of log τ", "log_variance"))
    series = {name: [getattr(row.matrix, field) for row in rows] for name, field in named}
    return _by_depth(
        "gamma",
        "How much the experts differ in scale, by depth",
        "Where the chosen statistic lies above the dashed line, a matrix counts as heterogeneous: "
        "it is normalised and refined. By default that is the variance. Good: both agree on which "
        "side a matrix is. γ far above the other means that τ happens to be close to 1 there.",
        "variance of log τ, and γ (no unit)",
        rows,
        series,
        level=rows[0].matrix.threshold if rows else 0.0,
    )


def draw_similarity(report: Report) -> Picture | None:
    """Draw how alike the experts are, if there are at least two."""
    if len(report.models) < 2 or not report.looked_at:
        return None
    views = [
        ("cosine of the task vectors", report.cosines, -1.0),
        ("overlap of leading inputs", report.mean_overlap("inputs"), 0.0),
        ("overlap of leading outputs", report.mean_overlap("outputs"), 0.0),
    ]
    figure = go.Figure()
    for _, values, low in views:
        figure.add_heatmap(
            x=_names(report), y=_names(report), z=values, zmin=low, zmax=1,
            colorscale="RdBu_r" if low < 0 else "Blues", texttemplate="%{z:.2f}", hoverongaps=False,
        )  # fmt: skip
    figure.update_yaxes(autorange="reversed", title="expert", type="category")
    figure.update_xaxes(title="expert", type="category")
    _menu(figure, [name for name, _, _ in views])
    return Picture(
        "similarity",
        "How alike the experts are",
        "Cosines over the whole model, and overlaps of the 16 leading singular directions of the "
        "task vectors, averaged over matrices (1: the same subspace). Good: cosines near 0 and "
        "overlaps near what random directions have, for then experts write to different places. "
        "Overlapping inputs with different outputs are what ACE is made for.",
        figure,
    )


def _spectra(report: Report) -> Picture | None:
    rows = report.rows_with("spectrum")
    if not rows:
        return None
    refined = [row for row in rows if row.matrix.spectrum.alignment is not None]
    rows = [(refined or rows)[n] for n in evenly_spaced(len(refined or rows), CHOICES)]
    figure = go.Figure()
    for row in rows:
        spectrum = row.matrix.spectrum
        curves = [
            ("before the refinement" if refined else "no refinement", spectrum.before, "y"),
            ("after it", spectrum.after if refined else [], "y"),
            ("cosine of the directions", spectrum.alignment or [], "y2"),
        ]
        for color, (name, values, axis) in zip(COLORS, curves, strict=False):
            figure.add_scatter(
                x=list(range(1, len(values) + 1)), y=values, name=name, mode="lines+markers",
                line_color=color, yaxis=axis, marker_size=5,
            )  # fmt: skip
    figure.update_xaxes(title="number of the singular value")
    figure.update_layout(
        yaxis={"title": "singular value (unit of the weights)", "rangemode": "tozero"}
    )
    if refined:
        axis = {"title": "cosine", "overlaying": "y", "side": "right", "range": [0, 1.02]}
        figure.update_layout(yaxis2={**axis, "dtick": 0.25})
    _menu(figure, [row.label for row in rows])
    return Picture(
        "spectra",
        "Top 5 % of the merge's singular values",
        "Before and after the spectral refinement, with the cosine between the directions of the "
        "same number (Fig. 2 of ACE-Merging). Good: after the refinement the curve is lifted as a "
        "whole, and the directions keep their places (cosine near 1)."
        if refined
        else "The largest singular values of the merged task vector. Good: none far above the "
        "others; there one direction would speak for all experts.",
        figure,
    )


def _stable_rank(report: Report) -> Picture | None:
    rows = report.rows_with("subspaces")
    return _by_depth(
        "stable-rank",
        "Stable rank of the task vectors, by depth",
        "How many directions an expert's change really uses. Good for merging: small against the "
        "width of the model, so that there is room for all. Adapters stay below their rank.",
        "‖Δ‖² / σ₁² (1 to the rank)",
        rows,
        _per_expert(report, rows, lambda row: row.matrix.subspaces.stable_rank),
    )


def _histograms(report: Report) -> Picture | None:
    lines = [line for line in report.looked_at if line.comparison.unit > 0]
    if not lines:
        return None
    lines = [lines[n] for n in evenly_spaced(len(lines), CHOICES)]
    figure = go.Figure()
    width = 2 * REACH / BINS
    for line in lines:
        centres = [(-REACH + width * (n + 0.5)) * line.comparison.unit for n in range(BINS)]
        for t, counts in enumerate(report.spread(line, line.comparison.histogram)):
            total = sum(counts or [])
            figure.add_scatter(
                x=centres, y=[n / total for n in counts[1:-1]] if counts else [],
                name=_names(report)[t], mode="lines", line_shape="hvh",
                line_color=COLORS[t % len(COLORS)],
            )  # fmt: skip
    figure.update_xaxes(title="entry of Δ (unit of the weights)", exponentformat="e")
    figure.update_yaxes(title="share of entries (per bin)", type="log", exponentformat="e")
    _menu(figure, [line.name for line in lines])
    return Picture(
        "histograms",
        "Entries of the task vectors",
        "Distribution of the entries of Δ in one tensor (Fig. 3 of ACE-Merging), out to five root "
        "mean squares. Good: bells of similar width. A needle at zero is a tensor that was hardly "
        "trained, single bins far out are outliers.",
        figure,
    )


def _coefficients(report: Report) -> Picture | None:
    rows = [row for row in report.rows if row.line.coefficients is not None]
    return _by_depth(
        "coefficients",
        "Merging coefficients",
        "λ of every expert and tensor (Fig. 6 of the StatsMerging paper). Good: structure, such as "
        "points that change with depth or with the kind of tensor. One level throughout means that "
        "task arithmetic would have done.",
        "λ (no unit)",
        rows,
        _per_expert(report, rows, lambda row: row.line.coefficients[: len(row.line.models)]),
        axis={},
    )


def _agreement(report: Report) -> Picture | None:
    rows = report.rows_with("agreement")
    own = _per_expert(
        report, rows, lambda row: [c[n] for n, c in enumerate(row.matrix.agreement.cosine)]
    )
    others = [row.other_cosines for row in rows]
    means = [math.fsum(values) / len(values) if values else None for values in others]
    return _by_depth(
        "agreement",
        "Estimated and measured covariances, by depth",
        "What ACE estimates from an expert's weights, beside what its samples have at the inputs "
        "of the same layers (Theorem 1 of ACE-Merging). Good: an expert's points near 1, and above "
        "the last series: the mean cosine with what other tasks have there. Where they are level, "
        "the estimate does not tell tasks apart.",
        "cosine of ΔᵀΔ and XᵀX (0 to 1)",
        rows,
        {**own, "with other tasks": means},
        axis={"range": [0, 1.02]},
    )


MAKERS: tuple[Callable[[Report], Picture | None], ...] = (
    draw_strength,
    _relative,
    draw_heterogeneity,
    draw_similarity,
    _coefficients,
    _spectra,
    _stable_rank,
    _agreement,
    _histograms,
)


def _per_expert(
    report: Report, rows: Sequence[Row], values: Callable[[Row], Sequence[Any]]
) -> dict[str, list[float | None]]:
    """Return a series for every expert."""
    columns = [report.spread(row.line, values(row)) for row in rows]
    return {name: [column[t] for column in columns] for t, name in enumerate(_names(report))}


def _by_depth(
    name: str,
    title: str,
    caption: str,
    unit: str,
    rows: Sequence[Row],
    series: Mapping[str, Sequence[float | None]],
    *,
    axis: Mapping[str, Any] = LOGARITHMIC,
    level: float = 0.0,
) -> Picture | None:
    """Return a picture of points over tensors in the order of their depth; None without any.

    Args:
        name, title, caption: see `Picture`.
        series: a value for every row, by what the points are called.
        axis: what plotly is to know of the values' axis.
        level: of a dashed line, if it is above 0.
    """
    if not rows:
        return None
    figure = go.Figure()
    starts = [n for n in range(len(rows)) if n == 0 or rows[n].layer != rows[n - 1].layer]
    starts = [n for n in starts if rows[n].layer is not None]
    shown = [starts[n] for n in evenly_spaced(len(starts), 12)]
    figure.update_layout(
        xaxis={
            "title": "layer (tensors from input to output)", "tickvals": shown,
            "ticktext": [str(rows[n].layer) for n in shown], "range": [-1, len(rows)],
            "zeroline": False,
        },
        yaxis={"title": unit, **axis},
        showlegend=len(series) > 1,
    )  # fmt: skip
    for number, (label, values) in enumerate(series.items()):
        if axis is LOGARITHMIC:  # which has no place for 0 and infinity
            values = [value if value and math.isfinite(value) else None for value in values]
        figure.add_scatter(
            x=list(range(len(rows))), y=list(values), name=label, mode="markers",
            marker={"size": 6, "color": COLORS[number % len(COLORS)], "opacity": 0.8},
            text=[shown_text(row.label) for row in rows],
            hovertemplate="%{text}<br>%{y:.3g}<extra>%{fullData.name}</extra>",
        )  # fmt: skip
    if level > 0:
        figure.add_hline(y=level, line_dash="dash", line_color=COLORS[3], line_width=1)
    return Picture(name, title, caption, figure)


def _menu(figure: go.Figure, labels: Sequence[str]) -> None:
    """Add a menu that shows one part of the traces, all parts being of the same length."""
    each = len(figure.data) // len(labels)
    shown = [
        [n // each == number for n in range(len(figure.data))] for number in range(len(labels))
    ]
    for trace, visible in zip(figure.data, shown[0], strict=True):
        trace.visible = visible
    buttons = [
        {"label": shown_text(label), "method": "restyle", "args": [{"visible": visible}]}
        for label, visible in zip(labels, shown, strict=True)
    ]
    place = {"direction": "down", "x": 0, "xanchor": "left", "y": 1.02, "yanchor": "bottom"}
    figure.update_layout(updatemenus=[{"buttons": buttons, "showactive": True, **place}])
