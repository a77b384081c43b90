# SPDX-License-Identifier: Apache-2.0
"""Singular directions and orthonormal factors against full decompositions in float64."""

from __future__ import annotations

import pytest
import torch
from matrices import SPECTRA, spectrum, with_values
from mergekit.merge_methods import merge_tensors
from torch import Tensor

from mergekit_ace.algebra.directions import (
    Directions,
    leading_directions,
    orthogonal_factor,
)

SMALL = [(20, 50), (50, 20), (30, 30)]
LARGE = [(280, 400), (400, 280), (280, 280)]  # where a Gram matrix is decomposed
UNITS = [1e-170, 1e-20, 1e15]  # squares of the first leave the range of float64


def svd(matrix: Tensor, count: int) -> Directions:
    left, values, right = torch.linalg.svd(matrix.double(), full_matrices=False)
    return Directions(left[:, :count], values[:count], right[:count].mT)


def distance(found: Tensor, expected: Tensor) -> float:
    return float((found - expected).norm() / expected.norm())


def polar(found: Directions) -> Tensor:
    return found.left @ found.right.mT


def is_orthonormal(columns: Tensor) -> bool:
    identity = torch.eye(columns.shape[1], dtype=torch.float64)
    return float((columns.mT @ columns - identity).abs().max()) <= 1e-7


@pytest.mark.parametrize("shape", SMALL + LARGE)
@pytest.mark.parametrize("unit", UNITS)
@pytest.mark.parametrize("share", [0.05, 0.7, 1.0])  # by some of the eigenvectors, or all
def test_leading_directions(rng, shape, unit, share):
    matrix = unit * with_values(rng, shape, spectrum("slow", min(shape)))
    count = max(1, int(share * min(shape)))
    found, expected = leading_directions(matrix, count), svd(matrix, count)
    torch.testing.assert_close(found.values / unit, expected.values / unit)
    assert distance(found.matrix / unit, expected.matrix / unit) <= 1e-9
    assert distance(polar(found), polar(expected)) <= 1e-9
    assert is_orthonormal(found.left)
    assert is_orthonormal(found.right)


@pytest.mark.parametrize("shape", SMALL + LARGE)
@pytest.mark.parametrize("unit", UNITS)
def test_directions_that_a_matrix_does_not_have_are_left_out(rng, shape, unit):
    matrix = unit * with_values(rng, shape, torch.linspace(2, 1, 6, dtype=torch.float64))
    found, expected = leading_directions(matrix, 9), svd(matrix, 6)
    assert is_orthonormal(found.left)
    assert is_orthonormal(found.right)
    torch.testing.assert_close(found.values / unit, expected.values / unit)
    assert len(leading_directions(matrix, 4).values) == 4
    assert distance(orthogonal_factor(matrix), polar(expected)) <= 1e-9


@pytest.mark.parametrize("shape", [*SMALL, *LARGE, (30, 0)])
def test_a_matrix_without_directions(shape):
    zeros = torch.zeros(shape)
    assert leading_directions(zeros, 3).left.shape == (shape[0], 0)
    assert torch.equal(orthogonal_factor(zeros), zeros.double())


@pytest.mark.parametrize("shape", LARGE)
@pytest.mark.parametrize("kind", SPECTRA)
def test_the_orthogonal_factor(rng, shape, kind):
    """Also where values are equal; values 1e-7 apart are where a Gram matrix loses digits."""
    matrix = with_values(rng, shape, spectrum(kind, 280))
    found = orthogonal_factor(matrix)
    lost = 1e-2 if kind == "steepest" else 1e-7
    assert distance(found, polar(svd(matrix, 280))) <= lost


@pytest.mark.parametrize("shape", SMALL + LARGE)
@pytest.mark.parametrize("repeated", [1.0, 3.0])
def test_equal_singular_values(rng, shape, repeated):
    """Vectors are arbitrary within their span, which is compared, as is U diag(σ) Vᵀ."""
    sigma = torch.cat([torch.full((6,), repeated), torch.full((7,), repeated / 2)]).double()
    matrix = with_values(rng, shape, sigma)
    found, expected = leading_directions(matrix, 6), svd(matrix, 6)
    for name in ("left", "right"):
        basis, exact = getattr(found, name), getattr(expected, name)
        assert distance(basis @ basis.mT, exact @ exact.mT) <= 1e-9
    assert distance(found.matrix, expected.matrix) <= 1e-9


@pytest.mark.parametrize("method", ["tsv_m", "iso_c", "iso_cts"])
@pytest.mark.parametrize("shape", [(40, 60), (280, 300)])
def test_the_rounding_of_float32_adds_no_directions(rng, method, shape):
    """Adapters that were added to float32 weights are merged as those added to nothing."""
    base = torch.randn(shape, generator=rng)
    deltas = [0.1 * with_values(rng, shape, torch.ones(3).double()) for _ in range(3)]
    expected = merge_tensors([torch.zeros_like(deltas[0]), *deltas], method, base_index=0)
    stored = [base, *((base + delta).float() for delta in deltas)]
    merged = merge_tensors(stored, method, base_index=0).double() - base
    assert distance(merged, expected) <= 2e-3  # of the result itself
