# SPDX-License-Identifier: Apache-2.0
"""Which libraries are fast on the processor at hand.

On a CPU torch leaves products and factorisations to MKL, which is made for Intel's processors. On
two cores of an AMD EPYC with AVX-512 it took twice as long as others that every installation has
anyway: oneDNN, a part of torch, for products in float32, and OpenBLAS, a part of SciPy, for
eigenvectors. (Products in float64 and solves with small triangles gained nothing by OpenBLAS: its
threads wait busily for more, and hinder those of torch.)
"""

from __future__ import annotations

import functools
import platform
from contextlib import AbstractContextManager
from pathlib import Path

import torch
from threadpoolctl import ThreadpoolController

# As processors name their makers: AMD, and Hygon with the same cores.
_OTHERS = ("AuthenticAMD", "HygonGenuine")


def avoids_mkl(device: torch.device) -> bool:
    """Whether work on `device` is better left to other libraries than MKL."""
    return device.type == "cpu" and mkl_is_slow()


@functools.cache
def mkl_is_slow() -> bool:
    """Whether this is such a processor, and torch multiplies with MKL on it."""
    return (
        torch.backends.mkl.is_available()
        and torch.backends.cpu.get_cpu_capability() == "AVX512"
        and _maker() in _OTHERS
    )


def threads_of_torch() -> AbstractContextManager:
    """Within it, OpenBLAS takes as many threads as torch: it knows nothing of torch's setting."""
    return _controller().limit(limits=torch.get_num_threads(), user_api="blas")


@functools.cache
def _controller() -> ThreadpoolController:
    return ThreadpoolController()


def _maker() -> str:
    """Of the processor, as it says itself; empty where that is not known."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:  # Windows has it at the end of its description
        return platform.processor().rpartition(" ")[2]
    return next((line.split()[-1] for line in lines if line.startswith("vendor_id")), "")
