# SPDX-License-Identifier: Apache-2.0
"""Methods on the matrices of task vectors: `tsv_m`, `iso_c`, `iso_cts`, `cart` and `wudi`.

Directions that a matrix has by rounding alone add nothing to the first three (departure: a full
decomposition returns arbitrary vectors there, which count as much as all others).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Annotated, Any, Literal

import torch
from pydantic import Field
from torch import Tensor

from mergekit_ace.algebra.directions import (
    EPS64,
    leading_directions,
    orthogonal_factor,
    present_directions,
)
from mergekit_ace.algebra.records import Fraction, Number
from mergekit_ace.methods.base import Citation, method_spec
from mergekit_ace.methods.inputs import TensorSettings
from mergekit_ace.methods.parameters import LAMBDA, LAYOUT, shared
from mergekit_ace.methods.peers.matrix_method import (
    MatrixMethod,
    TaskMatrices,
    decomposition_operations,
)

ICML = "International Conference on Machine Learning"


class TsvMerge(MatrixMethod):
    """TSV-Merge: task singular vectors without interference (the paper's Algorithm 1).

    Of Δ_t = U_t diag(σ_t) V_tᵀ the leading triplets are kept. The nearest orthonormal matrices U⊥
    and V⊥ replace the concatenated U_t and V_t, and the result is U⊥ diag(σ) V⊥ᵀ.
    """

    spec = method_spec("tsv_m", "TSV-Merge", "https://arxiv.org/abs/2412.00081", (LAMBDA, LAYOUT))
    summary = (
        "Keeps each expert's leading singular directions, and makes them orthogonal to those of "
        "the others."
    )
    citations = (
        Citation(
            "gargiulo2025tsv",
            "Gargiulo, Antonio Andrea and Crisostomi, Donato and Bucarelli, Maria Sofia "
            "and Scardapane, Simone and Silvestri, Fabrizio and Rodolà, Emanuele",
            "Task Singular Vectors: Reducing Task Interference in Model Merging",
            2025,
            "2412.00081",
            "Proceedings of the IEEE/CVF Conference on Computer Vision and Pattern Recognition",
        ),
    )
    own_rule = "merged from orthogonal singular directions"
    whole = True

    def rank(self, shape: Sequence[int], experts: int, parameters: Mapping[str, Any]) -> int:
        """Return floor(min(o, i) / T), or 1 (departure: the paper's share would be none)."""
        return max(1, min(shape) // experts)

    def combine(self, matrices: TaskMatrices, parameters: Mapping[str, Any]) -> Tensor:
        given = zip(matrices.deltas, matrices.floors, strict=True)
        parts = [present_directions(delta, matrices.rank, floor) for delta, floor in given]
        left = orthogonal_factor(torch.cat([part.left for part in parts], dim=1))
        right = orthogonal_factor(torch.cat([part.right for part in parts], dim=1))
        return (left * torch.cat([part.values for part in parts])) @ right.mT


ISO_CITATION = Citation(
    "marczak2025isotropic",
    "Marczak, Daniel and Magistri, Simone and Cygert, Sebastian and Twardowski, Bartłomiej and "
    "Bagdanov, Andrew D. and van de Weijer, Joost",
    "No Task Left Behind: Isotropic Model Merging with Common and Task-Specific Subspaces",
    2025,
    "2502.04959",
    ICML,
)


class IsoCMerge(MatrixMethod):
    """Iso-C: isotropic merging in the common subspace.

    It is σ̄ U Vᵀ of Σ_t Δ_t = U diag(σ) Vᵀ, with σ̄ the mean of all min(o, i) singular values.
    """

    spec = method_spec("iso_c", "Iso-C", "https://arxiv.org/abs/2502.04959", (LAMBDA, LAYOUT))
    summary = "Sums the task vectors, and makes all singular values of the sum equal."
    citations = (ISO_CITATION,)
    own_rule = "merged with equal singular values"

    def combine(self, matrices: TaskMatrices, parameters: Mapping[str, Any]) -> Tensor:
        found = present_directions(matrices.total(), floor=math.hypot(*matrices.floors))
        mean = float(found.values.sum()) / min(matrices.shape)
        return (found.left @ found.right.mT).mul_(mean)

    def operations(
        self, rows: int, columns: int, experts: int, parameters: Mapping[str, Any]
    ) -> float:
        return decomposition_operations(rows, columns)


# What is outside of a subspace, in units of the task vector's norm, that rounding may have left.
OUTSIDE = 1e4 * EPS64


class IsoCtsMerge(MatrixMethod):
    """Iso-CTS: isotropic merging in common and task-specific subspaces.

    Of r = min(o, i) directions each task contributes s leading ones of (I − U Uᵀ) Δ_t, U the common
    left ones, which are the other r − T·s and lead Σ_t Δ_t. The nearest orthonormal matrices
    replace the concatenated left and right directions, and their mean all r singular values.
    """

    spec = method_spec(
        "iso_cts",
        "Iso-CTS",
        "https://arxiv.org/abs/2502.04959",
        (
            LAMBDA,
            LAYOUT,
            shared(
                "common_fraction",
                Fraction,
                0.8,
                "Share of the directions that come from the sum of the task vectors.",
            ),
        ),
    )
    summary = (
        "Joins the leading directions of the summed task vectors with a few of each expert alone, "
        "all with equal singular values."
    )
    citations = (ISO_CITATION,)
    own_rule = "merged with equal singular values in common and own directions"

    def rank(self, shape: Sequence[int], experts: int, parameters: Mapping[str, Any]) -> int:
        """Return s, rounded so that all tasks get the same."""
        full = min(shape)
        own = full - int(full * parameters["common_fraction"])
        return min(round(own / experts), full // experts)

    def combine(self, matrices: TaskMatrices, parameters: Mapping[str, Any]) -> Tensor:
        full, each = min(matrices.shape), matrices.rank
        size, floor = full - each * len(matrices.deltas), math.hypot(*matrices.floors)
        common = present_directions(matrices.total(), max(1, size), floor).leading(size)
        parts = []
        for delta, own in zip(matrices.deltas, matrices.floors, strict=True):
            floor = max(own, OUTSIDE * float(torch.linalg.vector_norm(delta)))
            delta -= common.left @ (common.left.mT @ delta)
            parts.append(present_directions(delta, max(1, each), floor).leading(each))
        outer = torch.cat([part.left for part in parts], dim=1)  # orthogonal to the common ones
        left = torch.cat([common.left, orthogonal_factor(outer)], dim=1)
        right = torch.cat([part.right for part in (common, *parts)], dim=1)
        strength = sum(float(part.values.sum()) for part in (common, *parts)) / full
        return (left @ orthogonal_factor(right).mT).mul_(strength)


class CartMerge(MatrixMethod):
    """CART: centred arithmetic with rank-reduced task vectors, Δ̄ + λ Σ_t SVD_k(Δ_t − Δ̄).

    ``lambda`` is the paper's: it scales what is added to the average of the experts. The average
    itself, and with it everything that is no matrix, is not scaled.
    """

    spec = method_spec(
        "cart",
        "CART",
        "https://arxiv.org/abs/2412.12153",
        (
            replace(LAMBDA, description="Scale λ of what is added to the average."),
            LAYOUT,
            shared(
                "rank_fraction",
                Fraction,
                0.08,
                "Share of the directions that are kept of each expert.",
            ),
        ),
    )
    summary = "Takes the average of the experts, and adds what is left of each one at low rank."
    citations = (
        Citation(
            "choi2024cart",
            "Choi, Jiho and Kim, Donggyun and Lee, Chanhyuk and Hong, Seunghoon",
            "Revisiting Weight Averaging for Model Merging",
            2024,
            "2412.12153",
        ),
    )
    own_rule = "merged as the average and low-rank differences from it"

    def doubts(self, settings: TensorSettings) -> Iterator[tuple[str, str]]:
        return iter(())  # with λ = 0 it is the average of the experts

    def scale(self, parameters: Mapping[str, Any]) -> float:
        return 1.0

    def rank(self, shape: Sequence[int], experts: int, parameters: Mapping[str, Any]) -> int:
        """Return k = floor(rank_fraction · min(o, i)), at least 1 unless the fraction is 0."""
        fraction = parameters["rank_fraction"]
        return max(int(fraction * min(shape)), 1) if fraction > 0 else 0

    def combine(self, matrices: TaskMatrices, parameters: Mapping[str, Any]) -> Tensor:
        mean = matrices.total().div_(len(matrices.deltas))
        merged = mean.clone()
        for delta in matrices.deltas if matrices.rank else ():
            found = leading_directions(delta.sub_(mean), min(matrices.rank, *mean.shape))
            merged.add_(found.matrix, alpha=parameters["lambda"])
        return merged


# Task vectors whose root mean square entry lies within 2^±20 need no other unit in float32.
PLAIN_EXPONENT = 20
# Of a descent on task vectors that have a unit of their own, in that unit.
LARGEST_STEP = 0.01
BETAS, DENOMINATOR = (0.9, 0.999), 1e-8  # torch's, and the authors'
# With a smaller pivot than this share of the largest, a pseudo-inverse replaces Cholesky's factor.
LEAST_PIVOT = 1e-9


def minimise_exactly(deltas: Sequence[Tensor]) -> Tensor:
    """Return X = (Σ_t Δ_t G_t)(Σ_t G_t)⁺ with G_t = Δ_tᵀΔ_t / ‖Δ_t‖², (o, i).

    It minimises the paper's loss Σ_t ‖(X − Δ_t) Δ_tᵀ‖² / ‖Δ_t‖², which is quadratic. Where that
    does not determine X, it is the smallest X, which is also where a descent from Σ_t Δ_t ends: its
    gradient has no component there. With fewer rows M of all Δ_t / ‖Δ_t‖ than columns, it is
    X = L (M Mᵀ)⁺ M, where Σ_t Δ_t G_t = L M.

    Args:
        deltas: Δ_t, (o, i), float64, none of them zero.
    """
    units = [delta / torch.linalg.vector_norm(delta) for delta in deltas]
    rows, columns = deltas[0].shape
    if rows * len(deltas) > columns:
        pairs = zip(deltas, units, strict=True)
        numerator = sum(_through_the_smaller_square(delta, unit) for delta, unit in pairs)
        return _solve(numerator, sum(unit.mT @ unit for unit in units))
    stacked = torch.cat(units)
    left = torch.cat([d @ unit.mT for d, unit in zip(deltas, units, strict=True)], dim=1)
    return _solve(left, stacked @ stacked.mT) @ stacked


def _solve(rows: Tensor, gram: Tensor) -> Tensor:
    """Return R S⁺ of rows R, (o, n), and a positive semidefinite matrix S, (n, n)."""
    factor, failed = torch.linalg.cholesky_ex(gram)
    pivots = factor.diagonal().square()
    if not int(failed) and float(pivots.min()) > LEAST_PIVOT * float(pivots.max()):
        return torch.cholesky_solve(rows.mT, factor).mT
    values, vectors = torch.linalg.eigh(gram)
    kept = values > len(gram) * EPS64 * values[-1]
    return ((rows @ vectors[:, kept]) / values[kept]) @ vectors[:, kept].mT


def _through_the_smaller_square(left: Tensor, delta: Tensor) -> Tensor:
    """Return L Δᵀ Δ for L and Δ, (o, i): an (o, o) matrix of an embedding would fill the memory."""
    rows, columns = delta.shape
    return (left @ delta.mT) @ delta if rows < columns else left @ (delta.mT @ delta)


def minimise_by_adam(
    deltas: Sequence[Tensor], steps: int, learning_rate: float, unit: float = 1.0
) -> Tensor:
    """Descend on the paper's loss as the authors do: by Adam from Σ_t Δ_t, at a constant rate.

    Args:
        deltas: Δ_t / unit, (o, i).
        steps: of them.
        learning_rate: the largest change of an entry per step, in the unit of the weights.
        unit: what the task vectors were divided by.
    """
    merged = torch.stack(list(deltas)).sum(dim=0)
    mean, square = torch.zeros_like(merged), torch.zeros_like(merged)
    norms = [float(torch.linalg.vector_norm(d, dtype=torch.float64)) ** 2 for d in deltas]
    for step in range(1, steps + 1):
        gradient = torch.zeros_like(merged)
        for delta, norm in zip(deltas, norms, strict=True):
            gradient.add_(_through_the_smaller_square(merged - delta, delta), alpha=2 / norm)
        mean.lerp_(gradient, 1 - BETAS[0])
        square.mul_(BETAS[1]).addcmul_(gradient, gradient, value=1 - BETAS[1])
        denominator = (square / (1 - BETAS[1] ** step)).sqrt_().add_(DENOMINATOR / unit)
        merged.addcdiv_(mean, denominator, value=-learning_rate / unit / (1 - BETAS[0] ** step))
    return merged


class WudiMerge(MatrixMethod):
    """WUDI-Merging, by the published descent or exactly.

    The loss is Σ_t ‖(X − Δ_t) Δ_tᵀ‖² / ‖Δ_t‖²: the rows of a task vector stand for the inputs of
    its task.
    """

    spec = method_spec(
        "wudi",
        "WUDI-Merging",
        "https://arxiv.org/abs/2503.08099",
        (
            LAMBDA,
            LAYOUT,
            shared(
                "solver",
                Literal["adam", "exact"],
                "adam",
                "How the interference is minimised: by the authors' descent, or in closed form.",
            ),
            shared("steps", Annotated[int, Field(ge=0, strict=True)], 300, "Steps of adam."),
            shared(
                "learning_rate",
                Annotated[Number, Field(gt=0, le=1e15)],
                1e-5,
                "Of adam, in the unit of the weights.",
            ),
        ),
    )
    summary = (
        "Minimises the interference of the task vectors with each other on their own rows, which "
        "stand for the inputs of their tasks."
    )
    citations = (
        Citation(
            "cheng2025wudi",
            "Cheng, Runxi and Xiong, Feng and Wei, Yongxian and Zhu, Wanyun and Yuan, Chun",
            "Whoever Started the Interference Should End It: Guiding Data-Free Model Merging via "
            "Task Vectors",
            2025,
            "2503.08099",
            ICML,
        ),
    )
    own_rule = "merged with the least interference"
    whole = True

    def combine(self, matrices: TaskMatrices, parameters: Mapping[str, Any]) -> Tensor:
        deltas = matrices.deltas
        if parameters["solver"] == "exact":
            return minimise_exactly(deltas)
        # hundreds of products: in float32, whose digits a descent needs no more of
        energy = sum(float(delta.square().sum()) for delta in deltas)
        exponent = round(math.log2(energy / (len(deltas) * deltas[0].numel())) / 2)
        unit = 1.0 if abs(exponent) <= PLAIN_EXPONENT else 2.0**exponent
        for number, delta in enumerate(deltas):
            deltas[number] = delta.div_(unit).float()
        rate, own = parameters["learning_rate"], unit
        if unit < 1:  # steps and `DENOMINATOR` are absolute: the descent would leap from the start
            rate, own = min(rate / unit, LARGEST_STEP), 1.0
        return minimise_by_adam(deltas, parameters["steps"], rate, own).double().mul_(unit)

    def leaves_span(self, parameters: Mapping[str, Any]) -> str:
        adam = parameters.get("solver") == "adam"
        return "adam scales every entry by itself (`solver: exact` does not)" if adam else ""

    def operations(
        self, rows: int, columns: int, experts: int, parameters: Mapping[str, Any]
    ) -> float:
        """Return those of two products per step and expert, or of one decomposition."""
        if parameters["solver"] == "adam":
            return 4.0 * parameters["steps"] * experts * rows**2 * columns
        small = min(experts * rows, columns)
        return 4.0 * experts * rows * columns * small + 9.0 * small**3
