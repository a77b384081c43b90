# SPDX-License-Identifier: Apache-2.0
"""Weights mapped from checkpoints, and the streamed gradient against autograd in float64."""

from __future__ import annotations

import copy

import pytest
import torch
from checkpoints import fine_tuned, tiny_llama
from mergekit.merge_methods import merge_tensors
from torch import Tensor, nn
from torch.func import functional_call

from mergekit_ace.algebra import linalg
from mergekit_ace.training.family import MergedModel

EXPERTS = 3
IDS = torch.randint(0, 40, (2, 9), generator=torch.Generator().manual_seed(3))


def weights(model: nn.Module) -> dict[str, Tensor]:
    return {name: parameter.detach() for name, parameter in model.named_parameters()}


def test_products_are_the_gradient(monkeypatch):
    """∂L/∂λ by autograd in float64 through every θ_0 + Σ λ Δ."""
    monkeypatch.setattr(linalg, "BLOCK_ENTRIES", 100)  # fewer entries than a matrix has
    base = tiny_llama(tie_word_embeddings=True)  # one parameter with two gradients
    experts = [fine_tuned(base, seed=10 + k) for k in range(EXPERTS)]
    shape = EXPERTS, len(weights(base))
    coefficients = 0.3 * torch.randn(shape, generator=torch.Generator().manual_seed(1)).double()
    coefficients.requires_grad_(True)
    parameters = {}
    for column, (name, origin) in enumerate(weights(base).items()):
        deltas = [weights(expert)[name].double() - origin.double() for expert in experts]
        moved = [coefficients[row, column] * delta for row, delta in enumerate(deltas)]
        parameters[name] = origin.double() + sum(moved)
    inputs = {"input_ids": IDS, "labels": IDS}
    functional_call(copy.deepcopy(base).double(), parameters, (), inputs).loss.backward()
    versions = [weights(expert) for expert in experts]
    merged = MergedModel(copy.deepcopy(base), weights(base), versions, list(weights(base)))
    merged.write(torch.zeros(shape))
    assert all(torch.equal(t, weights(base)[n]) for n, t in weights(merged.module).items())
    merged.write(coefficients)
    for _ in range(2):  # backward passes add up
        merged.module(**inputs).loss.backward()
    error = (merged.products / 2 - coefficients.grad).norm() / coefficients.grad.norm()
    assert error <= 1e-5
    assert all(parameter.grad is None for parameter in merged.module.parameters()), "freed"


def test_the_base_in_another_precision_counts_as_in_the_method(rng):
    base = nn.Linear(64, 48, bias=False)
    origin = base.weight.detach().clone()
    tuned = origin + 0.01 * torch.randn(48, 64, generator=rng)
    versions = [tuned.bfloat16(), origin.bfloat16()]
    experts = [{"weight": version} for version in versions]
    merged = MergedModel(base, {"weight": origin}, experts, ["weight"])
    merged.write(torch.tensor([[0.5], [2.0]]))
    wide, known = [version.float() for version in versions], {"weight": [0.5, 2.0]}
    expected = merge_tensors([origin, *wide], "statsmerging", base_index=0, parameters=known)
    torch.testing.assert_close(base.weight.detach(), expected, rtol=0, atol=1e-7)
    moved = wide[0] - origin
    (base.weight * moved.sign()).sum().backward()  # a sum in which nothing cancels
    slope = float(moved.double().abs().sum())
    assert merged.products[:, 0].tolist() == pytest.approx([slope, 0], rel=1e-5)
