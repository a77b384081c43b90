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

from mergekit_ace.algebra.eigen import SPIKES, deflate_, leading_eigenpairs
from mergekit_ace.algebra.linalg import add_gram, blocks, narrow_, product

# Below it, a decomposition in float64 takes milliseconds.
SMALL_SIDE = 512
# Directions on either side of the k-th that are turned into place in float64.
WINDOW = 16
# What float32 rounds in vectors and products whatever the spectrum.
FLOOR = 2e-6
# Directions with σ above this multiple of σ_k are spikes.
SPIKE = 16.0
_EPS32 = torch.finfo(torch.float32).eps
_EPS64 = torch.finfo(torch.float64).eps


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
    directions = _directions(wide, rank, allowed)
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


def _directions(wide: Tensor, rank: int, allowed: float) -> _Directions:
    """By a decomposition in float32 if that is likely to be exact enough, and is."""
    gram = _gram(wide)
    if wide.dtype != torch.float32 or allowed <= 0 or len(wide) <= SMALL_SIDE:
        return _exact_directions(wide, gram, rank)
    energy = float(gram.trace())
    spike_values, spikes, largest = deflate_(gram)
    # the smallest error and the least strength that are possible with what is known already
    rest = max(energy - float(spike_values.sum()), 0.0)
    strength = float(spike_values.sqrt().sum()) / rank
    rounding = _EPS32 / 2 * largest + _EPS64 * energy
    if rank > len(spike_values) and strength * rank**0.5 * rounding * rank <= allowed * rest:
        found = _narrow_directions(wide, gram, (spike_values, spikes), energy, rank)
        if found.error * float(found.values[-rank:].sqrt().mean()) * rank**0.5 <= allowed / 2:
            return found
        return _exact_directions(wide, _gram(wide), rank)
    gram.addmm_(spikes * spike_values, spikes.mT)
    return _exact_directions(wide, gram, rank)


def _exact_directions(wide: Tensor, gram: Tensor, rank: int) -> _Directions:
    side, length = wide.shape
    values, vectors = leading_eigenpairs(gram, min(rank + 1, side), lean=length < 2 * side)
    # The singular values are the square roots, and the smallest wanted one may be noise.
    floor = SPIKE**2 * max(float(values[-rank]), side * _EPS64 * float(values[-1]))
    count = min(SPIKES, rank, int((values > floor).sum()))
    split = len(values) - count
    return _Directions(values, vectors[:, split:], vectors[:, :split].to(wide), 0.0)


def _narrow_directions(
    wide: Tensor, gram: Tensor, deflated: tuple[Tensor, Tensor], energy: float, rank: int
) -> _Directions:
    """The same by a decomposition in float32.

    It answers for a Gram matrix with an error of about u λ in the spectral norm, λ the largest
    eigenvalue left. What it mixes most are neighbours, and only mixing across the k-th does harm:
    `_sharpen` undoes it there. Over families of five kinds and two algorithms, the estimated error
    was between the error and 15 times it.

    Args:
        wide: F, (m, n).
        gram: F Fᵀ without its spikes; lost.
        deflated: θ and Y of the spikes, fewer than k.
        energy: ‖F‖_F².
        rank: k.
    """
    side, length = wide.shape
    spike_values, spikes = deflated
    below, above = min(WINDOW, side - rank), min(WINDOW, rank - len(spike_values))
    values, others = leading_eigenpairs(
        narrow_(gram, torch.float32), rank - len(spike_values) + below, lean=length < 2 * side
    )
    values = values.to(torch.float64)
    rounding = _EPS32 / 2 * float(values[-1]) + _EPS64 * energy
    gap = float("inf")
    if below > 0:
        window = slice(0, below + above)
        values[window], others[:, window] = _sharpen(wide, spikes, others[:, window])
        gap = float(min(values[below] - values[0], values[below + above - 1] - values[below - 1]))
    values = torch.cat([values, spike_values]).clamp(min=0)
    turned = float(values[-rank:].clamp(min=rounding).pow(-2).mean())
    error = rounding * (turned + 18 / rank / max(gap, 1e-3 * rounding) ** 2) ** 0.5 + FLOOR
    left_out = max(0, below - 1)
    return _Directions(values[left_out:], spikes, others[:, left_out:], error)


def _sharpen(wide: Tensor, spikes: Tensor, vectors: Tensor) -> tuple[Tensor, Tensor]:
    """Eigenpairs of F Fᵀ in the span of a few approximate eigenvectors, (m, w), in float64."""
    basis = vectors.to(torch.float64)
    basis = torch.linalg.qr(basis.addmm(spikes, spikes.mT @ basis, alpha=-1)).Q
    small = torch.zeros(basis.shape[1], basis.shape[1], dtype=torch.float64, device=basis.device)
    for columns in blocks(wide.shape[1], len(wide)):
        along = basis.mT @ wide[:, columns].to(torch.float64)
        small.addmm_(along, along.mT)
    values, rotation = torch.linalg.eigh(small)
    return values, (basis @ rotation).to(vectors.dtype)


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
            wide[:, columns] = _projected(part, scaled, others)
            continue
        exact = part.to(torch.float64)
        along = spikes.mT @ exact
        rest = exact.addmm_(spikes, along, alpha=-1).to(wide.dtype)
        component = (spikes * large) @ along
        wide[:, columns] = _projected(rest, scaled, others).add_(component)


def _projected(part: Tensor, scaled: Tensor, others: Tensor) -> Tensor:
    """P_k diag(1/σ) P_kᵀ F for some columns of F, in the order in which they lie in memory."""
    if part.is_contiguous() or not part.mT.is_contiguous():
        return product(scaled, product(others.mT, part))
    return product(product(part.mT, others), scaled.mT).mT


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
