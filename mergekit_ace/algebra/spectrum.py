# SPDX-License-Identifier: Apache-2.0
"""Spectral refinement (step 5 of ACE-Merging, Eqs. 15-19).

With F = U diag(σ) Vᵀ, the leading k directions are added once more, all with the same strength:
σ_iso U_k V_kᵀ, σ_iso = mean(σ_1…σ_k). No full decomposition of F is needed: with the eigenvectors
P of the smaller Gram matrix, U_k V_kᵀ = P_k diag(1/σ) P_kᵀ F (or its mirror image).
"""

from __future__ import annotations

import torch
from torch import Tensor

from mergekit_ace.algebra.covariance import CovarianceSums


def covariance_residual(sums: CovarianceSums) -> Tensor:
    """R = Σ_t Δ_t (S_t − S̄), (o, i), in ``sums.unit`` (Eqs. 15-16).

    Δ_t is uncentred and S̄ = A/T has the ridge. C_tᵀ1 = 0 makes Δ_t S_t = C_t S_t + 1 (S_t μ_t)ᵀ,
    hence R = H + 1 mᵀ − D (S + ε̄ I)/T: one product, and no second pass over the experts.

    Args:
        sums: with ``total`` and ``mean_product`` collected.
    """
    assert sums.total is not None
    assert sums.mean_product is not None
    residual = sums.product + sums.mean_product
    residual.addmm_(sums.total, sums.covariance, alpha=-1 / sums.tasks)
    residual.sub_(sums.total, alpha=sums.ridge / sums.tasks)
    return residual.mul_(sums.covariance_unit)  # S_t in the base's unit, which F = R + X depends on


def isotropic_component(matrix: Tensor, rank: int) -> tuple[Tensor, float]:
    """σ_iso U_k V_kᵀ of F, and σ_iso (Eqs. 17-18).

    Args:
        matrix: F, (o, i).
        rank: k, 1 ≤ k ≤ min(o, i).

    Returns:
        The component, (o, i), in F's dtype, and σ_iso.

    The Gram matrix squares F's condition number, so it is formed and decomposed in float64.
    Directions below the rounding error of F are not its own but noise: they count in σ_iso with
    their σ ≈ 0 and add no direction (departure: a full decomposition returns arbitrary vectors
    there, which the paper's formula would add at full strength).
    """
    wide = matrix if matrix.shape[0] <= matrix.shape[1] else matrix.mT  # (m, n), m ≤ n
    exact = wide.to(torch.float64)
    values, vectors = torch.linalg.eigh(exact @ exact.mT)  # ascending
    singular = values[-rank:].clamp(min=0).sqrt()
    strength = float(singular.mean())
    kept = singular > _noise_floor(matrix) * singular[-1]
    leading = vectors[:, -rank:][:, kept]
    directions = (leading / singular[kept]) @ (leading.mT @ exact)
    component = directions.mul_(strength).to(matrix.dtype)
    return (component if wide is matrix else component.mT), strength


def _noise_floor(matrix: Tensor) -> float:
    """σ/σ_1 below which a direction is rounding error: of the Gram matrix, or of F's entries."""
    gram = (min(matrix.shape) * torch.finfo(torch.float64).eps) ** 0.5
    return max(gram, 32 * torch.finfo(matrix.dtype).eps)
