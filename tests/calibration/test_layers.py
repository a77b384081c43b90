# SPDX-License-Identifier: Apache-2.0
"""Every linear of a calibrated model, against a naive least squares on what hooks see in models."""

from __future__ import annotations

from contextlib import ExitStack
from functools import partial
from typing import NamedTuple

import pytest
import torch
from checkpoints import fine_tuned, tiny_llama
from torch import Tensor
from transformers import GPTNeoXConfig, GPTNeoXForCausalLM, LlamaForCausalLM

from mergekit_ace.calibration.layers import (
    RIDGE,
    WRITERS,
    Calibration,
    SampleTeacher,
    ridge_factor,
    solve_from,
    summed_product,
)
from mergekit_ace.training.state import TrainingError

CPU = torch.device("cpu")


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
    found = {name: tensor.clone() for name, tensor in start.items()}
    for tensors in Calibration(model, CPU).layers(start, teachers):
        found |= tensors
    return found


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


@pytest.mark.parametrize("ridge", [1e-3, 1.0])
def test_the_closed_form_is_the_least_squares(rng, ridge):
    draw = partial(torch.randn, generator=rng)
    start = draw(5, 8)
    rows = [(draw(40, 8), draw(40, 5), 0.3), (draw(30, 8), draw(30, 5), 0.7)]
    gram = sum(w / len(x) * summed_product(x, x) for x, _, w in rows)
    cross = sum(w / len(x) * summed_product(y, x) for x, y, w in rows)
    found = solve_from(start, gram, cross, ridge_factor(gram, ridge))
    assert torch.allclose(found, stacked_least_squares(rows, start, ridge), atol=1e-6)


def test_products_of_many_rows_are_added_in_float64(rng):
    rows = 1 + 1e-3 * torch.randn(20000, 2, generator=rng)
    assert torch.allclose(summed_product(rows, rows), rows.double().mT @ rows.double(), rtol=1e-6)


def test_inputs_that_are_zero_keep_the_start(rng):
    start = torch.randn(3, 4, generator=rng)
    nothing = torch.zeros(4, 4, dtype=torch.float64)
    found = solve_from(start, nothing, torch.zeros(3, 4), ridge_factor(nothing, 1.0))
    assert torch.equal(found, start.double())


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


def test_the_start_as_its_only_teacher_changes_nothing(family, rng):
    start = family[-1].state_dict()
    found = calibrated(family[-1], start, [SampleTeacher(start, [draw(family[-1], rng)], 1.0)])
    for name, tensor in start.items():
        assert torch.allclose(found[name], tensor, atol=1e-5), name


@pytest.mark.parametrize("kind", ["other layers", "attention that is causal by a mask only"])
def test_models_of_another_kind_are_refused(kind):
    base = tiny_llama()
    if kind == "other layers":
        config = GPTNeoXConfig(
            vocab_size=base.config.vocab_size, hidden_size=base.config.hidden_size,
            num_hidden_layers=1, num_attention_heads=2, intermediate_size=16,
        )  # fmt: skip
        base.model.layers = GPTNeoXForCausalLM(config).gpt_neox.layers
    else:
        base.set_attn_implementation("eager")
    with pytest.raises(TrainingError, match=r"model\.layers\.0 of LlamaForCausalLM"):
        Calibration(base, CPU).check(base.state_dict())
