# SPDX-License-Identifier: Apache-2.0
"""What `inspect` measures of the task vectors Δ_t = W_t − W0 of one tensor."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from mergekit_ace.algebra.linalg import as_rows
from mergekit_ace.algebra.task_vectors import delta_blocks


def evenly_spaced(count: int, wanted: int) -> list[int]:
    """Return at most `wanted` of 0 … count − 1, the first and the last among them."""
    return np.linspace(0, count - 1, min(wanted, count)).round().astype(int).tolist()


def compare_entries(base: Tensor, experts: Sequence[Tensor]) -> dict[str, Any]:
    """Compare task vectors entry by entry, in float64, of tensors of any shape; see `Record`."""
    count, origin = base.numel(), as_rows(base)
    products = torch.zeros(len(experts), len(experts), dtype=torch.float64, device=base.device)
    changed = torch.zeros(len(experts), dtype=torch.int64, device=base.device)
    base_square = 0.0
    for rows, stack in delta_blocks(base, experts, torch.float64):
        base_square += float(torch.linalg.vector_norm(origin[rows], dtype=torch.float64)) ** 2
        deltas = stack.flatten(1)
        products += deltas @ deltas.mT
        changed += torch.count_nonzero(deltas, dim=1)
    base_norm, norms = math.sqrt(base_square), products.diagonal().sqrt()
    sizes, cosines = norms.tolist(), (products / torch.outer(norms, norms)).tolist()
    return {
        "base_norm": base_norm,
        "norm": sizes,
        "relative_size": [norm / base_norm if base_norm else None for norm in sizes],
        "unchanged": [1 - n / count if count else 1.0 for n in changed.tolist()],
        # 0/0 where one of them is zero
        "cosine": [[None if math.isnan(one) else one for one in row] for row in cosines],
    }
