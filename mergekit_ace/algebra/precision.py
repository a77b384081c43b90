# SPDX-License-Identifier: Apache-2.0
"""Float32 products in float32, whatever the caller has set.

torch may round the factors of a float32 product to TF32 on a GPU, or to bfloat16 on a CPU, where
the caller allowed that for training. Ten or seven bits are not enough to invert a covariance.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import torch

_LOCK = threading.Lock()  # the switches are global; --multi-gpu merges tensors side by side
_saved: list[str] = []
_users = 0


@contextmanager
def full_precision() -> Iterator[None]:
    """Within it, float32 products have float32 factors; afterwards the caller's setting is back."""
    global _users, _saved
    with _LOCK:
        if _users == 0:
            _saved = _get()
            _set(["highest"] if len(_saved) == 1 else ["ieee"] * len(_saved))
        _users += 1
    try:
        yield
    finally:
        with _LOCK:
            _users -= 1
            if _users == 0:
                _set(_saved)


def _backends() -> list:
    backends = [torch.backends.cuda.matmul, torch.backends.mkldnn]
    if not all(hasattr(backend, "fp32_precision") for backend in backends):
        return []  # before torch 2.9 there is one switch for all
    return [torch.backends.cuda.matmul, torch.backends.mkldnn.matmul]


def _get() -> list[str]:
    backends = _backends()
    if not backends:
        return [torch.get_float32_matmul_precision()]
    return [backend.fp32_precision for backend in backends]


def _set(values: list[str]) -> None:
    backends = _backends()
    if not backends:
        torch.set_float32_matmul_precision(values[0])
    for backend, value in zip(backends, values, strict=False):
        backend.fp32_precision = value
