# SPDX-License-Identifier: Apache-2.0
"""What `inspect` measures of the task vectors Δ_t = W_t − W0 of one tensor."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from mergekit_ace.algebra.task_vectors import PairTable

# Entries compared at once, which stay in a cache.
CHUNK = 2**18


def evenly_spaced(count: int, wanted: int) -> list[int]:
    """Return at most `wanted` of 0 … count − 1, the first and the last among them."""
    return np.linspace(0, count - 1, min(wanted, count)).round().astype(int).tolist()


def compare_entries(base: Tensor, experts: Sequence[Tensor]) -> dict[str, Any]:
    """Compare task vectors entry by entry, in float64, of tensors of any shape; see `Record`."""
    origin, *versions = (tensor.reshape(-1) for tensor in (base, *experts))
    count = base.numel()
    products = torch.zeros(len(experts), len(experts), dtype=torch.float64, device=base.device)
    changed = torch.zeros(len(experts), dtype=torch.int64, device=base.device)
    base_square = 0.0
    for start in range(0, count, CHUNK):
        part = slice(start, start + CHUNK)
        base_square += _norm(origin[part]) ** 2
        deltas = torch.stack([v[part].double() for v in versions]).sub_(origin[part].double())
        products += deltas @ deltas.mT
        changed += torch.count_nonzero(deltas, dim=1)
    base_norm, norms = math.sqrt(base_square), products.diagonal().sqrt()
    sizes = tuple(norms.tolist())
    return {
        "base_norm": base_norm,
        "norm": sizes,
        "relative_size": tuple(norm / base_norm if base_norm else None for norm in sizes),
        "unchanged": tuple(1 - n / count if count else 1.0 for n in changed.tolist()),
        "cosine": _pairs(products / torch.outer(norms, norms), sizes),
    }


def _norm(tensor: Tensor) -> float:
    return float(torch.linalg.vector_norm(tensor, dtype=torch.float64))


def _pairs(table: Tensor, sizes: Sequence[float]) -> PairTable:
    """Return a T × T table with None wherever a size is zero."""
    return tuple(
        tuple(value if sizes[s] and sizes[t] else None for t, value in enumerate(row))
        for s, row in enumerate(table.tolist())
    )
