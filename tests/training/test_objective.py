# SPDX-License-Identifier: Apache-2.0
"""The loss, its parts and the schedule, and what keeps a training near where it starts."""

from __future__ import annotations

import copy
import json
from pathlib import Path

import pytest
import torch
from families import answered, llama_family, parsed, rehearsed_family
from torch.nn.functional import cross_entropy, kl_div
from transformers import AutoModelForCausalLM, AutoTokenizer

from mergekit_ace.training.objective import collate_labels, summed_entropy, summed_loss
from mergekit_ace.training.run import run_training


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


@pytest.fixture
def rehearsed(tmp_path) -> dict:
    return rehearsed_family(tmp_path)


def test_the_base_answers_the_rehearsal(rehearsed, tmp_path):
    out = tmp_path / "out"
    file = run_training(parsed(rehearsed), out, quiet=True)
    assert len(file.coefficients) == 2, "the base is no expert"
    assert [e.task for e in file.contents.experts] == ["task0", "task1"]
    header, _, samples, *_ = (out / "scores.md").read_text().splitlines()
    assert header == "| accuracy on the test split | mean | task0 | task1 | rehearsal | loss |"
    assert samples == "| samples | 4 | 2 | 2 | 2 |  |"
    scores = file.contents.scores
    own = scores["each expert on its own"]["rehearsal"]
    assert 0 <= own < 1
    assert scores["base model"]["rehearsal"] == pytest.approx(own)
    assert all(len(score["accuracy"]) == 2 for score in scores.values())
    last = [json.loads(line) for line in (out / "training.jsonl").read_text().splitlines()][-1]
    assert 0 <= last["validation_rehearsal"] <= 1
    model = AutoModelForCausalLM.from_pretrained(rehearsed["base_model"]).eval()
    tokenizer = AutoTokenizer.from_pretrained(rehearsed["base_model"])
    lines = Path(rehearsed["rehearsal"]["path"]).read_text().splitlines()
    texts = [json.loads(line)["text"] for line in lines]
    known = {tuple(tokenizer(text)["input_ids"]) for text in texts}
    splits = answered(out, 2)
    for split in splits.values():
        for sample in split:
            ids = sample["input_ids"]
            assert tuple(ids.tolist()) in known
            with torch.no_grad():
                answers = model(input_ids=ids[None]).logits[0, :-1].argmax(-1)
            assert torch.equal(sample["hard"], answers[sample["supervised"][1:]])


def test_its_part_of_the_loss(rehearsed, tmp_path):
    """The first losses in training and validation are means over experts and base, in which the
    base counts w times all experts; so for two w, and without the base, they lie on one line in
    w / (1 + w)."""
    rehearsed["training"] |= {"epochs": 1, "max_steps": 1, "batch_size": 16}
    alone = copy.deepcopy(rehearsed)
    del alone["rehearsal"]
    losses = {0.0: first_losses(alone, tmp_path / "without")}
    for weight in (1.0, 3.0):
        rehearsed["training"]["rehearsal_weight"] = weight
        losses[weight] = first_losses(rehearsed, tmp_path / f"with{weight}")
    for of_experts, even, more in zip(*losses.values(), strict=True):
        of_base = 2 * even - of_experts
        assert abs(of_base - of_experts) > 0.01
        assert more == pytest.approx((of_experts + 3 * of_base) / 4, rel=1e-4)


def first_losses(config: dict, out: Path) -> tuple[float, float]:
    run_training(parsed(config), out, quiet=True)
    lines = map(json.loads, (out / "training.jsonl").read_text().splitlines())
    return next(lines)["validation_loss"], next(lines)["loss"]


def test_a_linear_schedule(rehearsed, tmp_path):
    """From the given rate, step by step, to zero after the last one."""
    rehearsed["training"] |= {"epochs": 2, "batch_size": 8, "learning_rate": 0.1}
    rehearsed["training"]["scheduler"] = {"kind": "linear"}
    run_training(parsed(rehearsed), tmp_path / "out", quiet=True)
    lines = map(json.loads, (tmp_path / "out" / "training.jsonl").read_text().splitlines())
    rates = [line["learning_rate"] for line in lines if "learning_rate" in line]
    assert len(rates) > 3
    assert rates == pytest.approx([0.1 * (1 - n / len(rates)) for n in range(len(rates))])


@pytest.mark.parametrize("activation", ["identity", "softmax"])
def test_a_penalty_keeps_coefficients_where_they_start(tmp_path, activation):
    config = llama_family(tmp_path)
    config["learner"] |= {"input": "direct", "activation": activation}
    config["training"] |= {"epochs": 3, "learning_rate": 0.02}
    start = 0.5 if activation == "softmax" else 0.3
    away = []
    for penalty in (0.0, 1e4):
        config["training"]["penalty"] = penalty
        file = run_training(parsed(config), tmp_path / f"out{penalty}", quiet=True)
        away.append(float((file.coefficients - start).abs().mean()))
    assert away[0] > 0
    assert away[1] < 0.5 * away[0]
