# SPDX-License-Identifier: Apache-2.0
"""Every linear of a calibrated model, against a naive least squares on what hooks see in models."""

from __future__ import annotations

from contextlib import nullcontext

import pytest
import torch
from checkpoints import fine_tuned, tiny_llama
from stacked import stacked_least_squares
from torch import Tensor
from transformers import GPTNeoXConfig, GPTNeoXForCausalLM, LlamaForCausalLM
from watched import watch

from mergekit_ace.calibration import layerwise
from mergekit_ace.calibration.layerwise import (
    RIDGE,
    WRITERS,
    Calibration,
    SampleTeacher,
)
from mergekit_ace.training.state import TrainingError

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def whole_precision(monkeypatch) -> None:
    """Float32 on processors that multiply in bfloat16, too."""
    monkeypatch.setattr(layerwise, "half_precision", lambda device: nullcontext())


@pytest.fixture(params=[False, True], ids=["plain", "biased"])
def family(request) -> list[LlamaForCausalLM]:
    """A base, two experts, and a poor merge of them."""
    base = tiny_llama(attention_bias=request.param)
    return [base, *(fine_tuned(base, seed, 0.05) for seed in (1, 2)), fine_tuned(base, 3, 0.02)]


def draw(model: LlamaForCausalLM, rng: torch.Generator, rows: int = 4) -> tuple[Tensor, Tensor]:
    """Tokens of which the last ones are padding."""
    ids = torch.randint(model.config.vocab_size, (rows, 24), generator=rng)
    used = torch.ones_like(ids, dtype=torch.bool)
    used[:, 20:] = False
    return ids, used


def calibrated(model, start: dict, teachers: list[SampleTeacher]) -> dict[str, Tensor]:
    found = dict(start)
    for tensors in Calibration(model, start, teachers, CPU).layers():
        found |= tensors
    return found


def test_every_linear_is_the_least_squares(family, rng):
    """What a linear reads in the calibrated model is what it was calibrated on."""
    base, *experts, merge = family
    batches = [[draw(base, rng), draw(base, rng, 2)], [draw(base, rng)]]
    teachers = [
        SampleTeacher(expert.state_dict(), own, weight)
        for expert, own, weight in zip(experts, batches, (0.4, 0.6), strict=True)
    ]
    start = {name: tensor.clone() for name, tensor in merge.state_dict().items()}
    found = calibrated(base, start, teachers)
    merge.load_state_dict(found)
    for name in watch(merge, batches[0][0][0]):
        key = f"model.layers.{name}.weight"
        rows = []
        for expert, teacher in zip(experts, teachers, strict=True):
            inputs, wanted = [], []
            for ids, used in teacher.batches:
                ours, own = watch(merge, ids)[name], watch(expert, ids)[name]
                outputs = own.inputs @ expert.state_dict()[key].mT
                if name.endswith(WRITERS):
                    bias = start.get(key.replace(".weight", ".bias"), 0.0)
                    outputs = own.outputs + own.stream - ours.stream - bias
                inputs.append(ours.inputs[used.flatten()])
                wanted.append(outputs[used.flatten()])
            rows.append((torch.cat(inputs), torch.cat(wanted), teacher.weight))
        expected = stacked_least_squares(rows, start[key], RIDGE)
        assert not torch.allclose(found[key], start[key], atol=1e-4), name
        assert torch.allclose(found[key].double(), expected, atol=1e-4), name


def test_one_teacher_is_followed(family, rng):
    """The residual stream comes back to the teacher's, though the embeddings are others."""
    base, expert, _, merge = family
    ids, used = draw(base, rng, 16)
    start = merge.state_dict()

    def distance() -> float:
        with torch.no_grad():
            wanted = expert.model(ids).last_hidden_state
            return float((merge.model(ids).last_hidden_state - wanted).norm() / wanted.norm())

    before = distance()
    merge.load_state_dict(
        calibrated(base, start, [SampleTeacher(expert.state_dict(), [(ids, used)], 1.0)])
    )
    assert distance() < 0.8 * before


def test_the_start_as_its_only_teacher_changes_nothing(family, rng):
    *_, merge = family
    start = {name: tensor.clone() for name, tensor in merge.state_dict().items()}
    found = calibrated(merge, start, [SampleTeacher(start, [draw(merge, rng)], 1.0)])
    for name, tensor in start.items():
        assert torch.allclose(found[name], tensor, atol=1e-5), name


def test_layers_of_another_kind_are_refused(family, rng):
    base = family[0]
    config = GPTNeoXConfig(
        vocab_size=base.config.vocab_size, hidden_size=base.config.hidden_size,
        num_hidden_layers=1, num_attention_heads=2, intermediate_size=16,
    )  # fmt: skip
    other = GPTNeoXForCausalLM(config).gpt_neox.layers
    base.model.layers = other
    start = base.state_dict()
    with pytest.raises(TrainingError, match=r"model\.layers\.0 of LlamaForCausalLM"):
        calibrated(base, start, [SampleTeacher(start, [draw(base, rng)], 1.0)])


def test_attention_that_sees_later_tokens_is_refused(rng):
    base = tiny_llama()
    base.set_attn_implementation("eager")  # causal by a mask only
    start = base.state_dict()
    with pytest.raises(TrainingError, match=r"model\.layers\.0 of LlamaForCausalLM"):
        calibrated(base, start, [SampleTeacher(start, [draw(base, rng)], 1.0)])


@pytest.mark.parametrize(
    ("known", "times", "faster"),
    [
        ({"avx512_bf16": True}, (1.0, 2.0), True),
        ({"amx_bf16": True}, (2.0, 1.0), False),  # it has bfloat16, and is slower in it
        ({"avx2": True}, (1.0, 2.0), False),  # not even tried
    ],
)
def test_whether_half_precision_is_faster_is_measured(monkeypatch, known, times, faster):
    half, whole = times
    seconds = iter([[9.0, half], [9.0, whole]])
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: known, raising=False)
    monkeypatch.setattr(layerwise.timeit, "repeat", lambda *_, **__: next(seconds))
    assert layerwise._half_is_faster.__wrapped__() is faster
