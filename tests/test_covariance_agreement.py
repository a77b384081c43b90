# SPDX-License-Identifier: Apache-2.0
"""The agreement of estimated with measured covariances, against plain formulas."""

from __future__ import annotations

import math

import pytest
import torch
from matrices import family
from measured_files import in_memory, random_covariance

from mergekit_ace.algebra.covariance_agreement import compare_covariances


@pytest.mark.parametrize("shape", [(10, 30), (40, 24)])
def test_against_plain_formulas(rng, shape):
    base, experts = family(rng, *shape, 2)
    covariances = [random_covariance(rng, shape[1]) for _ in experts]
    found = compare_covariances(base, experts, in_memory(covariances))
    grams = [(e - base).double().T @ (e - base).double() for e in experts]
    assert found.size == min(16, *shape)
    for t, gram in enumerate(grams):
        for s, covariance in enumerate(covariances):
            m = covariance.double()
            expected = float((gram * m).sum() / gram.norm() / m.norm())
            assert found.cosine[t][s] == pytest.approx(expected, rel=1e-4)
        one = torch.linalg.eigh(gram).eigenvectors[:, -found.size :]
        other = torch.linalg.eigh(covariances[t].double()).eigenvectors[:, -found.size :]
        cosines = torch.linalg.svdvals(one.T @ other).clamp(max=1)
        expected = [math.degrees(math.acos(c)) for c in cosines.tolist()]
        assert found.angles[t] == pytest.approx(expected, abs=0.5)


def test_what_the_theorem_says_is_a_cosine_of_one(rng):
    """Updates that are made of the inputs themselves have their covariance."""
    base = torch.randn(200, 12, generator=rng)
    inputs = torch.randn(200, 12, generator=rng) * torch.linspace(0.2, 3, 12)
    found = compare_covariances(base, [base + inputs], in_memory([inputs.T @ inputs / 200]))
    assert found.cosine[0][0] == pytest.approx(1, abs=1e-4)
    assert max(found.angles[0]) < 1


def test_experts_without_a_change_or_a_measurement(rng):
    base, experts = family(rng, 8, 6, 2)
    covariance = random_covariance(rng, 6)
    three = [base.clone(), *experts]
    found = compare_covariances(base, three, in_memory([covariance, None, covariance * 0]))
    assert found.angles == (None, None, None)
    assert found.cosine[0] == (None, None, None)
    assert found.cosine[1][0] is not None
    assert found.cosine[1][1:] == (None, None)
