# SPDX-License-Identifier: Apache-2.0
"""What `inspect` measures of the task vectors Δ_t = W_t − W0 of one tensor."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from mergekit_ace.algebra.linalg import full_precision, leading_directions
from mergekit_ace.algebra.task_vectors import (
    FixedLayout,
    PairTable,
    Subspaces,
    TensorRecord,
    as_matrices,
    task_vector,
)

# Entries compared at once, which stay in a cache.
CHUNK = 2**18
# Leading singular directions that span the subspaces compared.
SUBSPACE = 16
# Of a stack of matrices, so many are looked at, evenly spaced.
STACK_SAMPLE = 4


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


@full_precision()
def compare_subspaces(deltas: Iterable[Tensor]) -> Subspaces:
    """Compare the leading subspaces of task vectors, (o, i), which are asked for one by one."""
    directions, ranks = [], []
    for delta in deltas:
        found = leading_directions(delta, SUBSPACE)
        directions.append(found)
        strongest = float(found.values[0]) if len(found.values) else 0.0
        ranks.append((_norm(delta) / strongest) ** 2 if strongest else None)
    counts = [len(found.values) for found in directions]
    size = min(filter(None, counts), default=0)

    def overlaps(side: str) -> PairTable:
        leading = [getattr(found, side)[:, :size] for found in directions]
        products = [
            [float((one.mT @ other).square().sum()) for other in leading] for one in leading
        ]
        shares = torch.tensor(products, dtype=torch.float64) / max(1, size)
        return _pairs(shares.clamp(max=1), counts)

    return Subspaces(size, tuple(ranks), inputs=overlaps("right"), outputs=overlaps("left"))


def inspect_versions(
    tensors: Sequence[Tensor], record: TensorRecord, layout: FixedLayout, dtype: torch.dtype
) -> tuple[TensorRecord, dict[str, Any]]:
    """Return the record of a merge with the subspaces of some matrices, and `compare_entries`.

    Tensors, the base's first, are read by a layout. Of a stack `STACK_SAMPLE` matrices are looked
    at; a method that reads it entry by entry has one record of it, which stays as it is.
    """
    comparison, matrices = compare_entries(tensors[0], tensors[1:]), list(record.matrices)
    if layout == "mean" or tensors[0].numel() == 0:
        return record, comparison
    origins, *others = (as_matrices(tensor, layout) for tensor in tensors)
    if len(origins) != len(matrices):
        return record, comparison
    for n in evenly_spaced(len(origins), STACK_SAMPLE):
        deltas = (task_vector(own[n], origins[n], dtype) for own in others)
        matrices[n] = replace(matrices[n], subspaces=compare_subspaces(deltas))
    return replace(record, matrices=tuple(matrices)), comparison
