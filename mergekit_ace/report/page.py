# SPDX-License-Identifier: Apache-2.0
"""`report.html`: one file with everything in it, that opens without a network."""

from __future__ import annotations

import html
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path

import click
import numpy as np
import pandas as pd
import plotly.express as px
import plotly.graph_objects as go
from jinja2 import Environment, StrictUndefined

from mergekit_ace.algebra.inspection import BINS, REACH, PairTable, evenly_spaced
from mergekit_ace.files.saving import write_text
from mergekit_ace.report.record import Report, ReportError, read_records
from mergekit_ace.report.summary import summarize

# Told apart on white and on black, and by most colour-blind readers.
COLORS = ("#3b82f6", "#f59e0b", "#10b981", "#e11d48", "#8b5cf6", "#06b6d4", "#a16207", "#ec4899")
CHOICES = 12  # entries of a menu of tensors, and ticks of the axis of layers
TRANSPARENT = "rgba(255,255,255,0)"
# Columns of the table, and what they mean; those of the experts' τ follow.
COLUMNS = {
    "tensor": "Name, as it is written",
    "shape": "As stored",
    "rule": "How the tensor is merged",
    "heterogeneous": "What step 1 of ACE decides",
    "γ": "Heterogeneity, Eq. 7",
    "var log τ": "Variance of log τ, which has no unit",
    "ridge": "ε̄ in mean eigenvalues of Σ S_t, as used",
    "amplification": "‖X‖² / Σ ‖Δ_t‖² of the closed form",
    "agreement": "Mean cosine of ΔᵀΔ and what was measured, over the experts",
    "largest ‖Δ‖/‖W0‖": "Largest over the experts",
    "unchanged": "Largest share of entries that an expert left",
    "largest cosine": "Between two experts",
    "top 5 % before": "Share of energy before the refinement",
    "top 5 % after": "Share of energy after the refinement",
}
# Titles and captions of pictures over depth, and the units of their values.
BY_DEPTH = {
    "tau": (
        "How far each expert moved, by depth",
        "τ of every expert in every tensor, from input to output (Figs. 1 and 4–7 of ACE-Merging). "
        "Good: the experts' points lie within a factor of ten of each other. An expert far below "
        "the others is easily drowned; gaps are tensors that it left alone.",
        "τ = ‖Δ‖² (squared units of the weights)",
    ),
    "relative-size": (
        "Size of the change against the base, by depth",
        "Good: below a few percent, as fine-tuning does. Near 1 the expert is another model, or "
        "was trained from another base.",
        "‖Δ‖ / ‖W0‖ (share of the base's norm)",
    ),
    "gamma": (
        "How much the experts differ in scale, by depth",
        "Where the chosen statistic lies above the dashed line, a matrix counts as heterogeneous: "
        "it is normalised and refined. By default that is the variance. Good: both agree on which "
        "side a matrix is. γ far above the other means that τ happens to be close to 1 there.",
        "variance of log τ, and γ (no unit)",
    ),
    "coefficients": (
        "Merging coefficients",
        "λ of every expert and tensor (Fig. 6 of the StatsMerging paper). Good: structure, such as "
        "points that change with depth or with the kind of tensor. One level throughout means that "
        "task arithmetic would have done.",
        "λ (no unit)",
    ),
    "stable-rank": (
        "Stable rank of the task vectors, by depth",
        "How many directions an expert's change really uses. Good for merging: small against the "
        "width of the model, so that there is room for all. Adapters stay below their rank.",
        "‖Δ‖² / σ₁² (1 to the rank)",
    ),
    "agreement": (
        "Estimated and measured covariances, by depth",
        "What ACE estimates from an expert's weights, beside what its samples have at the inputs "
        "of the same layers (Theorem 1 of ACE-Merging). Good: an expert's points near 1, and above "
        "the last series: the mean cosine with what other tasks have there. Where they are level, "
        "the estimate does not tell tasks apart.",
        "cosine of ΔᵀΔ and XᵀX (0 to 1)",
    ),
}


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

    def html(self, *, with_library: bool) -> str:
        """Return the figure as HTML, with plotly's JavaScript or for a page that has it."""
        self.figure.update_layout(
            template="plotly_white",
            paper_bgcolor=TRANSPARENT,
            plot_bgcolor=TRANSPARENT,
            font={"family": "system-ui, sans-serif", "size": 12},
            margin={"l": 64, "r": 24, "t": 48 if self.figure.layout.updatemenus else 16, "b": 80},
            legend={"orientation": "h", "y": -0.22, "yanchor": "top", "title": ""},
            hovermode="closest",
        )
        return self.figure.to_html(
            full_html=False,
            include_plotlyjs=with_library,
            div_id=f"plot-{self.name}",
            config={"responsive": True, "displaylogo": False},
        )


def write_page(report: Report, path: Path, subtitle: str) -> None:
    """Write the page of a report, whole or not at all.

    Args:
        subtitle: where the report comes from.

    Raises:
        ReportError: no tensor could be compared.
        OSError: the page cannot be written.
    """
    if not report.records:
        raise ReportError("no tensor could be compared: there is nothing to show")
    template = files("mergekit_ace.report").joinpath("page.html.jinja").read_text("utf-8")
    environment = Environment(autoescape=True, undefined=StrictUndefined)
    page = environment.from_string(template).render(
        report=report,
        subtitle=subtitle,
        sentences=summarize(report)["sentences"],
        pictures=list(draw_pictures(report)),
        table=_table(report),
        help=COLUMNS,
    )
    write_text(path, page)


def show_report(lines: Path, out: Path) -> None:
    """`mergekit-ace report`: write a page from the JSON lines of a merge.

    Raises:
        ReportError: the file holds no lines of a report, or the page would replace it.
    """
    if out.exists() and out.samefile(lines):
        raise ReportError(f"the page would replace {lines}; name another file")
    report = Report(read_records(lines))
    write_page(report, out, f"From {lines.name}, written by the merge.")
    click.echo(str(out))


def _table(report: Report) -> pd.DataFrame:
    """Return the table of all matrices, without columns that are empty."""
    rows, shares = report.matrices, report.shares.groupby("row")
    columns = (
        rows.label,
        [" × ".join(map(str, shape)) or "scalar" for shape in rows["shape"]],
        rows.rule,
        rows.heterogeneous.map({True: "yes", False: "no"}),
        rows.gamma,
        rows.log_variance,
        rows.ridge,
        rows.amplification,
        shares.agreement.mean(),
        shares.relative_size.max(),
        rows.unchanged.map(max, na_action="ignore"),
        rows.cosine.map(_largest_cosine, na_action="ignore"),
        [spectrum and spectrum.share_before for spectrum in rows.spectrum],
        [spectrum and spectrum.share_after for spectrum in rows.spectrum],
    )
    table = pd.DataFrame(dict(zip(COLUMNS, columns, strict=True)))
    tau = report.shares.pivot(index="row", columns="expert", values="tau")[report.experts]
    return table.join(tau.add_prefix("τ ")).dropna(axis="columns", how="all")


def _largest_cosine(table: PairTable) -> float | None:
    known = [value for a, row in enumerate(table) for value in row[:a] if value is not None]
    return max(known, default=None)


def draw_pictures(report: Report) -> Iterator[Picture]:
    """Draw all pictures for which the report has the numbers."""
    shares = report.shares
    yield from _by_depth(report, "tau", shares.assign(value=shares.tau))
    yield from _by_depth(report, "relative-size", shares.assign(value=shares.relative_size))
    yield from _heterogeneity(report)
    yield from _similarity(report)
    learned = shares[shares.row.isin(report.having("coefficients").index)]
    yield from _by_depth(report, "coefficients", learned.assign(value=learned.weight), log=False)
    yield from _spectra(report)
    yield from _by_depth(report, "stable-rank", shares.assign(value=shares.stable_rank))
    yield from _agreement(report)
    yield from _histograms(report)


def _by_depth(
    report: Report, name: str, points: pd.DataFrame, *, log: bool = True
) -> Iterator[Picture]:
    """Yield a picture of points over tensors in the order of their depth; none without any.

    Args:
        name: of the picture in `BY_DEPTH`.
        points: with a `row` and `label` as in `Report.shares`, a `value`, and the series that it
            belongs to as `expert`.
        log: whether values are shown on a logarithmic axis, which has no place for 0 and infinity.
    """
    points = points[points.value.notna()]
    if log:
        points = points[(points.value > 0) & (points.value < np.inf)]
    if points.empty:
        return
    title, caption, unit = BY_DEPTH[name]
    figure = px.scatter(
        points.assign(label=points.label.map(_text), expert=points.expert.map(_text)),
        x="row",
        y="value",
        color="expert",
        hover_name="label",
        log_y=log,
        color_discrete_sequence=COLORS,
        labels={"row": "layer (tensors from input to output)", "value": unit},
        render_mode="svg",
    )
    layers = report.matrices.layer.dropna()
    starts = layers[layers != layers.shift()]
    shown = starts.iloc[evenly_spaced(len(starts), CHOICES)]
    figure.update_xaxes(tickvals=list(shown.index), ticktext=[*map(str, shown)], zeroline=False)
    if log:
        figure.update_yaxes(exponentformat="e", dtick=1)
    yield Picture(name, title, caption, figure)


def _heterogeneity(report: Report) -> Iterator[Picture]:
    rows = report.having("statistic").reset_index(names="row")
    series = {"γ": rows.gamma, "variance of log τ": rows.log_variance}
    points = pd.concat([rows.assign(expert=name, value=v) for name, v in series.items()])
    for picture in _by_depth(report, "gamma", points):
        if rows.threshold[0] > 0:
            line = {"line_dash": "dash", "line_color": COLORS[3], "line_width": 1}
            picture.figure.add_hline(y=rows.threshold[0], **line)
        yield picture


def _agreement(report: Report) -> Iterator[Picture]:
    rows = report.having("agreement").reset_index(names="row")
    tables = [np.array(agreement.cosine, dtype=float) for agreement in rows.agreement]
    others = [pd.Series(t[~np.eye(len(t), dtype=bool)]).mean() for t in tables]
    own = report.shares.assign(value=report.shares.agreement)
    points = pd.concat([own, rows.assign(expert="with other tasks", value=others)])
    yield from _by_depth(report, "agreement", points, log=False)


def _similarity(report: Report) -> Iterator[Picture]:
    if len(report.models) < 2 or not report.looked_at:
        return
    views = {
        "cosine of the task vectors": (report.cosines, -1.0),
        "overlap of leading inputs": (report.overlaps("inputs"), 0.0),
        "overlap of leading outputs": (report.overlaps("outputs"), 0.0),
    }
    figure, names = go.Figure(), [*map(_text, report.experts)]
    for values, low in views.values():
        figure.add_heatmap(
            x=names, y=names, z=values, zmin=low, zmax=1, hoverongaps=False,
            colorscale="RdBu_r" if low < 0 else "Blues", texttemplate="%{z:.2f}",
        )  # fmt: skip
    figure.update_yaxes(autorange="reversed", title="expert", type="category")
    figure.update_xaxes(title="expert", type="category")
    _add_menu(figure, list(views))
    yield Picture(
        "similarity",
        "How alike the experts are",
        "Cosines over the whole model, and overlaps of the 16 leading singular directions of the "
        "task vectors, averaged over matrices (1: the same subspace). Good: cosines near 0 and "
        "overlaps near what random directions have, for then experts write to different places. "
        "Overlapping inputs with different outputs are what ACE is made for.",
        figure,
    )


def _spectra(report: Report) -> Iterator[Picture]:
    rows = report.having("spectrum")
    refined = [spectrum.alignment is not None for spectrum in rows.spectrum]
    rows = rows[refined] if any(refined) else rows
    if rows.empty:
        return
    rows = rows.iloc[evenly_spaced(len(rows), CHOICES)]
    figure = go.Figure(layout={"xaxis_title": "number of the singular value"})
    figure.update_yaxes(title="singular value (unit of the weights)", rangemode="tozero")
    for spectrum in rows.spectrum:
        curves = {"before the refinement" if any(refined) else "no refinement": spectrum.before}
        if any(refined):
            curves |= {"after it": spectrum.after, "cosine of the directions": spectrum.alignment}
        for color, (name, values) in zip(COLORS, curves.items(), strict=False):
            figure.add_scatter(
                x=list(range(1, len(values) + 1)), y=values, name=name, mode="lines+markers",
                line_color=color, yaxis="y2" if name.startswith("cosine") else "y", marker_size=5,
            )  # fmt: skip
    if any(refined):
        axis = {"title": "cosine", "overlaying": "y", "side": "right", "range": [0, 1.02]}
        figure.update_layout(yaxis2={**axis, "dtick": 0.25, "showgrid": False})
    _add_menu(figure, rows.label)
    yield Picture(
        "spectra",
        "Top 5 % of the merge's singular values",
        "Before and after the spectral refinement, with the cosine between the directions of the "
        "same number (Fig. 2 of ACE-Merging). Good: after the refinement the curve is lifted as a "
        "whole, and the directions keep their places (cosine near 1)."
        if any(refined)
        else "The largest singular values of the merged task vector. Good: none far above the "
        "others; there one direction would speak for all experts.",
        figure,
    )


def _histograms(report: Report) -> Iterator[Picture]:
    records = [record for record in report.looked_at if record.unit > 0]
    if not records:
        return
    records = [records[n] for n in evenly_spaced(len(records), CHOICES)]
    figure, centres = go.Figure(), -REACH + 2 * REACH / BINS * (np.arange(BINS) + 0.5)
    for record in records:
        known = dict(zip(record.models, record.histogram, strict=True))
        for t, (model, name) in enumerate(zip(report.models, report.experts, strict=True)):
            counts = np.array(known.get(model, [0] * (BINS + 2)))
            figure.add_scatter(
                x=centres * record.unit, y=counts[1:-1] / max(1, counts.sum()), name=_text(name),
                mode="lines", line_shape="hvh", line_color=COLORS[t % len(COLORS)],
            )  # fmt: skip
    figure.update_xaxes(title="entry of Δ (unit of the weights)", exponentformat="e")
    figure.update_yaxes(title="share of entries (per bin)", type="log", exponentformat="e")
    _add_menu(figure, [record.name for record in records])
    yield Picture(
        "histograms",
        "Entries of the task vectors",
        "Distribution of the entries of Δ in one tensor (Fig. 3 of ACE-Merging), out to five root "
        "mean squares. Good: bells of similar width. A needle at zero is a tensor that was hardly "
        "trained, single bins far out are outliers.",
        figure,
    )


def _text(name: object) -> str:
    """Return a name as plotly shows it: as text, though it reads a few elements of HTML."""
    return html.escape(str(name), quote=False)


def _add_menu(figure: go.Figure, labels: Sequence[str]) -> None:
    """Add a menu that shows one part of the traces, all parts being of the same length."""
    part = np.arange(len(figure.data)) // (len(figure.data) // len(labels))
    shown = [(part == number).tolist() for number in range(len(labels))]
    for trace, visible in zip(figure.data, shown[0], strict=True):
        trace.visible = visible
    buttons = [
        {"label": _text(label), "method": "restyle", "args": [{"visible": visible}]}
        for label, visible in zip(labels, shown, strict=True)
    ]
    place = {"direction": "down", "x": 0, "xanchor": "left", "y": 1.02, "yanchor": "bottom"}
    figure.update_layout(updatemenus=[{"buttons": buttons, "showactive": True, **place}])
