# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import pytest
import torch

from mergekit_ace.algebra.closed_form import IllConditionedError, estimate_condition, solve
from mergekit_ace.algebra.covariance import CovarianceSums


def spd(rng: torch.Generator, size: int, condition: float) -> torch.Tensor:
    """A symmetric positive definite matrix of known condition number."""
    basis, _ = torch.linalg.qr(torch.randn(size, size, generator=rng, dtype=torch.float64))
    eigenvalues = torch.logspace(0, -torch.log10(torch.tensor(condition)), size).double()
    return basis * eigenvalues @ basis.T


def sums(system: torch.Tensor, numerator: torch.Tensor) -> CovarianceSums:
    half = numerator / 2
    return CovarianceSums(system, half, half.clone(), None, None)


@pytest.mark.parametrize("with_prior", [False, True])
def test_equals_a_general_solve(rng, with_prior):
    system = spd(rng, 20, 1e3)
    numerator = torch.randn(7, 20, generator=rng, dtype=torch.float64)
    prior = torch.rand(20, generator=rng, dtype=torch.float64) if with_prior else None
    solution, _ = solve(sums(system, numerator), prior)
    full = system + (torch.outer(torch.ones(20).double(), prior) if with_prior else 0)
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
    system = spd(rng, 30, condition) if condition else torch.zeros(30, 30, dtype=dtype)
    numerator = torch.randn(4, 30, generator=rng, dtype=dtype)
    with pytest.raises(IllConditionedError) as caught:
        solve(sums(system.to(dtype), numerator), None)
    assert caught.value.condition > 1e4


def test_refuses_non_finite_sums():
    system = torch.full((4, 4), float("nan"), dtype=torch.float64)
    with pytest.raises(IllConditionedError):
        solve(sums(system, torch.ones(2, 4, dtype=torch.float64)), None)
