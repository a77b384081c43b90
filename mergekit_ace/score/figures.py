# SPDX-License-Identifier: Apache-2.0
"""Shares of the experts' gains that merges keep, and how much they forget, with errors."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

DRAWS = 1000  # of the bootstrap
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
    origin, learned, after = (_sums(one) for one in (base, expert, merge))
    weights = _weights(len(origin))
    gains = weights @ (origin - learned)
    if not always and gains[0] <= 2 * gains[1:].std():
        return None
    return _estimate(weights @ (origin - after) / gains)


def forgot(base: Losses, merge: Losses) -> Estimate:
    """Return the rise of the loss in nats per token; positive is worse than the base."""
    tokens = np.array([count for _, count in base])
    weights = _weights(len(tokens))
    return _estimate(weights @ (_sums(merge) - _sums(base)) / (weights @ tokens))


def mean(estimates: Sequence[Estimate]) -> Estimate:
    """Return the mean of independent estimates."""
    errors = np.array([one.error for one in estimates], dtype=float)
    value = float(np.mean([one.value for one in estimates]))
    return Estimate(value, float(np.sqrt((errors**2).sum())) / len(errors))


def share_of_matches(matches: Sequence[bool]) -> Estimate:
    """Return the share of answers that are right."""
    share = float(np.mean(matches))
    return Estimate(share, float(np.sqrt(share * (1 - share) / len(matches))))


def _sums(losses: Losses) -> np.ndarray:
    return np.array([loss for loss, _ in losses])


def _weights(count: int) -> np.ndarray:
    """Return how often each sequence counts, (1 + DRAWS, count): once each, then at random."""
    generator = np.random.default_rng(0)
    drawn = generator.multinomial(count, [1 / count] * count, size=DRAWS)
    return np.concatenate([np.ones((1, count)), drawn])


def _estimate(draws: np.ndarray) -> Estimate:
    return Estimate(float(draws[0]), float(draws[1:].std()))
