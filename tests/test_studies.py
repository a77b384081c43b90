# SPDX-License-Identifier: Apache-2.0
"""What the benchmark tries for `ace_relative`, against definitions and slower ways."""

from __future__ import annotations

import pytest
import torch
from matrices import HETEROGENEOUS, family
from reference import naive_relative, naive_relative_errors


@pytest.fixture
def studies(example):
    return example("benchmark", "evidence.studies")


@pytest.fixture
def deltas(rng):
    base, experts = family(rng, 14, 9, 3, scales=HETEROGENEOUS, noise=0.5)
    return [(expert - base).double() for expert in experts]


def test_every_study_keeps_the_shape(studies, deltas):
    for name, rule in studies.STUDIES.items():
        merged = rule(deltas)
        assert merged.shape == deltas[0].shape, name
        assert merged.isfinite().all(), name


def test_the_fixed_one_is_the_method(studies, deltas):
    expected = naive_relative(torch.zeros(14, 9), deltas, epsilon=studies.EPSILON)
    torch.testing.assert_close(studies.STUDIES["fixed"](deltas), expected)
    torch.testing.assert_close(studies.balanced(deltas, 0), expected)


def test_intensities(studies, rng):
    from sklearn.covariance import ledoit_wolf_shrinkage  # takes seconds, and no other needs it

    for rows, width in ((40, 10), (10, 40), (200, 20)):
        sample = torch.randn(rows, width, generator=rng, dtype=torch.float64)
        sample[:, 0] *= 5
        epsilon = studies.ledoit_wolf(sample)
        expected = ledoit_wolf_shrinkage(sample.numpy(), assume_centered=True)
        assert epsilon / (1 + epsilon) == pytest.approx(expected)
        assert 0 < studies.oracle_approximating(sample) < float("inf")
    # many samples of a clear direction need no shrinkage, few of none need all of it
    clear = torch.randn(2000, 1, generator=rng, dtype=torch.float64) @ torch.ones(1, 5).double()
    noise = torch.randn(5, 200, generator=rng, dtype=torch.float64)
    for rule in (studies.ledoit_wolf, studies.oracle_approximating):
        assert rule(clear) < 0.01
        assert rule(noise) > 1


@pytest.mark.parametrize("shape", [(400, 100), (100, 400), (200, 200)])
def test_the_noise_edge_is_where_noise_ends(studies, rng, shape):
    noise = 3 * torch.randn(shape, generator=rng, dtype=torch.float64)
    ridge = studies.noise_edge(noise) * float(noise.square().sum()) / shape[1]
    assert ridge == pytest.approx(float(torch.linalg.matrix_norm(noise, 2)) ** 2, rel=0.15)


def test_rows_left_out_one_by_one(studies, deltas):
    epsilons = [0.1] * len(deltas)
    sigmas, shares = studies.systems(deltas, epsilons)
    system = sum(w * s for w, s in zip(shares, sigmas, strict=True))
    target = sum(w * d @ s for w, d, s in zip(shares, deltas, sigmas, strict=True))
    total = 0.0
    for delta, share in zip(deltas, shares, strict=True):
        share = share / float(delta.square().sum())
        missed = 0.0
        for row in delta:
            answer = delta @ row
            without = (target - share * answer[:, None] * row) @ torch.linalg.inv(
                system - share * row[:, None] * row
            )
            missed += float((without @ row - answer).square().sum())
        total += missed / float((delta @ delta.T).square().sum())
    assert studies.left_out_error(deltas, 0.1) == pytest.approx(total)


def test_a_balance_lowers_the_largest_error(studies, deltas):
    largest = []
    for rounds in (0, 3, 12):
        merged = studies.balanced(deltas, rounds)
        largest.append(max(naive_relative_errors(merged, deltas, studies.EPSILON)))
    assert largest[0] > largest[1] > largest[2]


def test_the_refinement_is_aces(studies, deltas, monkeypatch):
    """Uncentred ACE has the same S_t, with other scales: the shared parts are compared."""
    plain = studies.STUDIES["fixed"](deltas)
    assert torch.equal(studies.refined(deltas, 0.0), plain)
    component = studies.refined(deltas, 0.3) - plain
    values = torch.linalg.svdvals(component)
    rank = int(0.3 * 9)
    torch.testing.assert_close(values[:rank], values[:1].expand(rank))
    assert values[rank:].max() < 1e-9 * values[0]
    # where all experts are the same there is no residual, and X itself is refined
    same = studies.refined([deltas[0]] * 3, 0.3) - deltas[0]
    ridge = studies.EPSILON / 9 / 3
    expected = torch.linalg.svdvals(deltas[0] * (1 - 3 * ridge))[:rank].mean()
    assert float(torch.linalg.matrix_norm(same, 2)) == pytest.approx(float(expected))


def test_the_scale_that_undoes_the_ridge(studies, deltas):
    shares = studies.systems(deltas, [studies.EPSILON] * 3)[1]
    sigmas = studies.systems(deltas, [0.0] * 3)[0]

    def loss(merged):
        return sum(
            w * float((((merged - d) @ s) * (merged - d)).sum())
            for w, d, s in zip(shares, deltas, sigmas, strict=True)
        )

    best = studies.unshrunk(deltas)
    plain = studies.STUDIES["fixed"](deltas)
    assert float(best.norm() / plain.norm()) > 1
    assert all(loss(best) < loss(best * factor) for factor in (0.99, 1.01))
