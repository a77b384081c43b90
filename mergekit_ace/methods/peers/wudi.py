# SPDX-License-Identifier: Apache-2.0
"""`merge_method: wudi`: Cheng et al., "Whoever Started the Interference Should End It", ICML 2025.

The loss is Σ_t ‖(X − Δ_t) Δ_tᵀ‖² / ‖Δ_t‖²: the rows of a task vector stand for the inputs of its
task. The authors descend on it by Adam from Σ_t Δ_t; being quadratic, it has a closed form.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Annotated, Any, Literal

import torch
from pydantic import Field
from torch import Tensor

from mergekit_ace.algebra.conditioning import factorize_within, inverse_norm
from mergekit_ace.algebra.covariance import CANCELLED
from mergekit_ace.algebra.linalg import (
    add_gram,
    mirror,
    product,
    rounding,
    solve_,
)
from mergekit_ace.algebra.records import IllConditionedError, Number
from mergekit_ace.algebra.spectrum import DEFAULT_TOLERANCE, EPS64
from mergekit_ace.algebra.task_vectors import squared_norm
from mergekit_ace.methods.base import Citation, method_spec
from mergekit_ace.methods.parameters import LAMBDA, LAYOUT, shared
from mergekit_ace.methods.peers.matrix_method import MatrixMethod, TaskMatrices

# Beyond it a system counts as singular, and its pseudo-inverse is taken.
LARGEST_CONDITION = 1e11
BETAS, DENOMINATOR = (0.9, 0.999), 1e-8  # torch's, and the authors'


def minimise_exactly(deltas: Sequence[Tensor], tolerance: float = DEFAULT_TOLERANCE) -> Tensor:
    """Return X = (Σ_t Δ_t G_t)(Σ_t G_t)⁺ with G_t = Δ_tᵀΔ_t / ‖Δ_t‖², (o, i).

    Where the loss does not determine X, the smallest one, which is also where a descent from
    Σ_t Δ_t ends: its gradient has no component there.

    Args:
        deltas: Δ_t, (o, i), float64, or float32 where `tolerance` allows for it.
        tolerance: relative error that is allowed in X.
    """
    rows, columns = deltas[0].shape
    solve = _solve_by_columns if rows * len(deltas) > columns else _solve_by_rows
    for dtype in dict.fromkeys((deltas[0].dtype, torch.float64)):
        wide = [delta.to(dtype) for delta in deltas]
        norms = [squared_norm(delta) ** 0.5 for delta in wide]
        with suppress(IllConditionedError):  # more digits, or the pseudo-inverse, are the remedy
            return solve(wide, norms, tolerance, exact=False).to(deltas[0].dtype)
    return solve(wide, norms, tolerance, exact=True).to(deltas[0].dtype)


def _solve_by_columns(
    deltas: Sequence[Tensor], norms: Sequence[float], tolerance: float, *, exact: bool
) -> Tensor:
    """Solve the system of Σ_t G_t, (i, i), for X − Δ_1 = Σ_{t≠1} (Δ_t − Δ_1) G_t (Σ_t G_t)⁻¹."""
    first, columns = deltas[0], deltas[0].shape[1]
    total, numerator = first.new_zeros(columns, columns), first.new_zeros(first.shape)
    for delta, norm in zip(deltas, norms, strict=True):
        add_gram(total, delta.mT, 1 / norm**2)
        if exact:  # outside of the rows of the task vectors X is 0, and not Δ_1
            numerator.add_(_through_the_smaller_square(delta, delta), alpha=1 / norm**2)
        elif delta is not first:
            difference = delta - first
            numerator.add_(_through_the_smaller_square(difference, delta), alpha=1 / norm**2)
    mirror(total)
    if exact:
        return numerator @ _pseudo_inverse(total)
    lower, _ = factorize_within(total, LARGEST_CONDITION)
    growth = squared_norm(numerator) ** 0.5 * inverse_norm(lower)
    merged = solve_(numerator, lower).add_(first)
    size = max(squared_norm(merged) ** 0.5, CANCELLED * max(norms))
    _check(growth / size, merged.dtype, tolerance)
    return merged


def _solve_by_rows(
    deltas: Sequence[Tensor], norms: Sequence[float], tolerance: float, *, exact: bool
) -> Tensor:
    """Solve the smaller system, (N, N), of all rows M of the Δ_t / ‖Δ_t‖: X = L (M Mᵀ)⁻¹ M."""
    stacked = torch.cat([delta / norm for delta, norm in zip(deltas, norms, strict=True)])
    system = mirror(add_gram(stacked.new_zeros(len(stacked), len(stacked)), stacked))
    if not exact:
        size = squared_norm(system) ** 0.5
        factorize_within(system, LARGEST_CONDITION)
        _check(size * inverse_norm(system), system.dtype, tolerance)
    left = torch.cat(  # Σ_t Δ_t G_t = left @ stacked
        [product(d, d.mT).div_(norm) for d, norm in zip(deltas, norms, strict=True)], dim=1
    )
    if exact:
        return product(left @ _pseudo_inverse(system), stacked)
    return product(solve_(left, system), stacked)


def _check(growth: float, dtype: torch.dtype, tolerance: float) -> None:
    """Raise an error unless rounding, magnified by the inverse, stays below the tolerance."""
    error = rounding(dtype) * (3 + 8 * growth)
    if not error <= tolerance:
        raise IllConditionedError(growth, error)


def _through_the_smaller_square(left: Tensor, delta: Tensor) -> Tensor:
    """Return L Δᵀ Δ for L and Δ, (o, i): an (o, o) matrix of an embedding would fill the memory."""
    rows, columns = delta.shape
    if rows < columns:
        return product(product(left, delta.mT), delta)
    gram = add_gram(delta.new_zeros(columns, columns), delta.mT)
    return product(left, mirror(gram))


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
            return minimise_exactly(deltas, matrices.tolerance)
        # hundreds of products: in float32, whose digits a descent needs no more of
        narrow = [delta.to(torch.float32) for delta in deltas]
        steps, rate = parameters["steps"], parameters["learning_rate"]
        if unit < 1:  # steps and `DENOMINATOR` are absolute: the descent would leap from the start
            rate, unit = min(rate / unit, LARGEST_STEP), 1.0
        return minimise_by_adam(narrow, steps, rate, unit).to(deltas[0].dtype)

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
