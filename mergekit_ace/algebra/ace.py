# SPDX-License-Identifier: Apache-2.0
"""ACE-Merging of one stored tensor (Xu et al., CVPR 2026, arXiv 2603.02945), and `ace_plus`.

Steps 1 to 3 of Algorithm 1 are decided here; `ridge` solves the closed form and refines it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import ClassVar, Literal

import torch
from pydantic import BaseModel, ConfigDict, Field
from torch import Tensor

from mergekit_ace.algebra.linalg import full_precision
from mergekit_ace.algebra.plus import FLATTENING, FLATTENING_OF_ADAPTERS, orthogonal_sum
from mergekit_ace.algebra.ridge import MeasuredCovariance, Regression, merge_by_ridge
from mergekit_ace.algebra.task_vectors import (
    ActiveExperts,
    Factor,
    FixedLayout,
    Fraction,
    MatrixRecord,
    NonNegative,
    Ridge,
    Statistic,
    TableLayout,
    TensorRecord,
    by_layout,
    delta_blocks,
    measure_heterogeneity,
    merge_mean,
    resolve_layout,
    select_active,
    task_vector,
)

# ε where the ridge follows the spectrum.
RIDGE = 0.01
# The spread Var_t[log τ_t] above which experts count as heterogeneous by default.
CLEARLY_APART = 1.0
# A trace below this share of τ_t is what rounding leaves of 0: all rows moved alike.
NOTHING = 1e-10
# So many times as long as wide are embeddings that are the head as well, and no other matrices.
LONGEST = 8
# The share of TSV-Merge's sum in embeddings.
ORTHOGONAL_SHARE = 0.28


class PlusOptions(BaseModel):
    """What may be chosen per tensor of all methods here; ``scale`` is ``lambda`` in a config."""

    model_config = ConfigDict(frozen=True, extra="forbid", populate_by_name=True)
    refines: ClassVar[bool] = False  # whether a refinement may follow the closed form
    of_adapters: ClassVar[bool] = False  # which `ace_plus` flattens more

    scale: Factor = Field(
        default=1.0, alias="lambda", description="Scale λ; the result is W0 + λ X."
    )
    compute_dtype: Literal["float32", "float64"] = Field(
        default="float32", description="The dtype of task vectors, unless the tensors are wider."
    )


class AdapterOptions(PlusOptions):
    """What may be chosen where `ace_plus` merges adapters, read as (i, o) by their outputs."""

    of_adapters = True


class AceOptions(PlusOptions):
    """What may be chosen per tensor of `ace`."""

    refines: ClassVar[bool] = True

    epsilon: Ridge | None = Field(
        default=None,
        description="Ridge ε, in all of it added to the sum of the covariances (Eq. 9). By default "
        "0.01, and with epsilon_scale: absolute or relative the paper's 1e-5.",
    )
    epsilon_scale: Literal["spectrum", "absolute", "relative"] = Field(
        default="spectrum",
        description="What ε multiplies to give the ridge. spectrum: ‖S‖² / tr(S) of S = Σ S_t, a "
        "mean eigenvalue weighted by the eigenvalues, or more where an expert is weak; absolute: "
        "1, as in the paper; relative: the mean eigenvalue tr(S_t)/i of each estimate.",
    )
    heterogeneity: Statistic = Field(
        default="auto",
        description="What tells heterogeneous matrices. auto: Var_t[log τ_t] above 1; gamma: the "
        "paper's γ (Eq. 7), which depends on the unit of the weights and has a pole at τ = 1, "
        "above the threshold; log_variance: Var_t[log τ_t] above the threshold.",
    )
    heterogeneity_threshold: NonNegative = Field(
        default=0.3, description="Above it a matrix counts as heterogeneous; not used by auto."
    )
    adaptive_normalization: Literal["auto", "always", "never"] = Field(
        default="auto",
        description="Whether estimates are divided by their traces, S_t = G_t / tr(G_t) (Eq. 8); "
        "auto: in heterogeneous matrices.",
    )
    structural_prior: bool = Field(
        default=True,
        description="Whether the rank-one prior 1 cᵀ enters (Eqs. 11-13), which damps the merge's "
        "response to the all-ones input.",
    )
    spectral_refinement: Literal["auto", "always", "never"] = Field(
        default="auto",
        description="Whether the spectrum is refined (Eqs. 15-19); auto: in heterogeneous "
        "matrices. Use it with normalised estimates.",
    )
    refinement_mean: Literal["plain", "ridged"] = Field(
        default="plain",
        description="Whether the refinement's mean of the estimates holds their ridges. ridged is "
        "the paper's (Eq. 15), and turns against the experts where Σ ε_t exceeds 0.3. With plain, "
        "the refined merge is scaled to the size that it had, and a refinement that would turn "
        "against the experts is left out.",
    )
    rank_fraction: Fraction = Field(
        default=0.3, description="Share k / min(o, i) of the directions that are refined."
    )


def merge_tensor(
    base: Tensor,
    experts: Sequence[Tensor],
    weights: Sequence[float] | None = None,
    options: PlusOptions | None = None,
    layout: TableLayout = "auto",
    coefficients: Sequence[float] | None = None,
    *,
    shape: Sequence[int] | None = None,
    measured: Sequence[MeasuredCovariance | None] = (),
) -> tuple[Tensor, TensorRecord]:
    """Merge the versions of one stored tensor by ACE-Merging or `ace_plus`.

    Args:
        base: W0, of any floating dtype; ``matrix``: (o, i), where the layer computes W0 @ x;
            ``transposed``: (…, i, o); ``stacked``: (…, o, i), the leading axes a batch of matrices;
            ``flattened``: (o, …), read as (o, rest); ``mean``: any; ``table``: see `merge_table`.
        experts: W_t, each shaped as `base`.
        weights: w_t ≥ 0, one per expert; only their ratios matter; 0 leaves an expert out.
        options: `AceOptions`, by default, or `PlusOptions`.
        coefficients: λ_t of the experts' components of X, and of `ace` last that of the refinement;
            1 by default. What is refined is X with all of them at 1.
        shape: (o, i) of the matrices that the tensors are cores of, if they are; W0 is 0 then.
        measured: covariances of the experts' inputs, which replace a share of their estimates; None
            for an expert without one.

    Returns:
        W0 + λ X, in the compute dtype or wider (where no expert changed it the base itself), and
        the record. An `IllConditionedError` says that A cannot be factored, even in float64; an
        `OverflowError` that a task vector overflows the compute dtype.
    """
    options, count = options or AceOptions(), len(experts)
    weights = [1.0] * count if weights is None else weights
    given = [1.0] * (count + options.refines) if coefficients is None else coefficients
    for t, expert in enumerate(experts):
        if expert.shape != base.shape:
            shapes = f"{tuple(expert.shape)}, but the base {tuple(base.shape)}"
            raise ValueError(f"expert {t} has the shape {shapes}; merge versions of one tensor")
    valid = len(weights) == count > 0 and all(0 <= weight < math.inf for weight in weights)
    if not valid or len(given) != count + options.refines or not all(map(math.isfinite, given)):
        raise ValueError(
            "give at least one expert, a finite weight for each, 0 or greater, and a finite "
            "coefficient for each, and a last one for the refinement of `ace`: there are "
            f"{count} experts, and the weights {list(weights)}, and the coefficients {list(given)}"
        )
    dtype, own = getattr(torch, options.compute_dtype), given[:count]
    select = partial(select_active, weights=weights, dtype=dtype, coefficients=own, shape=shape)
    fixed = resolve_layout(layout, None, base.ndim)
    formula = partial(_merge_plus, options=options, layout=fixed, measured=measured)
    if isinstance(options, AceOptions):
        formula = partial(_merge_ace, options=options, refinement=given[-1], measured=measured)
    return by_layout(base, experts, fixed, select, options.scale, formula)


@full_precision()
def _merge_plus(
    base: Tensor,
    active: ActiveExperts,
    options: PlusOptions,
    layout: FixedLayout,
    measured: Sequence[MeasuredCovariance | None],
) -> tuple[Tensor, MatrixRecord]:
    """Merge one matrix by `ace_plus`: embeddings as the sum of two merges."""
    embeddings = layout == "table" or max(active.shape) > LONGEST * min(active.shape)
    share = ORTHOGONAL_SHARE * embeddings
    scale = (1 - share) * options.scale
    if layout == "table":
        merged, record = merge_table(base, active, scale)
    else:
        problem = _regression(active, options, measured, normalized=True)
        if not embeddings:
            others = sum(active.relative_weights) - 1
            adapters, turned = options.of_adapters, active.shape[0] < active.shape[1]
            strength, ridge = FLATTENING_OF_ADAPTERS if adapters else FLATTENING
            strength *= others if adapters else min(1.0, others)
            flattening = strength, ridge
            problem = replace(problem, sizes=active.tau, turned=turned, flattening=flattening)
        merged, record = merge_by_ridge(base, active, problem, scale, rule="ace_plus")
    if embeddings:
        total = orthogonal_sum(base, active, active.dtype)
        merged.add_(total, alpha=share * options.scale)
    return merged, record


def _merge_ace(
    base: Tensor,
    active: ActiveExperts,
    options: AceOptions,
    refinement: float,
    measured: Sequence[MeasuredCovariance | None],
) -> tuple[Tensor, MatrixRecord]:
    """Merge one matrix that at least two experts changed: decide its branch (step 1), and solve."""
    gamma, variance = measure_heterogeneity(active.tau)
    # γ depends on the unit of the weights: by default their spread alone decides (departure)
    auto = options.heterogeneity == "auto"
    threshold = CLEARLY_APART if auto else options.heterogeneity_threshold
    heterogeneous = (gamma if options.heterogeneity == "gamma" else variance) > threshold
    switch = {"auto": heterogeneous, "always": True, "never": False}
    normalized, rank = switch[options.adaptive_normalization], 0
    if switch[options.spectral_refinement]:
        rank = int(options.rank_fraction * min(active.shape))
    problem = _regression(active, options, measured, normalized=normalized)
    if not problem.experts:  # every expert moved all its rows alike
        return merge_mean(base, active, options.scale)
    return merge_by_ridge(
        base,
        active,
        replace(problem, rank=rank, refinement=refinement),
        options.scale,
        rule="ace",
        gamma=gamma,
        log_variance=variance,
        statistic=options.heterogeneity,
        threshold=threshold,
        heterogeneous=heterogeneous,
        normalized=normalized,
        refined=False,
        rank=rank,
    )


def _regression(
    active: ActiveExperts,
    options: PlusOptions,
    measured: Sequence[MeasuredCovariance | None],
    normalized: bool,
) -> Regression:
    """Return the regression of one matrix and its ridges (Eqs. 8-13), of experts with estimates."""
    ace = options if isinstance(options, AceOptions) else None
    unit, epsilon = (ace.epsilon_scale, ace.epsilon) if ace else ("spectrum", None)
    if epsilon is None:
        epsilon = RIDGE if unit == "spectrum" else 1e-5
    traces = dict(enumerate(active.traces if ace else active.tau))
    # 0 is no divisor (departure)
    traces = {t: trace for t, trace in traces.items() if trace > NOTHING * active.tau[t]}
    scales, ridges, found = [], [], {}
    for place, (t, trace) in enumerate(traces.items()):
        weight = active.weights[t]
        factor = weight / trace if normalized else weight
        relative = epsilon * factor * trace / active.shape[1]  # ε times S_t's mean eigenvalue
        ridge = {"spectrum": weight, "absolute": epsilon * factor, "relative": relative}
        ridges.append(ridge[unit])
        own = measured[active.positions[t]] if measured else None
        if own and own.mix and own.trace:
            found[place] = own, own.mix * factor * trace / own.trace
            factor *= 1 - own.mix
        scales.append(factor)
    prior = 0.0
    if ace and ace.structural_prior:
        prior = sum(active.tau) / len(active.tau) if normalized else 1.0
    return Regression(
        experts=tuple(traces),
        scales=scales,
        ridges=ridges,
        spectral=epsilon if unit == "spectrum" else None,
        measured=found,
        mix=next((own.mix for own, _ in found.values()), None),
        centred=ace is not None,
        prior=prior,
        ridged_mean=ace is not None and ace.refinement_mean == "ridged",
    )


def merge_table(base: Tensor, active: ActiveExperts, scale: float) -> tuple[Tensor, MatrixRecord]:
    """Merge a table of looked-up rows, (n, d), such as embeddings, that at least two changed.

    X[v] = Σ_t w_t c_tv Δ_t[v] / Σ_t w_t c_tv with c_tv = ‖Δ_t[v]‖² / τ_t + ε/n.
    """
    merged = base.to(active.dtype, copy=True)
    tau, weights, coefficients = merged.new_tensor(
        [active.tau, active.weights, active.coefficients], dtype=torch.float64
    )[:, :, None]
    for rows, stack in delta_blocks(base, active.experts, active.dtype):
        # in float64: squares of a far weaker expert's entries leave the range of float32
        counts = torch.linalg.vector_norm(stack, dim=2, dtype=torch.float64).square_().div_(tau)
        counts = counts.add_(RIDGE / len(base)).mul_(weights)
        counts.div_(counts.sum(dim=0)).mul_(coefficients * scale)
        merged[rows] += stack.mul_(counts[:, :, None]).sum(dim=0)
    return merged, active.record("ace_plus")


def split_tensor(
    base: Tensor,
    experts: Sequence[Tensor],
    options: PlusOptions,
    layout: FixedLayout,
) -> list[Tensor]:
    """Return the components X_t of the merge of one stored tensor, shaped as it, whose sum is X.

    X_t = C_t (S_t + ε_t I)(A + 1 cᵀ)⁻¹; with options of `ace` the refinement is one more, zeros
    where nothing is refined. Each component is a merge with all other coefficients at 0.
    """
    options = options.model_copy(update={"scale": 1.0})
    dtype = torch.promote_types(getattr(torch, options.compute_dtype), base.dtype)
    coefficients = torch.eye(len(experts) + options.refines).tolist()
    merges = (merge_tensor(base, experts, None, options, layout, one)[0] for one in coefficients)
    return [task_vector(merged, base, dtype) for merged in merges]
