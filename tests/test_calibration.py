# SPDX-License-Identifier: Apache-2.0
"""What the study of calibration tries beside the command, against a naive least squares."""

from __future__ import annotations

from contextlib import nullcontext
from types import ModuleType

import pytest
import torch
from checkpoints import fine_tuned, tiny_llama
from stacked import stacked_least_squares
from watched import watch


@pytest.fixture
def layerwise(example, monkeypatch) -> ModuleType:
    """The module under test, in float32 on every processor."""
    module = example("llm", "layerwise")
    monkeypatch.setattr(module, "half_precision", nullcontext)
    return module


@pytest.mark.parametrize("targets", ["outputs", "stream", "weights"])
def test_every_linear_is_the_least_squares(layerwise, rng, targets):
    """What a linear reads in the calibrated model is what it was calibrated on."""
    base = tiny_llama(tie_word_embeddings=True)
    experts = [fine_tuned(base, seed, 0.05) for seed in (1, 2)]
    merge = fine_tuned(base, 3, 0.02)
    samples = [torch.randint(base.config.vocab_size, (4, 24), generator=rng) for _ in experts]
    used = torch.ones(4, 24, dtype=torch.bool)
    used[:, 20:] = False
    teachers = [
        layerwise.Teacher(expert.state_dict(), ids, used, weight)
        for expert, ids, weight in zip(experts, samples, (0.4, 0.6), strict=True)
    ]
    start = {name: tensor.clone() for name, tensor in merge.state_dict().items()}
    settings = layerwise.Settings(ridge=0.1, targets=targets)
    found = layerwise.Calibration(base, start, teachers, settings).run()
    merge.load_state_dict(found)
    merged = [watch(merge, ids) for ids in samples]
    theirs = [watch(expert, ids) for expert, ids in zip(experts, samples, strict=True)]
    for name in merged[0]:
        key = f"model.layers.{name}.weight"
        rows = []
        for expert, teacher, all_ours, own in zip(experts, teachers, merged, theirs, strict=True):
            ours, wanted = all_ours[name], own[name].outputs
            if targets == "weights":
                wanted = ours.inputs @ expert.state_dict()[key].mT
            elif targets == "stream" and name.endswith(("o_proj", "down_proj")):
                wanted = wanted + own[name].stream - ours.stream
            kept = used.flatten()
            rows.append((ours.inputs[kept], wanted[kept], teacher.weight))
        expected = stacked_least_squares(rows, start[key], 0.1)
        assert not torch.allclose(found[key], start[key], atol=1e-3), name
        assert torch.allclose(found[key].double(), expected, atol=1e-4), name


def test_only_the_diagonal_stays(layerwise, rng):
    gram = torch.randn(3, 3, generator=rng)
    scaled = layerwise.scale_off_diagonal(gram, 0.9)
    assert torch.allclose(scaled.diagonal(), gram.diagonal())
    assert scaled[0, 2] == pytest.approx(0.9 * float(gram[0, 2]))


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
