# SPDX-License-Identifier: Apache-2.0
"""The linear map nearest to what several teachers want on samples, and to where it starts.

It minimises

    Σ_t w_t ‖W X_tᵀ − Y_tᵀ‖² / n_t + λ s̄ ‖W − W_m‖²,

X_t (n_t, i) being the inputs, Y_t (n_t, o) the wanted outputs, W_m (o, i) the start, and s̄ the mean
eigenvalue of C = Σ_t w_t X_tᵀX_t / n_t:

    W = W_m + (Σ_t w_t E_tᵀX_t / n_t) (C + λ s̄ I)⁻¹,  E_t = Y_t − X_t W_mᵀ.
"""

from __future__ import annotations

import torch
from torch import Tensor

CHUNK = 4096  # rows that are multiplied in float32 before they are added in float64


def mean_product(left: Tensor, right: Tensor) -> Tensor:
    """Return leftᵀ right / n, (a, b), in float64.

    Args:
        left: (n, a).
        right: (n, b).
    """
    total = torch.zeros(left.shape[1], right.shape[1], dtype=torch.float64, device=left.device)
    for one, other in zip(left.split(CHUNK), right.split(CHUNK), strict=True):
        total += one.float().mT @ other.float()
    return total / len(left)


def ridge_factor(gram: Tensor, ridge: float) -> Tensor:
    """Return the Cholesky factor of C + λ s̄ I, (i, i), for all linear layers with the same inputs.

    Args:
        gram: C, (i, i), float64.
        ridge: λ, > 0.
    """
    ridged = gram.clone()
    # Inputs that are all zero leave nothing to invert; any positive number then keeps the start.
    ridged.diagonal().add_(ridge * gram.diagonal().mean().clamp_min(1e-30))
    return torch.linalg.cholesky(ridged)


def solve_from(start: Tensor, gram: Tensor, cross: Tensor, factor: Tensor) -> Tensor:
    """Return the minimiser W of the module's docstring, (o, i), in float64.

    Args:
        start: W_m, (o, i).
        gram: C, (i, i).
        cross: Σ_t w_t Y_tᵀX_t / n_t, (o, i).
        factor: from `ridge_factor`.
    """
    start = start.double()
    residual = cross - start @ gram
    return start + torch.cholesky_solve(residual.mT, factor).mT
