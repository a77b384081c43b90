# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import pytest
import torch

from mergekit_ace.algebra import linalg as blocks
from mergekit_ace.algebra import linalg as symmetric
from mergekit_ace.algebra.linalg import (
    add_gram,
    cholesky_,
    diagonal_squares,
    mirror,
    narrow_,
    recover_,
)


@pytest.fixture(params=[1, 3, 1000], autouse=True)
def leaf(request, monkeypatch):
    """From halving down to single entries to no halving at all."""
    for size in ("PRODUCT_SIZE", "ONEDNN_SIZE", "FACTOR_SIZE"):
        monkeypatch.setattr(symmetric, size, request.param)


@pytest.mark.parametrize("size", [1, 2, 7, 20])
def test_gram_products(rng, size):
    factor = torch.randn(size, 9, generator=rng, dtype=torch.float64)
    start = torch.randn(size, size, generator=rng, dtype=torch.float64)
    start = start + start.T
    got = mirror(add_gram(start.clone(), factor, 0.5))
    torch.testing.assert_close(got, start + 0.5 * factor @ factor.T)


def test_only_the_lower_triangle_is_read(rng):
    matrix = torch.randn(8, 8, generator=rng, dtype=torch.float64)
    got = mirror(matrix.clone())
    assert torch.equal(got, got.T)
    assert torch.equal(got.tril(), matrix.tril())


@pytest.mark.parametrize("size", [1, 2, 7, 20])
def test_cholesky_in_place(rng, size):
    factor = torch.randn(size, size + 3, generator=rng, dtype=torch.float64)
    matrix = factor @ factor.T
    expected = torch.linalg.cholesky(matrix)
    got = matrix.tril() + torch.full_like(matrix, float("nan")).triu(1)
    for square in range(size):  # cholesky_ex may look at the triangle it does not need
        got[square, square:] = matrix[square, square:]
    assert cholesky_(got)
    torch.testing.assert_close(got, expected)


@pytest.mark.parametrize("size", [1, 2, 7, 20])
@pytest.mark.parametrize("gram_size", [1, 3, 6])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_two_matrices_in_the_memory_of_one(rng, monkeypatch, size, gram_size, dtype):
    monkeypatch.setattr(symmetric, "PRODUCT_SIZE", gram_size)
    matrix = torch.randn(size, size + 3, generator=rng, dtype=torch.float64)
    matrix = mirror(matrix @ matrix.T)
    expected = torch.linalg.cholesky(matrix)
    both = matrix.clone()
    squares = [square.clone() for square in diagonal_squares(both)]
    assert cholesky_(both, keep=True)
    torch.testing.assert_close(both.tril(), expected)
    both = narrow_(both, dtype)
    assert torch.equal(recover_(both, squares), matrix.to(dtype))


@pytest.mark.parametrize("block", [1, 7, 2**20])
def test_narrowed_in_its_own_memory(rng, monkeypatch, block):
    monkeypatch.setattr(blocks, "BLOCK_ENTRIES", block)
    matrix = torch.randn(5, 7, generator=rng, dtype=torch.float64)
    expected = matrix.float()
    place = matrix.data_ptr()
    got = narrow_(matrix, torch.float32)
    assert torch.equal(got, expected)
    assert got.is_contiguous()
    assert got.data_ptr() == place


@pytest.mark.parametrize("place", [0, 3, 6])
def test_no_factor(rng, place):
    matrix = torch.eye(7, dtype=torch.float64)
    matrix[place, place] = -1
    assert not cholesky_(matrix)
