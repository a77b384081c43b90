# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import threading

import pytest
import torch
from matrices import family

from mergekit_ace import merge_matrix
from mergekit_ace.algebra import choose as attempts
from mergekit_ace.algebra import linalg as precision
from mergekit_ace.algebra import linalg as processor
from mergekit_ace.algebra import linalg as products
from mergekit_ace.algebra.linalg import full_precision

EXACT = {"ieee", "highest"}


@pytest.fixture(autouse=True)
def put_back():
    yield
    torch.set_float32_matmul_precision("highest")


@pytest.mark.parametrize("setting", ["highest", "high", "medium"])
def test_the_setting_of_the_caller_comes_back(setting):
    torch.set_float32_matmul_precision(setting)
    before = precision._get()
    with full_precision():
        assert set(precision._get()) <= EXACT
        with full_precision():
            pass
        assert set(precision._get()) <= EXACT
    assert precision._get() == before
    assert torch.get_float32_matmul_precision() == setting
    with pytest.raises(KeyError), full_precision():
        raise KeyError
    assert torch.get_float32_matmul_precision() == setting


def test_a_setting_per_backend_comes_back():
    if not hasattr(torch.backends.cuda.matmul, "fp32_precision"):
        pytest.skip("this torch has no settings per backend")
    torch.backends.cuda.matmul.fp32_precision = "tf32"
    with full_precision():
        assert torch.backends.cuda.matmul.fp32_precision == "ieee"
        assert torch.backends.mkldnn.matmul.fp32_precision == "ieee"
    assert torch.backends.cuda.matmul.fp32_precision == "tf32"


def test_side_by_side():
    """The first to leave must not change it for the one that still computes."""
    torch.set_float32_matmul_precision("medium")
    left, seen = threading.Event(), []

    def stay():
        with full_precision():
            inside.set()
            left.wait(10)
            seen.extend(precision._get())

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


def test_torch_with_a_single_switch(monkeypatch):
    monkeypatch.setattr(precision, "_backends", list)
    torch.set_float32_matmul_precision("high")
    with full_precision():
        assert torch.get_float32_matmul_precision() == "highest"
    assert torch.get_float32_matmul_precision() == "high"


@pytest.mark.parametrize("library", ["mkl", "onednn"])
def test_a_merge_is_the_same_in_every_setting(rng, monkeypatch, library):
    monkeypatch.setattr(processor, "mkl_is_slow", lambda: library == "onednn")
    monkeypatch.setattr(products, "LARGE", 0)
    monkeypatch.setattr(attempts, "SMALL_SYSTEM", 0)
    base, experts = family(rng, 80, 60, 3, noise=1.0)
    expected, _ = merge_matrix(base, experts)
    torch.set_float32_matmul_precision("medium")
    merged, _ = merge_matrix(base, experts)
    assert torch.equal(merged, expected)
