# SPDX-License-Identifier: Apache-2.0
"""Losses of answers, and how far they agree."""

from __future__ import annotations

import pytest
import torch
from scipy.stats import pearsonr
from torch.nn.functional import cross_entropy, kl_div

from mergekit_ace.training.teachers import (
    agreement,
    collate_labels,
    summed_entropy,
    summed_loss,
)


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


def test_hard_labels_are_cross_entropy(rng):
    logits = torch.randn(5, 7, generator=rng)
    labels = torch.tensor([1, 0, 6, 3, 3])
    loss = summed_loss(logits, {"classes": labels})
    assert float(loss) == pytest.approx(float(cross_entropy(logits, labels, reduction="sum")))


def test_soft_labels_are_the_divergence_from_the_teacher(rng):
    logits, teacher = (torch.randn(5, 7, generator=rng) for _ in range(2))
    expected = kl_div(
        logits.log_softmax(-1), teacher.log_softmax(-1), reduction="sum", log_target=True
    )
    best = teacher.log_softmax(-1).topk(7)
    labels = {"log_probabilities": best.values, "classes": best.indices}
    assert float(summed_loss(logits, labels)) == pytest.approx(float(expected), rel=1e-5)


def test_the_entropy_of_the_merge_s_own_answers(rng):
    logits = torch.randn(5, 7, generator=rng)
    expected = torch.distributions.Categorical(logits=logits).entropy().sum()
    assert float(summed_entropy(logits)) == pytest.approx(float(expected), rel=1e-5)
    sure = torch.tensor([[200.0, 0.0, -200.0]])
    assert float(summed_entropy(sure)) == 0


def test_what_the_teacher_leaves_counts_as_one_class(rng):
    logits, teacher = (torch.randn(5, 7, generator=rng) for _ in range(2))
    best = teacher.log_softmax(-1).topk(3)
    labels = {"log_probabilities": best.values, "classes": best.indices}
    p = torch.cat([best.values.exp(), 1 - best.values.exp().sum(-1, keepdim=True)], -1)
    mine = logits.softmax(-1).gather(-1, best.indices)
    q = torch.cat([mine, 1 - mine.sum(-1, keepdim=True)], -1)
    expected = (p * (p / q).log()).sum()
    assert float(summed_loss(logits, labels)) == pytest.approx(float(expected), rel=1e-4)
    same = {"log_probabilities": best.values, "classes": best.indices}
    assert float(summed_loss(teacher, same)) == pytest.approx(0, abs=1e-5)


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
