# SPDX-License-Identifier: Apache-2.0
"""What the study of calibration counts and compares."""

from __future__ import annotations

import pytest
import torch


def test_padding_does_not_count(example):
    ids = torch.tensor([[5, 0, 7, 0, 0], [1, 2, 3, 4, 0], [1, 2, 3, 4, 5]])
    used = example("llm", "calibration").tokens_before_padding(ids, 0)
    assert used.tolist() == [
        [True, True, True, False, False], [True] * 4 + [False], [True] * 5,
    ]  # fmt: skip


def test_losses_are_compared_by_sequences(example):
    difference = example("llm", "calibration").loss_difference
    theirs = {"loss": [10.0, 30.0, 50.0], "tokens": [10, 10, 10]}
    alike = {"loss": [11.0, 31.0, 51.0], "tokens": [10, 10, 10]}
    assert difference(alike, theirs) == (pytest.approx(0.1), pytest.approx(0, abs=1e-6))
    uneven = {"loss": [10.0, 31.0, 52.0], "tokens": [10, 10, 10]}
    assert difference(uneven, theirs) == (pytest.approx(0.1), pytest.approx(0.1 / 3**0.5))
