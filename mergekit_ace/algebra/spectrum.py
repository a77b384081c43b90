# SPDX-License-Identifier: Apache-2.0
"""Spectral refinement (step 5 of ACE-Merging, Eqs. 15-19).

With F = U diag(σ) Vᵀ, the leading k directions are added once more, all with the same strength:
σ_iso U_k V_kᵀ, σ_iso = mean(σ_1…σ_k). No full decomposition of F is needed: with the eigenvectors
P of the smaller Gram matrix, U_k V_kᵀ = P_k diag(1/σ) P_kᵀ F (or its mirror image).
"""

from __future__ import annotations

import torch
from torch import Tensor

from mergekit_ace.algebra.blocks import blocks
from mergekit_ace.algebra.eigen import leading_eigenpairs
from mergekit_ace.algebra.symmetric import add_gram


class WeakDirectionsError(ValueError):
    """The error of F would show in its leading directions by more than is allowed."""


def isotropic_component(
    matrix: Tensor, rank: int, error: float = 0.0, allowed: float = 0.0
) -> tuple[Tensor, float]:
    """σ_iso U_k V_kᵀ of F, and σ_iso (Eqs. 17-18).

    Args:
        matrix: F, (o, i); overwritten by the component and returned.
        rank: k, 1 ≤ k ≤ min(o, i).
        error: of F, in the Frobenius norm, beside its rounding; where the caller has no more exact
            F to fall back to, 0.
        allowed: Frobenius norm of the component's error that may come of it.

    Raises:
        WeakDirectionsError: that error would show in the result, by its `blur`.

    The Gram matrix squares F's condition number, so it is formed and decomposed in float64.
    Directions below the rounding error of F are not its own but noise: they count in σ_iso with
    their σ ≈ 0 and add no direction (departure: a full decomposition returns arbitrary vectors
    there, which the paper's formula would add at full strength).
    """
    wide = matrix if matrix.shape[0] <= matrix.shape[1] else matrix.mT  # (m, n), m ≤ n
    side, length = wide.shape
    gram = torch.zeros(side, side, dtype=torch.float64, device=wide.device)
    for columns in blocks(length, side):
        add_gram(gram, wide[:, columns].to(torch.float64))
    size = float(gram.trace()) ** 0.5  # ‖F‖
    values, vectors = leading_eigenpairs(gram, min(rank + 1, side), lean=length < 2 * side)
    del gram
    singular = values[-rank:].clamp(min=0).sqrt()
    strength = float(singular.mean())
    if error > 0:
        relative = error / size + 2 * torch.finfo(matrix.dtype).eps
        if strength * rank**0.5 * blur(values, rank, (side, length), size * relative) > allowed:
            raise WeakDirectionsError("directions too weak, or too close to the next")
    # what the Gram matrix, which squares σ, cannot tell from zero in float64
    noise = (side * torch.finfo(torch.float64).eps) ** 0.5
    kept = singular > noise * singular[-1]
    leading = vectors[:, -rank:][:, kept]
    scaled = (leading * (strength / singular[kept])).to(wide)
    leading = leading.to(wide)
    del vectors
    for columns in blocks(length, side):
        wide[:, columns] = scaled @ (leading.mT @ wide[:, columns])
    return matrix, strength


def blur(values: Tensor, rank: int, shape: tuple[int, int], error: float) -> float:
    """Estimated relative error of U_k V_kᵀ when F has the error ‖δF‖_F = `error`.

    To first order, noise of standard deviation s in the entries moves U_k V_kᵀ, whose norm is √k,
    by s·√((m + n) Σ_{j≤k} 1/σ_j² + 2/(σ_k − σ_{k+1})²): weak directions turn, and the last one
    mixes with the first one that is left out.

    Args:
        values: the largest eigenvalues of the Gram matrix, ascending: σ²; at least k + 1 of them
            unless it has no more.
        rank: k.
        shape: of F, or of its transpose.
        error: of F.
    """
    rows, columns = shape
    sigma = values.clamp(min=0).sqrt()
    noise = error / (rows * columns) ** 0.5
    turned = (rows + columns) * float(sigma[-rank:].pow(-2).mean())
    gap = float(sigma[-rank] - sigma[-rank - 1]) if rank < len(sigma) else float("inf")
    mixed = 2 / rank / gap**2 if gap > 0 else float("inf")
    return noise * (turned + mixed) ** 0.5 if noise > 0 else 0.0
