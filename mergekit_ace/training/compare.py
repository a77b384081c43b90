# SPDX-License-Identifier: Apache-2.0
"""What learning was worth: the learned coefficients beside simple ones, on the test split."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict

import torch
from torch import Tensor

from mergekit_ace.training.session import Score, Session


def score_coefficients(session: Session, coefficients: Tensor, split: str = "test") -> Score:
    """The merge by λ per group, (K, G)."""
    session.write(coefficients)
    return session.evaluate(split)


def simple_merges(session: Session, shape: Sequence[int]) -> dict[str, Score]:
    """The base model, the mean of the experts, and task arithmetic; or what training starts at.

    Args:
        session: model and data.
        shape: (K, G).

    Returns:
        Scores on the test split by name. Of the weights of task arithmetic, or of λ, that with the
        least loss on the validation split.
    """
    basis = session.config.basis

    def equal(weight: float, split: str = "test") -> Score:
        return score_coefficients(session, torch.full(tuple(shape), float(weight)), split)

    if basis == "task_vector":
        rows = {"base model": equal(0), "uniform (mean of the experts)": equal(1 / shape[0])}
        weights, tried = session.config.compare.task_arithmetic, "task arithmetic, weight"
    else:
        rows = {"base model": equal(0), f"{basis}, without data": equal(1)}
        weights, tried = session.config.compare.scale, f"{basis}, λ"
    if weights:
        losses = {weight: equal(weight, "validation").loss for weight in weights}
        best = min(losses, key=losses.__getitem__)
        rows[f"{tried} {best:g} (best of {len(weights)})"] = equal(best)
    return rows


def as_table(rows: dict[str, Score], tasks: Sequence[str], *, rehearsal: bool = False) -> str:
    """The scores as a Markdown table: mean accuracy of the experts' tasks, each one's, the loss.

    Args:
        rows: by name.
        tasks: of the experts.
        rehearsal: add a column for it.
    """
    header = ["accuracy on the test split", "mean", *map(_short, tasks)]
    header += ["rehearsal"] * rehearsal + ["loss"]
    lines = [header, ["---"] * len(header)]
    for name, score in rows.items():
        shares = [f"{share:.3f}" for share in (score.mean_accuracy, *score.accuracy)]
        if rehearsal:
            shares.append("–" if score.rehearsal is None else f"{score.rehearsal:.3f}")
        loss = "–" if score.loss is None else f"{score.loss:.4f}"
        lines.append([name, *shares, loss])
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def as_json(rows: dict[str, Score]) -> dict[str, dict]:
    """The scores as JSON has them."""
    return {name: asdict(score) for name, score in rows.items()}


def _short(task: str) -> str:
    return task.rstrip("/").rpartition("/")[2] or task
