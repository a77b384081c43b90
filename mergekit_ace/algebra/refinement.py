# SPDX-License-Identifier: Apache-2.0
"""Spectral refinement (step 5 of ACE-Merging, Eqs. 15-19).

With F = U diag(σ) Vᵀ, the leading k directions are added once more, all with the same strength:
σ_iso U_k V_kᵀ, σ_iso = mean(σ_1…σ_k). No full decomposition of F is needed: with the eigenvectors
P of the smaller Gram matrix, U_k V_kᵀ = P_k diag(1/σ) P_kᵀ F (or its mirror image). The Gram matrix
squares F's condition number; so all of it is done in float64.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from mergekit_ace.algebra.covariance import Solution
from mergekit_ace.algebra.linalg import add_gram, blocks, product
from mergekit_ace.algebra.records import IllConditionedError, tolerance
from mergekit_ace.algebra.spectrum import EPS64, leading_eigenpairs
from mergekit_ace.algebra.task_vectors import squared_norm


@dataclass(frozen=True)
class IsotropicComponent:
    """What the refinement adds to X.

    Attributes:
        matrix: σ_iso U_k V_kᵀ, (o, i).
        strength: σ_iso.
        error: its estimated error in the Frobenius norm that the error of F leads to.
    """

    matrix: Tensor
    strength: float
    error: float


def refine(solution: Solution, rank: int) -> IsotropicComponent:
    """Return what the refinement adds to X.

    Args:
        solution: with F, which is overwritten.
        rank: k, 1 ≤ k ≤ min(o, i).

    Raises:
        IllConditionedError: the error of F would show in the component by more than `tolerance`,
            and more digits are to be had.
    """
    assert solution.target is not None
    size = squared_norm(solution.merged) ** 0.5
    error = solution.error * size if solution.merged.dtype == torch.float32 else 0.0
    component = isotropic_component(solution.target, rank, error)
    if component.error > tolerance(solution.condition) * size:
        raise IllConditionedError(solution.condition, component.error / size)
    return component


def isotropic_component(matrix: Tensor, rank: int, error: float = 0.0) -> IsotropicComponent:
    """Return σ_iso U_k V_kᵀ of F (Eqs. 17-18).

    Args:
        matrix: F, (o, i); overwritten by the component.
        rank: k, 1 ≤ k ≤ min(o, i).
        error: of F, in the Frobenius norm, beside its rounding; 0 where it does not matter.

    Directions below the rounding error of F are not its own but noise: they count in σ_iso with
    their σ ≈ 0 and add no direction (departure: a full decomposition returns arbitrary vectors
    there, which the paper's formula would add at full strength).
    """
    wide = matrix if matrix.shape[0] <= matrix.shape[1] else matrix.mT
    side, length = wide.shape
    gram = torch.zeros(side, side, dtype=torch.float64, device=wide.device)
    for columns in blocks(length, side):
        add_gram(gram, wide[:, columns].to(torch.float64))
    values, vectors = leading_eigenpairs(gram, min(rank + 1, side))
    del gram
    sigma = values.clamp(min=0).sqrt()
    strength = float(sigma[-rank:].mean())
    if error > 0:
        error += 2 * torch.finfo(matrix.dtype).eps * float(torch.linalg.norm(matrix))
        error = strength * rank**0.5 * estimate_blur(sigma, rank, (side, length), error)
    # what the Gram matrix, which squares σ, cannot tell from zero
    kept = sigma[-rank:] > (side * EPS64) ** 0.5 * sigma[-1]
    vectors = vectors[:, -rank:][:, kept]
    scaled = vectors * (strength / sigma[-rank:][kept])
    for columns in blocks(length, side):
        wide[:, columns] = product(scaled, product(vectors.mT, wide[:, columns].to(torch.float64)))
    return IsotropicComponent(matrix, strength, error)


def estimate_blur(sigma: Tensor, rank: int, shape: tuple[int, int], error: float) -> float:
    """Estimate the relative error of U_k V_kᵀ when F has the error ‖δF‖_F = `error`.

    To first order, noise of standard deviation s in the entries moves U_k V_kᵀ, whose norm is √k,
    by s·√((m + n) Σ_{j≤k} 1/σ_j² + 2/(σ_k − σ_{k+1})²): weak directions turn, and the last one
    mixes with the first one that is left out.

    Args:
        sigma: the largest singular values, ascending; at least k + 1 of them unless there are no
            more.
        rank: k.
        shape: of F, or of its transpose.
        error: of F, above 0.
    """
    rows, columns = shape
    noise = error / (rows * columns) ** 0.5
    turned = (rows + columns) * float(sigma[-rank:].pow(-2).mean())
    gap = float(sigma[-rank] - sigma[-rank - 1]) if rank < len(sigma) else float("inf")
    mixed = 2 / rank / gap**2 if gap > 0 else float("inf")
    return noise * (turned + mixed) ** 0.5
