# SPDX-License-Identifier: Apache-2.0
"""Spectral refinement (step 5 of ACE-Merging, Eqs. 15-19).

With F = U diag(σ) Vᵀ, the leading k directions are added once more, all with the same strength:
σ_iso U_k V_kᵀ, σ_iso = mean(σ_1…σ_k). No full decomposition of F is needed: with the eigenvectors
P of the smaller Gram matrix, U_k V_kᵀ = P_k diag(1/σ) P_kᵀ F (or its mirror image).

The Gram matrix squares F's condition number and is formed in float64. Its decomposition takes half
the time in float32, which is exact enough once the few directions far above all others, the spikes,
are taken out; they keep float64 to the end, because the smallest part of a spike that a rounded
vector of another direction contains outweighs that direction.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from mergekit_ace.algebra.blocks import blocks
from mergekit_ace.algebra.eigen import SPIKES, deflate_, leading_eigenpairs
from mergekit_ace.algebra.symmetric import add_gram, narrow_

# Below it, a decomposition in float64 takes milliseconds.
SMALL_SIDE = 512
# What float32 rounds in vectors and products whatever the spectrum.
FLOOR = 2e-6
# Directions with σ above this multiple of σ_k are spikes.
SPIKE = 16.0


class WeakDirectionsError(ValueError):
    """The error of F would show in its leading directions by more than is allowed."""


@dataclass(frozen=True)
class _Directions:
    """Leading eigenpairs of the Gram matrix of F, (m, n), m ≤ n.

    Attributes:
        values: σ², ascending, in float64; one more than wanted, where there is one.
        spikes: the vectors of the largest of them, (m, l), in float64.
        others: the vectors of the others, (m, len(values) − l), in the dtype of F.
        error: estimated relative error of U_k V_kᵀ from the decomposition.
    """

    values: Tensor
    spikes: Tensor
    others: Tensor
    error: float


def isotropic_component(
    matrix: Tensor, rank: int, error: float = 0.0, allowed: float = 0.0
) -> tuple[Tensor, float]:
    """σ_iso U_k V_kᵀ of F, and σ_iso (Eqs. 17-18).

    Args:
        matrix: F, (o, i); overwritten by the component and returned.
        rank: k, 1 ≤ k ≤ min(o, i).
        error: of F, in the Frobenius norm, beside its rounding; where the caller has no more exact
            F to fall back to, 0.
        allowed: Frobenius norm of the component's error that may come of it, and of a
            decomposition in float32.

    Raises:
        WeakDirectionsError: that error would show in the result, by its `blur`.

    Directions below the rounding error of F are not its own but noise: they count in σ_iso with
    their σ ≈ 0 and add no direction (departure: a full decomposition returns arbitrary vectors
    there, which the paper's formula would add at full strength).
    """
    wide = matrix if matrix.shape[0] <= matrix.shape[1] else matrix.mT
    directions = _narrow_directions(wide, rank, allowed) or _exact_directions(wide, rank)
    values = directions.values
    singular = values[-rank:].clamp(min=0).sqrt()
    strength = float(singular.mean())
    if error > 0:
        relative = error + 2 * torch.finfo(matrix.dtype).eps * float(torch.linalg.norm(matrix))
        blurred = blur(values, rank, tuple(wide.shape), relative) + directions.error
        if strength * rank**0.5 * blurred > allowed:
            raise WeakDirectionsError("directions too weak, or too close to the next")
    _project_(wide, directions, singular, strength)
    return matrix, strength


def _gram(wide: Tensor) -> Tensor:
    """F Fᵀ, (m, m), in float64, its lower triangle."""
    side, length = wide.shape
    gram = torch.zeros(side, side, dtype=torch.float64, device=wide.device)
    for columns in blocks(length, side):
        add_gram(gram, wide[:, columns].to(torch.float64))
    return gram


def _exact_directions(wide: Tensor, rank: int) -> _Directions:
    side, length = wide.shape
    values, vectors = leading_eigenpairs(_gram(wide), min(rank + 1, side), lean=length < 2 * side)
    # The singular values are the square roots, and the smallest wanted one may be noise.
    floor = SPIKE**2 * max(float(values[-rank]), side * _EPS64 * float(values[-1]))
    count = min(SPIKES, rank, int((values > floor).sum()))
    split = len(values) - count
    return _Directions(values, vectors[:, split:], vectors[:, :split].to(wide), 0.0)


def _narrow_directions(wide: Tensor, rank: int, allowed: float) -> _Directions | None:
    """The same by a decomposition in float32; None where that is of no use, or not exact enough."""
    side, length = wide.shape
    if wide.dtype != torch.float32 or allowed <= 0 or side <= SMALL_SIDE or rank + 1 > side:
        return None
    gram = _gram(wide)
    energy = float(gram.trace())
    spike_values, spikes = deflate_(gram)
    count = rank + 1 - len(spike_values)
    if count < 2:
        return None
    others_values, others = leading_eigenpairs(
        narrow_(gram, torch.float32), count, lean=length < 2 * side
    )
    values = torch.cat([others_values.double(), spike_values])
    # the error of the Gram matrix of which these are the eigenpairs, in the spectral norm
    rounding = _EPS32 / 2 * float(others_values[-1]) + _EPS64 * energy
    turned = float(values[-rank:].clamp(min=rounding).pow(-2).mean())
    gap = max(float(values[1] - values[0]), 1e-3 * rounding)
    error = rounding * (turned + 18 / (rank * side * gap**2)) ** 0.5 + FLOOR
    strength = float(values[-rank:].clamp(min=0).sqrt().mean())
    if strength * rank**0.5 * error > allowed / 2:
        return None
    return _Directions(values, spikes, others, error)


def _project_(wide: Tensor, directions: _Directions, singular: Tensor, strength: float) -> None:
    """σ_iso P_k diag(1/σ) P_kᵀ F in the place of F, (m, n), in blocks of columns."""
    side, length = wide.shape
    # what the Gram matrix, which squares σ, cannot tell from zero in float64
    kept = singular > (side * _EPS64) ** 0.5 * singular[-1]
    scale = strength / singular
    split = len(singular) - directions.spikes.shape[1]
    spikes, large = directions.spikes, scale[split:]
    others = directions.others[:, directions.others.shape[1] - split :][:, kept[:split]]
    scaled = (others * scale[:split][kept[:split]]).to(wide)
    for columns in blocks(length, side):
        part = wide[:, columns]
        if not spikes.shape[1]:
            wide[:, columns] = scaled @ (others.mT @ part)
            continue
        exact = part.to(torch.float64)
        along = spikes.mT @ exact
        rest = exact.addmm_(spikes, along, alpha=-1).to(wide.dtype)
        component = (spikes * large) @ along
        wide[:, columns] = torch.addmm(component.to(wide.dtype), scaled, others.mT @ rest)


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


_EPS32 = torch.finfo(torch.float32).eps
_EPS64 = torch.finfo(torch.float64).eps
