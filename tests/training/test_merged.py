# SPDX-License-Identifier: Apache-2.0
"""The streamed gradient against autograd through the whole merge, in float64."""

from __future__ import annotations

import copy

import pytest
import torch
from checkpoints import fine_tuned, tiny_llama
from mergekit.merge_methods import merge_tensors
from torch import Tensor, nn
from torch.func import functional_call

from mergekit_ace.training import merged as merged_module
from mergekit_ace.training.merged import MergedModel

EXPERTS = 3


@pytest.fixture(autouse=True, params=[100, 2**18])
def block(request, monkeypatch) -> None:
    """Tensors are read in blocks of so many entries."""
    monkeypatch.setattr(merged_module, "BLOCK", request.param)


class Family:
    """A tiny Llama with experts, and a loss on it."""

    def __init__(self, **config):
        self.base = tiny_llama(**config)
        self.experts = [fine_tuned(self.base, seed=10 + k) for k in range(EXPERTS)]
        self.names = [name for name, _ in self.base.named_parameters()]
        generator = torch.Generator().manual_seed(3)
        self.ids = torch.randint(0, 40, (2, 9), generator=generator)

    def merged(self) -> MergedModel:
        experts = [weights(expert) for expert in self.experts]
        return MergedModel(copy.deepcopy(self.base), weights(self.base), experts, self.names)

    def loss(self, model, parameters: dict[str, Tensor] | None = None) -> Tensor:
        inputs = {"input_ids": self.ids, "labels": self.ids}
        if parameters is None:
            return model(**inputs).loss
        return functional_call(model, parameters, (), inputs).loss


def weights(model) -> dict[str, Tensor]:
    return {name: parameter.detach() for name, parameter in model.named_parameters()}


def naive_gradients(family: Family, coefficients: Tensor) -> Tensor:
    """∂L/∂λ by autograd in float64 through every θ_0 + Σ λ Δ."""
    model = copy.deepcopy(family.base).double()
    parameters = {}
    for column, name in enumerate(family.names):
        origin = weights(family.base)[name].double()
        total = origin
        for row, expert in enumerate(family.experts):
            total = total + coefficients[row, column] * (weights(expert)[name].double() - origin)
        parameters[name] = total
    return family.loss(model, parameters)


def relative_error(got: Tensor, expected: Tensor) -> float:
    return float((got - expected).norm() / expected.norm())


def test_products_are_the_gradient():
    family = Family(tie_word_embeddings=True)  # one parameter with two gradients
    coefficients = torch.randn(
        EXPERTS, len(family.names), generator=torch.Generator().manual_seed(1)
    )
    coefficients = (0.3 * coefficients).double().requires_grad_(True)
    naive_gradients(family, coefficients).backward()
    merged = family.merged()
    merged.write(coefficients)
    for _ in range(2):  # backward passes add up
        family.loss(merged.module).backward()
    merged.collect()
    assert relative_error(merged.products / 2, coefficients.grad) <= 1e-5
    assert all(parameter.grad is None for parameter in merged.module.parameters()), "freed"
    merged.clear()
    assert not merged.products.any()


def test_zero_coefficients_write_the_base_bit_for_bit():
    family = Family()
    merged = family.merged()
    merged.write(torch.ones(EXPERTS, len(family.names)))
    merged.write(torch.zeros(EXPERTS, len(family.names)))
    assert all(torch.equal(t, weights(family.base)[n]) for n, t in weights(merged.module).items())


def test_the_base_in_another_precision_counts_as_in_the_method(rng):
    base = nn.Linear(64, 48, bias=False)
    origin = base.weight.detach().clone()
    tuned = origin + 0.01 * torch.randn(48, 64, generator=rng)
    versions = [tuned.bfloat16(), origin.bfloat16()]
    experts = [{"weight": version} for version in versions]
    merged = MergedModel(base, {"weight": origin}, experts, ["weight"])
    given = [0.5, 2.0]
    merged.write(torch.tensor(given)[:, None])
    wide = [version.float() for version in versions]
    parameters = {"weight": given}
    expected = merge_tensors([origin, *wide], "statsmerging", base_index=0, parameters=parameters)
    torch.testing.assert_close(base.weight.detach(), expected, rtol=0, atol=1e-7)
    (base.weight * torch.ones(48, 64)).sum().backward()
    merged.collect()
    slope = float((wide[0] - origin).double().sum())
    assert merged.products[:, 0].tolist() == pytest.approx([slope, 0], rel=1e-5)
