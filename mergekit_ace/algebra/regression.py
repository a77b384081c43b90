# SPDX-License-Identifier: Apache-2.0
"""RegMean: the regression onto the experts' outputs on their own inputs, which were measured.

Jin et al., "Dataless Knowledge Fusion by Merging Weights of Language Models", ICLR 2023, arXiv
2212.09849. With G_t = X_tᵀX_t/n_t of the inputs X_t, (n_t, i), of expert t, its entries off the
diagonal multiplied by α, the merge minimises Σ_t w_t ‖(W − W_t) X_tᵀ‖²/n_t:

    W = (Σ_t w_t W_t G_t)(Σ_t w_t G_t)⁻¹ = W0 + (Σ_t w_t Δ_t G_t)(Σ_t w_t G_t)⁻¹,

which is the closed form of ACE-Merging without its prior, with S_t = w_t G_t: every form of its
solve serves that is not made of task vectors alone.

Departures: a ridge of at least 1e-6 mean eigenvalues, without which inputs that are 0 in all
samples would have no solution (they get the mean of the Δ_t); and an expert that left a matrix as
it was takes no part in it, as everywhere here.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import torch
from pydantic import BaseModel, ConfigDict, Field
from torch import Tensor

from mergekit_ace.algebra.low_rank import CoreSpace
from mergekit_ace.algebra.measured import MeasuredInputs
from mergekit_ace.algebra.records import (
    Factor,
    FixedLayout,
    Fraction,
    MatrixRecord,
    Observer,
    Ridge,
    TensorRecord,
)
from mergekit_ace.algebra.ridge import Estimate, Problem, TaskVectors, merge_by_ridge
from mergekit_ace.algebra.task_vectors import (
    ActiveExperts,
    by_layout,
    merge_mean,
    select_active,
)

LEAST_RIDGE = 1e-6  # in mean eigenvalues


class RegressionOptions(BaseModel):
    """What may be chosen per tensor; see `AceOptions`."""

    model_config = ConfigDict(frozen=True, extra="forbid", populate_by_name=True)

    scale: Factor = Field(1.0, alias="lambda", description="Scale λ; the result is W0 + λ X.")
    off_diagonal: Fraction = Field(
        0.9,
        description="α, by which entries of X_tᵀX_t off its diagonal are multiplied; the paper's "
        "is 0.9, and 0.1 for T5.",
    )
    epsilon: Ridge = Field(
        0.0,
        description="A ridge beside α, or instead of it with off_diagonal: 1, in mean eigenvalues "
        "of X_tᵀX_t; never below 1e-6.",
    )


def merge_tensor_by_regression(
    base: Tensor,
    experts: Sequence[Tensor],
    weights: Sequence[float],
    options: RegressionOptions,
    layout: FixedLayout,
    coefficients: Sequence[float] | None = None,
    *,
    observe: Observer | None = None,
    space: CoreSpace | None = None,
    measured: MeasuredInputs | None = None,
) -> tuple[Tensor, TensorRecord]:
    """Merge the versions of one stored tensor; arguments and result as of `merge_tensor`.

    A matrix of whose inputs nothing was measured gets the mean of the task vectors, as vectors do.
    """
    select = partial(
        select_active, weights=weights, dtype=torch.float32, coefficients=coefficients, space=space
    )
    formula = partial(
        merge_by_regression,
        options=options,
        measured=measured or MeasuredInputs(),
        observe=observe,
    )
    return by_layout(base, experts, layout, select, options.scale, formula)


def merge_by_regression(
    base: Tensor,
    active: ActiveExperts,
    options: RegressionOptions,
    measured: MeasuredInputs,
    observe: Observer | None = None,
) -> tuple[Tensor, MatrixRecord]:
    """Merge one matrix that at least two experts changed; arguments as of `merge_tensor`."""
    if measured.of(active.positions) is None:
        return merge_mean(base, active, options.scale)
    problem = partial(_problem, base, active, options, measured)
    return merge_by_ridge(base, active, problem, options.scale, observe=observe, rule="regmean")


def _problem(
    base: Tensor,
    active: ActiveExperts,
    options: RegressionOptions,
    measured: MeasuredInputs,
    dtype: torch.dtype,
) -> Problem:
    """Return the regression by w_t G_t of the experts that were measured, of mean eigenvalue 1."""
    found = [measured.covariance(position) for position in active.positions]
    total = math.fsum(w * m.trace for w, m in zip(active.weights, found, strict=True) if m)
    epsilon, columns = max(options.epsilon, LEAST_RIDGE), base.shape[1]
    given = zip(active.experts, active.weights, active.coefficients, found, strict=True)
    experts, estimates = [], []
    for expert, weight, coefficient, own in given:
        if own is None:
            continue
        experts.append(expert)
        estimates.append(
            Estimate(
                scale=0.0,
                ridge=epsilon * weight * own.trace / total,
                coefficient=coefficient,
                measured=replace(own, off_diagonal=options.off_diagonal),
                measured_scale=weight * columns / total,
            )
        )
    return Problem(TaskVectors(base, experts, dtype, centred=False), estimates)
