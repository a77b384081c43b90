# SPDX-License-Identifier: Apache-2.0
"""What measurements say of merges, with errors; as tables, and as pages with pictures."""

from __future__ import annotations

import html
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
import plotly.express as px
import plotly.graph_objects as go

from mergekit_ace.files.saving import write_text
from mergekit_ace.naming import short_names
from mergekit_ace.score.config import ScoreConfig

DRAWS = 1000  # of the bootstrap
WHITE = "plotly_white"
Losses = Sequence[tuple[float, int]]  # of each sequence: summed loss in nats, tokens


class Estimate(NamedTuple):
    """A number with its standard error, if that is known."""

    value: float
    error: float | None

    def __str__(self) -> str:
        return f"{self.value:.3f}" + ("" if self.error is None else f" ± {self.error:.3f}")

    @property
    def signed(self) -> str:
        """The number with its sign."""
        return str(self) if self.value < 0 else f"+{self}"


def kept(base: Losses, expert: Losses, merge: Losses, *, always: bool = False) -> Estimate | None:
    """Return (L(base) − L(merge)) / (L(base) − L(expert)) on an expert's sequences.

    1 is as good as the expert, 0 as the base. None where the expert is not better than the base by
    two standard errors, since then nothing can be kept; but a number `always` where it is known to
    be better.
    """
    origin, learned, after = (np.array([loss for loss, _ in one]) for one in (base, expert, merge))
    weights = _weights(len(origin))
    gains = weights @ (origin - learned)
    if not always and gains[0] <= 2 * gains[1:].std():
        return None
    return _estimate(weights @ (origin - after) / gains)


def forgot(base: Losses, merge: Losses) -> Estimate:
    """Return the rise of the loss in nats per token; positive is worse than the base."""
    (before, tokens), (after, _) = np.array(base).T, np.array(merge).T
    weights = _weights(len(tokens))
    return _estimate(weights @ (after - before) / (weights @ tokens))


def mean(estimates: Sequence[Estimate]) -> Estimate:
    """Return the mean of independent estimates."""
    values, errors = np.array(estimates, dtype=float).T
    return Estimate(float(values.mean()), float(np.linalg.norm(errors)) / len(errors))


def share_of_matches(matches: Sequence[bool]) -> Estimate:
    """Return the share of answers that are right."""
    share = float(np.mean(matches))
    return Estimate(share, float(np.sqrt(share * (1 - share) / len(matches))))


def _weights(count: int) -> np.ndarray:
    """Return how often each sequence counts, (1 + DRAWS, count): once each, then at random."""
    generator = np.random.default_rng(0)
    drawn = generator.multinomial(count, [1 / count] * count, size=DRAWS)
    return np.concatenate([np.ones((1, count)), drawn])


def _estimate(draws: np.ndarray) -> Estimate:
    return Estimate(float(draws[0]), float(draws[1:].std()))


class Scores:
    """What was measured of all models, in figures.

    Attributes:
        kept: by merge and expert; None where an expert gains nothing.
        mean_kept: by merge, over the experts that gain.
        forgot: by merge.
        tables: right answers and results of tasks, by title and model.
    """

    def __init__(self, config: ScoreConfig, measured: Mapping[str, Mapping[str, Any]]):
        """Take what was measured by exam, or `task NAME`, and model."""
        names = short_names([expert.model for expert in config.models])
        experts = zip(names, config.models, strict=True)
        self.own = {name for name, one in experts if one.data is None and one.has_texts}
        self.own |= {"keep"} if config.keep is None else set()

        self.kept: dict[str, dict[str, Estimate | None]] = {merge: {} for merge in config.merges}
        self.forgot: dict[str, Estimate] = {}
        self.tables: dict[str, dict[str, Estimate]] = {}
        for exam, found in measured.items():
            if exam.startswith("task "):
                title = f"{exam.removeprefix('task ')} ({found['base']['metric']})"
                self.tables[title] = {
                    model: Estimate(one["value"], one["error"]) for model, one in found.items()
                }
                continue
            losses = {model: one["losses"] for model, one in found.items()}
            for merge in config.merges:
                if exam == "keep":
                    self.forgot[merge] = forgot(losses["base"], losses[merge])
                else:
                    self.kept[merge][exam] = kept(losses["base"], losses[exam], losses[merge])
            if "matches" in found["base"]:
                shares = {model: share_of_matches(one["matches"]) for model, one in found.items()}
                self.tables[f"exact answers: {exam}"] = shares
        known = {merge: [*filter(None, own.values())] for merge, own in self.kept.items()}
        self.mean_kept = {merge: mean(shares) for merge, shares in known.items() if shares}

    def summary(self) -> dict[str, Any]:
        """Return the figures as JSON has them: [value, standard error]."""
        return {
            "kept": self.kept, "mean_kept": self.mean_kept, "forgot": self.forgot,
            "tables": self.tables,
            "texts_written_by_models": sorted(self.own),
        }  # fmt: skip

    def __str__(self) -> str:
        columns = list(next(iter(self.kept.values())))
        *head, last = (f"{name}*" if name in self.own else name for name in (*columns, "keep"))
        last = last.replace("keep", "forgot")
        rows: list[list[Any]] = [["kept", *head, "mean", f"{last} (nats)"]]
        for merge, shares in self.kept.items():
            cells = [shares[name] or "–" for name in columns]
            rows.append([merge, *cells, self.mean_kept.get(merge, "–"), self.forgot[merge].signed])
        text = aligned(rows)
        if self.own:
            text += "\n* on texts that the model wrote itself"
        for name in columns:
            if any(shares[name] is None for shares in self.kept.values()):
                text += f"\n– {name} is no better than the base on its texts: nothing to keep"
        for title, found in self.tables.items():
            text += "\n\n" + aligned([[title, ""], *found.items()])
        return text


def aligned(rows: Sequence[Sequence[Any]]) -> str:
    """Return rows of cells as a table."""
    texts = [[str(cell) for cell in row] for row in rows]
    widths = [max(map(len, column)) for column in zip(*texts, strict=True)]
    lines = [[c.ljust(w) for c, w in zip(row, widths, strict=True)] for row in texts]
    return "\n".join("  ".join(line).rstrip() for line in lines)


def show_scores(scores: Scores, path: Path) -> None:
    """Write the page, `scores.html`."""
    share = "Kept: share of the expert's gain (1: all of it)"
    rise = "Forgot: rise of the loss in nats per token"
    bars: list[tuple[str, str, str, Estimate | None]] = []
    for merge, shares in scores.kept.items():
        own = {**shares, "mean": scores.mean_kept.get(merge)}
        bars += [(share, merge, expert, one) for expert, one in own.items()]
    bars += [(rise, merge, "keep", one) for merge, one in scores.forgot.items()]
    for title, found in scores.tables.items():
        bars += [("Tasks and answers", model, title, one) for model, one in found.items()]
    rows = [(*place, *one) for *place, one in bars if one is not None]
    frame = pd.DataFrame(rows, columns=["title", "model", "of", "value", "error"])
    figures = [
        px.bar(
            part, x="of", y="value", color="model", error_y="error", barmode="group",
            title=title, template=WHITE,
        ).update_traces(texttemplate="%{y:.2f}")
        for title, part in frame.groupby("title", sort=False)
    ]  # fmt: skip
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
