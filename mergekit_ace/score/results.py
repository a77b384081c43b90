# SPDX-License-Identifier: Apache-2.0
"""Scores and searches as tables, and as pages with pictures that open without a network."""

from __future__ import annotations

import html
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import pandas as pd
import plotly.express as px
import plotly.graph_objects as go

from mergekit_ace.files.saving import write_text
from mergekit_ace.naming import short_names
from mergekit_ace.score.config import ScoreConfig
from mergekit_ace.score.figures import Estimate, forgot, kept, mean, share_of_matches

WHITE = "plotly_white"


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
        names = short_names([expert.model for expert in config.models])
        experts = zip(names, config.models, strict=True)
        self.own = {name for name, one in experts if one.data is None and one.has_texts}
        self.own |= {"keep"} if config.keep is None else set()
        self.models = ["base", *names, *config.merges]
        self.matches: dict[str, dict[str, Estimate]] = {}
        self.tasks: dict[str, dict[str, Sequence[Any]]] = {}

        def losses(exam: str, model: str) -> Any:
            return measured[f"{exam} / {model}"]["losses"]

        read = [name for name in names if f"{name} / base" in measured]
        self.kept = {
            merge: {name: kept(*(losses(name, m) for m in ("base", name, merge))) for name in read}
            for merge in config.merges
        }
        known = {m: [one for one in own.values() if one] for m, own in self.kept.items()}
        self.mean_kept = {merge: mean(shares) for merge, shares in known.items() if shares}
        before = losses("keep", "base")
        self.forgot = {merge: forgot(before, losses("keep", merge)) for merge in config.merges}
        for key, value in measured.items():
            exam, model = key.split(" / ", 1)
            if exam.startswith("task "):
                self.tasks.setdefault(exam.removeprefix("task "), {})[model] = value
            elif "matches" in value:
                self.matches.setdefault(exam, {})[model] = share_of_matches(value["matches"])

    def summary(self) -> dict[str, Any]:
        """Return the figures as JSON has them: [value, standard error]."""
        return {
            "kept": self.kept, "mean_kept": self.mean_kept, "forgot": self.forgot,
            "exact_match": self.matches, "tasks": self.tasks,
            "texts_written_by_models": sorted(self.own),
        }  # fmt: skip

    @cached_property
    def tables(self) -> dict[str, dict[str, Estimate]]:
        """Answers and tasks: figures of models by title."""
        found = {f"exact answers: {exam}": own for exam, own in self.matches.items()}
        for task, results in self.tasks.items():
            metric = next(iter(results.values()))[0]
            own = {model: Estimate(*result[1:]) for model, result in results.items()}
            found[f"{task} ({metric})"] = own
        return found

    def __str__(self) -> str:
        columns = list(next(iter(self.kept.values())))
        head = [f"{name}*" if name in self.own else name for name in columns]
        last = "forgot*" if "keep" in self.own else "forgot"
        rows: list[list[Any]] = [["kept", *head, "mean", f"{last} (nats)"]]
        for merge, shares in self.kept.items():
            cells = [shares[name] or "–" for name in columns]
            rows.append([merge, *cells, self.mean_kept.get(merge, "–"), self.forgot[merge].signed])
        text = aligned(rows)
        if self.own:
            text += "\n* on texts that the model wrote itself"
        idle = {n for shares in self.kept.values() for n, one in shares.items() if one is None}
        for name in sorted(idle):
            text += f"\n– {name} is no better than the base on its texts: there is nothing to keep"
        for title, found in self.tables.items():
            lines = [[model, found[model]] for model in self.models if model in found]
            text += "\n\n" + aligned([[title, ""], *lines])
        return text


def aligned(rows: Sequence[Sequence[Any]]) -> str:
    """Return rows of cells as a table."""
    texts = [[str(cell) for cell in row] for row in rows]
    widths = [max(map(len, column)) for column in zip(*texts, strict=True)]
    lines = [[c.ljust(w) for c, w in zip(row, widths, strict=True)] for row in texts]
    return "\n".join("  ".join(line).rstrip() for line in lines)


def show_scores(scores: Scores, path: Path) -> None:
    """Write the page, `scores.html`."""
    means = {merge: {"mean": one} for merge, one in scores.mean_kept.items()}
    shares = [
        (merge, expert, share)
        for merge, found in scores.kept.items()
        for expert, share in (found | means.get(merge, {})).items()
    ]
    others = [(m, title, one) for title, own in scores.tables.items() for m, one in own.items()]
    figures = []
    for title, bars in {
        "Kept: share of the expert's gain (1: all of it)": shares,
        "Forgot: rise of the loss in nats per token": [
            (merge, "keep", one) for merge, one in scores.forgot.items()
        ],
        "Tasks and answers": others,
    }.items():
        rows = [[name, of, *one] for name, of, one in bars if one is not None]
        if rows:
            frame = pd.DataFrame(rows, columns=["model", "of", "value", "error"])
            figure = px.bar(
                frame, x="of", y="value", color="model", error_y="error", barmode="group",
                title=title, template=WHITE,
            )  # fmt: skip
            figures.append(figure.update_traces(texttemplate="%{y:.2f}"))
    _write_page(path, "Scores", str(scores), figures)


def show_search(points: Sequence[dict[str, Any]], budget: float, text: str, path: Path) -> None:
    """Write `search.html`: the table, and all trials by what they keep and forget."""
    frame = pd.DataFrame(points)
    labels = {"aim": "aim, on few texts", "forgot": "forgot, on few texts (nats per token)"}
    figure = px.scatter(
        frame, x="forgot", y="aim", color="merge", hover_name="trial", labels=labels,
        title="Trials", template=WHITE,
    )  # fmt: skip
    line = frame.query("frontier").sort_values("forgot")
    if len(line):
        figure.add_scatter(x=line.forgot, y=line.aim, mode="lines", name="frontier")
    figure.add_vline(x=budget, line_dash="dot", annotation_text="budget")
    _write_page(path, "Search", text, [figure])


def _write_page(path: Path, title: str, text: str, figures: Sequence[go.Figure]) -> None:
    plots = [
        figure.to_html(full_html=False, include_plotlyjs=number == 0)
        for number, figure in enumerate(figures)
    ]
    body = f"<h1>{title}</h1><pre>{html.escape(text)}</pre>" + "".join(plots)
    write_text(path, f'<!doctype html><meta charset="utf-8"><title>{title}</title>{body}\n')
