# SPDX-License-Identifier: Apache-2.0
"""ACE-Merging of one matrix: Xu et al., CVPR 2026, arXiv 2603.02945, Algorithm 1.

task vectors -> heterogeneity -> covariance sums -> closed form -> spectrum -> added to the base.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

from torch import Tensor

from mergekit_ace.algebra.closed_form import (
    Attempt,
    choose_attempts,
    first_success,
    solve,
    solve_guarded,
)
from mergekit_ace.algebra.covariance import Covariances, Solution, estimate_covariances
from mergekit_ace.algebra.layouts import by_layout, resolve_layout
from mergekit_ace.algebra.linalg import full_precision
from mergekit_ace.algebra.low_rank import CoreSpace
from mergekit_ace.algebra.measured import MeasuredInputs
from mergekit_ace.algebra.records import (
    AceOptions,
    Layout,
    MatrixRecord,
    Observer,
    TensorRecord,
    show,
)
from mergekit_ace.algebra.refinement import IsotropicComponent, refine
from mergekit_ace.algebra.ridge_floor import amplification
from mergekit_ace.algebra.rounding_noise import genuine_share
from mergekit_ace.algebra.task_vectors import (
    ActiveExperts,
    Heterogeneity,
    check_versions,
    measure_heterogeneity,
    merge_mean,
    merge_trivial,
    select_active,
)


@dataclass(frozen=True)
class Branch:
    """What step 1 decides for one matrix.

    Attributes:
        statistics: both measures of heterogeneity.
        heterogeneous: whether the chosen one exceeds the threshold.
        normalized: whether covariances are divided by their traces.
        rank: k of the refinement; 0 without.
    """

    statistics: Heterogeneity
    heterogeneous: bool
    normalized: bool
    rank: int


def merge_tensor(
    base: Tensor,
    experts: Sequence[Tensor],
    weights: Sequence[float] | None = None,
    options: AceOptions | None = None,
    layout: Layout = "auto",
    coefficients: Sequence[float] | None = None,
    *,
    least_memory: bool = False,
    observe: Observer | None = None,
    attempts: Sequence[Attempt] | None = None,
    space: CoreSpace | None = None,
    measured: MeasuredInputs | None = None,
) -> tuple[Tensor, TensorRecord]:
    """Merge the versions of one stored tensor by ACE-Merging.

    Args:
        base: W0. ``matrix``: (o, i); ``transposed``: (…, i, o); ``stacked``: (…, o, i), the leading
            axes a batch of matrices; ``flattened``: (o, …), read as (o, rest); ``mean``: any.
        experts: W_t, each shaped as `base`.
        weights: w_t ≥ 0 per expert, 1 by default.
        options: see `AceOptions`.
        layout: see `resolve_layout`; ``auto`` knows no name and no architecture here.
        coefficients: of the components, T + 1, see `merge_matrix`.
        least_memory: take the form with the least working memory instead of the fastest.
        observe: called for every matrix, see `merge_matrix`.
        attempts: of every matrix, see `merge_matrix`.
        space: of which the tensors are cores, if they are; `base` is 0 then.
        measured: of the inputs, where there is one matrix, see `merge_matrix`.

    Returns:
        The merged tensor, shaped as `base`, in the compute dtype or wider, and its record. Where no
        expert changed anything it is `base` itself.

    Raises:
        TypeError, ValueError, IllConditionedError, OverflowError: see `merge_matrix`.
    """
    options = options or AceOptions()
    weights = weights if weights is not None else [1.0] * len(experts)
    check_versions(base, experts, weights)

    matrix = partial(
        merge_matrix,
        weights=weights,
        options=options,
        observe=observe,
        coefficients=coefficients,
        least_memory=least_memory,
        attempts=attempts,
        space=space,
        measured=measured,
    )

    def mean(base: Tensor, experts: Sequence[Tensor]) -> tuple[Tensor, MatrixRecord]:
        own = coefficients and coefficients[: len(experts)]
        active = select_active(base, experts, weights, options.dtype, own)
        return merge_mean(base, active, options.scale)

    return by_layout(base, experts, resolve_layout(layout, None, base.ndim), matrix, mean)


@full_precision()
def merge_matrix(
    base: Tensor,
    experts: Sequence[Tensor],
    weights: Sequence[float] | None = None,
    options: AceOptions | None = None,
    observe: Observer | None = None,
    coefficients: Sequence[float] | None = None,
    *,
    least_memory: bool = False,
    attempts: Sequence[Attempt] | None = None,
    space: CoreSpace | None = None,
    measured: MeasuredInputs | None = None,
) -> tuple[Tensor, MatrixRecord]:
    """Merge the versions of one matrix.

    Args:
        base: W0, (o, i), any floating dtype, finite. The layer computes W0 @ x.
        experts: W_t, each (o, i), finite.
        weights: w_t ≥ 0, one per expert; only their ratios matter; 0 leaves an expert out.
        options: see `AceOptions`.
        observe: called with X, (o, i), of the closed form, and again once it is refined; from the
            start if that has to be computed anew with more digits. It must not write to X.
        coefficients: λ_t of the experts' components of X, and last that of the refinement, T + 1 in
            all: any finite numbers, 1 by default. What is refined is X with all of them at 1. With
            others, and a prior or a refinement, the closed form is computed twice.
        least_memory: take the form with the least working memory instead of the fastest.
        attempts: forms and precisions to try in turn; by default see `choose_attempts`.
        space: of which the matrices are cores, if they are; `base` is 0 then, and so is W0.
        measured: covariances of the inputs, which take the place of a share of the estimates; not
            together with `space`.

    Working memory, beside the inputs and the result: at most four float32 matrices of max(i², o·i)
    entries, or in the dual form of max(N², o·i) with N = T·o, whatever T is (with a refinement, F
    and six of min(o, i)², if that is more), and six blocks of 4 MiB, or of an eighth of a matrix up
    to 16 MiB. Twice that for the few matrices that have to be solved in float64, and for float64
    weights.

    A prior or a refinement that would turn the merge against the experts is left out: see
    `solve_guarded` and `choose_component`.

    Returns:
        W0 + λ X, (o, i), in the compute dtype or wider (the base itself, uncast, where no expert
        changed it), and the record of what was done.

    Raises:
        TypeError, ValueError: the versions do not belong together, see `check_versions`, are no
            matrices of floating-point numbers, or are not finite.
        IllConditionedError: A cannot be factored, even in float64; raise ``epsilon``.
        OverflowError: a task vector overflows the compute dtype.
    """
    options = options or AceOptions()
    weights = weights if weights is not None else [1.0] * len(experts)
    check_versions(base, experts, weights)
    if base.ndim != 2:
        raise ValueError(f"the base has {base.ndim} axes, and a matrix two; see merge_tensor")
    *own, refinement = coefficients or [1.0] * (len(experts) + 1)
    active = select_active(base, experts, weights, options.dtype, own, space)
    trivial = merge_trivial(base, active, options.scale)
    if trivial is not None:
        return trivial
    if active.shape[0] == 1:  # one row is its own column mean: a vector in the shape of a matrix
        return merge_mean(base, active, options.scale)
    for version in (base, *active.experts):
        if not version.is_floating_point():
            raise TypeError(f"a matrix of {version.dtype} is no weight; convert it to float32")
    branch = decide_branch(base, active, options)
    measured = measured and measured.of(active.positions)
    if attempts is None:
        attempts = choose_attempts(
            base, active,
            refined=branch.rank > 0, least_memory=least_memory, measured=measured is not None,
        )  # fmt: skip

    def merge(attempt: Attempt) -> tuple[Tensor, MatrixRecord]:
        return _merge(base, active, options, branch, attempt, observe, refinement, measured)

    return first_success(attempts, merge)


def decide_branch(base: Tensor, active: ActiveExperts, options: AceOptions) -> Branch:
    """Take step 1: how much do the experts differ in scale, and what follows from it (Eq. 7)?

    What counts of τ_t is what is not the rounding of the expert's checkpoint, τ_t − r_t². (In the
    paper it is τ_t, which is the same unless an expert is stored in a coarser precision.)
    """
    given = zip(active.experts, active.tau, strict=True)
    statistics = measure_heterogeneity(
        [tau * genuine_share(expert, base, tau) for expert, tau in given]
    )
    value = statistics.gamma if options.heterogeneity == "gamma" else statistics.log_variance
    heterogeneous = value > options.heterogeneity_threshold
    switch = {"auto": heterogeneous, "always": True, "never": False}
    rank = int(options.rank_fraction * min(active.shape))
    return Branch(
        statistics=statistics,
        heterogeneous=heterogeneous,
        normalized=switch[options.adaptive_normalization],
        rank=rank if switch[options.spectral_refinement] else 0,
    )


def _merge(
    base: Tensor,
    active: ActiveExperts,
    options: AceOptions,
    branch: Branch,
    attempt: Attempt,
    observe: Observer | None,
    refinement: float,
    measured: MeasuredInputs | None,
) -> tuple[Tensor, MatrixRecord]:
    """Take steps 2 to 6 in one form and precision.

    Raises:
        IllConditionedError: they have too few digits.
    """
    covariances = estimate_covariances(
        base,
        active,
        options,
        normalized=branch.normalized,
        refined=branch.rank > 0,
        dtype=attempt.dtype,
        noise=attempt.noise,
        measured=measured,
    )
    if not covariances.tasks:  # every expert moved all its rows alike
        return merge_mean(base, active, options.scale)
    prior, refined = options.structural_prior, branch.rank > 0
    weighted = any(task.coefficient != 1 for task in covariances.tasks)
    component, floor = None, options.ridge_floor
    if prior or refined or not weighted:
        solution, prior = solve_guarded(
            covariances.unweighted(), attempt.form, prior=prior, refined=refined, floor=floor
        )
        component = choose_component(covariances, solution, branch.rank) if refined else None
        covariances, floor = covariances.with_ridges_of(solution.covariances), False
    if weighted:
        solution = solve(covariances, attempt.form, prior=prior, refined=False, floor=floor)
    merged, covariances = solution.merged, solution.covariances
    size = amplification(merged, covariances)
    show(observe, "closed form", merged, covariances.unit)
    if component is not None:
        merged.add_(component.matrix, alpha=refinement)
        show(observe, "refined", merged, covariances.unit)
    record = MatrixRecord(
        rule="ace",
        weight=active.spread(active.weights, 0.0),
        tau=active.all_tau,
        changed=active.changed,
        gamma=branch.statistics.gamma,
        log_variance=branch.statistics.log_variance,
        statistic=options.heterogeneity,
        threshold=options.heterogeneity_threshold,
        heterogeneous=branch.heterogeneous,
        normalized=branch.normalized,
        prior=prior,
        refined=component is not None,
        epsilon=active.spread(covariances.epsilon, None),
        ridge=covariances.relative_ridge,
        raised=covariances.raised if options.ridge_floor else None,
        amplification=size,
        rank=branch.rank,
        sigma_iso=component and component.strength * covariances.unit,
        form=attempt.form,
        condition=solution.condition,
        precision=str(attempt.dtype).removeprefix("torch."),
        tolerance=attempt.tolerance(solution.condition),
        mix=measured and measured.mix,
    )
    return merged.mul_(options.scale * covariances.unit).add_(base), record


def choose_component(
    covariances: Covariances, solution: Solution, rank: int
) -> IsotropicComponent | None:
    """Return what the refinement adds to X; None where that points against the experts' sum.

    Normalised estimates of experts of very different strength, or weight, can have an R that does
    (departure; with ``refinement_mean: ridged``, which is the paper's to the letter, it is added).
    """
    component = refine(solution, rank)
    if not covariances.ridged_mean and covariances.points_against(component.matrix):
        return None
    return component
