# SPDX-License-Identifier: Apache-2.0
"""Statistics of weights against numpy in float64, with full decompositions."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from mergekit_ace.algebra.learner import (
    STATISTICS,
    WeightMoments,
    combine,
    features,
    measure_moments,
)


def naive(tensor, rank):
    array = np.asarray(tensor.detach().double())
    matrix = array.reshape(1, -1) if array.ndim < 2 else array.reshape(array.shape[0], -1)
    singular = np.linalg.svd(matrix, compute_uv=False)[:rank]
    singular = np.concatenate([singular, np.zeros(rank - len(singular))])
    return [array.mean(), array.var(), np.linalg.norm(array), *singular]


@pytest.mark.parametrize("shape", [(40, 60), (7,), (2, 50), (8, 3, 5, 5), ()])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_statistics_are_those_of_numpy(rng, shape, dtype):
    tensor = (torch.randn(shape, generator=rng) + 0.3).to(dtype)
    got = features(measure_moments(tensor, 3), STATISTICS, 3)
    np.testing.assert_allclose(got, naive(tensor, 3), rtol=1e-6, atol=1e-12)


@pytest.mark.parametrize(("shape", "scale"), [((600, 520), 1e-12), ((520, 900), 1e12)])
def test_large_matrices_need_no_full_decomposition(rng, monkeypatch, shape, scale):
    tensor = torch.randn(shape, generator=rng)
    tensor += torch.randn(shape[0], 2, generator=rng) @ torch.randn(2, shape[1], generator=rng)
    tensor *= scale
    expected = np.linalg.svd(tensor.double().numpy(), compute_uv=False)[:5]
    for name in ("svd", "svdvals"):
        monkeypatch.delattr(torch.linalg, name)
    found = measure_moments(tensor, 5).singular
    np.testing.assert_allclose(found, expected, rtol=2e-5)
    assert measure_moments(tensor, 5).singular == found, "the same in every run"


def test_zero_and_empty_tensors():
    assert features(measure_moments(torch.zeros(3, 4), 2), STATISTICS, 2) == [0.0] * 5
    assert features(measure_moments(torch.zeros(0, 4), 2), STATISTICS, 2) == [0.0] * 5


def test_a_small_spread_beside_a_large_mean_is_not_lost():
    tensor = torch.full((1000,), 1e4, dtype=torch.float64)
    tensor[::2] += 1e-3
    (variance,) = features(measure_moments(tensor, 0), ("variance",), 0)
    assert variance == pytest.approx(2.5e-7, rel=1e-6)


def test_what_is_not_finite_is_refused():
    for bad in (float("nan"), float("inf")):
        with pytest.raises(ValueError, match="NaN or Inf"):
            measure_moments(torch.tensor([[0.0, bad]]), 1)


def test_together_is_the_block_diagonal_matrix(rng):
    parts = [torch.randn(4, 5, generator=rng), torch.randn(6, generator=rng) + 2, torch.zeros(0)]
    got = combine([measure_moments(part, 3) for part in parts], 3)
    entries = torch.cat([part.flatten() for part in parts])
    block = torch.block_diag(parts[0], parts[1][None])
    assert features(got, ("mean", "variance", "magnitude"), 3) == pytest.approx(
        naive(entries, 0)[:3], rel=1e-6
    )
    assert got.singular == pytest.approx(torch.linalg.svdvals(block)[:3].tolist(), rel=1e-6)


def test_features_come_in_the_order_asked_for():
    moments = WeightMoments(4, 1.0, 8.0, (3.0, 2.0, 1.0))
    assert features(moments, ("singular_values", "mean"), 2) == [3.0, 2.0, 1.0]
