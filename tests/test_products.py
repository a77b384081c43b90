# SPDX-License-Identifier: Apache-2.0
"""Products by the library that a processor calls for, against float64.

oneDNN is forced here on matrices far too small for it, on whatever processor the tests run on.
"""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from mergekit_ace.algebra import linalg as processor
from mergekit_ace.algebra import linalg as products
from mergekit_ace.algebra import linalg as triangular
from mergekit_ace.algebra.linalg import (
    add_gram,
    add_product_,
    cholesky_,
    mirror,
    product,
    rounding,
    set_product_,
    solve_,
)

CPU = torch.device("cpu")


@pytest.fixture(params=["mkl", "onednn", "onednn in tiles"])
def library(request, monkeypatch):
    force(monkeypatch, request.param != "mkl")
    if request.param == "onednn in tiles":
        monkeypatch.setattr(products, "BLOCK_ENTRIES", 700)
        monkeypatch.setattr(products, "RUN", 5)
    return request.param


def force(monkeypatch, onednn: bool) -> None:
    if onednn and not products._onednn_works():
        pytest.skip("this torch has no oneDNN")
    monkeypatch.setattr(processor, "mkl_is_slow", lambda: onednn)
    monkeypatch.setattr(products, "LARGE", 0)


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


@pytest.mark.parametrize("careful", [False, True])
@pytest.mark.parametrize("right", LAYOUTS)
@pytest.mark.parametrize("left", LAYOUTS)
def test_products(rng, library, left, right, careful):
    first, second = layouts(rng, 37, 70)[left], layouts(rng, 70, 53)[right]
    expected = first.double() @ second.double()
    close = {"atol": 2e-5, "rtol": 1e-5}
    torch.testing.assert_close(product(first, second, careful=careful).double(), expected, **close)
    for place in layouts(rng, 37, 53).values():
        if 0 in place.stride():  # cannot be written to
            continue
        start = place.double()
        assert add_product_(place, first, second, -0.5, careful=careful) is place
        torch.testing.assert_close(place.double(), start - 0.5 * expected, **close)
        assert set_product_(place, first, second) is not None
        torch.testing.assert_close(place.double(), expected, **close)


@pytest.mark.parametrize("shape", [(1, 70, 53), (37, 1, 53), (37, 70, 1), (1, 1, 1), (0, 3, 4)])
def test_thin_products(rng, library, shape):
    rows, inner, columns = shape
    first = torch.randn(rows, inner, generator=rng)
    second = torch.randn(inner, columns, generator=rng)
    expected = first.double() @ second.double()
    torch.testing.assert_close(product(first, second).double(), expected, atol=1e-5, rtol=1e-5)
    total = torch.ones(rows, columns)
    add_product_(total, first, second, 2.0, careful=True)
    torch.testing.assert_close(total.double(), 1 + 2 * expected, atol=1e-5, rtol=1e-5)


def test_float64_stays_float64(rng, library):
    first = torch.randn(40, 50, generator=rng, dtype=torch.float64)
    assert product(first, first.T).dtype == torch.float64
    assert torch.equal(product(first, first.T), first @ first.T)
    assert rounding(first) == torch.finfo(torch.float64).eps / 2


@pytest.mark.parametrize("transposed", [False, True])
def test_gram_factor_and_solve(rng, library, monkeypatch, transposed):
    monkeypatch.setattr(triangular, "MANY", 0)
    factor = torch.randn(600, 700, generator=rng)
    factor = factor.T.contiguous().T if transposed else factor
    gram = mirror(add_gram(600 * torch.eye(600), factor, careful=transposed))
    exact = 600 * torch.eye(600, dtype=torch.float64) + factor.double() @ factor.double().T
    assert (gram - exact).norm() < 1e-6 * exact.norm()
    rows = torch.randn(80, 600, generator=rng)
    expected = torch.linalg.solve(exact, rows.double().T).T
    lower = gram.clone()
    assert cholesky_(lower, careful=transposed)
    lower += torch.full_like(lower, math.nan).triu(1)  # only the triangle is read
    for given in (rows.clone(), rows.mT.contiguous().mT):
        solved = solve_(given, lower, careful=transposed)
        assert solved.data_ptr() == given.data_ptr()
        assert (solved - expected).norm() < 1e-5 * expected.norm()


@pytest.mark.parametrize("inner", [512, 4096])
@pytest.mark.parametrize("careful", [False, True])
def test_rounding_errors_are_as_large_as_is_said(rng, monkeypatch, inner, careful):
    """The error of MKL over random summands is at most five units; LOSS multiplies it."""
    force(monkeypatch, True)
    first = torch.randn(256, inner, generator=rng)
    second = torch.randn(inner, 256, generator=rng)
    expected = first.double() @ second.double()
    error = (product(first, second, careful=careful) - expected).norm() / expected.norm()
    assert error <= 5 * rounding(first, careful=careful)
    assert rounding(first, careful=True) < rounding(first)


def test_short_products_stay_with_torch(rng, monkeypatch):
    monkeypatch.setattr(processor, "mkl_is_slow", lambda: True)
    monkeypatch.setattr(products, "_onednn", None)
    first = torch.randn(100, 100, generator=rng)
    assert torch.equal(product(first, first), first @ first)


def test_a_torch_without_such_products(rng, monkeypatch):
    def missing(left, right):
        raise AttributeError("no such operator")

    force(monkeypatch, True)
    monkeypatch.setattr(products, "_onednn", missing)
    products._onednn_works.cache_clear()
    try:
        first = torch.randn(100, 100, generator=rng)
        assert torch.equal(product(first, first), first @ first)
    finally:
        products._onednn_works.cache_clear()


@pytest.mark.parametrize(
    ("maker", "capability", "slow"),
    [
        ("GenuineIntel", "AVX512", False),
        ("AuthenticAMD", "AVX512", True),
        ("HygonGenuine", "AVX512", True),
        ("AuthenticAMD", "AVX2", False),
        ("", "AVX512", False),
    ],
)
def test_processors(monkeypatch, maker, capability, slow):
    monkeypatch.setattr(processor, "_maker", lambda: maker)
    monkeypatch.setattr(torch.backends.mkl, "is_available", lambda: True)
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: capability)
    assert processor.mkl_is_slow.__wrapped__() is slow
    monkeypatch.setattr(processor, "mkl_is_slow", lambda: slow)
    assert processor.avoids_mkl(CPU) is slow
    assert not processor.avoids_mkl(torch.device("meta"))


def test_a_torch_without_mkl(monkeypatch):
    monkeypatch.setattr(processor, "_maker", lambda: "AuthenticAMD")
    monkeypatch.setattr(torch.backends.mkl, "is_available", lambda: False)
    assert not processor.mkl_is_slow.__wrapped__()


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("processor\t: 0\nvendor_id\t: AuthenticAMD\nmodel\t\t: 2\n", "AuthenticAMD"),
        ("processor\t: 0\nBogoMIPS\t: 50.00\n", ""),  # not an x86
        (None, "GenuineIntel"),  # Windows
    ],
)
def test_makers(monkeypatch, text, expected):
    def read(path, encoding):
        if text is None:
            raise FileNotFoundError(path)
        return text

    monkeypatch.setattr(processor.Path, "read_text", read)
    monkeypatch.setattr(
        processor.platform, "processor", lambda: "Intel64 Family 6 Stepping 4, GenuineIntel"
    )
    assert processor._maker() == expected


def test_other_libraries_take_as_many_threads_as_torch():
    def threads() -> set[int]:
        pools = processor._controller().info()
        return {pool["num_threads"] for pool in pools if pool["user_api"] == "blas"}

    outside, before = threads(), torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        with processor.threads_of_torch():
            assert threads() == {3}
    finally:
        torch.set_num_threads(before)
    assert threads() == outside
