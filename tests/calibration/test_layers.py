# SPDX-License-Identifier: Apache-2.0
"""What a calibration computes, against whole models: linear layers as hooks see them, and λ."""

from __future__ import annotations

import copy
from functools import partial
from typing import NamedTuple

import pytest
import torch
from checkpoints import LLAMA, fine_tuned, tiny, tiny_llama
from torch import Tensor
from transformers import LlamaForCausalLM, MistralForCausalLM, Qwen2ForCausalLM, Qwen3ForCausalLM

from mergekit_ace.calibration.calibrate import (
    RIDGE,
    SCALES,
    WRITERS,
    SampleTeacher,
    calibrated_layers,
    choose_scale,
    comparison_batch,
    decoder_steps,
    scaled_weights,
)
from mergekit_ace.training import tasks

CPU = torch.device("cpu")


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
    model, seen, stream = copy.deepcopy(model), {}, []

    def keep(name, module, given, output):
        seen[name] = Watched(given[0].flatten(0, 1), output.flatten(0, 1), stream[-1])

    for name, module in model.model.layers.named_modules():
        if name.endswith("layernorm"):
            module.register_forward_pre_hook(lambda _, given: stream.append(given[0].flatten(0, 1)))
        if name.endswith("_proj"):
            module.register_forward_hook(partial(keep, name))
    model(ids)
    return seen


@pytest.mark.parametrize("biased", [False, True])
def test_every_linear_is_the_least_squares(rng, monkeypatch, biased):
    """What a linear reads in the calibrated model is what it was calibrated on.

    Of three texts the longest is alone, and the others are padded. Where inputs are all zero,
    weights stay.
    """
    monkeypatch.setitem(tasks._TOKENS, "cpu", 40)
    base = tiny_llama(attention_bias=biased)
    base.set_attn_implementation("eager")  # which is not causal without a mask
    merge, *experts = (fine_tuned(base, seed, 0.05) for seed in (3, 1, 2))
    merge.model.layers[1].post_attention_layernorm.weight.data.zero_()
    texts = [
        [torch.randint(base.config.vocab_size, (length,), generator=rng) for length in lengths]
        for lengths in ((24, 9, 17), (20, 12))
    ]
    teachers = [
        SampleTeacher(expert.state_dict(), own, weight)
        for expert, own, weight in zip(experts, texts, (0.4, 0.6), strict=True)
    ]
    start = {name: tensor.clone() for name, tensor in merge.state_dict().items()}
    found = {**start}
    for tensors in calibrated_layers(base, start, teachers, CPU):
        found |= tensors
    merge.load_state_dict(found)
    seen = [
        [(watch(merge, ids[None]), watch(expert, ids[None])) for ids in own]
        for expert, own in zip(experts, texts, strict=True)
    ]
    for name in seen[0][0][0]:
        key = f"model.layers.{name}.weight"
        if name.startswith("1.mlp."):
            assert torch.equal(found[key], start[key])
            continue
        rows = []
        for expert, teacher, pairs in zip(experts, teachers, seen, strict=True):
            inputs, wanted = [], []
            for ours, own in ((one[name], other[name]) for one, other in pairs):
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
    model = tiny(build, **LLAMA, head_dim=16)
    layer, hidden = model.model.layers[0], torch.randn(1, 12, 32, generator=rng)
    rotary = model.model.rotary_emb(hidden, torch.arange(12)[None])
    *_, (found, _) = decoder_steps(layer, hidden, rotary)
    mask = torch.full((12, 12), -torch.inf).triu(1)[None, None]
    whole = layer(hidden, position_embeddings=rotary, attention_mask=mask)
    torch.testing.assert_close(found, whole, atol=1e-5, rtol=1e-4)


def draw(vocabulary: int, rng: torch.Generator, rows: int) -> dict[str, Tensor]:
    """Texts with a prompt, of which the first one is padded."""
    ids = torch.randint(vocabulary, (rows, 12), generator=rng)
    mask = torch.ones_like(ids)
    mask[0, 9:] = 0
    supervised = mask.bool()
    supervised[:, :4] = False
    return {"input_ids": ids, "attention_mask": mask, "supervised": supervised}


def naive_share(models: list, batches: list[dict[str, Tensor]], scale: float) -> float:
    """A base, a merge and experts as whole models in float64, one sequence at a time."""
    base, merged, *experts = (copy.deepcopy(model).double() for model in models)
    between, ends = copy.deepcopy(base), merged.state_dict().items()
    origin = base.state_dict()
    between.load_state_dict({name: torch.lerp(origin[name], end, scale) for name, end in ends})
    shares = []
    for expert, batch in zip(experts, batches, strict=True):
        lost = [0.0, 0.0]
        for ids, mask, wanted in zip(*batch.values(), strict=True):
            length = int(mask.sum())
            target, *others = (
                model(ids[None, :length]).logits[0, :-1].log_softmax(-1)[wanted[1:length]]
                for model in (expert, base, between)
            )
            for number, other in enumerate(others):
                lost[number] += float((target.exp() * (target - other)).sum())
        shares.append(1 - lost[1] / lost[0])
    return sum(shares) / len(shares)


@pytest.mark.parametrize("tied", [False, True])
@torch.no_grad()
def test_the_best_scale_is_that_of_whole_models(rng, tied):
    base = tiny_llama(tie_word_embeddings=tied)
    experts = [fine_tuned(base, seed, 0.3) for seed in (1, 2)]
    merged = copy.deepcopy(base)
    for name, tensor in merged.state_dict().items():
        tensor += sum(expert.state_dict()[name] - base.state_dict()[name] for expert in experts)
    batches = [draw(base.config.vocab_size, rng, rows) for rows in (3, 4)]
    stored = [
        {name: tensor.clone() for name, tensor in model.state_dict().items()}
        for model in (base, merged, *experts)
    ]
    if tied:  # as on disk
        for weights in stored:
            del weights["lm_head.weight"]
    config = copy.deepcopy(base.config)
    config.attention_dropout = 0.5  # of training, which this is not
    with torch.device("meta"):
        model = LlamaForCausalLM(config).bfloat16()
    model.model.rotary_emb = copy.deepcopy(base.model.rotary_emb)
    table, more = stored[2]["model.embed_tokens.weight"], torch.ones(3, base.config.hidden_size)
    stored[2]["model.embed_tokens.weight"] = torch.cat((table, more))  # which the merge has not
    pairs = list(zip(stored[2:], batches, strict=True))
    scale, share, before = choose_scale(model, stored[0], stored[1], pairs, CPU)
    curve = [naive_share([base, merged, *experts], batches, scale) for scale in SCALES]
    assert scale == SCALES[curve.index(max(curve))]
    assert share == pytest.approx(max(curve), abs=2e-3)
    assert before == pytest.approx(curve[SCALES.index(1.0)], abs=2e-3)


def test_what_the_base_lacks_stays_as_merged():
    base, merged = torch.zeros(2, 3), torch.ones(4, 3).bfloat16()
    between = scaled_weights({"a": base}, {"a": merged, "b": merged}, 0.25)
    assert between["a"].dtype == torch.float32
    assert between["a"][:, 0].tolist() == [0.25, 0.25, 1.0, 1.0]
    assert torch.equal(between["b"], merged)
    fewer = scaled_weights({"a": base}, {"a": torch.ones(1, 3)}, 0.5)
    assert fewer["a"].tolist() == [[0.5] * 3]


def test_texts_that_are_compared():
    def texts(length: int, count: int = 1) -> list[dict[str, Tensor]]:
        return [{"input_ids": torch.arange(length)}] * count

    long = comparison_batch(texts(400, 64))
    assert long["input_ids"].shape == (5, 400), "2,048 tokens at most"
    mixed = comparison_batch([*texts(3000), *texts(7), *texts(4)])
    assert mixed["attention_mask"].sum(dim=1).tolist() == [7, 4]
    assert comparison_batch(texts(3000))["input_ids"].shape == (1, 3000)
