# SPDX-License-Identifier: Apache-2.0
"""Scales, ridges and traces against their definitions."""

from __future__ import annotations

import pytest
import torch
from matrices import HETEROGENEOUS, family
from reference import task_vector_error
from torch import Tensor

from mergekit_ace.algebra import covariance
from mergekit_ace.algebra.adaptive import merge_tensor
from mergekit_ace.algebra.covariance import LARGEST_RIDGE, estimate_covariances
from mergekit_ace.algebra.records import AceOptions, MatrixRecord
from mergekit_ace.algebra.task_vectors import select_active


def estimates(base, experts, weights, *, normalized, **options):
    active = select_active(base, experts, weights, torch.float64)
    options = AceOptions(compute_dtype="float64", **options)
    return estimate_covariances(base, active, options, normalized=normalized, dtype=torch.float64)


@pytest.mark.parametrize("normalized", [True, False])
@pytest.mark.parametrize("relative", [True, False])
@pytest.mark.parametrize("plain", [True, False])
def test_against_their_definitions(rng, monkeypatch, normalized, relative, plain):
    monkeypatch.setattr(covariance, "PLAIN_EXPONENT", 20 if plain else -1)
    base, experts = family(rng, 12, 30, 3, scales=HETEROGENEOUS)
    got = estimates(
        base,
        experts,
        [2.0, 1.0, 3.0],
        normalized=normalized,
        epsilon=0.01,
        epsilon_scale="relative" if relative else "absolute",
    )
    assert (got.unit == 1) == plain
    assert got.covariance_unit == (1 if normalized else got.unit**2)
    taus = []
    for t, (expert, w) in enumerate(zip(experts, (1.0, 0.5, 1.5), strict=True)):
        delta = expert.double() - base.double()
        centred = delta - delta.mean(dim=0)
        gram = centred.T @ centred
        s = w * (gram / gram.trace() if normalized else gram)
        eps = 0.01 * float(s.trace()) / 30 if relative else 0.01 * w
        if normalized and not relative:
            eps /= float(gram.trace())
        task = got.tasks[t]
        torch.testing.assert_close(task.centred() * got.unit, centred)
        columns = slice(3, 7)
        torch.testing.assert_close(
            task.centred(slice(2, 5), columns) * got.unit, centred[2:5, columns]
        )
        ours = task.scale * task.centred().T @ task.centred() * got.covariance_unit
        torch.testing.assert_close(ours, s)
        assert got.epsilon[t] == pytest.approx(eps)
        assert task.ridge * got.covariance_unit == pytest.approx(eps)
        taus.append(float(delta.square().sum()))
    assert got.mean_tau == pytest.approx(sum(taus) / 3 if normalized else 1)
    assert got.ridge == pytest.approx(sum(task.ridge for task in got.tasks))


def test_the_unit_is_a_power_of_two(rng):
    base, experts = family(rng, 12, 10, 2)
    for size in (1e-12, 1e12):
        got = estimates(base * size, [e * size for e in experts], [1.0, 1.0], normalized=False)
        assert got.unit != 1
        mantissa, _ = torch.frexp(torch.tensor(got.unit))
        assert mantissa == 0.5


def test_a_trace_that_the_means_drown(rng):
    """τ − o‖μ‖² has no digit left where the rows moved almost alike."""
    base = torch.zeros(20, 6)
    rows = 1e-4 * torch.randn(20, 6, generator=rng)
    experts = [base + 100 + rows, base + rows]
    got = estimates(base, experts, [1.0, 1.0], normalized=True, epsilon=1.0)
    for expert, epsilon in zip(experts, got.epsilon, strict=True):
        delta = expert.double()
        assert 1 / epsilon == pytest.approx(float((delta - delta.mean(0)).square().sum()), rel=1e-9)


def test_the_reference_is_the_smallest_task_vector_of_full_weight(rng):
    base, experts = family(rng, 12, 10, 4, scales=[1.0, 0.1, 10.0, 0.01])
    got = estimates(base, experts, [1.0, 1.0, 1.0, 1e-6], normalized=False)
    assert got.reference == 1


def test_an_expert_without_a_covariance_has_no_estimate(rng):
    base, experts = family(rng, 12, 10, 2)
    base, experts = base.double(), [e.double() for e in experts]
    alike = base + torch.randn(10, generator=rng)
    got = estimates(base, [alike, *experts], [1.0, 1.0, 1.0], normalized=True)
    assert len(got.tasks) == 2
    assert got.epsilon[0] == 0
    assert len(estimates(base, [alike, *experts], [1.0] * 3, normalized=False).tasks) == 3


@pytest.mark.parametrize("size", [1e-16, 1e-24, 1e-36, 1e-40])
def test_ridges_far_above_task_vectors_leave_the_refinement_its_digits(rng, size):
    """The ridges cancel in R; above 1e10 mean eigenvalues only their rounding would be left."""
    base = torch.zeros(24, 16, dtype=torch.float64)
    members = [
        base + (1 + t) * torch.randn(24, 16, generator=rng, dtype=torch.float64) for t in range(3)
    ]
    options = AceOptions(adaptive_normalization="always", spectral_refinement="always")

    def merge(unit: float, dtype: torch.dtype) -> tuple[Tensor, MatrixRecord]:
        versions = [(unit * tensor).to(dtype) for tensor in (base, *members)]
        merged, record = merge_tensor(versions[0], versions[1:], None, options, "matrix")
        return merged.double() / unit, record.matrices[0]

    expected, larger = merge(1e-8, torch.float64)
    merged, record = merge(size, torch.float32)
    assert larger.ridge < LARGEST_RIDGE
    assert record.ridge == pytest.approx(LARGEST_RIDGE, rel=1e-3)
    assert record.refined
    assert task_vector_error(merged, expected, base) <= 1e-4


def test_any_ridge_that_is_allowed_can_be_solved(rng):
    base = torch.zeros(24, 16)
    members = [0.02 * (1 + t) * torch.randn(24, 16, generator=rng) for t in range(3)]
    merged = [
        merge_tensor(base, members, None, AceOptions(epsilon=epsilon), "matrix")[0]
        for epsilon in (1e9, 1e12, 1e30)
    ]
    for other in merged[1:]:
        assert task_vector_error(other, merged[0].double(), base.double()) <= 1e-5
