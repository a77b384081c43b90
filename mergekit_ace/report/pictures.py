# SPDX-License-Identifier: Apache-2.0
"""Two pictures for a model card, as files. They need matplotlib, the extra `plots`."""

from __future__ import annotations

from pathlib import Path

from mergekit_ace.report.figures import COLORS
from mergekit_ace.report.tables import Report

PICTURES = {
    "merge_task_vectors.png": "How far each expert moved, by depth",
    "merge_experts.png": "How alike the experts are",
}


def save_pictures(report: Report, folder: Path) -> dict[str, str]:
    """Write them; file names and what they show.

    Raises:
        ImportError: there is no matplotlib.
    """
    from matplotlib.figure import Figure

    names = list(PICTURES)
    figure = Figure(figsize=(8, 4), layout="constrained")
    _task_vectors(report, figure.add_subplot())
    figure.savefig(folder / names[0], dpi=120)
    figure = Figure(figsize=(8, 4), layout="constrained")
    if report.looked_at and len(report.models) > 1:
        _similarity(report, figure)
        title = PICTURES[names[1]]
    else:
        _heterogeneity(report, figure.add_subplot())
        title = "How much the experts differ in scale, by depth"
    figure.savefig(folder / names[1], dpi=120)
    return {names[0]: PICTURES[names[0]], names[1]: title}


def _task_vectors(report: Report, axes) -> None:
    rows = [row for row in report.rows if any(row.matrix["tau"])]
    for t, name in enumerate(report.experts):
        points = [(n, report.spread(row.line, row.matrix["tau"])[t]) for n, row in enumerate(rows)]
        points = [(n, value) for n, value in points if value]
        color = COLORS[t % len(COLORS)]
        axes.scatter(*zip(*points, strict=True), s=9, color=color, label=name) if points else None
    axes.set(yscale="log", xlabel="tensor, from input to output", ylabel="τ = ‖Δ‖²")
    axes.set_title("How far each expert moved")
    axes.legend()


def _heterogeneity(report: Report, axes) -> None:
    for number, (key, name) in enumerate((("gamma", "γ"), ("log_variance", "variance of log τ"))):
        values = [(n, row.matrix[key]) for n, row in enumerate(report.solved) if row.matrix[key]]
        if values:
            axes.scatter(*zip(*values, strict=True), s=9, color=COLORS[number], label=name)
    axes.set(yscale="log", xlabel="matrix, from input to output", ylabel="no unit")
    axes.set_title("How much the experts differ in scale")
    axes.legend()


def _similarity(report: Report, figure) -> None:
    views = (
        ("cosine of task vectors", report.cosines, -1, "RdBu_r"),
        ("overlap of leading inputs", report.mean_overlap("inputs"), 0, "Blues"),
    )
    places = range(len(report.experts))
    for axes, (title, values, low, colors) in zip(figure.subplots(1, 2), views, strict=True):
        numbers = [[float("nan") if v is None else v for v in row] for row in values]
        image = axes.imshow(numbers, vmin=low, vmax=1, cmap=colors)
        axes.set_xticks(places, report.experts, rotation=45, ha="right")
        axes.set_yticks(places, report.experts)
        axes.set_title(title)
        figure.colorbar(image, ax=axes, shrink=0.8)
