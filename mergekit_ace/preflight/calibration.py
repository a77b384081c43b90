# SPDX-License-Identifier: Apache-2.0
"""How fast this machine is, in a fraction of a second."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from mergekit_ace.algebra.linalg import product

SIDE = 1536  # of the products: a few milliseconds on anything
SWEEP = 2**23  # entries of the sum, too many for a cache
SAMPLE = 32 * 2**20  # bytes read
# Merges reach this part of the rate of a single product: factors and solves, blocks, float64.
EFFICIENCY = 0.5
UNKNOWN_DISK = 1e9  # bytes per second


@dataclass(frozen=True)
class Rates:
    """Rates of a machine.

    Attributes:
        operations: of a merge in float32, per second.
        memory: bytes per second of a sweep.
        read: bytes per second from disk.
    """

    operations: float
    memory: float
    read: float


def calibrate(device: str, file: Path | None) -> Rates:
    """Measure them.

    Args:
        device: of the matrix work.
        file: on the disk that is read; a usual rate without one.
    """
    matrix = torch.ones(SIDE, SIDE, device=device)
    seconds = _best(lambda: product(matrix, matrix), device)
    vector = torch.ones(SWEEP, device=device)
    sweep = _best(lambda: vector.add_(1.0), device)
    return Rates(
        operations=EFFICIENCY * 2 * SIDE**3 / seconds,
        memory=2 * 4 * SWEEP / sweep,
        read=_read_rate(file) if file is not None else UNKNOWN_DISK,
    )


def _best(work: Callable[[], object], device: str, rounds: int = 4) -> float:
    """Seconds of the fastest of a few rounds, the first of which warms up."""
    times = []
    for _ in range(rounds):
        start = time.perf_counter()
        work()
        if device.startswith("cuda"):
            torch.cuda.synchronize(device)
        times.append(time.perf_counter() - start)
    return max(min(times[1:]), 1e-9)


def _read_rate(path: Path) -> float:
    """From the disk itself where the system can be asked to forget the part first."""
    try:
        with open(path, "rb", buffering=0) as file:
            size = min(SAMPLE, path.stat().st_size)
            if size < 2**20:
                return UNKNOWN_DISK
            if hasattr(os, "posix_fadvise"):
                os.posix_fadvise(file.fileno(), 0, size, os.POSIX_FADV_DONTNEED)
            start = time.perf_counter()
            while size > 0:
                part = len(file.read(min(size, 2**22)))
                if not part:
                    break
                size -= part
            return min(SAMPLE, path.stat().st_size) / (time.perf_counter() - start)
    except OSError:
        return UNKNOWN_DISK
