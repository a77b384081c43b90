# SPDX-License-Identifier: Apache-2.0
"""Accuracy and correlation out of sums."""

from __future__ import annotations

import pytest
import torch
from scipy.stats import pearsonr

from mergekit_ace.training.teachers import agreement, count_agreement


def correlation(given: torch.Tensor, wanted: torch.Tensor) -> float:
    return agreement(count_agreement(given, wanted), numbers=True)


def test_the_share_of_right_classes():
    sums = count_agreement(torch.tensor([1, 2, 3, 0]), torch.tensor([1, 0, 3, 3]))
    assert agreement(sums, numbers=False) == 0.5


def test_sums_of_batches_are_those_of_all(rng):
    given, noise = torch.randn(2, 50, generator=rng)
    wanted = 3 + given - noise
    parts = [count_agreement(given[n : n + 7], wanted[n : n + 7]) for n in range(0, 50, 7)]
    expected = pearsonr(given.double(), wanted.double()).statistic
    assert agreement(sum(parts), numbers=True) == pytest.approx(expected)
    assert correlation(wanted, -wanted) == pytest.approx(-1)


def test_a_constant_agrees_with_nothing(rng):
    constant, other = torch.full((30,), 4.3), torch.randn(30, generator=rng)
    assert correlation(constant, other) == 0
    assert correlation(other, constant) == 0
