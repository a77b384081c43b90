# SPDX-License-Identifier: Apache-2.0
"""Accuracy and correlation of answers."""

from __future__ import annotations

import pytest
import torch
from scipy.stats import pearsonr

from mergekit_ace.training.teachers import agreement


def test_the_share_of_right_classes():
    assert agreement(torch.tensor([1, 2, 3, 0]), torch.tensor([1, 0, 3, 3])) == 0.5


def test_numbers_agree_by_their_correlation(rng):
    given, noise = torch.randn(2, 50, generator=rng)
    wanted = 3 + given - noise
    expected = pearsonr(given.double(), wanted.double()).statistic
    assert agreement(given, wanted) == pytest.approx(expected)
    assert agreement(wanted, -wanted) == pytest.approx(-1)


def test_a_constant_agrees_with_nothing(rng):
    constant, other = torch.full((30,), 4.3), torch.randn(30, generator=rng)
    assert agreement(constant, other) == 0
    assert agreement(other, constant) == 0
