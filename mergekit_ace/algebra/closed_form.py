# SPDX-License-Identifier: Apache-2.0
"""The merge of one matrix by the ridge regression that the covariances of its experts define."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from operator import attrgetter
from typing import Any

from torch import Tensor

from mergekit_ace.algebra.covariance import Covariances, Solution
from mergekit_ace.algebra.dual import solve_dual
from mergekit_ace.algebra.forms import Attempt, choose_attempts, first_success
from mergekit_ace.algebra.primal import solve_lean, solve_primal, solve_tall
from mergekit_ace.algebra.records import (
    Form,
    MatrixRecord,
    Observer,
    show,
)
from mergekit_ace.algebra.refinement import IsotropicComponent, refine
from mergekit_ace.algebra.ridge_floor import amplification, solve_within_bound
from mergekit_ace.algebra.task_vectors import ActiveExperts, merge_mean

SOLVERS = {"primal": solve_primal, "tall": solve_tall, "lean": solve_lean, "dual": solve_dual}
# From a form and precision to the estimates, and what only their method records.
Estimate = Callable[[Attempt], tuple[Covariances, dict[str, Any]]]


def merge_by_ridge(
    base: Tensor,
    active: ActiveExperts,
    estimate: Estimate,
    scale: float,
    *,
    measured: bool = False,
    prior: bool = False,
    floor: bool = False,
    rank: int = 0,
    refinement: float = 1.0,
    least_memory: bool = False,
    observe: Observer | None = None,
    attempts: Sequence[Attempt] | None = None,
) -> tuple[Tensor, MatrixRecord]:
    """Merge the versions of one matrix by the closed form.

    Args:
        base: W0, (o, i), finite.
        active: at least two experts W_t, each (o, i), that changed it.
        estimate: of the covariances. Where there are none, the merge is the mean.
        scale: λ.
        measured: whether a covariance is not that of the task vector alone.
        prior: whether the structural prior enters.
        floor: whether the ridge is raised where X would be amplified.
        rank: k of the refinement; 0 without.
        refinement: its coefficient.
        least_memory: take the form with the least working memory instead of the fastest.
        observe: called with X, see `merge_matrix`.
        attempts: forms and precisions to try in turn; by default see `choose_attempts`.

    Returns:
        W0 + λ X, (o, i), in the compute dtype or wider, and the record of what was done.

    Raises:
        IllConditionedError: Σ_t S_t cannot be factored, even in float64.
    """
    if attempts is None:
        attempts = choose_attempts(
            base, active, refined=rank > 0, least_memory=least_memory, measured=measured
        )

    def merge(attempt: Attempt) -> tuple[Tensor, MatrixRecord]:
        covariances, known = estimate(attempt)
        if not covariances.tasks:  # every expert moved all its rows alike
            return merge_mean(base, active, scale)
        solution, component, with_prior = _solve_weighted(
            covariances, attempt.form, prior=prior, floor=floor, rank=rank
        )
        merged, covariances = solution.merged, solution.covariances
        size = amplification(merged, covariances)
        show(observe, "closed form", merged, covariances.unit)
        if component is not None:
            merged.add_(component.matrix, alpha=refinement)
            show(observe, "refined", merged, covariances.unit)
            known |= {"refined": True, "sigma_iso": component.strength * covariances.unit}
        if covariances.epsilon:
            known["epsilon"] = active.spread(covariances.epsilon, None)
        record = active.record(
            prior=with_prior,
            ridge=covariances.relative_ridge,
            raised=covariances.raised if floor else None,
            bounded=covariances.bounded if floor else None,
            amplification=size,
            form=attempt.form,
            condition=solution.condition,
            precision=str(attempt.dtype).removeprefix("torch."),
            tolerance=attempt.tolerance(solution.condition),
            **known,
        )
        return merged.mul_(scale * covariances.unit).add_(base), record

    return first_success(attempts, merge)


def _solve_weighted(
    covariances: Covariances, form: Form, *, prior: bool, floor: bool, rank: int
) -> tuple[Solution, IsotropicComponent | None, bool]:
    """Return X with the tasks' coefficients, what the refinement adds, and whether c is in it.

    The ridge, the prior and the refinement are decided with all coefficients at 1, so that X is
    linear in them.
    """
    weighted, component = any(task.coefficient != 1 for task in covariances.tasks), None
    if not weighted or prior or floor or rank:
        solution, prior = solve_guarded(
            covariances.unweighted(), form, prior=prior, refined=rank > 0, floor=floor
        )
        component = choose_component(solution, rank) if rank else None
        if not weighted:
            return solution, component, prior
        covariances = covariances.with_ridges_of(solution.covariances)
        del solution  # its memory is needed
    return SOLVERS[form](covariances, prior=prior, refined=False), component, prior


def solve(
    covariances: Covariances, form: Form, *, prior: bool, refined: bool, floor: bool = False
) -> Solution:
    """Solve the closed form in one of its forms; see `solve_primal` and the others.

    Args:
        covariances: the estimates of at least one task; all coefficients are 1.
        form: of the closed form.
        prior, refined: see `solve_primal`.
        floor: whether the ridge is raised where X would be amplified (`solve_within_bound`).

    Raises:
        IllConditionedError: the form has too few digits at that precision.
    """
    solver = partial(SOLVERS[form], prior=prior, refined=refined)
    if not floor:
        return solver(covariances)
    return solve_within_bound(
        covariances,
        lambda bound: solver(covariances, floor=bound),
        attrgetter("merged"),
    )


def solve_guarded(
    covariances: Covariances, form: Form, *, prior: bool, refined: bool, floor: bool = False
) -> tuple[Solution, bool]:
    """Solve as `solve` does, without a prior that would turn X against the sum of the experts.

    Where few directions stand out of the ridge, the prior takes out more than the component along
    the all-ones vector, up to all that the experts have in common. (Departure: the paper's always
    enters, and so does ours with ``refinement_mean: ridged``.)

    Args:
        covariances, form, prior, refined, floor: see `solve`.

    Returns:
        The solution, and whether the prior is in it.
    """
    solution = solve(covariances, form, prior=prior, refined=refined, floor=floor)
    if prior and not covariances.ridged_mean and covariances.points_against(solution.merged):
        return solve(covariances, form, prior=False, refined=refined, floor=floor), False
    return solution, prior


def choose_component(solution: Solution, rank: int) -> IsotropicComponent | None:
    """Return what the refinement adds to X; None where that points against the experts' sum.

    Normalised estimates of experts of very different strength, or weight, can have an R that does
    (departure; with ``refinement_mean: ridged``, which is the paper's to the letter, it is added).
    """
    component, covariances = refine(solution, rank), solution.covariances
    if not covariances.ridged_mean and covariances.points_against(component.matrix):
        return None
    return component
