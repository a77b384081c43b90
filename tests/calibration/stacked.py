# SPDX-License-Identifier: Apache-2.0
"""A naive least squares that judges the closed form of calibration."""

from __future__ import annotations

import torch
from torch import Tensor


def stacked_least_squares(
    rows: list[tuple[Tensor, Tensor, float]], start: Tensor, ridge: float
) -> Tensor:
    """Minimise Σ w ‖W Xᵀ − Yᵀ‖² / n + λ s̄ ‖W − W_m‖² by stacking all rows.

    Args:
        rows: (X, Y, w) of every teacher.
        start: W_m.
        ridge: λ.
    """
    left = [(w / len(x)) ** 0.5 * x.double() for x, _, w in rows]
    right = [(w / len(x)) ** 0.5 * y.double() for x, y, w in rows]
    mean = sum(x.square().sum() for x in left) / start.shape[1]
    root = (ridge * mean) ** 0.5
    left.append(root * torch.eye(start.shape[1], dtype=torch.float64))
    right.append(root * start.double().mT)
    return torch.linalg.lstsq(torch.cat(left), torch.cat(right)).solution.mT
