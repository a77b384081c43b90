# SPDX-License-Identifier: Apache-2.0
"""Losses of answers, and how far they agree."""

from __future__ import annotations

import pytest
import torch
from scipy.stats import pearsonr
from torch.nn.functional import cross_entropy

from mergekit_ace.training.teachers import (
    agreement,
    collate_labels,
    summed_entropy,
    summed_loss,
)


def test_agreement(rng):
    """The share of right classes; of numbers their correlation, of a constant nothing."""
    assert agreement(torch.tensor([1, 2, 3, 0]), torch.tensor([1, 0, 3, 3])) == 0.5
    given, noise = torch.randn(2, 50, generator=rng)
    wanted = 3 + given - noise
    expected = pearsonr(given.double(), wanted.double()).statistic
    assert agreement(given, wanted) == pytest.approx(expected)
    assert agreement(wanted, -wanted) == pytest.approx(-1)
    constant = torch.full((50,), 4.3)
    assert agreement(constant, given) == agreement(given, constant) == 0


@pytest.mark.parametrize("known", [7, 3])
def test_losses_of_labels(rng, known):
    """Cross-entropy, and the divergence from a teacher, whose other classes count as one."""
    logits, teacher = (torch.randn(5, 7, generator=rng) for _ in range(2))
    classes = torch.tensor([1, 0, 6, 3, 3])
    expected = cross_entropy(logits, classes, reduction="sum")
    assert float(summed_loss(logits, {"classes": classes})) == pytest.approx(float(expected))
    best = teacher.log_softmax(-1).topk(known)
    p = best.values.double().exp()
    q = logits.double().softmax(-1).gather(-1, best.indices)
    if known < 7:
        p, q = (torch.cat((part, 1 - part.sum(-1, keepdim=True)), -1) for part in (p, q))
    labels = {"log_probabilities": best.values, "classes": best.indices}
    assert float(summed_loss(logits, labels)) == pytest.approx(
        float((p * (p / q).log()).sum()), rel=1e-4
    )
    assert float(summed_loss(teacher, labels)) == pytest.approx(0, abs=1e-5)


def test_the_entropy_of_the_merge_s_own_answers(rng):
    logits = torch.randn(5, 7, generator=rng)
    expected = torch.distributions.Categorical(logits=logits).entropy().sum()
    assert float(summed_entropy(logits)) == pytest.approx(float(expected), rel=1e-5)
    sure = torch.tensor([[200.0, 0.0, -200.0]])
    assert float(summed_entropy(sure)) == 0


@pytest.mark.parametrize("labels", ["hard", "soft", "true"])
def test_numbers_are_answered_by_numbers(labels):
    samples = [{"hard": torch.tensor([1.5]), "true": torch.tensor([2.0])}] * 2
    found = collate_labels(samples, labels)
    wanted = 2.0 if labels == "true" else 1.5
    assert found["numbers"].tolist() == [wanted] * 2
    assert found["target"].tolist() == [2.0] * 2
    loss = summed_loss(torch.tensor([[1.0], [3.0]]), found)
    assert float(loss) == (1 - wanted) ** 2 + (3 - wanted) ** 2


def test_the_truth_is_what_counts_as_right_where_it_is_known():
    samples = [{"hard": torch.tensor([1]), "true": torch.tensor([2])}] * 2
    labels = collate_labels(samples, "hard")
    assert labels["classes"].tolist() == [1, 1]
    assert labels["target"].tolist() == [2, 2]
    unknown = collate_labels([{"hard": torch.tensor([1])}], "hard")
    assert unknown["target"].tolist() == [1]
