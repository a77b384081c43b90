# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import pytest
import torch
from matrices import with_values

from mergekit_ace.algebra.covariance import Covariances, Solution
from mergekit_ace.algebra.records import IllConditionedError
from mergekit_ace.algebra.refinement import isotropic_component, refine


@pytest.mark.parametrize("shape", [(20, 30), (30, 20), (20, 20)])
@pytest.mark.parametrize("rank", [1, 6, 20])
def test_equals_the_full_decomposition(rng, shape, rank):
    matrix = torch.randn(shape, generator=rng, dtype=torch.float64)
    found = isotropic_component(matrix.clone(), rank)
    component, strength = found.matrix, found.strength
    u, sigma, vh = torch.linalg.svd(matrix, full_matrices=False)
    assert strength == pytest.approx(float(sigma[:rank].mean()), rel=1e-12)
    torch.testing.assert_close(component, strength * (u[:, :rank] @ vh[:rank]))


def test_a_spiked_spectrum(rng):
    """σ over five orders of magnitude: squared, it would not survive float32."""
    u, _ = torch.linalg.qr(torch.randn(40, 40, generator=rng, dtype=torch.float64))
    v, _ = torch.linalg.qr(torch.randn(40, 40, generator=rng, dtype=torch.float64))
    matrix = u * torch.logspace(0, -5, 40, dtype=torch.float64) @ v.T
    found = isotropic_component(matrix.clone(), 30)
    component, strength = found.matrix, found.strength
    torch.testing.assert_close(component / strength, u[:, :30] @ v[:, :30].T, rtol=0, atol=1e-6)


def test_directions_that_do_not_exist_are_not_invented(rng):
    """F of rank 3, refined with k = 8: five directions of a full SVD would be arbitrary."""
    left = torch.randn(20, 3, generator=rng, dtype=torch.float64)
    matrix = left @ torch.randn(3, 25, generator=rng, dtype=torch.float64)
    found = isotropic_component(matrix.clone(), 8)
    component, strength = found.matrix, found.strength
    assert torch.linalg.matrix_rank(component, rtol=1e-3) == 3
    sigma = torch.linalg.svdvals(matrix)
    assert strength == pytest.approx(float(sigma[:3].sum() / 8), rel=1e-4)


def test_refuses_directions_that_the_error_hides(rng):
    merged = torch.randn(4, 9, generator=rng)
    matrix = torch.diag(torch.tensor([1.0, 0.5, 0.01, 0.001])) @ merged

    def solution(error: float, dtype: torch.dtype) -> Solution:
        return Solution(
            merged.to(dtype),
            matrix.to(dtype, copy=True),
            condition=1.0,
            error=error,
            covariances=Covariances((), 0, 1.0, 1.0, (), 1.0),
        )

    refine(solution(1e-7, torch.float32), 2)
    with pytest.raises(IllConditionedError) as caught:
        refine(solution(1e-6, torch.float32), 4)
    assert caught.value.error > 2e-5
    refine(solution(1e-6, torch.float64), 4)  # there are no more digits to be had


SPECTRA = {
    "flat": torch.linspace(2, 1, 60),
    "a few spikes": torch.cat([torch.tensor([1e4, 3e3, 1e3]), torch.linspace(2, 1, 57)]),
    "a hundredfold": torch.logspace(1, -1, 60),
    "steep": torch.logspace(0, -12, 60),
    "many spikes": torch.cat([torch.linspace(2e4, 1e4, 20), torch.linspace(2, 1, 40)]),
    "low rank": torch.cat([torch.ones(5), torch.zeros(55)]),
}


@pytest.mark.parametrize("shape", [(60, 90), (90, 60), (60, 60)])
@pytest.mark.parametrize("kind", SPECTRA)
def test_float32_targets(rng, kind, shape):
    """As exact as a full decomposition of the rounded matrix in float64."""
    matrix = with_values(rng, shape, SPECTRA[kind].double()).float()
    u, sigma, vh = torch.linalg.svd(matrix.double(), full_matrices=False)
    rank = {"low rank": 5, "many spikes": 30}.get(kind, 18)
    expected = sigma[:rank].mean() * (u[:, :rank] @ vh[:rank])
    component = isotropic_component(matrix, rank).matrix
    assert (component - expected).norm() <= 1e-6 * expected.norm()


@pytest.mark.parametrize("noise", [0.0, 0.3])
@pytest.mark.parametrize("shape", [(60, 90), (90, 60)])
@pytest.mark.parametrize("kind", ["flat", "a hundredfold"])
def test_products_in_few_digits_are_hidden(rng, kind, shape, noise):
    """What products in float32 cost cannot be seen behind what the rounding of experts costs."""
    target = with_values(rng, shape, SPECTRA[kind].double()).float()
    size = float(target.norm())
    covariances = Covariances((), 0, 1.0, 1.0, (), 1.0, taus=(size**2,), noise=noise)
    solution = Solution(target.clone(), target.clone(), 1.0, 0.0, covariances)
    expected = isotropic_component(target.double(), 18).matrix
    error = (refine(solution, 18).matrix - expected).norm()
    moved = torch.randn(shape, generator=rng, dtype=torch.float64)
    moved = target + moved * (noise * size / moved.norm())
    hidden = 0.02 * (isotropic_component(moved, 18).matrix - expected).norm()
    assert error <= max(2e-5 * size, hidden)
    assert error > 1e-8 * size  # they were in float32


def test_a_zero_matrix_has_no_directions():
    found = isotropic_component(torch.zeros(4, 6), 2)
    component, strength = found.matrix, found.strength
    assert strength == 0
    assert not component.any()
