# SPDX-License-Identifier: Apache-2.0
"""Accuracy and correlation out of sums."""

from __future__ import annotations

import pytest
import torch
from scipy.stats import pearsonr

from mergekit_ace.training.agreement import Agreement


def test_the_share_of_right_classes():
    found = Agreement.of(torch.tensor([1, 2, 3, 0]), torch.tensor([1, 0, 3, 3]))
    assert found.accuracy == 0.5


def test_sums_of_batches_are_those_of_all(rng):
    given, noise = torch.randn(2, 50, generator=rng)
    wanted = 3 + given - noise
    parts = [Agreement.of(given[n : n + 7], wanted[n : n + 7]).sums for n in range(0, 50, 7)]
    expected = pearsonr(given.double(), wanted.double()).statistic
    assert Agreement(sum(parts)).correlation == pytest.approx(expected)
    assert Agreement.of(wanted, -wanted).correlation == pytest.approx(-1)


def test_a_constant_agrees_with_nothing(rng):
    constant, other = torch.full((30,), 4.3), torch.randn(30, generator=rng)
    assert Agreement.of(constant, other).correlation == 0
    assert Agreement.of(other, constant).correlation == 0
