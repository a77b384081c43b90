# SPDX-License-Identifier: Apache-2.0
"""ACE-Merging of one stored tensor: Xu et al., CVPR 2026, arXiv 2603.02945, Algorithm 1; and ours.

Steps 1 to 3 are decided here: how heterogeneous the experts are, whether their covariances G_t are
divided by their traces, and with which ridge and prior the closed form is solved (`ridge`).

``ace_relative`` is ours: the same regression with all covariances brought to trace 1 and nothing
else, so that it minimises Σ_t w_t ‖(X − Δ_t) K_t^½‖² with K_t = Δ_tᵀΔ_t / τ_t and a ridge. A table
whose rows are looked up, such as token embeddings, is a special case. Read as (d, n), it multiplies
unit vectors, so that the covariance of its inputs is diagonal whatever the task: how often each row
is asked for. Of the estimate Δ_tΔ_tᵀ, with Δ_t stored (n, d), the diagonal is left, and the merge
is a mean row by row, X[v] = Σ_t w_t c_tv Δ_t[v] / Σ_t w_t c_tv with c_tv = ‖Δ_t[v]‖² / τ_t + ε/n.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import ClassVar, Literal

import torch
from pydantic import BaseModel, ConfigDict, Field
from torch import Tensor

from mergekit_ace.algebra.linalg import blocks
from mergekit_ace.algebra.low_rank import CoreSpace
from mergekit_ace.algebra.measured import MeasuredInputs
from mergekit_ace.algebra.records import (
    Factor,
    Fraction,
    MatrixRecord,
    NonNegative,
    RelativeLayout,
    Ridge,
    Statistic,
    TensorRecord,
)
from mergekit_ace.algebra.ridge import Estimate, Problem, TaskVectors, merge_by_ridge
from mergekit_ace.algebra.task_vectors import (
    ActiveExperts,
    Heterogeneity,
    by_layout,
    check_versions,
    measure_heterogeneity,
    merge_mean,
    resolve_layout,
    select_active,
    task_vector,
)

# The spread Var_t[log τ_t] from which experts count as heterogeneous by default: τ_t that differ by
# a factor of e in the mean.
CLEARLY_APART = 1.0
# A trace below this share of τ_t is what rounding leaves of 0: all rows moved alike.
NOTHING = 1e-10


CENTRED = "Whether the column means of Δ_t are taken out (Eq. 5)."


class RidgeOptions(BaseModel):
    """What may be chosen per tensor of every method by ridge regression.

    Every field says what it is in its description; mergekit's name for ``scale`` is ``lambda``,
    which Python reserves.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", populate_by_name=True)
    refines: ClassVar[bool] = False  # whether a refinement may follow the closed form

    scale: Factor = Field(
        default=1.0, alias="lambda", description="Scale λ; the result is W0 + λ X."
    )
    epsilon: Ridge | None = Field(
        default=None,
        description="Ridge ε, in all of it added to the sum of the covariances (Eq. 9). By default "
        "0.01, and with epsilon_scale: absolute or relative the paper's 1e-5.",
    )
    epsilon_scale: Literal["spectrum", "absolute", "relative"] = Field(
        default="spectrum",
        description="What ε multiplies to give the ridge. spectrum: ‖S‖² / tr(S) of S = Σ S_t, a "
        "mean eigenvalue weighted by the eigenvalues; absolute: 1, as in the paper; relative: the "
        "mean eigenvalue tr(S_t)/i of each estimate.",
    )
    compute_dtype: Literal["float32", "float64"] = Field(
        default="float32", description="The dtype of task vectors, unless the tensors are wider."
    )

    @property
    def dtype(self) -> torch.dtype:
        """``compute_dtype`` as torch's."""
        return torch.float64 if self.compute_dtype == "float64" else torch.float32

    @property
    def ridge(self) -> float:
        """ε as given, or its default."""
        if self.epsilon is not None:
            return self.epsilon
        return 0.01 if self.epsilon_scale == "spectrum" else 1e-5


class AceOptions(RidgeOptions):
    """What may be chosen per tensor of `ace`.

    Defaults are the paper's (arXiv 2603.02945) except for ``epsilon_scale``, ``heterogeneity`` and
    ``refinement_mean``, whose other values ``absolute``, ``gamma`` and ``ridged`` are the paper's.
    """

    refines: ClassVar[bool] = True

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
    centred: bool = Field(
        default=True,
        description=f"{CENTRED} X then has no mean row: a shift of all outputs alike is lost.",
    )


class RelativeOptions(RidgeOptions):
    """What may be chosen per tensor of `ace_relative`."""

    centred: bool = Field(default=False, description=f"{CENTRED} Not of tables.")
    structural_prior: bool = Field(
        default=False,
        description="Whether ACE's rank-one prior enters (Eqs. 11-13); not for tables.",
    )


def merge_tensor(
    base: Tensor,
    experts: Sequence[Tensor],
    weights: Sequence[float] | None = None,
    options: AceOptions | RelativeOptions | None = None,
    layout: RelativeLayout = "auto",
    coefficients: Sequence[float] | None = None,
    *,
    space: CoreSpace | None = None,
    measured: MeasuredInputs | None = None,
) -> tuple[Tensor, TensorRecord]:
    """Merge the versions of one stored tensor by ACE-Merging, or by `ace_relative`.

    Args:
        base: W0, any floating dtype, finite. ``matrix``: (o, i), where the layer computes W0 @ x;
            ``transposed``: (…, i, o); ``stacked``: (…, o, i), the leading axes a batch of matrices;
            ``flattened``: (o, …), read as (o, rest); ``mean``: any; ``table``: see `merge_table`.
        experts: W_t, finite, each shaped as `base`.
        weights: w_t ≥ 0, one per expert; only their ratios matter; 0 leaves an expert out.
        options: of the method: `AceOptions`, by default, or `RelativeOptions`.
        layout: see `resolve_layout`; ``auto`` knows no name and no architecture here.
        coefficients: λ_t of the experts' components of X, and of `ace` last that of the refinement:
            any finite numbers, 1 by default. What is refined is X with all of them at 1.
        space: of which the tensors are cores, if they are; `base` is 0 then, and so is W0.
        measured: covariances of the inputs, where there is one matrix, which take the place of a
            share of the estimates; not together with `space`.

    Working memory for a matrix, beside the inputs and the result: T + 4 float32 matrices of
    max(i², o·i) entries, task vectors in blocks of 1 GiB; twice that where float32 is not enough.

    Returns:
        W0 + λ X, shaped as `base`, in the compute dtype or wider (the base itself, uncast, where no
        expert changed it), and the record of what was done.

    Raises:
        TypeError, ValueError: the versions do not belong together, see `check_versions`, are no
            floating-point numbers, or are not finite.
        IllConditionedError: A cannot be factored, even in float64; raise ``epsilon``.
        OverflowError: a task vector overflows the compute dtype.
    """
    options = options or AceOptions()
    weights = weights if weights is not None else [1.0] * len(experts)
    check_versions(base, experts, weights, coefficients, len(experts) + options.refines)
    own = coefficients and coefficients[: len(experts)]
    given = {"coefficients": own, "space": space, "keep": True}
    select = partial(select_active, weights=weights, dtype=options.dtype, **given)
    fixed = resolve_layout(layout, None, base.ndim)
    if fixed == "table" and isinstance(options, RelativeOptions):
        formula = partial(merge_table, options=options, measured=measured)
    else:
        last = coefficients[-1] if coefficients and options.refines else 1.0
        given = {"refinement": last, "measured": measured}
        formula = partial(merge_changed, options=options, **given)
    return by_layout(base, experts, fixed, select, options.scale, formula)


def merge_matrix(
    base: Tensor,
    experts: Sequence[Tensor],
    weights: Sequence[float] | None = None,
    options: AceOptions | RelativeOptions | None = None,
    coefficients: Sequence[float] | None = None,
    *,
    space: CoreSpace | None = None,
    measured: MeasuredInputs | None = None,
) -> tuple[Tensor, MatrixRecord]:
    """Merge the versions of one matrix, (o, i); arguments and errors as of `merge_tensor`.

    Returns:
        W0 + λ X, (o, i), and the record of what was done.
    """
    if isinstance(base, Tensor) and base.ndim != 2:
        raise ValueError(f"the base has {base.ndim} axes, and a matrix two; see merge_tensor")
    given = {"space": space, "measured": measured}
    merged, record = merge_tensor(base, experts, weights, options, "matrix", coefficients, **given)
    return merged, record.matrices[0]


@dataclass(frozen=True)
class Branch:
    """What step 1 decides for one matrix.

    Attributes:
        statistics: both measures of heterogeneity.
        threshold: above which a statistic tells a heterogeneous matrix.
        heterogeneous: whether it counts as one.
        normalized: whether covariances are divided by their traces.
        rank: k of the refinement; 0 without.
    """

    statistics: Heterogeneity
    threshold: float
    heterogeneous: bool
    normalized: bool
    rank: int


def decide_branch(active: ActiveExperts, options: AceOptions | RelativeOptions) -> Branch:
    """Take step 1: how much do the experts differ in scale, and what follows from it (Eq. 7)?

    γ divides by (mean log τ)², so that it depends on the unit of the weights, and is large near
    τ = 1 whatever the experts are. ``auto`` asks for their spread alone (departure).
    """
    statistics = measure_heterogeneity(active.tau)
    variance = statistics.log_variance
    if isinstance(options, RelativeOptions):
        return Branch(statistics, CLEARLY_APART, False, True, 0)
    value = statistics.gamma if options.heterogeneity == "gamma" else variance
    auto = options.heterogeneity == "auto"
    threshold = CLEARLY_APART if auto else options.heterogeneity_threshold
    heterogeneous = value > threshold
    switch = {"auto": heterogeneous, "always": True, "never": False}
    rank = int(options.rank_fraction * min(active.shape))
    return Branch(
        statistics=statistics,
        threshold=threshold,
        heterogeneous=heterogeneous,
        normalized=switch[options.adaptive_normalization],
        rank=rank if switch[options.spectral_refinement] else 0,
    )


def merge_changed(
    base: Tensor,
    active: ActiveExperts,
    options: AceOptions | RelativeOptions,
    *,
    refinement: float = 1.0,
    measured: MeasuredInputs | None = None,
) -> tuple[Tensor, MatrixRecord]:
    """Merge one matrix that at least two experts changed; arguments as of `merge_tensor`."""
    for version in (base, *active.experts):
        if not version.is_floating_point():
            raise TypeError(f"a matrix of {version.dtype} is no weight; convert it to float32")
    branch = decide_branch(active, options)
    measured = measured and measured.of(active.positions)
    own = estimated(base, active, options, branch)
    if not own:  # every expert moved all its rows alike
        return merge_mean(base, active, options.scale)
    known = {"rule": "ace_relative"}
    if isinstance(options, AceOptions):
        known = {
            "rule": "ace",
            "gamma": branch.statistics.gamma,
            "log_variance": branch.statistics.log_variance,
            "statistic": options.heterogeneity,
            "threshold": branch.threshold,
            "heterogeneous": branch.heterogeneous,
            "normalized": branch.normalized,
            "refined": False,
        }
    return merge_by_ridge(
        base,
        active,
        partial(make_problem, base, active, options, branch, own, measured),
        options.scale,
        rank=branch.rank,
        refinement=refinement,
        mix=measured and measured.mix,
        **known,
    )


def estimated(
    base: Tensor, active: ActiveExperts, options: AceOptions | RelativeOptions, branch: Branch
) -> dict[int, float]:
    """Return tr(G_t) of the active experts that have an estimate, by their number among them.

    One whose rows all moved alike has C_t = 0: nothing can be divided by its trace, nor has a ridge
    that counts in traces a size (departure: the paper divides by zero).
    """
    traces = dict(enumerate(active.traces if options.centred else active.tau))
    for t, (expert, tau) in enumerate(zip(active.experts, active.tau, strict=True)):
        if options.centred and traces[t] <= 1e-2 * tau:  # the difference has lost its digits
            delta = task_vector(expert, base, torch.float64)
            traces[t] = float((delta - delta.mean(dim=0)).square().sum())
    if branch.normalized or options.epsilon_scale == "relative":
        return {t: trace for t, trace in traces.items() if trace > NOTHING * active.tau[t]}
    return traces if any(traces.values()) else {}


def make_problem(
    base: Tensor,
    active: ActiveExperts,
    options: AceOptions | RelativeOptions,
    branch: Branch,
    traces: dict[int, float],
    measured: MeasuredInputs | None,
    dtype: torch.dtype,
) -> Problem:
    """Return the regression of one matrix (Eqs. 8-13).

    Args:
        base, active, options, branch, measured: see `merge_changed`.
        traces: from `estimated`.
        dtype: of the task vectors.
    """
    columns, scale = active.shape[1], options.epsilon_scale
    total = sum(active.weights[t] for t in traces)
    epsilon = options.ridge
    estimates = []
    for t, trace in traces.items():
        weight = active.weights[t]
        factor = weight / trace if branch.normalized else weight
        ridge = weight / total
        if scale == "relative":  # ε times the mean eigenvalue of S_t
            ridge = epsilon * factor * trace / columns
        elif scale == "absolute":
            ridge = epsilon * factor
        own = measured.covariance(active.positions[t]) if measured else None
        share = measured.mix if measured and own is not None else 0.0
        estimates.append(
            Estimate(
                scale=(1 - share) * factor,
                ridge=ridge,
                coefficient=active.coefficients[t],
                measured=own if share else None,
                measured_scale=share * factor * trace / own.trace if own is not None else 0.0,
            )
        )
    prior = 0.0
    if options.structural_prior:
        prior = sum(active.tau) / len(active.tau) if branch.normalized else 1.0
    experts = [active.experts[t] for t in traces]
    stack = active.stack
    if stack is not None and (len(stack), stack.dtype) != (len(experts), dtype):
        stack = None
    return Problem(
        TaskVectors(base, experts, dtype, centred=options.centred, stack=stack),
        estimates,
        spectral=epsilon if scale == "spectrum" else None,
        prior=prior,
        refined=branch.rank > 0,
        ridged_mean=isinstance(options, AceOptions) and options.refinement_mean == "ridged",
    )


def merge_table(
    base: Tensor,
    active: ActiveExperts,
    options: RelativeOptions,
    measured: MeasuredInputs | None = None,
) -> tuple[Tensor, MatrixRecord]:
    """Merge the versions of one table.

    Args:
        base: W0, (n, d), a row per thing that is looked up, n > 1.
        active: at least two experts W_t, each (n, d), that changed it.
        options: of which ε counts in mean squared norms of a row of Δ_t.
        measured: how often each row was looked up, whose shares take the place of a share of the
            c_tv.

    Returns:
        W0 + λ X, (n, d), in the compute dtype or wider, and the record of what was done.
    """
    rows, width = base.shape
    counts = base.new_zeros((len(active.experts), rows), dtype=torch.float64)  # w_t c_tv
    mixed = False
    given = zip(active.experts, active.weights, active.tau, active.positions, strict=True)
    for count, (expert, weight, tau, position) in zip(counts, given, strict=True):
        for block in blocks(rows, width, base.device):
            # in float64: squares of a far weaker expert's entries leave the range of float32
            delta = task_vector(expert[block], base[block], active.dtype)
            count[block] = torch.linalg.vector_norm(delta, dim=1, dtype=torch.float64).square_()
        count.div_(tau)
        asked = measured.count(position) if measured else None
        if measured and asked is not None:
            mixed = True
            count.lerp_(asked.to(count), measured.mix)
        count.add_(options.ridge / rows).mul_(weight)
    total = counts.sum(dim=0)
    counts.div_(torch.where(total > 0, total, 1.0))  # with ε = 0, rows that nobody has moved
    counts.mul_(counts.new_tensor(active.coefficients)[:, None])
    merged = base.to(active.dtype, copy=True)
    for block in blocks(rows, width, base.device):
        for count, expert in zip(counts, active.experts, strict=True):
            delta = task_vector(expert[block], base[block], active.dtype)
            merged[block] += delta.mul_(count[block, None]).mul_(options.scale)
    precision = str(active.dtype).removeprefix("torch.")
    mix = measured.mix if mixed and measured else None
    return merged, active.record("ace_relative", precision=precision, mix=mix)
