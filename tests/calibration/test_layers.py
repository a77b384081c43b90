# SPDX-License-Identifier: Apache-2.0
"""Every linear of a calibrated model, against a naive least squares on what hooks see in models."""

from __future__ import annotations

from contextlib import ExitStack
from functools import partial
from typing import NamedTuple

import pytest
import torch
from checkpoints import LLAMA, fine_tuned, tiny_llama
from torch import Tensor
from transformers import (
    LlamaForCausalLM,
    MistralForCausalLM,
    Qwen2ForCausalLM,
    Qwen3ForCausalLM,
)

from mergekit_ace.calibration.layers import (
    RIDGE,
    WRITERS,
    SampleTeacher,
    calibrated_layers,
    decoder_steps,
)
from mergekit_ace.training import tasks


@pytest.fixture(params=[False, True], ids=["plain", "biased"])
def family(request) -> list[LlamaForCausalLM]:
    """A base, two experts, and a poor merge of them."""
    base = tiny_llama(attention_bias=request.param)
    return [base, *(fine_tuned(base, seed, 0.05) for seed in (1, 2)), fine_tuned(base, 3, 0.02)]


def draw(model: LlamaForCausalLM, rng: torch.Generator, *lengths: int) -> list[Tensor]:
    """Texts of so many tokens."""
    return [torch.randint(model.config.vocab_size, (length,), generator=rng) for length in lengths]


def stacked_least_squares(
    rows: list[tuple[Tensor, Tensor, float]], start: Tensor, ridge: float
) -> Tensor:
    """Minimise Σ w ‖W Xᵀ − Yᵀ‖² / n + λ s̄ ‖W − W_m‖² by stacking all rows (X, Y, w)."""
    left = [(w / len(x)) ** 0.5 * x.double() for x, _, w in rows]
    right = [(w / len(x)) ** 0.5 * y.double() for x, y, w in rows]
    mean = sum(x.square().sum() for x in left) / start.shape[1]
    root = (ridge * mean) ** 0.5
    left.append(root * torch.eye(start.shape[1], dtype=torch.float64))
    right.append(root * start.double().mT)
    return torch.linalg.lstsq(torch.cat(left), torch.cat(right)).solution.mT


class Watched(NamedTuple):
    """Inputs, outputs without bias, and the residual stream of a linear, a row for each token."""

    inputs: Tensor
    outputs: Tensor
    stream: Tensor


@torch.no_grad()
def watch(model: LlamaForCausalLM, ids: Tensor) -> dict[str, Watched]:
    """Return what all linears of the decoder layers do, by name, as hooks see it."""
    seen: dict[str, Watched] = {}
    stream = torch.tensor(0.0)

    def keep_stream(module, given):
        nonlocal stream
        stream = given[0].flatten(0, 1)

    def keep(name, module, given, output):
        seen[name] = Watched(given[0].flatten(0, 1), output.flatten(0, 1), stream)

    with ExitStack() as hooks:
        for name, module in model.model.layers.named_modules():
            if name.endswith("layernorm"):
                hooks.callback(module.register_forward_pre_hook(keep_stream).remove)
            if name.endswith("_proj"):
                hooks.callback(module.register_forward_hook(partial(keep, name)).remove)
        model(ids)
    return seen


def test_every_linear_is_the_least_squares(family, rng, monkeypatch):
    """What a linear reads in the calibrated model is what it was calibrated on.

    Of three texts the longest is alone, and the others are padded.
    """
    monkeypatch.setitem(tasks._TOKENS, "cpu", 40)
    base, *experts, merge = family
    base.set_attn_implementation("eager")  # which is not causal without a mask
    texts = [draw(base, rng, 24, 9, 17), draw(base, rng, 20, 12)]
    teachers = [
        SampleTeacher(expert.state_dict(), own, weight)
        for expert, own, weight in zip(experts, texts, (0.4, 0.6), strict=True)
    ]
    start = {name: tensor.clone() for name, tensor in merge.state_dict().items()}
    found = {**start}
    for tensors in calibrated_layers(base, start, teachers, torch.device("cpu")):
        found |= tensors
    merge.load_state_dict(found)
    for name in watch(merge, texts[0][0][None]):
        key = f"model.layers.{name}.weight"
        rows = []
        for expert, teacher in zip(experts, teachers, strict=True):
            inputs, wanted = [], []
            for ids in teacher.texts:
                ours, own = watch(merge, ids[None])[name], watch(expert, ids[None])[name]
                outputs = own.inputs @ expert.state_dict()[key].mT
                if name.endswith(WRITERS):
                    bias = start.get(key.replace(".weight", ".bias"), 0.0)
                    outputs = own.outputs + own.stream - ours.stream - bias
                inputs.append(ours.inputs)
                wanted.append(outputs)
            rows.append((torch.cat(inputs), torch.cat(wanted), teacher.weight))
        expected = stacked_least_squares(rows, start[key], RIDGE)
        assert not torch.allclose(found[key], start[key], atol=1e-4), name
        assert torch.allclose(found[key].double(), expected, atol=1e-4), name


@torch.no_grad()
@pytest.mark.parametrize(
    "build", [LlamaForCausalLM, MistralForCausalLM, Qwen2ForCausalLM, Qwen3ForCausalLM]
)
def test_steps_are_those_of_the_layer(build, rng):
    model = build(build.config_class(**LLAMA, head_dim=16))
    layer, hidden = model.model.layers[0], torch.randn(1, 12, 32, generator=rng)
    for length in (12, 7):
        rotary = model.model.rotary_emb(hidden, torch.arange(length)[None])
        *_, (found, _) = decoder_steps(layer, hidden[:, :length], rotary)
        mask = torch.full((length, length), -torch.inf).triu(1)[None, None]
        whole = layer(hidden[:, :length], position_embeddings=rotary, attention_mask=mask)
        torch.testing.assert_close(found, whole, atol=1e-5, rtol=1e-4)
