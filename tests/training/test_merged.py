# SPDX-License-Identifier: Apache-2.0
"""The streamed gradient against autograd through the whole merge, in float64."""

from __future__ import annotations

import copy

import pytest
import torch
from checkpoints import fine_tuned, tiny_llama
from covering import covered
from mergekit.merge_methods import merge_tensors
from torch import Tensor, nn
from torch.func import functional_call

from mergekit_ace.algebra.learner import Learner, LearnerConfig, features, measure_moments
from mergekit_ace.naming import block_of
from mergekit_ace.training import merged as merged_module
from mergekit_ace.training.merged import MergedModel

EXPERTS = 3


@pytest.fixture(autouse=True, params=[100, 2**18])
def block(request, monkeypatch) -> None:
    """Tensors are read in blocks of so many entries."""
    monkeypatch.setattr(merged_module, "BLOCK", request.param)


class Family:
    """A tiny Llama with experts, the groups of its tensors, and a loss on it."""

    def __init__(self, granularity: str, **config):
        self.base = tiny_llama(**config)
        self.experts = [fine_tuned(self.base, seed=10 + k) for k in range(EXPERTS)]
        self.names = [name for name, _ in self.base.named_parameters()]
        keys = {
            "tensor": self.names,
            "block": [block_of(name) for name in self.names],
            "task": [""] * len(self.names),
        }[granularity]
        numbers = {key: n for n, key in enumerate(dict.fromkeys(keys))}
        self.groups = torch.tensor([numbers[key] for key in keys])
        generator = torch.Generator().manual_seed(3)
        self.ids = torch.randint(0, 40, (2, 9), generator=generator)

    def statistics(self, config: LearnerConfig) -> Tensor:
        """One tensor of each group stands for all: what they mean does not matter here."""
        first = [self.names[self.groups.tolist().index(g)] for g in self.groups.unique().tolist()]
        rows = [
            [
                features(measure_moments((e - b).detach(), config.rank), config.statistics, 3)
                for e, b in ((weights(expert)[n], weights(self.base)[n]) for n in first)
            ]
            for expert in self.experts
        ]
        return torch.tensor(rows, dtype=torch.float64)

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
    wide = coefficients.double()[:, family.groups]
    parameters = {}
    for column, name in enumerate(family.names):
        origin = weights(family.base)[name].double()
        total = origin
        for row, expert in enumerate(family.experts):
            total = total + wide[row, column] * (weights(expert)[name].double() - origin)
        parameters[name] = total
    return family.loss(model, parameters)


def relative_error(got: Tensor, expected: Tensor) -> float:
    return float((got - expected).norm() / expected.norm())


@covered(
    activation=["softmax", "relu", "identity"],
    granularity=["tensor", "block", "task"],
    kind=["shared", "concatenated", "direct"],
)
def test_the_gradient_of_the_learner_is_that_of_autograd(granularity, activation, kind):
    family = Family(granularity)
    config = LearnerConfig(input=kind, hidden=16, activation=activation)
    statistics = family.statistics(config)
    depths = torch.linspace(0, 1, statistics.shape[1])
    torch.manual_seed(0)
    learner = Learner(config, *statistics.shape[:2])
    learner.standardizer.fit(statistics)
    for parameter in learner.parameters():  # the last layer starts at 0, which hides all others
        torch.nn.init.normal_(parameter, std=0.1)

    coefficients = learner(statistics, depths)
    naive_gradients(family, coefficients).backward()
    expected = [parameter.grad.clone() for parameter in learner.parameters()]

    learner.zero_grad()
    merged = family.merged()
    coefficients = learner(statistics, depths)
    merged.write(coefficients[:, family.groups])
    family.loss(merged.module).backward()
    merged.collect()
    gradient = torch.zeros(coefficients.shape, dtype=torch.float64)
    gradient.index_add_(1, family.groups, merged.products)
    coefficients.backward(gradient.float())
    for parameter, truth in zip(learner.parameters(), expected, strict=True):
        assert (parameter.grad - truth).norm() <= 1e-5 * max(t.norm() for t in expected)


def test_products_are_the_gradient():
    family = Family("tensor", tie_word_embeddings=True)  # one parameter with two gradients
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
    merged.clear()
    assert not merged.products.any()


def test_experts_of_different_dtypes():
    family = Family("tensor")
    rounded = {name: tensor.bfloat16() for name, tensor in weights(family.experts[1]).items()}
    mixed = [weights(family.experts[0]), rounded]
    merged = MergedModel(copy.deepcopy(family.base), weights(family.base), mixed, family.names)
    merged.write(torch.full((2, len(family.names)), 0.5))
    for name in family.names:
        parts = [weights(family.base)[name].double(), *(e[name].double() for e in mixed)]
        expected = parts[0] + sum(0.5 * (part - parts[0]) for part in parts[1:])
        assert relative_error(weights(merged.module)[name], expected) <= 1e-6


def test_gradients_are_freed_and_nothing_else_moves():
    family = Family("tensor")
    frozen = "model.norm.weight"
    names = [name for name in family.names if name != frozen]
    before = [{n: t.clone() for n, t in weights(m).items()} for m in (family.base, *family.experts)]
    module = copy.deepcopy(family.base)
    experts = [weights(expert) for expert in family.experts]
    merged = MergedModel(module, weights(family.base), experts, names)
    merged.write(torch.full((EXPERTS, len(names)), 0.5))
    family.loss(module).backward()
    merged.collect()
    assert all(parameter.grad is None for parameter in module.parameters())
    assert not module.get_parameter(frozen).requires_grad
    assert torch.equal(module.get_parameter(frozen), family.base.get_parameter(frozen))
    for model, known in zip((family.base, *family.experts), before, strict=True):
        assert all(torch.equal(tensor, known[name]) for name, tensor in weights(model).items())


def test_zero_coefficients_write_the_base_bit_for_bit():
    family = Family("tensor")
    merged = family.merged()
    merged.write(torch.ones(EXPERTS, len(family.names)))
    merged.write(torch.zeros(EXPERTS, len(family.names)))
    assert all(torch.equal(t, weights(family.base)[n]) for n, t in weights(merged.module).items())


def test_the_base_in_another_precision_counts_as_in_the_method(rng):
    base = nn.Linear(64, 48, bias=False)
    origin = base.weight.detach().clone()
    versions = [origin + 0.01 * torch.randn(48, 64, generator=rng), origin.bfloat16()]
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
    slope = float((versions[0] - origin).double().sum())
    assert merged.products[:, 0].tolist() == pytest.approx([slope, 0], rel=1e-5)
