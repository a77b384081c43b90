# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import pytest
import torch
from scipy.linalg import LinAlgError

from mergekit_ace.algebra import eigenpairs
from mergekit_ace.algebra.eigenpairs import estimate_blur, leading_eigenpairs, smaller_gram
from mergekit_ace.algebra.refinement import isotropic_component


@pytest.mark.parametrize("count", [1, 5, 12])
def test_leading_eigenpairs(rng, count):
    factor = torch.randn(12, 30, generator=rng, dtype=torch.float64)
    matrix = factor @ factor.T
    lower = matrix.tril() + torch.full_like(matrix, 7.0).triu(1)
    values, vectors = leading_eigenpairs(lower, count)
    torch.testing.assert_close(values, torch.linalg.eigvalsh(matrix).flip(0)[:count])
    torch.testing.assert_close(matrix @ vectors, vectors * values)
    torch.testing.assert_close(vectors.T @ vectors, torch.eye(count, dtype=torch.float64))


def test_no_convergence_has_the_name_that_torch_gives_it(monkeypatch):
    def fail(*given, **named):
        raise LinAlgError("did not converge")

    monkeypatch.setattr(eigenpairs.lapack, "dstevd", fail, raising=False)  # SciPy before 1.16
    monkeypatch.setattr(eigenpairs, "eigh_tridiagonal", fail)
    with pytest.raises(torch.linalg.LinAlgError, match="did not converge"):
        leading_eigenpairs(torch.eye(3), 1)


@pytest.mark.parametrize("size", [1, 2, 3, 64, 150])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_sizes_and_precisions(rng, size, dtype):
    """By single eigenvectors, by divide and conquer, and where there is next to nothing to do."""
    factor = torch.randn(size, size + 3, generator=rng, dtype=torch.float64)
    gram = smaller_gram(factor)
    whole = gram.tril() + gram.tril(-1).mT
    for count in {1, -(-size // 10), -(-size // 3), size}:
        values, vectors = leading_eigenpairs(gram.to(dtype, copy=True), count)
        assert values.dtype == torch.float64
        assert vectors.dtype == dtype
        allowed = 20 * torch.finfo(dtype).eps * float(values[0]) * size**0.5
        assert float((whole @ vectors.double() - vectors.double() * values).norm()) <= allowed
        identity = torch.eye(count, dtype=torch.float64)
        distance = (vectors.double().T @ vectors.double() - identity).norm()
        assert float(distance) <= 20 * torch.finfo(dtype).eps * size**0.5


@pytest.mark.parametrize("shape", [(4, 9), (9, 4)])
def test_the_smaller_gram_matrix(rng, shape):
    matrix = torch.randn(shape, generator=rng)
    short = matrix if shape[0] < shape[1] else matrix.T
    expected = (short.double() @ short.double().T).tril()
    torch.testing.assert_close(smaller_gram(matrix).tril(), expected)


@pytest.mark.parametrize("decay", [0.3, 1.0, 2.0])
@pytest.mark.parametrize("shape", [(12, 40), (40, 40), (60, 15)])
def test_blur_is_the_size_of_the_error(rng, shape, decay):
    u, sigma, vh = torch.linalg.svd(
        torch.randn(shape, generator=rng, dtype=torch.float64), full_matrices=False
    )
    sigma = 10 ** -torch.linspace(0, decay, len(sigma), dtype=torch.float64)
    matrix = u * sigma @ vh
    expected = isotropic_component(matrix.clone(), 4).matrix
    noise = torch.randn(shape, generator=rng, dtype=torch.float64)
    noise *= 1e-6 * matrix.norm() / noise.norm()
    got = isotropic_component(matrix + noise, 4).matrix
    estimate = estimate_blur(sigma, 4, shape, 1e-6 * float(matrix.norm()))
    assert estimate / 5 < (got - expected).norm() / expected.norm() < estimate * 2
