# SPDX-License-Identifier: Apache-2.0
"""The network from statistics to coefficients, and the statistics, against numpy in float64."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from mergekit_ace.algebra.learner import (
    STATISTICS,
    Learner,
    LearnerConfig,
    Standardizer,
    combine,
    features,
    measure_moments,
)

EXPERTS, TENSORS = 3, 5


@pytest.mark.parametrize("kind", ["shared", "concatenated", "direct"])
@pytest.mark.parametrize("activation", ["softmax", "relu", "identity"])
def test_kinds_and_activations(rng, kind, activation):
    """Training starts at task arithmetic; then an activation does what its name says."""
    config = LearnerConfig(input=kind, hidden=8, activation=activation)
    statistics = torch.randn(EXPERTS, TENSORS, config.features, generator=rng).double().exp()
    depths, learner = torch.linspace(0, 1, TENSORS), Learner(config, EXPERTS, TENSORS)
    start = 1 / EXPERTS if activation == "softmax" else 0.3
    torch.testing.assert_close(learner(statistics, depths), torch.full((EXPERTS, TENSORS), start))
    for parameter in learner.parameters():
        torch.nn.init.normal_(parameter, std=0.2, generator=rng)
    learner.standardizer.fit(statistics)
    coefficients = learner(statistics, depths)
    assert coefficients.std() > 0
    if activation == "softmax":
        torch.testing.assert_close(coefficients.sum(0), torch.ones(TENSORS))
    if activation == "relu":
        assert (coefficients >= 0).all()


def test_statistics_are_standardised_over_experts_and_tensors(rng):
    statistics = 1e-3 * torch.randn(EXPERTS, TENSORS, 6, generator=rng).double().exp()
    statistics[..., 0] *= -1
    flat = Standardizer(6).fit(statistics)(statistics).double().flatten(0, 1)
    torch.testing.assert_close(flat.mean(0), torch.zeros(6).double(), atol=1e-6, rtol=0)
    torch.testing.assert_close(flat.std(0, correction=0), torch.ones(6).double(), atol=1e-6, rtol=0)
    decades = torch.logspace(-12, 0, 13, dtype=torch.float64)[None, :, None]
    steps = Standardizer(1).fit(decades)(decades).flatten().diff()
    assert steps.min() > 0.2 * steps.max(), "told apart down to the smallest"
    constant = torch.zeros(2, 3, 4, dtype=torch.float64)
    constant[..., 1] = 7.0
    assert not Standardizer(4).fit(constant)(constant).any()


def naive(tensor, rank=3):
    array = np.asarray(tensor.double())
    matrix = array.reshape(1, -1) if array.ndim < 2 else array.reshape(array.shape[0], -1)
    singular = np.linalg.svd(matrix, compute_uv=False)[:rank]
    singular = np.concatenate([singular, np.zeros(rank - len(singular))])
    return [array.mean(), array.var(), np.linalg.norm(array), *singular]


@pytest.mark.parametrize("shape", [(40, 60), (7,), (2, 50), (8, 3, 5, 5), (), (600, 520)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_statistics_are_those_of_numpy(rng, monkeypatch, shape, dtype):
    """Large matrices need no full decomposition."""
    tensor = (torch.randn(shape, generator=rng) + 0.3).to(dtype)
    if shape == (600, 520):
        tensor *= 1e-12
        for name in ("svd", "svdvals"):
            monkeypatch.delattr(torch.linalg, name)
    moments, expected = measure_moments(tensor, 3), naive(tensor)
    np.testing.assert_allclose(features(moments, STATISTICS, 3), expected, rtol=2e-5, atol=1e-30)
    assert features(moments, ("variance", "mean"), 3) == pytest.approx(expected[1::-1], rel=1e-6)
    assert measure_moments(tensor, 3) == moments, "the same in every run"


def test_zeros_small_spreads_and_what_is_not_finite():
    for shape in ((3, 4), (0, 4)):
        assert features(measure_moments(torch.zeros(shape), 2), STATISTICS, 2) == [0.0] * 5
    tensor = torch.full((1000,), 1e4, dtype=torch.float64)
    tensor[::2] += 1e-3
    (variance,) = features(measure_moments(tensor, 0), ("variance",), 0)
    assert variance == pytest.approx(2.5e-7, rel=1e-6)
    with pytest.raises(ValueError, match="NaN or Inf"):
        measure_moments(torch.tensor([[0.0, float("inf")]]), 1)


def test_together_is_the_block_diagonal_matrix(rng):
    parts = [torch.randn(4, 5, generator=rng), torch.randn(6, generator=rng) + 2, torch.zeros(0)]
    got = features(combine([measure_moments(part, 3) for part in parts], 3), STATISTICS, 3)
    entries = torch.cat([part.flatten() for part in parts])
    block = torch.block_diag(parts[0], parts[1][None])
    assert got == pytest.approx([*naive(entries)[:3], *naive(block)[3:]], rel=1e-6)
