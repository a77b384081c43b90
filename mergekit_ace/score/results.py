# SPDX-License-Identifier: Apache-2.0
"""The scores of all merges as a table, and as a page with bars that opens without a network."""

from __future__ import annotations

import html
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pandas as pd
import plotly.express as px

from mergekit_ace.files.saving import write_text
from mergekit_ace.naming import short_names
from mergekit_ace.score.config import ScoreConfig
from mergekit_ace.score.figures import Estimate, forgot, kept, mean, share_of_matches


class Scores:
    """What was measured of all models, in figures.

    Attributes:
        kept: by merge and expert; None where an expert gains nothing.
        mean_kept: by merge, over the experts that gain.
        forgot: by merge.
        matches: share of right answers by exam and model.
        tasks: (metric, value, error) by task and model.
    """

    def __init__(self, config: ScoreConfig, measured: dict[str, Any]):
        self.experts = short_names([expert.model for expert in config.models])
        self.own = {
            name
            for name, expert in zip(self.experts, config.models, strict=True)
            if expert.data is None and expert.has_texts
        } | ({"keep"} if config.keep is None else set())
        self.models = ["base", *self.experts, *config.merges]
        self.kept: dict[str, dict[str, Estimate | None]] = {}
        self.mean_kept: dict[str, Estimate] = {}
        self.forgot: dict[str, Estimate] = {}
        self.matches: dict[str, dict[str, Estimate]] = {}
        self.tasks: dict[str, dict[str, Sequence[Any]]] = {}

        def losses(exam: str, model: str) -> Any:
            return measured[f"{exam} / {model}"]["losses"]

        examined = [n for n in self.experts if f"{n} / base" in measured]
        for merge in config.merges:
            self.kept[merge] = {
                name: kept(losses(name, "base"), losses(name, name), losses(name, merge))
                for name in examined
            }
            known = [one for one in self.kept[merge].values() if one is not None]
            if known:
                self.mean_kept[merge] = mean(known)
            self.forgot[merge] = forgot(losses("keep", "base"), losses("keep", merge))
        for key, value in measured.items():
            exam, model = key.split(" / ", 1)
            if exam.startswith("task "):
                self.tasks.setdefault(exam.removeprefix("task "), {})[model] = value
            elif "matches" in value:
                share = share_of_matches(value["matches"])
                self.matches.setdefault(exam, {})[model] = share

    def summary(self) -> dict[str, Any]:
        """Return the figures as JSON has them: [value, standard error]."""
        return {
            "kept": self.kept, "mean_kept": self.mean_kept, "forgot": self.forgot,
            "exact_match": self.matches, "tasks": self.tasks,
            "texts_written_by_models": sorted(self.own),
        }  # fmt: skip

    def __str__(self) -> str:
        columns = list(next(iter(self.kept.values())))
        head = [f"{name}*" if name in self.own else name for name in columns]
        last = "forgot*" if "keep" in self.own else "forgot"
        rows = [["kept", *head, "mean", f"{last} (nats)"]]
        for merge, shares in self.kept.items():
            cells = ["–" if shares[name] is None else str(shares[name]) for name in columns]
            whole = str(self.mean_kept[merge]) if merge in self.mean_kept else "–"
            rows.append([merge, *cells, whole, f"{self.forgot[merge].value:+.3f} ± "
                         f"{self.forgot[merge].error:.3f}"])  # fmt: skip
        text = _aligned(rows)
        if self.own:
            text += "\n* on texts that the model wrote itself"
        idle = {n for shares in self.kept.values() for n, one in shares.items() if one is None}
        for name in sorted(idle):
            text += f"\n– {name} is no better than the base on its texts: there is nothing to keep"
        for exam, found in self.matches.items():
            text += "\n\n" + _aligned([
                [f"exact answers: {exam}", ""],
                *([model, str(found[model])] for model in self.models if model in found),
            ])  # fmt: skip
        for task, results in self.tasks.items():
            metric = next(iter(results.values()))[0]
            text += "\n\n" + _aligned([
                [f"{task} ({metric})", ""],
                *(
                    [model, str(Estimate(*results[model][1:]))]
                    for model in self.models
                    if model in results
                ),
            ])  # fmt: skip
        return text


def _aligned(rows: list[list[str]]) -> str:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = (
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in rows
    )
    return "\n".join(lines)


def show_scores(scores: Scores, path: Path) -> None:
    """Write the page, `scores.html`."""
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
                template="plotly_white",
            )  # fmt: skip
            figure.update_traces(texttemplate="%{y:.2f}")
            figures.append(figure.to_html(full_html=False, include_plotlyjs=not figures))
    body = f"<h1>Scores</h1><pre>{html.escape(str(scores))}</pre>" + "".join(figures)
    write_text(path, f'<!doctype html><meta charset="utf-8"><title>Scores</title>{body}\n')
