# SPDX-License-Identifier: Apache-2.0
"""Pictures of a training: the coefficients over depth (Fig. 6) and the curve (Fig. 8)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from mergekit_ace.coefficients.file import CoefficientFile


def draw(file: CoefficientFile, log: list[dict[str, Any]], folder: Path) -> str:
    """Draw both pictures into `folder`; a line on what was drawn, or how to get the pictures."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        return "no pictures: pip install 'mergekit-ace[plots]' and run the same command again"
    _heatmap(file, Figure(figsize=(12, 1.5 + 0.4 * file.contents.rows))).savefig(
        folder / "coefficients.png", dpi=120, bbox_inches="tight"
    )
    _curve(log, Figure(figsize=(7, 4))).savefig(
        folder / "training.png", dpi=120, bbox_inches="tight"
    )
    return f"pictures: {folder / 'coefficients.png'}, {folder / 'training.png'}"


def _heatmap(file: CoefficientFile, figure: Any) -> Any:
    """Experts by tensors, input on the left."""
    order = file.depths.argsort(stable=True)
    axes = figure.subplots()
    values = file.coefficients[:, order].numpy()
    image = axes.imshow(values, aspect="auto", interpolation="nearest", cmap="viridis")
    tasks = [expert.task.rstrip("/").rpartition("/")[2] for expert in file.contents.experts]
    tasks += ["refinement"] * (file.contents.rows - len(tasks))
    axes.set_yticks(range(len(tasks)), tasks)
    axes.set_xlabel("tensors, from input to output")
    axes.set_title("merging coefficients")
    figure.colorbar(image, ax=axes)
    return figure


def _curve(log: list[dict[str, Any]], figure: Any) -> Any:
    """Training and validation loss by step."""
    axes = figure.subplots()
    for key, label in (("loss", "training"), ("validation_loss", "validation")):
        points = [(line["step"], line[key]) for line in log if key in line]
        axes.plot(*zip(*points, strict=True), label=label)
    axes.set_xlabel("step")
    axes.set_ylabel("loss")
    axes.legend()
    return figure
