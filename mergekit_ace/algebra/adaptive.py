# SPDX-License-Identifier: Apache-2.0
"""ACE-Merging of one matrix: Xu et al., CVPR 2026, arXiv 2603.02945, Algorithm 1.

task vectors -> heterogeneity -> covariance sums -> closed form -> spectrum -> added to the base.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch import Tensor

from mergekit_ace.algebra.closed_form import merge_by_ridge
from mergekit_ace.algebra.covariance import Covariances, estimate_covariances
from mergekit_ace.algebra.forms import Attempt
from mergekit_ace.algebra.layouts import resolve_layout
from mergekit_ace.algebra.linalg import full_precision
from mergekit_ace.algebra.low_rank import CoreSpace
from mergekit_ace.algebra.measured import MeasuredInputs
from mergekit_ace.algebra.records import (
    AceOptions,
    Layout,
    MatrixRecord,
    Observer,
    TensorRecord,
)
from mergekit_ace.algebra.rounding_noise import genuine_share
from mergekit_ace.algebra.task_vectors import (
    ActiveExperts,
    Heterogeneity,
    by_layout,
    check_versions,
    measure_heterogeneity,
    select_active,
)

# The least Var_t[log τ_t] at which γ is believed: τ_t that differ by a factor of e. Where τ is
# near 1, γ is large whatever the experts are, and normalisation and refinement gain nothing.
CLEARLY_APART = 1.0


@dataclass(frozen=True)
class Branch:
    """What step 1 decides for one matrix.

    Attributes:
        statistics: both measures of heterogeneity.
        heterogeneous: whether the matrix counts as heterogeneous.
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
        base: W0, any floating dtype, finite. ``matrix``: (o, i), where the layer computes W0 @ x;
            ``transposed``: (…, i, o); ``stacked``: (…, o, i), the leading axes a batch of matrices;
            ``flattened``: (o, …), read as (o, rest); ``mean``: any.
        experts: W_t, finite, each shaped as `base`.
        weights: w_t ≥ 0, one per expert; only their ratios matter; 0 leaves an expert out.
        options: see `AceOptions`.
        layout: see `resolve_layout`; ``auto`` knows no name and no architecture here.
        coefficients: λ_t of the experts' components of X, and last that of the refinement, T + 1 in
            all: any finite numbers, 1 by default. What is refined is X with all of them at 1. With
            others, and a prior, a refinement or the floor of the ridge, the closed form is computed
            twice.
        least_memory: take the form with the least working memory instead of the fastest.
        observe: called with X, (o, i), of every matrix's closed form, and again once it is refined;
            from the start if that has to be computed anew with more digits. It must not write to X.
        attempts: forms and precisions to try in turn; by default see `choose_attempts`.
        space: of which the tensors are cores, if they are; `base` is 0 then, and so is W0.
        measured: covariances of the inputs, where there is one matrix, which take the place of a
            share of the estimates; not together with `space`.

    Working memory for a matrix, beside the inputs and the result: at most four float32 matrices of
    max(i², o·i) entries, or in the dual form of max(N², o·i) with N = T·o, whatever T is (with a
    refinement, F and six of min(o, i)², if that is more), and six blocks of 4 MiB, or of an eighth
    of a matrix up to 16 MiB. Twice that for the few matrices that have to be solved in float64, and
    for float64 weights.

    A prior or a refinement that would turn the merge against the experts is left out: see
    `solve_guarded` and `choose_component`.

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
    check_versions(base, experts, weights, coefficients, len(experts) + 1)
    own = coefficients and coefficients[: len(experts)]
    select = partial(
        select_active, weights=weights, dtype=options.dtype, coefficients=own, space=space
    )
    formula = partial(
        merge_adaptively,
        options=options,
        refinement=coefficients[-1] if coefficients else 1.0,
        observe=observe,
        least_memory=least_memory,
        attempts=attempts,
        measured=measured,
    )
    fixed = resolve_layout(layout, None, base.ndim)
    return by_layout(base, experts, fixed, select, options.scale, formula)


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
    """Merge the versions of one matrix, (o, i); arguments and errors as of `merge_tensor`.

    Returns:
        W0 + λ X, (o, i), and the record of what was done.
    """
    if isinstance(base, Tensor) and base.ndim != 2:
        raise ValueError(f"the base has {base.ndim} axes, and a matrix two; see merge_tensor")
    merged, record = merge_tensor(
        base, experts, weights, options, "matrix", coefficients,
        least_memory=least_memory, observe=observe, attempts=attempts, space=space,
        measured=measured,
    )  # fmt: skip
    return merged, record.matrices[0]


@full_precision()
def merge_adaptively(
    base: Tensor,
    active: ActiveExperts,
    options: AceOptions,
    *,
    refinement: float = 1.0,
    observe: Observer | None = None,
    least_memory: bool = False,
    attempts: Sequence[Attempt] | None = None,
    measured: MeasuredInputs | None = None,
) -> tuple[Tensor, MatrixRecord]:
    """Merge one matrix that at least two experts changed; arguments as of `merge_tensor`."""
    for version in (base, *active.experts):
        if not version.is_floating_point():
            raise TypeError(f"a matrix of {version.dtype} is no weight; convert it to float32")
    branch = decide_branch(base, active, options)
    measured = measured and measured.of(active.positions)
    known = {
        "rule": "ace",
        "gamma": branch.statistics.gamma,
        "log_variance": branch.statistics.log_variance,
        "statistic": options.heterogeneity,
        "threshold": options.heterogeneity_threshold,
        "heterogeneous": branch.heterogeneous,
        "normalized": branch.normalized,
        "refined": False,
        "rank": branch.rank,
        "mix": measured and measured.mix,
    }

    def estimate(attempt: Attempt) -> tuple[Covariances, dict[str, Any]]:
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
        return covariances, dict(known)

    return merge_by_ridge(
        base,
        active,
        estimate,
        options.scale,
        measured=measured is not None,
        prior=options.structural_prior,
        floor=options.ridge_floor,
        rank=branch.rank,
        refinement=refinement,
        least_memory=least_memory,
        observe=observe,
        attempts=attempts,
    )


def decide_branch(base: Tensor, active: ActiveExperts, options: AceOptions) -> Branch:
    """Take step 1: how much do the experts differ in scale, and what follows from it (Eq. 7)?

    What counts of τ_t is what is not the rounding of the expert's checkpoint, τ_t − r_t². (In the
    paper it is τ_t, which is the same unless an expert is stored in a coarser precision.) γ divides
    by (mean log τ)²: where τ is near 1 it is large whatever the experts are. So ``auto`` asks for
    some spread as well (departure).
    """
    given = zip(active.experts, active.tau, strict=True)
    statistics = measure_heterogeneity(
        [tau * genuine_share(expert, base, tau) for expert, tau in given]
    )
    variance = statistics.log_variance
    value = variance if options.heterogeneity == "log_variance" else statistics.gamma
    heterogeneous = value > options.heterogeneity_threshold
    if options.heterogeneity == "auto":
        heterogeneous = heterogeneous and variance > CLEARLY_APART
    switch = {"auto": heterogeneous, "always": True, "never": False}
    rank = int(options.rank_fraction * min(active.shape))
    return Branch(
        statistics=statistics,
        heterogeneous=heterogeneous,
        normalized=switch[options.adaptive_normalization],
        rank=rank if switch[options.spectral_refinement] else 0,
    )
