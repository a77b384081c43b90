# SPDX-License-Identifier: Apache-2.0
"""What the benchmark tries against the loss of old skills, on inputs that are shared or not."""

from __future__ import annotations

import pytest
import torch
from matrices import HETEROGENEOUS, family
from torch import Tensor

EXPERTS, COLUMNS = 3, 12


@pytest.fixture
def overlaps(example):
    return example("benchmark", "evidence.overlaps")


@pytest.fixture
def apart(rng) -> list[Tensor]:
    """Experts of one strength that read inputs of their own, four each, all alike."""
    whole = torch.linalg.qr(torch.randn(14, COLUMNS, generator=rng, dtype=torch.float64)).Q
    places = torch.arange(COLUMNS) // 4
    return [whole * (places == t) for t in range(EXPERTS)]


@pytest.fixture
def together(rng) -> list[Tensor]:
    """Experts that read the same inputs, and answer otherwise."""
    right = torch.randn(COLUMNS, COLUMNS, generator=rng, dtype=torch.float64)
    turns = [torch.randn(14, COLUMNS, generator=rng, dtype=torch.float64) for _ in range(EXPERTS)]
    return [torch.linalg.qr(turn).Q @ right for turn in turns]


def test_every_rule_keeps_the_shape(overlaps, rng):
    base, experts = family(rng, 14, 9, 3, scales=HETEROGENEOUS, noise=0.5)
    deltas = [(expert - base).double() for expert in experts]
    plain = overlaps.ridged(deltas)
    for name, rule in overlaps.OVERLAPS.items():
        merged = rule(deltas)
        assert merged.shape == plain.shape, name
        assert float(merged.norm()) > 0, name


@pytest.mark.parametrize("power", [0.0, 0.5, 1.0])
def test_users(overlaps, apart, together, power):
    assert overlaps.users(apart, power) == pytest.approx(1)
    assert overlaps.users(together, power) == pytest.approx(EXPERTS)
    halves = [apart[0], apart[0] + apart[1]]  # one input of two is shared
    cosine = 0.5**0.5
    assert overlaps.users(halves, power) == pytest.approx(1 + cosine)


def test_uses(overlaps, rng):
    delta = torch.randn(14, 3, generator=rng, dtype=torch.float64) @ torch.randn(
        3, 9, generator=rng, dtype=torch.float64
    )
    torch.testing.assert_close(overlaps.uses(delta, 1.0), delta.T @ delta)
    root = overlaps.uses(delta, 0.5)
    torch.testing.assert_close(root @ root, delta.T @ delta)
    projector = overlaps.uses(delta, 0.0)
    torch.testing.assert_close(delta @ projector, delta)
    assert float(projector.trace()) == pytest.approx(3)


def test_what_nobody_shares_is_shrunk(overlaps, apart):
    plain, one = overlaps.ridged(apart), EXPERTS**-0.5
    expected = {
        "λ = √(n/T) of spans": one,
        "λ = √(n/T) of |Δ|": one,
        "λ = min(1, 2n/T) of |Δ|": 2 / EXPERTS,
        "as large as one expert": float(apart[0].norm() / plain.norm()),
        "the base as an expert": EXPERTS / (EXPERTS + 1),
        "the base as an even expert": EXPERTS / (EXPERTS + 1),
        "n/T of every direction": 1 / EXPERTS,
        "√(n/T) in the system": one,
    }
    for name, factor in expected.items():
        merged = overlaps.OVERLAPS[name](apart)
        assert float((merged - factor * plain).norm()) < 0.03 * float(plain.norm()), name


def test_what_all_share_is_not(overlaps, together):
    plain = overlaps.ridged(together)
    for name in (
        "λ = √(n/T) of spans", "λ = √(n/T) of |Δ|", "λ = min(1, 2n/T) of |Δ|",
        "n/T of every direction", "√(n/T) in the system", "pooled by spans",
    ):  # fmt: skip
        merged = overlaps.OVERLAPS[name](together)
        assert float((merged - plain).norm()) < 1e-6 * float(plain.norm()), name
    base = overlaps.base_as_expert(together, even=False)
    torch.testing.assert_close(base, plain * (EXPERTS / (EXPERTS + 1)))


def test_pooled_covariances(overlaps, apart):
    torch.testing.assert_close(overlaps.pooled(apart, 0.0), overlaps.ridged(apart))
    mean = torch.stack(apart).mean(dim=0)
    torch.testing.assert_close(overlaps.pooled(apart, 1.0), mean)
    by_spans = overlaps.pooled(apart, 1 - EXPERTS**-0.5)
    torch.testing.assert_close(overlaps.pooled(apart), by_spans)
