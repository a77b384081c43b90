# SPDX-License-Identifier: Apache-2.0
"""`scores.html`: bars of what merges keep and forget; it opens without a network."""

from __future__ import annotations

import html
from pathlib import Path

import pandas as pd
import plotly.express as px

from mergekit_ace.files.saving import write_text
from mergekit_ace.score.table import Scores


def show_scores(scores: Scores, path: Path) -> None:
    """Write the page."""
    bars = [
        {"merge": merge, "expert": expert, "kept": share.value, "error": share.error}
        for merge, shares in scores.kept.items()
        for expert, share in (shares | {"mean": scores.mean_kept.get(merge)}).items()
        if share is not None
    ]
    losses = [
        {"merge": merge, "forgot": one.value, "error": one.error}
        for merge, one in scores.forgot.items()
    ]
    results = [
        {"task": task, "model": model, "value": value, "error": error}
        for task, found in scores.tasks.items()
        for model, (_, value, error) in found.items()
    ] + [
        {"task": f"{exam}, exact answers", "model": model, "value": one.value, "error": one.error}
        for exam, found in scores.matches.items()
        for model, one in found.items()
    ]
    figures = []
    for rows, x, y, color, title in (
        (bars, "expert", "kept", "merge", "Kept: share of the expert's gain (1: all of it)"),
        (losses, "merge", "forgot", None, "Forgot: rise of the loss in nats per token"),
        (results, "task", "value", "model", "Tasks and answers"),
    ):
        if rows:
            frame = pd.DataFrame(rows)
            figure = px.bar(
                frame, x=x, y=y, color=color, error_y="error", barmode="group", title=title,
                text_auto=".2f", template="plotly_white",
            )  # fmt: skip
            figures.append(figure.to_html(full_html=False, include_plotlyjs=not figures))
    body = f"<h1>Scores</h1><pre>{html.escape(str(scores))}</pre>" + "".join(figures)
    write_text(path, f'<!doctype html><meta charset="utf-8"><title>Scores</title>{body}\n')
