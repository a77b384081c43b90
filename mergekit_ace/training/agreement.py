# SPDX-License-Identifier: Apache-2.0
"""How far answers agree with what is right: counted batch by batch, and over all processes."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Agreement:
    """Sums over answers, from which accuracy or correlation follows.

    Attributes:
        sums: (7,), float64: of answers, right ones; of numbers given x and wanted y: x, y, x², y²
            and xy.
    """

    sums: Tensor

    @classmethod
    def of(cls, given: Tensor, wanted: Tensor) -> Agreement:
        """Compare answers, (P,), with what was wanted: classes, or numbers in floating point."""
        x, y = given.double().cpu(), wanted.double().cpu()
        parts = (x == y, x, y, x * x, y * y, x * y)
        sums = [float(len(x)), *(float(part.sum()) for part in parts)]
        return cls(torch.tensor(sums, dtype=torch.float64))

    @property
    def accuracy(self) -> float:
        """Share of answers that are what was wanted, 0 to 1."""
        return float(self.sums[1] / self.sums[0])

    @property
    def correlation(self) -> float:
        """Pearson's correlation of numbers, −1 to 1; 0 where one side is constant."""
        count, _, x, y, xx, yy, xy = self.sums.tolist()
        own, other = xx - x * x / count, yy - y * y / count
        if own <= 1e-12 * xx or other <= 1e-12 * yy:  # what rounding leaves of a constant
            return 0.0
        return (xy - x * y / count) / math.sqrt(own * other)
