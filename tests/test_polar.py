# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import pytest
import torch
from covering import covered
from matrices import with_values
from torch import Tensor

from mergekit_ace.algebra import polar
from mergekit_ace.algebra.polar import nearest_orthonormal, polar_factor
from mergekit_ace.algebra.spectrum import SMALL_SIDE


def naive_polar(matrix: Tensor, least: float = 0.0) -> Tensor:
    left, values, right = torch.linalg.svd(matrix.double(), full_matrices=False)
    kept = values > least
    return left[:, kept] @ right[kept]


def distance(found: Tensor, expected: Tensor) -> float:
    return float((found.double() - expected).norm() / expected.norm())


SIDE = SMALL_SIDE + 20
SPECTRA = {
    "slow": torch.arange(1, SIDE + 1, dtype=torch.float64) ** -0.5,
    "equal": torch.ones(SIDE, dtype=torch.float64),
    "steep": torch.logspace(0, -3, SIDE, dtype=torch.float64),
    "very steep": torch.logspace(0, -5, SIDE, dtype=torch.float64),
}


@pytest.mark.parametrize("shape", [(SIDE, SIDE), (SIDE, SIDE + 90), (700, SIDE)])
@pytest.mark.parametrize("kind", SPECTRA)
@pytest.mark.parametrize("tolerance", [1e-9, 2e-5])
def test_the_error_is_below_the_tolerance(rng, shape, kind, tolerance):
    matrix = with_values(rng, shape, SPECTRA[kind])
    found = polar_factor(matrix, tolerance=tolerance)
    assert distance(found, naive_polar(matrix)) <= tolerance


@covered(
    shape=[(SIDE, SIDE), (SIDE, SIDE + 90), (700, SIDE)],
    kind=SPECTRA,
    tolerance=[2e-4, 2e-3],
    size=[1e-6, 1e6],
)
def test_float32_where_that_is_enough(rng, shape, kind, tolerance, size):
    matrix = (size * with_values(rng, shape, SPECTRA[kind])).float()
    found = polar_factor(matrix, tolerance=tolerance)
    assert found.dtype == torch.float32
    assert distance(found, naive_polar(matrix)) <= tolerance


@pytest.mark.parametrize("shape", [(SIDE, SIDE), (SIDE + 50, SIDE), (SIDE, 700)])
def test_directions_that_are_rounding_are_left_out(rng, shape):
    sigma = torch.cat([torch.ones(40), torch.full((SIDE - 40,), 1e-7)]).double()
    matrix = with_values(rng, shape, sigma)
    expected = naive_polar(matrix, 1e-3)
    assert distance(polar_factor(matrix, floor=1e-3), expected) <= 1e-9
    singular = with_values(rng, shape, torch.ones(40, dtype=torch.float64))
    assert distance(polar_factor(singular), naive_polar(singular, 1e-3)) <= 1e-9


@pytest.fixture
def attempts(monkeypatch) -> list[tuple[torch.dtype, bool]]:
    """The dtypes that were tried, and whether they had the digits."""
    seen = []

    def recorded(tall, *arguments):
        found = by_steps(tall, *arguments)
        seen.append((tall.dtype, found is not None))
        return found

    by_steps = polar._by_steps
    monkeypatch.setattr(polar, "_by_steps", recorded)
    return seen


@pytest.mark.parametrize(
    ("weakest", "tolerance"), [(1e-3, 4e-4), (1e-4, 4e-4), (1e-5, 4e-4), (1e-5, 2e-3)]
)
def test_a_lone_weak_direction_needs_no_float64(rng, attempts, weakest, tolerance):
    """It is found without its size being known beforehand: float32's Gram matrix has lost it."""
    sigma = torch.linspace(1, 0.1, SIDE, dtype=torch.float64)
    sigma[-1] = weakest
    matrix = with_values(rng, (SIDE, SIDE), sigma).float()
    found = polar_factor(matrix, tolerance=tolerance)
    assert attempts == [(torch.float32, True)]
    assert distance(found, naive_polar(matrix)) <= tolerance


def test_many_weak_directions_need_float64(rng, attempts):
    matrix = with_values(rng, (SIDE, SIDE), SPECTRA["very steep"]).float()
    found = polar_factor(matrix, tolerance=4e-4)
    assert attempts == [(torch.float32, False), (torch.float64, True)]
    assert distance(found, naive_polar(matrix)) <= 4e-4


@pytest.mark.parametrize("floor", [1e-5, 1e-3])
def test_a_direction_below_the_floor_is_left_out_in_float32(rng, floor):
    """Also where the floor is below what float32's Gram matrix can tell from zero."""
    sigma = torch.linspace(1, 0.1, SIDE, dtype=torch.float64)
    sigma[-1] = floor / 4
    matrix = with_values(rng, (SIDE, SIDE), sigma).float()
    found = polar_factor(matrix, floor=floor, tolerance=2e-3)
    assert distance(found, naive_polar(matrix, floor)) <= 2e-3


@pytest.mark.parametrize("weight", [1.0, 1e3, 1e6])
def test_the_error_of_a_step_is_known(rng, weight):
    step = with_values(rng, (SIDE + 40, SIDE), SPECTRA["steep"]).float()
    moved, error = polar._through_inverse(step, None, weight, torch.float32)
    exact = step.double()
    system = torch.eye(SIDE, dtype=torch.float64) + weight * exact.mT @ exact
    real = float((moved.double() - exact @ torch.linalg.inv(system)).norm()) / SIDE**0.5
    assert real / 2 <= error <= 2 * real + 1e-7  # a measurement in float32


def test_a_step_maps_singular_values_near_to_one():
    for ratio in (1e-6, 1e-3, 0.1, 0.9):
        a, b, c = polar.step_weights(ratio)
        points = torch.logspace(0, -1, 200, dtype=torch.float64) ** 2
        points = torch.cat([points, torch.linspace(ratio, 1, 2000, dtype=torch.float64)])
        points = points[points >= ratio]
        mapped = points * (a + b * points**2) / (1 + c * points**2)
        assert float(mapped.max()) <= 1 + 1e-9
        least = ratio * (a + b * ratio**2) / (1 + c * ratio**2)
        assert float(mapped.min()) >= least * (1 - 1e-9) > ratio


def test_nearest_orthonormal(rng):
    matrix = torch.randn(8, 5, generator=rng, dtype=torch.float64)
    nearest = nearest_orthonormal([matrix[:, :2], matrix[:, 2:]])
    torch.testing.assert_close(nearest.T @ nearest, torch.eye(5, dtype=torch.float64))
    torch.testing.assert_close(nearest.T @ matrix, (nearest.T @ matrix).T)  # polar: P symmetric
    assert (torch.linalg.eigvalsh(nearest.T @ matrix) > 0).all()
    repeated = nearest_orthonormal([matrix, matrix])
    assert int(torch.linalg.matrix_rank(repeated)) == 5


@pytest.mark.parametrize("angle", [1.0, 1e-2, 0.0])
def test_many_columns_made_orthonormal(rng, angle):
    """300 columns, half of them turned from the other half by an angle: at 0 they repeat them."""
    basis, _ = torch.linalg.qr(torch.randn(400, 300, generator=rng, dtype=torch.float64))
    columns = basis.clone()
    columns[:, 150:] = columns[:, :150] + angle * columns[:, 150:]
    found = nearest_orthonormal([columns[:, :150], columns[:, 150:]])
    left, values, right = torch.linalg.svd(columns, full_matrices=False)
    kept = values > 1e-12
    expected = left[:, kept] @ right[kept]
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-9)
