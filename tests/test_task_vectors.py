# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import pytest
import torch

from mergekit_ace.algebra.linalg import squared_norm
from mergekit_ace.algebra.task_vectors import select_active, task_vector


def test_bfloat16_differences_are_exact():
    base = torch.tensor([1.0, 3.0]).bfloat16()
    expert = torch.tensor([1.0078125, 0.0101]).bfloat16()
    delta = task_vector(expert, base, torch.float32)
    assert torch.equal(delta.double(), expert.double() - base.double())
    assert not torch.equal((expert - base).double(), delta.double())


@pytest.mark.parametrize("size", [1e-30, 1e-15, 1.0, 1e15, 1e30])
@pytest.mark.parametrize("shape", [(100,), (10, 10), (2, 5, 10)])
def test_squared_norm_in_and_out_of_the_range_of_float32(size, shape):
    assert squared_norm(torch.full(shape, size)) == pytest.approx(100 * size**2, rel=1e-6)
    mixed = torch.full(shape, size * 1e-20)
    mixed.view(-1)[0] = size
    expected = float(mixed.double().square().sum())
    assert squared_norm(mixed) == pytest.approx(expected, rel=1e-6)
    assert squared_norm(torch.zeros(shape)) == 0


def test_weights_are_rescaled_over_the_active_experts_only():
    base = torch.zeros(3, 3)
    experts = [base + 1, base.clone(), base + 2, base + 3]
    active = select_active(base, experts, [3.0, 100.0, 1.0, 0.0], torch.float32)
    assert active.positions == (0, 2)
    assert active.weights == pytest.approx((1.5, 0.5))
    assert active.all_tau == pytest.approx((9.0, 0.0, 36.0, 81.0))
    assert active.tau == pytest.approx((9.0, 36.0))
    assert active.spread(["a", "b"], None) == ("a", None, "b", None)


@pytest.mark.parametrize("size", [1e-300, 1e300])
def test_extreme_weights(size):
    base = torch.zeros(2, 2)
    active = select_active(base, [base + 1, base + 2], [size, 3 * size], torch.float32)
    assert active.weights == pytest.approx((0.5, 1.5))


def test_a_task_vector_that_overflows():
    base = torch.full((2, 2), -3e38)
    with pytest.raises(OverflowError, match=r"expert 0 overflows torch\.float32; compute_dtype"):
        select_active(base, [-base], [1.0], torch.float32)
    assert select_active(base, [-base], [1.0], torch.float64).positions == (0,)
