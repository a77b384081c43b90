# SPDX-License-Identifier: Apache-2.0
"""Column-centred task vectors (Eq. 5), given out in blocks of rows."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from mergekit_ace.algebra.blocks import blocks
from mergekit_ace.algebra.task_vectors import task_vector


class CentredTaskVector:
    """C_t = Δ_t − 1 μ_tᵀ of one expert, in units of `unit`.

    A tall matrix larger than a block is formed anew, block by block, in every sweep: embeddings and
    heads never exist whole in the compute dtype. Any other is formed once.

    Attributes:
        mean: μ_t, (i,), the column means of Δ_t.
        tall: o ≥ i; otherwise there is a single block.
    """

    def __init__(
        self, expert: Tensor, base: Tensor, unit: float, formed: torch.dtype, dtype: torch.dtype
    ):
        """
        Args:
            expert, base: W_t and W0, (o, i).
            unit: what Δ_t is divided by.
            formed: the dtype in which W_t − W0 is subtracted.
            dtype: of the blocks given out, at least as wide.
        """
        self._expert, self._base = expert, base
        self._unit, self._formed, self._dtype = unit, formed, dtype
        rows, columns = base.shape
        self.tall = rows >= columns
        self._ranges = list(blocks(rows, columns)) if self.tall else [slice(0, rows)]
        total = torch.zeros(columns, dtype=torch.float64, device=base.device)
        for block in self._ranges:
            delta = self._delta(block)
            for part in delta.split(1024):  # short sums in float32, long ones in float64
                total += part.sum(dim=0)
        self.mean = (total / rows).to(dtype)
        self._whole = delta.sub_(self.mean) if len(self._ranges) == 1 else None

    def blocks(self) -> Iterator[tuple[slice, Tensor]]:
        """Ranges of rows and C_t there, (rows, i); not to be written to."""
        for block in self._ranges:
            whole = self._whole
            yield block, whole if whole is not None else self._delta(block).sub_(self.mean)

    def _delta(self, rows: slice) -> Tensor:
        delta = task_vector(self._expert[rows], self._base[rows], self._formed)
        return delta.to(self._dtype).div_(self._unit)
