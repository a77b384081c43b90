# SPDX-License-Identifier: Apache-2.0
"""`merge_method: wudi`: Cheng et al., "Whoever Started the Interference Should End It", ICML 2025.

The loss is Σ_t ‖(X − Δ_t) Δ_tᵀ‖² / ‖Δ_t‖²: the rows of a task vector stand for the inputs of its
task. The authors descend on it by Adam from Σ_t Δ_t; being quadratic, it has a closed form.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal

import torch
from pydantic import Field
from torch import Tensor

from mergekit_ace.algebra.records import Number
from mergekit_ace.algebra.spectrum import EPS64
from mergekit_ace.algebra.task_vectors import squared_norm
from mergekit_ace.methods.base import Citation, method_spec
from mergekit_ace.methods.parameters import LAMBDA, LAYOUT, shared
from mergekit_ace.methods.peers.matrix_method import MatrixMethod, TaskMatrices

BETAS, DENOMINATOR = (0.9, 0.999), 1e-8  # torch's, and the authors'


def minimise_exactly(deltas: Sequence[Tensor]) -> Tensor:
    """Return X = (Σ_t Δ_t G_t)(Σ_t G_t)⁺ with G_t = Δ_tᵀΔ_t / ‖Δ_t‖², (o, i).

    Where the loss does not determine X, the smallest one, which is also where a descent from
    Σ_t Δ_t ends: its gradient has no component there.

    Args:
        deltas: Δ_t, (o, i), float64.
    """
    rows, columns = deltas[0].shape
    norms = [squared_norm(delta) ** 0.5 for delta in deltas]
    if rows * len(deltas) > columns:
        total, numerator = deltas[0].new_zeros(columns, columns), torch.zeros_like(deltas[0])
        for delta, norm in zip(deltas, norms, strict=True):
            total.addmm_(delta.mT, delta, alpha=1 / norm**2)
            numerator.add_(_through_the_smaller_square(delta, delta), alpha=1 / norm**2)
        return numerator @ _pseudo_inverse(total)
    stacked = torch.cat([delta / norm for delta, norm in zip(deltas, norms, strict=True)])
    turned = [(d @ d.mT).div_(norm) for d, norm in zip(deltas, norms, strict=True)]
    left = torch.cat(turned, dim=1)  # Σ_t Δ_t G_t = left @ stacked
    return (left @ _pseudo_inverse(stacked @ stacked.mT)) @ stacked


def _through_the_smaller_square(left: Tensor, delta: Tensor) -> Tensor:
    """Return L Δᵀ Δ for L and Δ, (o, i): an (o, o) matrix of an embedding would fill the memory."""
    rows, columns = delta.shape
    return left @ (delta.mT @ delta) if columns < rows else (left @ delta.mT) @ delta


def _pseudo_inverse(gram: Tensor) -> Tensor:
    values, vectors = torch.linalg.eigh(gram)
    kept = values > len(gram) * EPS64 * values[-1]
    return (vectors[:, kept] / values[kept]) @ vectors[:, kept].mT


def minimise_by_adam(
    deltas: Sequence[Tensor], steps: int, learning_rate: float, unit: float = 1.0
) -> Tensor:
    """Descend as the authors do: by Adam from Σ_t Δ_t with a constant learning rate.

    Args:
        deltas: Δ_t / unit, (o, i).
        steps: of them.
        learning_rate: the largest change of an entry per step, in the unit of the weights.
        unit: what the task vectors were divided by.
    """
    merged = torch.stack(list(deltas)).sum(dim=0)
    mean, square = torch.zeros_like(merged), torch.zeros_like(merged)
    norms = [squared_norm(delta) for delta in deltas]
    for step in range(1, steps + 1):
        gradient = torch.zeros_like(merged)
        for delta, norm in zip(deltas, norms, strict=True):
            gradient.add_(_through_the_smaller_square(merged - delta, delta), alpha=2 / norm)
        mean.lerp_(gradient, 1 - BETAS[0])
        square.mul_(BETAS[1]).addcmul_(gradient, gradient, value=1 - BETAS[1])
        denominator = (square / (1 - BETAS[1] ** step)).sqrt_().add_(DENOMINATOR / unit)
        merged.addcdiv_(mean, denominator, value=-learning_rate / unit / (1 - BETAS[0] ** step))
    return merged


# Of a descent on task vectors that have a unit of their own, in that unit.
LARGEST_STEP = 0.01
Rate = Annotated[Number, Field(gt=0, le=1e15)]


class WudiMerge(MatrixMethod):
    """WUDI-Merging, by the published descent or exactly."""

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
            shared("learning_rate", Rate, 1e-5, "Of adam, in the unit of the weights."),
        ),
    )
    summary = (
        "Minimises the interference of the task vectors with each other on their own rows, which "
        "stand for the inputs of their tasks."
    )
    citations = (
        Citation(
            key="cheng2025wudi",
            authors="Cheng, Runxi and Xiong, Feng and Wei, Yongxian and Zhu, Wanyun and Yuan, Chun",
            title="Whoever Started the Interference Should End It: Guiding Data-Free Model "
            "Merging via Task Vectors",
            year=2025,
            arxiv="2503.08099",
            booktitle="International Conference on Machine Learning",
        ),
    )
    own_rule = "merged with the least interference"
    whole = True

    def combine(self, matrices: TaskMatrices, parameters: Mapping[str, Any]) -> Tensor:
        deltas, unit = matrices.deltas, matrices.unit
        if parameters["solver"] == "exact":
            return minimise_exactly(deltas)
        # hundreds of products: in float32, whose digits a descent needs no more of
        narrow = [delta.to(torch.float32) for delta in deltas]
        steps, rate = parameters["steps"], parameters["learning_rate"]
        if unit < 1:  # steps and `DENOMINATOR` are absolute: the descent would leap from the start
            rate, unit = min(rate / unit, LARGEST_STEP), 1.0
        return minimise_by_adam(narrow, steps, rate, unit).to(torch.float64)

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
