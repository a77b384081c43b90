# SPDX-License-Identifier: Apache-2.0
"""Both libraries against float64, on matrices as they may lie in memory; and the switches."""

from __future__ import annotations

import math
import threading

import pytest
import torch
from matrices import family
from threadpoolctl import threadpool_info
from torch import Tensor

from mergekit_ace import AceOptions, merge_matrix
from mergekit_ace.algebra import linalg
from mergekit_ace.algebra.forms import Attempt
from mergekit_ace.algebra.linalg import (
    SciPy,
    Torch,
    add_gram,
    add_product_,
    blocks,
    cholesky_,
    full_precision,
    library,
    mirror,
    orthonormal,
    product,
    restore_,
    rounding,
    set_product_,
    solve_,
)

EXACT = {"ieee", "highest"}


@pytest.fixture(params=[SciPy, Torch], ids=["scipy", "torch"])
def by(request):
    return request.param


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
def test_products(rng, by, left, right):
    first, second = layouts(rng, 37, 70)[left], layouts(rng, 70, 53)[right]
    expected = first.double() @ second.double()
    close = {"atol": 2e-5, "rtol": 1e-5}
    torch.testing.assert_close(product(first, second).double(), expected, **close)
    for place in layouts(rng, 37, 53).values():
        if 0 in place.stride():  # cannot be written to
            continue
        start = place.double()
        by.add_product_(place, first, second, -0.5)
        torch.testing.assert_close(place.double(), start - 0.5 * expected, **close)
        by.set_product_(place, first, second)
        torch.testing.assert_close(place.double(), expected, **close)


@pytest.mark.parametrize("shape", [(1, 70, 53), (37, 1, 53), (37, 70, 1), (1, 1, 1), (0, 3, 4)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_thin_and_empty_products(rng, shape, dtype):
    rows, inner, columns = shape
    first = torch.randn(rows, inner, generator=rng, dtype=dtype)
    second = torch.randn(inner, columns, generator=rng, dtype=dtype)
    expected = first @ second
    assert product(first, second).dtype == dtype
    torch.testing.assert_close(product(first, second), expected, atol=1e-5, rtol=1e-5)
    total = torch.ones(rows, columns, dtype=dtype)
    assert add_product_(total, first, second, 2.0) is total
    torch.testing.assert_close(total, 1 + 2 * expected, atol=1e-5, rtol=1e-5)
    assert set_product_(total, first[:, :0], second[:0]) is total
    assert not total.any()


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("size", [1, 2, 20, 600])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_gram_factor_and_solve(rng, by, size, dtype, transposed):
    factor = torch.randn(size, size + 100, generator=rng, dtype=dtype)
    factor = factor.T.contiguous().T if transposed else factor
    gram = size * torch.eye(size, dtype=dtype)
    by.add_gram(gram, factor, 0.5)
    mirror(gram)
    exact = size * torch.eye(size, dtype=torch.float64)
    exact += 0.5 * factor.double() @ factor.double().T
    bar = 20 * rounding(dtype)
    assert (gram - exact).norm() <= bar * exact.norm()
    both, diagonal = gram.clone(), gram.diagonal().clone()
    assert by.cholesky_(both)
    torch.testing.assert_close(both.tril(), torch.linalg.cholesky(gram))
    rows = torch.randn(80, size, generator=rng, dtype=dtype)
    expected = torch.linalg.solve(exact, rows.double().T).T
    lower = both + torch.full_like(both, math.nan).triu(1)  # only the triangle is read
    by.solve_(rows, lower)
    assert (rows - expected).norm() <= 50 * bar * expected.norm()
    assert torch.equal(restore_(both, diagonal), gram)  # two matrices in the memory of one


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("shape", [(70, 9), (9, 9), (5, 9)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_an_orthonormal_basis(rng, by, shape, layout, dtype):
    columns = layouts(rng, *shape)[layout].to(dtype)
    before, count = columns.clone(), min(shape)
    basis = by.orthonormal(columns)
    assert basis.shape == (shape[0], count)
    assert basis.dtype == dtype
    near = {"atol": 100 * rounding(dtype), "rtol": 0}
    torch.testing.assert_close(basis.mT @ basis, torch.eye(count, dtype=dtype), **near)
    largest = float(columns.abs().max())
    torch.testing.assert_close(basis @ (basis.mT @ columns) / largest, columns / largest, **near)
    assert torch.equal(columns, before)


def test_orthonormal_bases_of_a_stack(rng):
    stack = torch.randn(3, 12, 4, generator=rng)
    torch.testing.assert_close(orthonormal(stack)[1], orthonormal(stack[1]))


def test_a_part_of_the_rows_is_solved_for_in_place(rng):
    rows = torch.randn(9, 5, generator=rng)
    factor = torch.randn(5, 8, generator=rng)
    gram = mirror(add_gram(torch.eye(5), factor))
    expected = rows.clone()
    expected[2:6] = torch.linalg.solve(gram, rows[2:6], left=False)
    assert cholesky_(gram)
    solve_(rows[2:6], gram)
    torch.testing.assert_close(rows, expected)


def test_only_the_lower_triangle_is_read(rng):
    matrix = torch.randn(8, 8, generator=rng, dtype=torch.float64)
    got = mirror(matrix.clone())
    assert torch.equal(got, got.T)
    assert torch.equal(got.tril(), matrix.tril())
    large = torch.randn(1200, 1200, generator=rng)
    assert torch.equal(mirror(large.clone()), large.tril() + large.tril(-1).T)


@pytest.mark.parametrize("place", [0, 3, 6])
@pytest.mark.parametrize("value", [-1.0, 0.0, math.nan])
def test_no_factor(by, place, value):
    matrix = torch.eye(7, dtype=torch.float64)
    matrix[place, place] = value
    assert not by.cholesky_(matrix)


@pytest.mark.parametrize("inner", [256, 2048, 8192])
def test_rounding_errors_are_as_large_as_is_said(rng, inner):
    first = torch.randn(256, inner, generator=rng)
    second = torch.randn(inner, 256, generator=rng)
    expected = first.double() @ second.double()
    error = (product(first, second) - expected).norm() / expected.norm()
    assert rounding(torch.float32) <= error <= 8 * rounding(torch.float32)


def test_who_works_where(rng):
    matrix = torch.ones(2, 2)
    assert library(matrix) is SciPy
    assert library(matrix, matrix[:0]) is Torch
    assert library(matrix.to("meta")) is Torch


def test_blocks_are_slices_of_all():
    assert list(blocks(10, 3, entries=9)) == [slice(0, 3), slice(3, 6), slice(6, 9), slice(9, 10)]
    assert list(blocks(2, 100, entries=9)) == [slice(0, 1), slice(1, 2)]
    assert list(blocks(0, 5)) == []
    assert next(blocks(2**12, 2**12)).stop * 2**12 == 2**21  # an eighth
    assert next(blocks(2**14, 2**12)).stop * 2**12 == linalg.LARGEST_BLOCK


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
    attempts = [Attempt("primal", torch.float32)]
    options = AceOptions(spectral_refinement="never")
    base, experts = family(rng, 80, 60, 3, noise=1.0)
    expected, _ = merge_matrix(base, experts, options=options, attempts=attempts)
    torch.set_float32_matmul_precision("medium")
    merged, _ = merge_matrix(base, experts, options=options, attempts=attempts)
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
