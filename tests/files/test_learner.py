# SPDX-License-Identifier: Apache-2.0
"""The network from statistics to coefficients."""

from __future__ import annotations

import pytest
import torch
from pydantic import ValidationError

from mergekit_ace.algebra.learner import Learner, LearnerConfig, Standardizer

EXPERTS, TENSORS = 3, 5


def inputs(config, experts=EXPERTS, tensors=TENSORS):
    generator = torch.Generator().manual_seed(0)
    shape = (experts, tensors, config.features)
    statistics = 1e-3 * torch.randn(shape, generator=generator, dtype=torch.float64).exp()
    return statistics, torch.linspace(0, 1, tensors)


def stirred(config):
    """A learner that is past its start, where all outputs are equal."""
    torch.manual_seed(0)
    learner = Learner(config, EXPERTS, TENSORS)
    for parameter in learner.parameters():
        torch.nn.init.normal_(parameter, std=0.2)
    learner.standardizer.fit(inputs(config)[0])
    return learner.eval()


@pytest.mark.parametrize("kind", ["shared", "concatenated", "direct"])
@pytest.mark.parametrize("activation", ["softmax", "relu", "identity"])
def test_kinds_and_activations(kind, activation):
    """Training starts at task arithmetic; then an activation does what its name says."""
    config = LearnerConfig(input=kind, hidden=8, activation=activation)
    first = Learner(config, EXPERTS, TENSORS)(*inputs(config))
    start = 1 / EXPERTS if activation == "softmax" else 0.3
    torch.testing.assert_close(first, torch.full((EXPERTS, TENSORS), start))
    coefficients = stirred(config)(*inputs(config))
    assert coefficients.shape == (EXPERTS, TENSORS)
    assert coefficients.std() > 0
    if activation == "softmax":
        torch.testing.assert_close(coefficients.sum(0), torch.ones(TENSORS))
    if activation == "relu":
        assert (coefficients >= 0).all()


def test_a_shared_learner_serves_other_experts_and_tensors():
    config = LearnerConfig(input="shared", hidden=8)
    learner = stirred(config)
    assert learner(*inputs(config, 6, 11)).shape == (6, 11)
    # one tensor at a time gives what all at once give: that is how a merge predicts
    statistics, depths = inputs(config)
    single = learner(statistics[:, 2:3], depths[2:3])
    torch.testing.assert_close(single, learner(statistics, depths)[:, 2:3])


def test_statistics_are_standardised_over_experts_and_tensors():
    config = LearnerConfig()
    statistics, _ = inputs(config)
    statistics[..., 0] *= -1
    standard = Standardizer(config.features).fit(statistics)(statistics).double()
    flat = standard.flatten(0, 1)
    torch.testing.assert_close(flat.mean(0), torch.zeros(6).double(), atol=1e-6, rtol=0)
    torch.testing.assert_close(flat.std(0, correction=0), torch.ones(6).double(), atol=1e-6, rtol=0)
    decades = torch.logspace(-12, 0, 13, dtype=torch.float64)[None, :, None]
    steps = Standardizer(1).fit(decades)(decades).flatten().diff()
    assert steps.min() > 0.2 * steps.max(), "told apart down to the smallest"
    constant = torch.zeros(2, 3, 4, dtype=torch.float64)
    constant[..., 1] = 7.0
    assert not Standardizer(4).fit(constant)(constant).any()


@pytest.mark.parametrize("wrong", [{"statistics": ["mean", "mean"]}, {"rank": 0}, {"width": 3}])
def test_wrong_settings_are_refused(wrong):
    with pytest.raises(ValidationError, match=next(iter(wrong))):
        LearnerConfig(**wrong)
