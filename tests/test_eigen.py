# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import pytest
import torch

from mergekit_ace.algebra.eigen import leading_eigenpairs


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
