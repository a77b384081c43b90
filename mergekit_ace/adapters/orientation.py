# SPDX-License-Identifier: Apache-2.0
"""PEFT's factors A and B as the factors of a stored tensor's change, and back.

PEFT's linear layers change a weight (o, i) by B · A with B (o, r) and A (r, i). Conv1D and
embeddings store the transpose, convolutions have their window in A, and the matrices of a packed
parameter lie side by side: A (E · r, i) by matrix first, B (o, r · E) by rank first.
"""

from __future__ import annotations

from typing import Literal

from torch import Tensor

from mergekit_ace.algebra.low_rank import LowRank

Kind = Literal["linear", "transposed", "embedding", "convolution", "parameter", "bias", "saved"]


def from_peft(
    kind: Kind,
    first: Tensor,
    second: Tensor,
    shape: tuple[int, ...],
    swapped: bool = False,
) -> LowRank:
    """Return the change of a stored tensor from PEFT's factors.

    Args:
        kind: of the change.
        first: A, as PEFT stores it.
        second: B, likewise.
        shape: of the stored tensor.
        swapped: a packed parameter is stored (E, i, o).
    """
    if kind in ("transposed", "embedding"):
        return LowRank(first.T, second.T, shape)
    if kind == "convolution":
        return LowRank(second.flatten(1), first.flatten(1), shape)
    if kind == "parameter" and len(shape) == 3:
        count = shape[0]
        rows = first.reshape(count, -1, first.shape[1])
        columns = second.reshape(second.shape[0], -1, count).permute(2, 0, 1)
        if swapped:
            return LowRank(rows.mT, columns.mT, shape)
        return LowRank(columns, rows, shape)
    return LowRank(second, first, shape)


def to_peft(kind: Kind, factors: LowRank, swapped: bool = False) -> tuple[Tensor, Tensor]:
    """Return A and B, as PEFT stores them, of the change of a stored tensor.

    Args:
        kind: of the change.
        factors: of it.
        swapped: a packed parameter is stored (E, i, o).
    """
    left, right, shape = factors.left, factors.right, factors.shape
    if kind in ("transposed", "embedding"):
        return left.T, right.T
    if kind == "convolution":
        window = shape[2:]
        return right.reshape(-1, shape[1], *window), left.reshape(*left.shape, *(1 for _ in window))
    if kind == "parameter" and len(shape) == 3:
        columns, rows = (right.mT, left.mT) if swapped else (left, right)
        return rows.flatten(0, 1), columns.permute(1, 2, 0).flatten(1)
    return right, left
