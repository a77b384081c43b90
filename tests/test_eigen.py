# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import pytest
import torch
from scipy.linalg import LinAlgError

from mergekit_ace.algebra import eigen
from mergekit_ace.algebra.eigen import SPIKES, deflate_, leading_eigenpairs


@pytest.mark.parametrize("lean", [True, False])
@pytest.mark.parametrize("count", [1, 5, 12])
def test_leading_eigenpairs(rng, lean, count):
    factor = torch.randn(12, 30, generator=rng, dtype=torch.float64)
    matrix = factor @ factor.T
    lower = matrix.tril() + torch.full_like(matrix, 7.0).triu(1)
    values, vectors = leading_eigenpairs(lower, count, lean=lean)
    torch.testing.assert_close(values, torch.linalg.eigvalsh(matrix)[-count:])
    torch.testing.assert_close(matrix @ vectors, vectors * values)
    torch.testing.assert_close(vectors.T @ vectors, torch.eye(count, dtype=torch.float64))


@pytest.mark.parametrize("spikes", [0, 1, 7])
def test_spikes_are_taken_out(rng, spikes):
    values = torch.linspace(1, 2, 100, dtype=torch.float64)
    values[100 - spikes :] = torch.logspace(3, 8, spikes, dtype=torch.float64)
    vectors, _ = torch.linalg.qr(torch.randn(100, 100, generator=rng, dtype=torch.float64))
    matrix = vectors * values @ vectors.T
    lower = matrix.tril() + torch.full_like(matrix, 7.0).triu(1)
    found, directions, largest = deflate_(lower)
    torch.testing.assert_close(found, values[100 - spikes :])
    assert largest <= values[99 - spikes] * (1 + 1e-9)
    rest = vectors[:, : 100 - spikes]
    assert (rest.T @ directions).norm() < 1e-9
    expected = rest * values[: 100 - spikes] @ rest.T
    assert (lower - expected).norm() <= 1e-14 * matrix.norm() + 1e-9 * expected.norm()


def test_a_slow_decay_has_no_spikes(rng):
    values = torch.linspace(1, 10, 300, dtype=torch.float64)
    vectors, _ = torch.linalg.qr(torch.randn(300, 300, generator=rng, dtype=torch.float64))
    matrix = vectors * values @ vectors.T
    rest = matrix.clone()
    found, _, largest = deflate_(rest)
    assert 5 < largest <= 10
    assert len(found) < SPIKES / 8
    assert torch.linalg.eigvalsh(rest)[-1] <= values[-1] * (1 + 1e-12)


def test_no_convergence_has_the_name_that_torch_gives_it(monkeypatch):
    def fail(*given, **named):
        raise LinAlgError("did not converge")

    monkeypatch.setattr(eigen, "eigh", fail)
    with pytest.raises(torch.linalg.LinAlgError, match="did not converge"):
        leading_eigenpairs(torch.eye(3), 1, lean=True)
