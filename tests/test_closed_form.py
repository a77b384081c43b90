# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import pytest
import torch

from mergekit_ace.algebra.closed_form import (
    IllConditionedError,
    estimate_condition,
    factorize,
    solve,
    structural_prior,
)


def spd(rng: torch.Generator, size: int, condition: float) -> torch.Tensor:
    """A symmetric positive definite matrix of known condition number."""
    basis, _ = torch.linalg.qr(torch.randn(size, size, generator=rng, dtype=torch.float64))
    exponents = torch.linspace(0, 1, size, dtype=torch.float64)
    return basis * condition**-exponents @ basis.T


@pytest.mark.parametrize("with_prior", [False, True])
def test_equals_a_general_solve(rng, with_prior):
    covariance = spd(rng, 20, 1e3)
    numerator = torch.randn(7, 20, generator=rng, dtype=torch.float64)
    prior = structural_prior(covariance, mean_tau=0.3) if with_prior else None
    solution = solve(factorize(covariance.clone(), 0.01), numerator.clone(), prior)
    full = covariance + 0.01 * torch.eye(20, dtype=torch.float64)
    if with_prior:
        full = full + torch.ones(20, 1).double() * covariance.mean(dim=0) / 0.3
    expected = torch.linalg.solve(full, numerator, left=False)
    torch.testing.assert_close(solution, expected, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("condition", [1.0, 1e2, 1e5, 1e8])
def test_condition_is_estimated_within_a_factor_of_two(rng, condition):
    system = spd(rng, 60, condition)
    estimate = estimate_condition(system, torch.linalg.cholesky(system))
    assert condition / 2 <= estimate <= condition * 1.01


@pytest.mark.parametrize(
    ("dtype", "condition"), [(torch.float32, 1e5), (torch.float64, 1e14), (torch.float64, None)]
)
def test_refuses_noise(rng, dtype, condition):
    covariance = spd(rng, 30, condition) if condition else torch.zeros(30, 30, dtype=dtype)
    with pytest.raises(IllConditionedError) as caught:
        factorize(covariance.to(dtype), 0.0)
    assert caught.value.condition > 1e4


def test_refuses_non_finite_sums():
    with pytest.raises(IllConditionedError):
        factorize(torch.full((4, 4), float("nan"), dtype=torch.float64), 1.0)
