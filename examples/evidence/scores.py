# SPDX-License-Identifier: Apache-2.0
"""Scores of a merge: the share of the experts' gains that it keeps, and how much it forgets.

With L(·) the summed loss on a text, *kept* of expert t is (L(base) − L(merge)) / (L(base) −
L(expert t)) on t's text: 1 is as good as the expert, 0 no better than the base. *Forgot* is the
rise of the loss per token, in the mean over texts that nobody was trained on. Standard errors come
from a bootstrap over sequences, which are drawn alike for all models.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from family import Losses

SCALES = (0.3, 0.5, 0.7, 0.85, 1.0, 1.2, 1.5)  # λ
LARGER = (2.0, 2.5, 3.0, 4.0, 6.0, 8.0)  # in turn, where the largest λ so far is the best
BUDGET = 0.05  # nats per token, or share of answers, that a merge may forget
DRAWS = 200


def with_error(draws: np.ndarray) -> tuple[float, float]:
    """Return an estimate, the first number, with its standard error, by its resampled values."""
    return round(float(draws[0]), 4), round(float(draws[1:].std()), 4)


def best_within(
    scales: np.ndarray, kept: np.ndarray, forgot: np.ndarray, budget: float = BUDGET
) -> tuple[float, float]:
    """Return the most that is kept within a budget, and its λ, on lines between points.

    Args:
        scales: λ in rising order, (n,).
        kept, forgot: at each λ, (n,).
        budget: that `forgot` may reach.
    """
    scales, kept, forgot = (np.concatenate([[0.0], part]) for part in (scales, kept, forgot))
    best = (0.0, 0.0)  # the base itself
    for place in range(len(scales)):
        if forgot[place] <= budget:
            best = max(best, (float(kept[place]), float(scales[place])))
        if place + 1 < len(scales) and (forgot[place] - budget) * (forgot[place + 1] - budget) < 0:
            share = (budget - forgot[place]) / (forgot[place + 1] - forgot[place])
            crossing = [part[place] + share * np.diff(part)[place] for part in (kept, scales)]
            best = max(best, (float(crossing[0]), float(crossing[1])))
    return best


def judge_merges(
    base: Losses, experts: Mapping[str, Losses], merged: Mapping[float, Losses], seed: int = 0
) -> dict[str, Any]:
    """Return `kept`, `forgot` and shares by `experts` at each of `scales`, and `at_budget`.

    The latter is the most that is kept at any λ that forgets no more than BUDGET, with straight
    lines between the λ that were measured; `best_scale` is that λ.

    Args:
        base: losses of the base model on all texts.
        experts: losses of each expert, by the name of its text; other texts are untrained ones.
        merged: losses of the merge at each λ, in rising order.
        seed: of the bootstrap.
    """
    generator = np.random.default_rng(seed)
    shape = (DRAWS + 1, len(merged))
    shares, changes = {}, [np.zeros(shape)] * all(name in experts for name in base)
    for name, before in base.items():
        tokens = np.array([count for _, count in before])
        origin = np.array([loss for loss, _ in before])
        after = np.array([[loss for loss, _ in losses[name]] for losses in merged.values()])
        drawn = generator.multinomial(len(origin), [1 / len(origin)] * len(origin), size=DRAWS)
        weights = np.concatenate([np.ones((1, len(origin))), drawn])
        if name in experts:
            gains = origin - np.array([loss for loss, _ in experts[name][name]])
            gained = (weights @ gains)[:, None]
            gained[gained == 0] = np.inf  # an expert that learned nothing has nothing to keep
            shares[name] = (weights @ (origin - after).T) / gained
        else:
            changes.append((weights @ (after - origin).T) / (weights @ tokens)[:, None])
    kept, forgot = np.mean(list(shares.values()), 0), np.mean(changes, 0)
    scales = np.array(list(merged))
    best = np.array([best_within(scales, *pair) for pair in zip(kept, forgot, strict=True)])
    return {
        "scales": list(merged),
        "kept": [with_error(column) for column in kept.T],
        "forgot": [with_error(column) for column in forgot.T],
        "experts": {name: [round(float(s), 4) for s in share[0]] for name, share in shares.items()},
        "at_budget": with_error(best[:, 0]),
        "best_scale": round(float(best[0, 1]), 3),
    }
