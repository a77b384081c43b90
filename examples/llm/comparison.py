# SPDX-License-Identifier: Apache-2.0
"""The tables: our figures beside the published ones, per task and as shares of the experts'."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from statistics import fmean
from typing import TypeAlias

from suite import Suite

Scores: TypeAlias = Mapping[str, float]
Line: TypeAlias = tuple[str, Scores, float | None]
EXPERTS = "experts"


def mean_over_experts(suite: Suite, tasks: Sequence[str], scores: Scores) -> float | None:
    """Average each expert's tasks, then the experts; None where a task is missing."""
    if any(task not in scores for task in tasks):
        return None
    by_expert = defaultdict(list)
    for task in tasks:
        by_expert[suite.tasks[task].expert].append(scores[task])
    return fmean(map(fmean, by_expert.values()))


def shares(scores: Scores, experts: Scores) -> dict[str, float]:
    """Return each score as a percentage of the expert's, where both are known."""
    return {task: 100 * scores[task] / experts[task] for task in scores if experts.get(task)}


def _table(
    heading: str, suite: Suite, tasks: Sequence[str], lines: Iterable[Line]
) -> Iterator[str]:
    yield f"| {heading} | " + " | ".join([*tasks, "mean"]) + " |"
    yield "|---" * (len(tasks) + 2) + "|"
    for title, scores, published in lines:
        mean = mean_over_experts(suite, tasks, scores)
        # Scores are rounded, so that the mean as published is the better one, if of these tasks.
        if published is not None and (mean is None or set(tasks) == set(suite.tasks)):
            mean = published
        values = [*map(scores.get, tasks), mean]
        if any(value is not None for value in values):
            cells = ["–" if value is None else f"{value:.1f}" for value in values]
            yield "| " + " | ".join([title, *cells]) + " |"


def compare(suite: Suite, tasks: Sequence[str], ours: Mapping[str, Scores]) -> str:
    """Return two Markdown tables: scores in percent, and shares of the experts' scores.

    `ours` are scores between 0 and 1 by row and task; published rows are in italics below them.
    """
    percent = {row: {t: 100 * s for t, s in scores.items()} for row, scores in ours.items()}
    reference = next((row.scores for row in suite.published if row.row == EXPERTS), {})
    theirs = [(f"*{row.row}* [{n}]", row) for n, row in enumerate(suite.published, 1)]
    scores: list[Line] = [(row, values, None) for row, values in percent.items()]
    scores += [(title, row.scores, row.mean) for title, row in theirs]
    of_experts: list[Line] = [
        (row, shares(values, percent[EXPERTS]), None) for row, values in percent.items()
    ]
    of_experts += [(title, shares(row.scores, reference), row.share) for title, row in theirs]
    lines = [
        *_table("score in %", suite, tasks, scores),
        "",
        *_table("share of the experts in %", suite, tasks, of_experts),
        "",
        *(f"[{n}] {row.source}" for n, row in enumerate(suite.published, 1)),
    ]
    return "\n".join(lines).rstrip() + "\n"
