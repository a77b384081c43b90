# SPDX-License-Identifier: Apache-2.0
"""Products, factors and eigenpairs of matrices as they may lie in memory; and the switches."""

from __future__ import annotations

import threading

import pytest
import torch
from matrices import family
from threadpoolctl import threadpool_info
from torch import Tensor

from mergekit_ace import merge_matrix
from mergekit_ace.algebra import linalg
from mergekit_ace.algebra.linalg import (
    add_product_,
    blocks,
    factorize,
    full_precision,
    gram,
    leading_eigenpairs,
    product,
    solve,
)

EXACT = {"ieee", "highest"}


def layouts(rng: torch.Generator, rows: int, columns: int) -> dict[str, Tensor]:
    """A matrix as it may lie in memory."""
    around = torch.randn(rows + 3, columns + 5, generator=rng)
    return {
        "rows": torch.randn(rows, columns, generator=rng),
        "columns": torch.randn(columns, rows, generator=rng).mT,
        "rows with gaps": around[2 : 2 + rows, 4 : 4 + columns],
        "columns with gaps": torch.randn(columns + 3, rows + 5, generator=rng)[:columns, :rows].mT,
        "repeated": torch.randn(rows, 1, generator=rng).expand(rows, columns),
    }


LAYOUTS = list(layouts(torch.Generator(), 1, 1))


@pytest.mark.parametrize("right", LAYOUTS)
@pytest.mark.parametrize("left", LAYOUTS)
def test_products(rng, left, right):
    one, other = layouts(rng, 7, 5)[left], layouts(rng, 5, 9)[right]
    expected = one.double() @ other.double()
    torch.testing.assert_close(product(one, other).double(), expected, atol=1e-5, rtol=1e-5)
    total = torch.ones(7, 9)
    assert add_product_(total, one, other, 0.5) is total
    torch.testing.assert_close(total.double(), 1 + expected / 2, atol=1e-5, rtol=1e-5)
    squares = gram(one)
    torch.testing.assert_close(squares, one @ one.mT, atol=1e-5, rtol=1e-5)
    assert torch.equal(squares, squares.mT)


@pytest.mark.parametrize("shape", [(0, 3, 4), (3, 0, 4), (3, 4, 0), (1, 1, 1)])
def test_thin_and_empty_products(rng, shape):
    rows, inner, columns = shape
    one, other = torch.randn(rows, inner, generator=rng), torch.randn(inner, columns, generator=rng)
    assert torch.equal(product(one, other), one @ other)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("size", [1, 5, 70])
def test_factor_and_solve(rng, size, dtype):
    wide = torch.randn(size, size + 5, generator=rng, dtype=dtype)
    system, rows = gram(wide), torch.randn(3, size, generator=rng, dtype=dtype)
    lower, failed = factorize(system.clone())
    assert int(failed) == 0
    bar = {"atol": 1e-3 if dtype == torch.float32 else 1e-10, "rtol": 0}
    torch.testing.assert_close(lower @ lower.mT, system, **bar)
    torch.testing.assert_close(solve(rows.clone(), lower) @ system, rows, **bar)
    assert solve(rows[:0], lower).shape == (0, size)


@pytest.mark.parametrize("value", [-1.0, float("nan")])
def test_no_factor(value):
    matrix = torch.eye(4)
    matrix[2, 2] = value
    lower, failed = factorize(matrix)
    assert int(failed) != 0 or not lower.isfinite().all()


@pytest.mark.parametrize("count", [1, 4, 30])
def test_leading_eigenpairs(rng, count):
    system = gram(torch.randn(30, 40, generator=rng, dtype=torch.float64))
    values, vectors = leading_eigenpairs(system.clone(), count)
    assert torch.equal(values, values.sort(descending=True).values)
    expected = torch.linalg.eigvalsh(system).flip(0)[:count]
    torch.testing.assert_close(values, expected)
    torch.testing.assert_close(system @ vectors, vectors * values, atol=1e-9, rtol=0)
    torch.testing.assert_close(vectors.mT @ vectors, torch.eye(count, dtype=torch.float64))


def test_blocks_are_slices_of_all():
    assert list(blocks(10, 3, entries=9)) == [slice(0, 3), slice(3, 6), slice(6, 9), slice(9, 10)]
    assert list(blocks(2, 100, entries=9)) == [slice(0, 1), slice(1, 2)]
    assert list(blocks(0, 5)) == []
    assert next(blocks(2**12, 2**12)).stop * 2**12 == linalg.BLOCK_ENTRIES


@pytest.fixture
def precision_put_back():
    yield
    torch.set_float32_matmul_precision("highest")


@pytest.mark.usefixtures("precision_put_back")
@pytest.mark.parametrize("setting", ["highest", "high", "medium"])
def test_the_setting_of_the_caller_comes_back(setting):
    torch.set_float32_matmul_precision(setting)
    before = linalg._get_precision()
    with full_precision():
        assert set(linalg._get_precision()) <= EXACT
        with full_precision():
            pass
        assert set(linalg._get_precision()) <= EXACT
    assert linalg._get_precision() == before
    assert torch.get_float32_matmul_precision() == setting
    with pytest.raises(KeyError), full_precision():
        raise KeyError
    assert torch.get_float32_matmul_precision() == setting


@pytest.mark.usefixtures("precision_put_back")
def test_a_setting_per_backend_comes_back():
    if not hasattr(torch.backends.cuda.matmul, "fp32_precision"):
        pytest.skip("this torch has no settings per backend")
    torch.backends.cuda.matmul.fp32_precision = "tf32"
    with full_precision():
        assert torch.backends.cuda.matmul.fp32_precision == "ieee"
        assert torch.backends.mkldnn.matmul.fp32_precision == "ieee"
    assert torch.backends.cuda.matmul.fp32_precision == "tf32"


@pytest.mark.usefixtures("precision_put_back")
def test_side_by_side():
    """The first to leave must not change it for the one that still computes."""
    torch.set_float32_matmul_precision("medium")
    left, seen = threading.Event(), []

    def stay():
        with full_precision():
            inside.set()
            left.wait(10)
            seen.extend(linalg._get_precision())

    inside = threading.Event()
    with full_precision():
        thread = threading.Thread(target=stay)
        thread.start()
        inside.wait(10)
    left.set()
    thread.join()
    assert seen
    assert set(seen) <= EXACT
    assert torch.get_float32_matmul_precision() == "medium"


@pytest.mark.usefixtures("precision_put_back")
def test_torch_with_a_single_switch(monkeypatch):
    monkeypatch.setattr(linalg, "_backends", list)
    torch.set_float32_matmul_precision("high")
    with full_precision():
        assert torch.get_float32_matmul_precision() == "highest"
    assert torch.get_float32_matmul_precision() == "high"


@pytest.mark.usefixtures("precision_put_back")
def test_a_merge_is_the_same_in_every_setting(rng):
    base, experts = family(rng, 80, 60, 3, noise=1.0)
    expected, record = merge_matrix(base, experts)
    assert record.precision == "float32"
    torch.set_float32_matmul_precision("medium")
    merged, _ = merge_matrix(base, experts)
    assert torch.equal(merged, expected)


def test_scipy_takes_as_many_threads_as_torch():
    def threads() -> set[int]:
        return {pool["num_threads"] for pool in threadpool_info() if pool["user_api"] == "blas"}

    outside, before = threads(), torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        with full_precision():
            assert threads() == {3}
            with full_precision():
                assert threads() == {3}
            assert threads() == {3}
    finally:
        torch.set_num_threads(before)
    assert threads() == outside
