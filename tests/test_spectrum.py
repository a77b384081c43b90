# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import pytest
import torch
from covering import covered
from matrices import SPECTRA, spectrum, with_values

from mergekit_ace.algebra import spectrum as spectrum_module
from mergekit_ace.algebra.eigenpairs import leading_eigenpairs
from mergekit_ace.algebra.spectrum import SMALL_SIDE, leading_directions, singular_directions


def with_spectrum(rng, shape, sigma):
    """A matrix with these singular values and its singular vectors, in float64."""
    rows, columns = shape
    left, _ = torch.linalg.qr(torch.randn(rows, len(sigma), generator=rng, dtype=torch.float64))
    right, _ = torch.linalg.qr(torch.randn(columns, len(sigma), generator=rng, dtype=torch.float64))
    return left * sigma @ right.T, left, right


@pytest.mark.parametrize("shape", [(30, 50), (50, 30), (300, 400), (400, 300), (300, 300)])
@pytest.mark.parametrize("size", [1e-25, 1.0, 1e25])
def test_decaying_spectra(rng, shape, size):
    sigma = size * torch.logspace(0, -3, min(shape), dtype=torch.float64)
    matrix, left, right = with_spectrum(rng, shape, sigma)
    found = leading_directions(matrix.float(), 8)
    assert found.values.tolist() == pytest.approx(sigma[:8].tolist(), rel=1e-4)
    assert found.left.shape == (shape[0], 8)
    assert found.right.shape == (shape[1], 8)
    for basis, exact in ((found.left, left), (found.right, right)):
        overlap = (basis.double().T @ exact[:, :8]).square().sum() / 8
        assert float(overlap) == pytest.approx(1, abs=1e-3)


@pytest.mark.parametrize("shape", [(2000, 300), (700, 1000), (1200, 1200)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_three_digits_of_the_hardest_spectrum(rng, shape, dtype):
    matrix = torch.randn(shape, generator=rng).to(dtype)
    expected = torch.linalg.svdvals(matrix.double())[:16]
    found = leading_directions(matrix, 16).values
    assert float(found[0]) == pytest.approx(float(expected[0]), rel=1e-3)
    energy = [float(values.square().sum()) for values in (found, expected)]
    assert energy[0] == pytest.approx(energy[1], rel=1e-3)


@pytest.mark.parametrize("shape", [(300, 300), (700, 280), (270, 900)])
def test_a_slow_decay(rng, shape):
    sigma = torch.arange(1, min(shape) + 1, dtype=torch.float64) ** -0.7
    matrix, left, _ = with_spectrum(rng, shape, sigma)
    found = leading_directions(matrix.float(), 15)
    share = float(sigma[:15].square().sum() / sigma.square().sum())
    energy = found.values.square().sum() / matrix.square().sum()
    assert float(energy) == pytest.approx(share, rel=1e-4)
    cosines = (found.left[:, :5].double() * left[:, :5]).sum(0).abs()
    torch.testing.assert_close(cosines, torch.ones_like(cosines), atol=1e-3, rtol=0)


@pytest.mark.parametrize("rank", [1, 4, 16, 40])
@pytest.mark.parametrize("noise", [0.0, 1e-8])
def test_low_rank(rng, rank, noise):
    """Adapters: no direction may count twice when there are no others left."""
    assert SMALL_SIDE < 300
    matrix, *_ = with_spectrum(rng, (300, 500), torch.linspace(2, 1, rank, dtype=torch.float64))
    matrix += noise * torch.randn(300, 500, generator=rng)
    found = leading_directions(matrix.float(), 30)
    known = min(rank, 30)
    expected = torch.linspace(2, 1, rank)[:known].tolist()
    assert found.values[:known].tolist() == pytest.approx(expected, rel=1e-4)
    assert (found.values[known:] < 2e-3).all()
    for basis in (found.left, found.right):
        torch.testing.assert_close(basis.mT @ basis, torch.eye(30), atol=1e-4, rtol=0)


def test_a_zero_matrix():
    for size in (5, 300):
        assert not leading_directions(torch.zeros(size, size + 1), 3).values.any()


def test_no_global_random_numbers(rng):
    matrix = torch.randn(300, 300, generator=rng)
    state = torch.get_rng_state()
    first = leading_directions(matrix, 5)
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.equal(leading_directions(matrix, 5).values, first.values)


def test_directions_that_rounding_cannot_tell_from_zero_are_left_out(rng):
    sigma = torch.tensor([3.0, 2.0, 1e-17], dtype=torch.float64)
    matrix, *_ = with_spectrum(rng, (6, 9), sigma)
    found = singular_directions(matrix)
    assert found.values.tolist() == pytest.approx([3.0, 2.0])
    torch.testing.assert_close(found.matrix, matrix)
    assert len(found.leading(1).values) == len(singular_directions(matrix, 1).values) == 1


@covered(
    strength=3,
    kind=SPECTRA,
    rank=[None, 100, 20],
    digits=[
        (torch.float64, 1e-9),
        (torch.float64, 2e-5),
        (torch.float32, 2e-4),
        (torch.float32, 2e-3),
    ],
    shape=[(300, 420), (420, 300), (300, 300)],
)
def test_large_matrices(rng, shape, kind, rank, digits):
    """By a Gram matrix where that has the digits, or a decomposition of the matrix itself."""
    dtype, tolerance = digits
    assert min(shape) > SMALL_SIDE
    matrix = with_values(rng, shape, spectrum(kind, 300)).to(dtype)
    found = singular_directions(matrix, rank, tolerance=tolerance)
    left, sigma, right = torch.linalg.svd(matrix.double(), full_matrices=False)
    count = rank or 300
    torch.testing.assert_close(found.values, sigma[:count], rtol=tolerance, atol=1e-9)
    assert found.left.dtype == found.right.dtype == dtype
    together, expected = found.left @ found.right.T, left[:, :count] @ right[:count]
    assert float((together - expected).norm()) <= tolerance * count**0.5
    for basis in (found.left.double(), found.right.double()):
        identity = torch.eye(count, dtype=torch.float64)
        assert float((basis.T @ basis - identity).norm()) <= 2 * tolerance * count**0.5
    if found.rest is not None:
        assert float((found.left.mT @ found.rest).norm()) <= tolerance * count**0.5


@pytest.mark.parametrize("shape", [(300, 420), (420, 300)])
@pytest.mark.parametrize("rank", [None, 20])
def test_a_large_matrix_of_low_rank(rng, shape, rank):
    matrix = with_values(rng, shape, torch.ones(20, dtype=torch.float64))
    found = singular_directions(matrix, rank)
    torch.testing.assert_close(found.values, torch.ones(20, dtype=torch.float64))
    torch.testing.assert_close(found.matrix, matrix)


def test_float32_where_noise_exchanges_directions_anyway(rng, monkeypatch):
    """So many directions about the cut are so close that float32 does not tell them apart."""
    sigma = spectrum("slow", 300)
    sigma[80:120] = sigma[100] * (1 + 4e-3 * torch.linspace(1, -1, 40, dtype=torch.float64))
    matrix = with_values(rng, (300, 300), sigma).float()
    noise = 0.05 * float(matrix.norm())
    dtypes = []
    monkeypatch.setattr(
        spectrum_module,
        "leading_eigenpairs",
        lambda gram, count: dtypes.append(gram.dtype) or leading_eigenpairs(gram, count),
    )
    singular_directions(matrix, 100, tolerance=2e-4)
    assert dtypes == [torch.float32, torch.float64]
    dtypes.clear()
    found = singular_directions(matrix, 100, tolerance=2e-4, noise=noise)
    assert dtypes == [torch.float32]
    moved = matrix + noise / 300 * torch.randn(300, 300, generator=rng)
    exact, after = (
        left[:, :100] @ right[:100]
        for left, _, right in (torch.linalg.svd(m.double()) for m in (matrix, moved))
    )
    change = float((after - exact).norm()) / 100**0.5
    assert 0.2 * change <= found.blur <= change  # of all exchanges, the estimate sees one
    error = float((found.left @ found.right.mT - exact).norm()) / 100**0.5
    assert error <= min(0.01 * change, 2e-3)


@pytest.mark.parametrize("gap", [3e-4, 1e-3, 3e-3])
@pytest.mark.parametrize("shape", [(300, 400), (300, 300)])
def test_close_neighbours_on_both_sides_of_a_cut(rng, shape, gap):
    """Divide and conquer mixes them, as much as does not show in their residuals."""
    places = torch.arange(300, dtype=torch.float64)
    for _ in range(6):
        sigma = torch.maximum(1 / (places + 1), 0.04 * (1 - places / 300))
        sigma[60] = sigma[59] * (1 - gap)
        matrix = with_values(rng, shape, sigma).float()
        found = singular_directions(matrix, 60, tolerance=2e-3)
        left, values, right = torch.linalg.svd(matrix.double(), full_matrices=False)
        error = (found.left.double() @ found.right.double().mT) - left[:, :60] @ right[:60]
        assert float(error.norm()) <= 1e-3 * 60**0.5
        torch.testing.assert_close(found.values, values[:60], rtol=1e-5, atol=0)


@pytest.mark.parametrize("angle", [1e-6, 1e-4, 1e-2])
def test_bad_eigenvectors_know_their_error(rng, monkeypatch, angle):
    """What is wrong with float32's eigenvectors shows in their residuals, and float64 follows."""
    matrix = with_values(rng, (300, 300), spectrum("slow", 300)).float()
    exact = singular_directions(matrix.double(), 32)

    def turned(gram, count):
        values, vectors = leading_eigenpairs(gram, count)
        if gram.dtype == torch.float32:
            vectors = vectors + angle * vectors.roll(1, dims=0)
        return values, vectors

    monkeypatch.setattr(spectrum_module, "leading_eigenpairs", turned)
    found = singular_directions(matrix, 32, tolerance=1e-4)
    error = found.left @ found.right.T - (exact.left @ exact.right.T).float()
    assert float(error.norm()) <= 1e-4 * 32**0.5
