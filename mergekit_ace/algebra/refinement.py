# SPDX-License-Identifier: Apache-2.0
"""Spectral refinement (step 5 of ACE-Merging, Eqs. 15-19).

With F = U diag(σ) Vᵀ, the leading k directions are added once more, all with the same strength:
σ_iso U_k V_kᵀ, σ_iso = mean(σ_1…σ_k). No full decomposition of F is needed: with the eigenvectors
P of the smaller Gram matrix, U_k V_kᵀ = P_k diag(1/σ) P_kᵀ F (or its mirror image). The Gram matrix
squares F's condition number; so it is summed up in float64, and its eigenvectors are in float64,
too, unless the rounding of the experts hides what float32 spoils.

U_k V_kᵀ is not well determined by F. Two directions whose σ are closer than an error of F mix;
where one of them is the last that counts, the sum of k directions, of norm √k, changes by up to √2.
In a large matrix with a smooth spectrum, the rounding of experts stored in bfloat16 exchanges
several.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from mergekit_ace.algebra.covariance import Solution
from mergekit_ace.algebra.linalg import add_gram, blocks, mirror, product, rounding
from mergekit_ace.algebra.records import (
    HIDDEN_SHARE,
    LARGEST_HIDDEN,
    IllConditionedError,
    is_noisy,
    tolerance,
)
from mergekit_ace.algebra.spectrum import leading_eigenpairs
from mergekit_ace.algebra.task_vectors import squared_norm

# Float32 mixes directions of nearly the same strength; so many beyond the last one are computed to
# tell which belong to the k.
SPARE = 32
# Residuals of eigenvectors in float32 are no estimate of their error above that share of σ².
CLEAR = 0.25


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
    gram = smaller_gram(solution.target)
    if solution.target.dtype != torch.float32:
        space = solution.covariances.space
        shape = space.shape if space else None
        return decompose(solution.target, gram, rank, shape).component_()
    if is_noisy(solution.covariances.noise):
        narrow = decompose_narrowly(solution.target, gram, rank)
        if narrow is not None and _error(solution, narrow) <= _allowed(solution, narrow):
            return narrow.component_()
    leading = decompose(solution.target, gram, rank)
    error = _error(solution, leading)
    if error > _allowed(solution, leading):
        size = squared_norm(solution.merged) ** 0.5
        raise IllConditionedError(solution.condition, error / size)
    return leading.component_()


def _error(solution: Solution, leading: Leading) -> float:
    """Estimate the error of the component, in the Frobenius norm."""
    size = squared_norm(solution.merged) ** 0.5
    given = solution.error * size + 4 * rounding(torch.float32) * leading.energy**0.5
    return leading.component_error(given)


def _allowed(solution: Solution, leading: Leading) -> float:
    """Return the error of the component that is allowed, in the Frobenius norm.

    The rounding of the experts is in F at least as it is in X, and is blurred as an error is.
    """
    covariances, size = solution.covariances, squared_norm(solution.merged) ** 0.5
    allowed = tolerance(solution.condition) * size
    if covariances.noise > 0:
        blurred = leading.blur(covariances.noise * covariances.energy**0.5)
        allowed = max(allowed, min(HIDDEN_SHARE * blurred, LARGEST_HIDDEN * size))
    return allowed


def isotropic_component(matrix: Tensor, rank: int) -> IsotropicComponent:
    """Return σ_iso U_k V_kᵀ of F (Eqs. 17-18), decomposed in float64.

    Args:
        matrix: F, (o, i); overwritten by the component.
        rank: k, 1 ≤ k ≤ min(o, i).
    """
    return decompose(matrix, smaller_gram(matrix), rank).component_()


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
        sigma: its largest singular values, ascending, (k + 1,), or (k,) where there are no more;
            float64.
        vectors: the singular vectors of the k largest, (m, k).
        energy: ‖F‖_F².
        error: of F, in the Frobenius norm, that the vectors of each of the directions stand for,
            shaped as `sigma`; 0 in float64.
    """

    matrix: Tensor
    rank: int
    asked: int
    shape: tuple[int, int]
    sigma: Tensor
    vectors: Tensor
    energy: float
    error: Tensor

    @property
    def strength(self) -> float:
        """σ_iso; directions that a core does not have are 0."""
        return float(self.sigma[-self.rank :].sum()) / self.asked

    @property
    def kept(self) -> Tensor:
        """Which of the k directions a Gram matrix in float64, which squares σ, tells from zero."""
        least = (min(self.shape) * torch.finfo(torch.float64).eps) ** 0.5 / 2 * self.sigma[-1]
        return self.sigma[-self.rank :] > least

    def component_error(self, given: float = 0.0) -> float:
        """Estimate the error of σ_iso U_k V_kᵀ where F has one already; Frobenius norms both."""
        return self.blur(self.error.square().add(given**2).sqrt())

    def blur(self, error: float | Tensor) -> float:
        """Estimate the error of σ_iso U_k V_kᵀ that one of F leads to, see `estimate_blur`."""
        blurred = estimate_blur(self.sigma, self.rank, tuple(self.matrix.shape), error)
        return self.strength * self.rank**0.5 * blurred

    def component_(self) -> IsotropicComponent:
        """Write the component over F."""
        wide, kept, strength = _on_its_shorter_side(self.matrix), self.kept, self.strength
        vectors = self.vectors if bool(kept.all()) else self.vectors[:, kept]
        scaled = vectors * (strength / self.sigma[-self.rank :][kept]).to(vectors)
        for columns in blocks(wide.shape[1], len(wide)):
            part = wide[:, columns].to(vectors.dtype)
            wide[:, columns] = product(scaled, product(vectors.mT, part))
        return IsotropicComponent(self.matrix, strength)


def smaller_gram(matrix: Tensor) -> Tensor:
    """Return F Fᵀ, or Fᵀ F if that is smaller, in float64; only the lower triangle is filled."""
    wide = _on_its_shorter_side(matrix)
    side, length = wide.shape
    gram = torch.zeros(side, side, dtype=torch.float64, device=wide.device)
    for columns in blocks(length, side):
        add_gram(gram, wide[:, columns].double())
    return gram


def decompose(
    matrix: Tensor, gram: Tensor, rank: int, shape: tuple[int, int] | None = None
) -> Leading:
    """Return the k leading directions of F, (o, i), in float64.

    Args:
        matrix: F, (o, i), or its core.
        gram: see `smaller_gram`; overwritten.
        rank: k, 1 ≤ k ≤ min(o, i).
        shape: (o, i), if `matrix` is a core.
    """
    energy = float(gram.diagonal().sum())
    values, vectors = leading_eigenpairs(gram, min(rank + 1, len(gram)))
    return _leading(
        matrix, rank, shape or (matrix.shape[0], matrix.shape[1]), (values, vectors), energy
    )


def decompose_narrowly(matrix: Tensor, gram: Tensor, rank: int) -> Leading | None:
    """Return the k leading directions of F, (o, i), in float32; None where that cannot tell them.

    The weakest are turned among themselves in float64 (Rayleigh and Ritz), since float32 mixes them
    with what follows. A residual ‖FFᵀp − σ²p‖ that the vectors leave is that of an error of F with
    random entries of a standard deviation of ‖FFᵀp − σ²p‖ / (2σ√m).

    Args:
        matrix: F, (o, i).
        gram: see `smaller_gram`; its upper triangle is filled.
        rank: k, 1 ≤ k ≤ min(o, i).
    """
    side = len(gram)
    _, vectors = leading_eigenpairs(gram.float(), min(rank + 1 + SPARE, side))
    mirror(gram)
    weakest = torch.linalg.qr(vectors[:, : 2 * SPARE].double()).Q
    _, turn = torch.linalg.eigh(product(weakest.mT, product(gram, weakest)))
    vectors[:, : 2 * SPARE] = product(weakest, turn).float()
    vectors = vectors[:, -min(rank + 1, side) :]
    squares, residuals = gram.new_empty(2, vectors.shape[1])
    for part in blocks(*vectors.mT.shape):
        exact = vectors[:, part].double()
        images = product(gram, exact)
        squares[part] = (exact * images).sum(dim=0)
        residuals[part] = images.sub_(exact.mul_(squares[part])).norm(dim=0)
    if not bool((residuals < CLEAR * squares).all()):
        return None
    shape, energy = (matrix.shape[0], matrix.shape[1]), float(gram.diagonal().sum())
    leading = _leading(matrix, rank, shape, (squares, vectors), energy)
    return replace(leading, error=residuals / leading.sigma * (max(matrix.shape) ** 0.5 / 2))


def _leading(
    matrix: Tensor,
    rank: int,
    shape: tuple[int, int],
    pairs: tuple[Tensor, Tensor],
    energy: float,
) -> Leading:
    values, vectors = pairs
    found = min(rank, vectors.shape[0])
    sigma = values.double().clamp(min=0).sqrt()
    error = torch.zeros_like(sigma)
    return Leading(matrix, found, rank, shape, sigma, vectors[:, -found:], energy, error)


def _on_its_shorter_side(matrix: Tensor) -> Tensor:
    return matrix if matrix.shape[0] <= matrix.shape[1] else matrix.mT


def estimate_blur(sigma: Tensor, rank: int, shape: tuple[int, ...], error: float | Tensor) -> float:
    """Estimate the relative error of U_k V_kᵀ when F has the error ‖δF‖_F = `error`.

    To first order, noise of standard deviation s in the entries moves U_k V_kᵀ, whose norm is √k,
    by s·√((m + n) Σ_{j≤k} 1/σ_j² + 2/(σ_k − σ_{k+1})²): weak directions turn, and the last one
    mixes with the first one that is left out, until it is exchanged for that.

    Args:
        sigma: the largest singular values, ascending; at least k + 1 of them unless there are no
            more.
        rank: k.
        shape: of F, or of its transpose.
        error: of F; or of F as it shows in every one of the directions, shaped as `sigma`.
    """
    rows, columns = shape
    noise = torch.as_tensor(error, device=sigma.device).expand_as(sigma) / (rows * columns) ** 0.5
    turned = (rows + columns) * float((noise / sigma)[-rank:].square().mean())
    gap = float(sigma[-rank] - sigma[-rank - 1]) if rank < len(sigma) else math.inf
    exchanged = min(1.0, float(noise[-rank]) / gap) if gap > 0 else 1.0
    return (turned + 2 / rank * exchanged**2) ** 0.5
