# SPDX-License-Identifier: Apache-2.0
"""Covariances of a layer's inputs that were measured on samples, in the place of estimates."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor


def packed_size(columns: int) -> int:
    """Return how many entries the lower triangle of a matrix (i, i) has."""
    return columns * (columns + 1) // 2


def pack(matrix: Tensor) -> Tensor:
    """Return the lower triangle of a symmetric matrix row by row, as LAPACK packs it."""
    return torch.cat([matrix[row, : row + 1] for row in range(len(matrix))])


@dataclass(frozen=True)
class MeasuredCovariance:
    """M_t = X_tᵀX_t/n_t, (i, i), of one expert, finite, with a row of X_t per token."""

    packed: Tensor  # see `pack`; maybe on another device, maybe mapped from a file
    columns: int  # i
    off_diagonal: float = 1.0  # α, which entries off the diagonal are multiplied by, 0 to 1

    @cached_property
    def trace(self) -> float:
        """tr(M_t)."""
        places = torch.arange(self.columns, device="cpu")
        return float(self.packed[places * (places + 3) // 2].double().sum())

    def matrix(self, like: Tensor) -> Tensor:
        """Return M_t, (i, i), in the dtype of a tensor, where that is."""
        places = torch.tril_indices(self.columns, self.columns, device="cpu")
        lower = torch.zeros(self.columns, self.columns, dtype=like.dtype, device="cpu")
        lower[places[0], places[1]] = self.packed.to("cpu", like.dtype)
        full = (lower + lower.tril(-1).mT).mul_(self.off_diagonal)
        full.diagonal().copy_(lower.diagonal())
        return full.to(like.device)


@dataclass(frozen=True)
class MeasuredInputs:
    """What was measured of the inputs of one tensor; entries in the order of all experts.

    Both kinds of covariances are brought to one trace before they are mixed.
    """

    covariances: tuple[MeasuredCovariance | None, ...] = ()  # of a matrix; None: no sample came
    counts: tuple[Tensor | None, ...] = ()  # of a table, how often each row was looked up, (n,)
    mix: float = 1.0  # share of the measured in the covariances of a merge, 0 to 1

    def covariance(self, position: int) -> MeasuredCovariance | None:
        """Return that of one expert, if it says anything."""
        found = self.covariances[position] if self.covariances and self.mix > 0 else None
        return found if found is not None and found.trace > 0 else None

    def count(self, position: int) -> Tensor | None:
        """Return the counts of one expert as shares, (n,), in float64, if there are any."""
        found = self.counts[position] if self.counts and self.mix > 0 else None
        return None if found is None or not found.any() else found.double() / found.double().sum()
