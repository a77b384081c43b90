# SPDX-License-Identifier: Apache-2.0
"""Calibration layer by layer, against a naive least squares on what hooks see in whole models."""

from __future__ import annotations

from contextlib import nullcontext
from functools import partial
from types import ModuleType

import pytest
import torch
from checkpoints import fine_tuned, tiny_llama
from torch import Tensor
from transformers import LlamaForCausalLM


@pytest.fixture
def layerwise(example, monkeypatch) -> ModuleType:
    """The module under test, in float32 on every processor."""
    module = example("llm", "layerwise")
    monkeypatch.setattr(module, "half_precision", nullcontext)
    return module


@pytest.fixture
def family() -> list[LlamaForCausalLM]:
    """A base, two experts, and a poor merge of them."""
    base = tiny_llama(tie_word_embeddings=True)
    return [base, *(fine_tuned(base, seed, 0.05) for seed in (1, 2)), fine_tuned(base, 3, 0.02)]


def ids_of(model: LlamaForCausalLM, rng: torch.Generator) -> Tensor:
    return torch.randint(model.config.vocab_size, (4, 24), generator=rng)


def naive(rows: list[tuple[Tensor, Tensor, float]], start: Tensor, ridge: float) -> Tensor:
    """Minimise Σ w ‖W Xᵀ − Yᵀ‖² / n + λ s̄ ‖W − W_m‖² by stacking all rows.

    Args:
        rows: (X, Y, w) of every teacher.
        start: W_m.
        ridge: λ.
    """
    left = [(w / len(x)) ** 0.5 * x.double() for x, _, w in rows]
    right = [(w / len(x)) ** 0.5 * y.double() for x, y, w in rows]
    mean = sum(x.square().sum() for x in left) / start.shape[1]
    root = (ridge * mean) ** 0.5
    left.append(root * torch.eye(start.shape[1], dtype=torch.float64))
    right.append(root * start.double().mT)
    return torch.linalg.lstsq(torch.cat(left), torch.cat(right)).solution.mT


@pytest.mark.parametrize("ridge", [1e-3, 1.0])
def test_the_closed_form_is_the_least_squares(layerwise, rng, ridge):
    draw = partial(torch.randn, generator=rng)
    start = draw(5, 8)
    rows = [(draw(40, 8), draw(40, 5), 0.3), (draw(30, 8), draw(30, 5), 0.7)]
    gram = sum(w * layerwise.product(x, x) for x, _, w in rows)
    cross = sum(w * layerwise.product(y, x) for x, y, w in rows)
    wanted = naive(rows, start, ridge)
    assert torch.allclose(layerwise.solve(start, gram, cross, ridge, None), wanted, atol=1e-6)
    span, _ = torch.linalg.qr(draw(8, 3).double())
    within = [(x.double() @ span, y.double() - x.double() @ start.double().mT, w)
              for x, y, w in rows]  # fmt: skip
    scale = gram.trace() / 8 / (span.mT @ gram @ span).trace() * 3  # s̄ is that of all of C
    change = naive(within, torch.zeros(5, 3), float(ridge * scale)) @ span.mT
    found = layerwise.solve(start, gram, cross, ridge, span)
    assert torch.allclose(found, start + change, atol=1e-6)


def test_a_layer_in_steps_is_the_layer(layerwise, family, rng):
    model = family[0]
    ids = ids_of(model, rng)
    with torch.no_grad():
        seen = model(ids, output_hidden_states=True).hidden_states
        rotary = model.model.rotary_emb(seen[0], torch.arange(ids.shape[1])[None])
        *_, last = layerwise.steps(model.model.layers[0], seen[0], rotary)
    assert torch.allclose(last.stream, seen[1], atol=1e-5)


@torch.no_grad()
def watch(model: LlamaForCausalLM, ids: Tensor) -> dict[str, tuple[Tensor, Tensor, Tensor]]:
    """Return inputs, outputs and the residual stream of all linears, a row for each token."""
    seen: dict[str, tuple[Tensor, Tensor, Tensor]] = {}
    stream = torch.tensor(0.0)

    def keep_stream(module, given):
        nonlocal stream
        stream = given[0].flatten(0, 1)

    def keep(name, module, given, output):
        seen[name] = given[0].flatten(0, 1), output.flatten(0, 1), stream

    hooks = []
    for name, module in model.model.layers.named_modules():
        if name.endswith("layernorm"):
            hooks.append(module.register_forward_pre_hook(keep_stream))
        if name.endswith("_proj"):
            hooks.append(module.register_forward_hook(partial(keep, name)))
    model(ids)
    for hook in hooks:
        hook.remove()
    return seen


@pytest.mark.parametrize("targets", ["outputs", "stream", "weights"])
def test_every_linear_is_the_least_squares(layerwise, family, rng, targets):
    """What a linear reads in the calibrated model is what it was calibrated on."""
    base, *experts, merge = family
    samples = [ids_of(base, rng) for _ in experts]
    used = torch.ones(4, 24, dtype=torch.bool)
    used[:, 20:] = False
    teachers = [
        layerwise.Teacher(expert.state_dict(), ids, used, weight)
        for expert, ids, weight in zip(experts, samples, (0.4, 0.6), strict=True)
    ]
    start = {name: tensor.clone() for name, tensor in merge.state_dict().items()}
    settings = layerwise.Settings(ridge=0.1, targets=targets)
    found = layerwise.Calibration(base, start, {}, teachers, settings).run()
    merge.load_state_dict(found)
    merged = [watch(merge, ids) for ids in samples]
    theirs = [watch(expert, ids) for expert, ids in zip(experts, samples, strict=True)]
    rows_used = used.flatten()
    for name in merged[0]:
        key = f"model.layers.{name}.weight"
        rows = []
        for expert, teacher, ours, own in zip(experts, teachers, merged, theirs, strict=True):
            ours, own = ours[name], own[name]
            wanted = own[1]
            if targets == "weights":
                wanted = ours[0] @ expert.state_dict()[key].mT
            elif targets == "stream" and name.endswith(("o_proj", "down_proj")):
                wanted = own[1] + own[2] - ours[2]
            rows.append((ours[0][rows_used], wanted[rows_used], teacher.weight))
        assert not torch.allclose(found[key], start[key], atol=1e-3), name
        assert torch.allclose(found[key].double(), naive(rows, start[key], 0.1), atol=1e-4), name


def test_one_teacher_is_learned_to_the_end(layerwise, family, rng):
    """The residual stream comes back to the teacher's, though the embeddings are others."""
    base, expert, _, merge = family
    ids = torch.randint(base.config.vocab_size, (16, 24), generator=rng)
    teacher = layerwise.Teacher(expert.state_dict(), ids, torch.ones_like(ids, dtype=torch.bool))
    start = merge.state_dict()

    def distance() -> float:
        with torch.no_grad():
            wanted = expert.model(ids).last_hidden_state
            return float((merge.model(ids).last_hidden_state - wanted).norm() / wanted.norm())

    before = distance()
    merge.load_state_dict(
        layerwise.Calibration(base, start, {}, [teacher], layerwise.Settings(ridge=1e-3)).run()
    )
    assert distance() < 0.5 * before


def test_only_what_is_asked_for_changes(layerwise, family, rng):
    base, expert, _, merge = family
    ids = ids_of(base, rng)
    teacher = layerwise.Teacher(expert.state_dict(), ids, torch.ones_like(ids, dtype=torch.bool))
    start = {name: tensor.clone() for name, tensor in merge.state_dict().items()}
    settings = layerwise.Settings(linears=("down_proj",), layers=(0.0, 0.5), rank=3)
    found = layerwise.Calibration(base, start, base.state_dict(), [teacher], settings).run()
    depth = base.config.num_hidden_layers
    changed = {name for name, tensor in found.items() if not torch.equal(tensor, start[name])}
    assert changed == {f"model.layers.{n}.mlp.down_proj.weight" for n in range(-(-depth // 2))}
    for name in changed:
        rank = torch.linalg.matrix_rank((found[name] - start[name]).double(), rtol=1e-4)
        assert rank == 3


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
