# SPDX-License-Identifier: Apache-2.0
"""Spectral refinement (step 5 of ACE-Merging, Eqs. 15-19).

With F = U diag(σ) Vᵀ, the leading k directions are added once more, all with the same strength:
σ_iso U_k V_kᵀ, σ_iso = mean(σ_1…σ_k). No full decomposition of F is needed: with the eigenvectors
P of the smaller Gram matrix, U_k V_kᵀ = P_k diag(1/σ) P_kᵀ F (or its mirror image). The Gram matrix
squares F's condition number; so it is summed up and decomposed in float64.

U_k V_kᵀ is not well determined by F. Two directions whose σ are closer than an error of F mix;
where one of them is the last that counts, the sum of k directions, of norm √k, changes by up to √2.
In a large matrix with a smooth spectrum, the rounding of experts stored in bfloat16 exchanges
several.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from mergekit_ace.algebra.covariance import Solution
from mergekit_ace.algebra.eigenpairs import (
    estimate_blur,
    leading_eigenpairs,
    on_shorter_side,
    smaller_gram,
)
from mergekit_ace.algebra.linalg import blocks, product, rounding
from mergekit_ace.algebra.records import IllConditionedError, hidden_error, tolerance


@dataclass(frozen=True)
class IsotropicComponent:
    """What the refinement adds to X.

    Attributes:
        matrix: σ_iso U_k V_kᵀ, (o, i).
        strength: σ_iso.
    """

    matrix: Tensor
    strength: float


def refine(solution: Solution, rank: int) -> IsotropicComponent:
    """Return what the refinement adds to X.

    Args:
        solution: with F, which is overwritten.
        rank: k, 1 ≤ k ≤ min(o, i); of the matrix that a core stands for, if F is one.

    Raises:
        IllConditionedError: the error of F would show in the component by more than `tolerance`,
            and more digits are to be had.
    """
    assert solution.target is not None
    space = solution.covariances.space
    leading = decompose(solution.target, rank, space.shape if space else None)
    if solution.target.dtype == torch.float64:
        return leading.component_()
    size, unit = solution.covariances.size(solution.merged), rounding(torch.float32)
    given = solution.error * size + 4 * unit * leading.energy**0.5
    error, allowed = leading.blur(given), _allowed(solution, leading)
    if error > allowed:
        raise IllConditionedError(solution.condition, error / size)
    # every p_jᵀF is rounded against all of F
    rounded = leading.blur(given + (len(leading.vectors) * leading.energy) ** 0.5 * unit)
    return leading.component_(torch.float32 if rounded <= allowed else torch.float64)


def _allowed(solution: Solution, leading: Leading) -> float:
    """Return the error of the component that is allowed, in the Frobenius norm.

    The rounding of the experts is in F at least as it is in X, and is blurred as an error is.
    """
    covariances, size = solution.covariances, solution.covariances.size(solution.merged)
    allowed = tolerance(solution.condition) * size
    if covariances.noise > 0:
        blurred = leading.blur(covariances.noise * covariances.energy**0.5)
        allowed = max(allowed, hidden_error(blurred / size) * size)
    return allowed


def isotropic_component(matrix: Tensor, rank: int) -> IsotropicComponent:
    """Return σ_iso U_k V_kᵀ of F (Eqs. 17-18), decomposed in float64.

    Args:
        matrix: F, (o, i); overwritten by the component.
        rank: k, 1 ≤ k ≤ min(o, i).
    """
    return decompose(matrix, rank).component_()


@dataclass(frozen=True)
class Leading:
    """The leading directions of F on its shorter side, m ≤ n.

    Directions below the rounding error of F are not its own but noise: they count in σ_iso with
    their σ ≈ 0 and add no direction (departure: a full decomposition returns arbitrary vectors
    there, which the paper's formula would add at full strength).

    Attributes:
        matrix: F, (o, i), or its core.
        rank: k, or all of a core that has fewer directions.
        asked: k.
        shape: (o, i).
        sigma: its largest singular values, the largest first, (k + 1,), or (k,) where there are no
            more; float64.
        vectors: the singular vectors of the k largest, (m, k).
        energy: ‖F‖_F².
    """

    matrix: Tensor
    rank: int
    asked: int
    shape: tuple[int, int]
    sigma: Tensor
    vectors: Tensor
    energy: float

    @property
    def strength(self) -> float:
        """σ_iso; directions that a core does not have are 0."""
        return float(self.sigma[: self.rank].sum()) / self.asked

    @property
    def kept(self) -> int:
        """How many of the k directions a Gram matrix in float64, which squares σ, tells from 0."""
        least = (min(self.shape) * torch.finfo(torch.float64).eps) ** 0.5 / 2 * self.sigma[0]
        return int((self.sigma[: self.rank] > least).sum())

    def blur(self, error: float) -> float:
        """Estimate the error of σ_iso U_k V_kᵀ that one of F leads to; Frobenius norms both."""
        blurred = estimate_blur(self.sigma, self.rank, tuple(self.matrix.shape), error)
        return self.strength * self.rank**0.5 * blurred

    def component_(self, dtype: torch.dtype = torch.float64) -> IsotropicComponent:
        """Write the component over F, by products in some dtype."""
        wide, strength = on_shorter_side(self.matrix), self.strength
        vectors = self.vectors[:, : self.kept]
        scaled = (vectors * (strength / self.sigma[: self.kept])).to(dtype)
        vectors = vectors.to(dtype)
        for columns in blocks(wide.shape[1], len(wide), wide.device):
            part = wide[:, columns].to(dtype)
            wide[:, columns] = product(scaled, product(vectors.mT, part))
        return IsotropicComponent(self.matrix, strength)


def decomposition_memory(rows: int, columns: int) -> int:
    """Return the bytes of F, (o, i), in float32, and of three (m, m) in float64 to decompose it."""
    return 4 * rows * columns + 24 * min(rows, columns) ** 2


def decompose(matrix: Tensor, rank: int, shape: tuple[int, int] | None = None) -> Leading:
    """Return the k leading directions of F, (o, i), in float64.

    Args:
        matrix: F, (o, i), or its core.
        rank: k, 1 ≤ k ≤ min(o, i).
        shape: (o, i), if `matrix` is a core.
    """
    gram = smaller_gram(matrix)
    energy, found = float(gram.diagonal().sum()), min(rank, len(gram))
    squares, vectors = leading_eigenpairs(gram, min(rank + 1, len(gram)))
    sigma = squares.clamp(min=0).sqrt()
    shape = shape or (matrix.shape[0], matrix.shape[1])
    return Leading(matrix, found, rank, shape, sigma, vectors[:, :found], energy)
