# SPDX-License-Identifier: Apache-2.0
"""In which form the closed form is solved, and in which precision: counted operations and bytes."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from mergekit_ace.algebra.primal import through_gram
from mergekit_ace.algebra.records import (
    Form,
    IllConditionedError,
    MatrixRecord,
    is_noisy,
    tolerance,
)
from mergekit_ace.algebra.rounding_noise import estimate_rounding
from mergekit_ace.algebra.task_vectors import ActiveExperts

# Operations that take as long as a byte from memory. Two cores of a server do 200 to 400 Gflop/s
# and 15 GB/s, a data-centre GPU 50 Tflop/s and 3 TB/s in float32: 13 to 27.
OPERATIONS_PER_BYTE = 16


@dataclass(frozen=True)
class Cost:
    """What a form takes for one matrix.

    Attributes:
        operations: floating-point operations of products, factors and solves.
        bytes: moved to and from memory, where it is not part of a product.
        memory: bytes of working memory beside inputs and result.
    """

    operations: float
    bytes: float
    memory: float

    @property
    def total(self) -> float:
        """All of it in operations."""
        return self.operations + OPERATIONS_PER_BYTE * self.bytes


def primal_cost(rows: int, columns: int, tasks: int, refined: bool, itemsize: int = 4) -> Cost:
    """Count the (i, i) system, for T matrices (o, i) in a dtype of `itemsize` bytes."""
    area, square = rows * columns, columns**2
    gram = through_gram(rows, columns)
    numerator = 2 * area * columns if gram else 4 * area * rows
    operations = tasks * area * columns + (tasks - 1) * numerator  # symmetric products count half
    operations += columns**3 / 3 + (1 + refined) * 2 * area * columns
    formed = (3 * tasks if gram else 2 * tasks) + refined * tasks  # task vectors
    moved = 3 * formed * area + 6 * tasks * square
    memory = square + max(gram * square, refined * (square + area))
    return Cost(operations, itemsize * moved, itemsize * memory)


def tall_cost(rows: int, columns: int, tasks: int, refined: bool, itemsize: int = 4) -> Cost:
    """Count the (i, i) system with a mixing matrix per task; what is in float64 counts double."""
    return _mixing_cost(rows, columns, tasks, refined, itemsize, tasks - 1)


def lean_cost(rows: int, columns: int, tasks: int, refined: bool, itemsize: int = 4) -> Cost:
    """Count the same with one mixing matrix at a time."""
    return _mixing_cost(rows, columns, tasks, refined, itemsize, 1)


def _mixing_cost(
    rows: int, columns: int, tasks: int, refined: bool, itemsize: int, kept: int
) -> Cost:
    area, square, again = rows * columns, columns**2, max(0, tasks - 1 - kept)
    operations = (tasks + again) * area * columns + (tasks - 1 + refined) * 2 * area * columns
    operations += 2 * columns**3 / 3 + (tasks - 1) * 4 * columns**3
    formed = 2 * tasks + again + refined * tasks
    moved = 3 * formed * area + 8 * (tasks + again) * square
    memory = 8 * square + itemsize * max(kept * square, refined * area)
    return Cost(operations, itemsize * moved, memory)


def dual_cost(rows: int, columns: int, tasks: int, refined: bool, itemsize: int = 4) -> Cost:
    """Count the (N, N) system, N = T·o."""
    area, size = rows * columns, rows * tasks
    operations = size**2 * columns + size**3 / 3 + 2 * size**2 * rows
    operations += (2 + 2 * refined) * size * area
    moved = 3 * 2 * tasks * area + 6 * size**2
    memory = size**2 + (1 + refined) * size * rows + refined * area
    return Cost(operations, itemsize * moved, itemsize * memory)


# Working memory beside inputs and result, in matrices of max(i², o·i) entries (of max(N², o·i) in
# the dual form). All but ``tall`` keep to it whatever T is.
MATRICES = 4

COSTS: dict[Form, Callable[..., Cost]] = {
    "primal": primal_cost,
    "tall": tall_cost,
    "lean": lean_cost,
    "dual": dual_cost,
}


def choose_forms(
    rows: int,
    columns: int,
    tasks: int,
    *,
    refined: bool,
    least_memory: bool = False,
    noisy: bool = False,
    measured: bool = False,
) -> list[Form]:
    """Return the forms for a matrix, in the order in which they are to be tried in float32.

    Args:
        rows, columns: o and i.
        tasks: T.
        refined: whether the spectral refinement follows.
        least_memory: whether memory counts, instead of time.
        noisy: whether the rounding of the experts hides the loss of some digits.
        measured: whether a covariance is not that of the task vector alone.

    The dual form is out of the question where N ≥ i: M Mᵀ is as large as A there, and singular; and
    where a covariance was measured, which is no product of task vectors. Of the other three,
    ``primal`` takes the fewest products unless the matrix is tall; ``tall``, and ``lean`` where
    that would take more than `MATRICES`, lose ten times fewer digits. They follow where ``primal``
    was not enough, and come first with a refinement, which is nearly always so unless the experts
    are noisy.
    """
    costs = {form: cost(rows, columns, tasks, refined) for form, cost in COSTS.items()}
    if rows * tasks >= columns or measured:
        del costs["dual"]
    if least_memory:
        return [min(costs, key=lambda form: costs[form].memory)]
    limit = MATRICES * 4 * columns * max(rows, columns)
    mixing: Form = "tall" if costs["tall"].memory <= limit else "lean"
    cheapest = min(("primal", mixing), key=lambda form: costs[form].total)
    if "dual" in costs and costs["dual"].total < costs[cheapest].total:
        return ["dual"]
    return [mixing] if cheapest == mixing or (refined and not noisy) else ["primal", mixing]


# Below this many operations float64 costs milliseconds on anything.
SMALL_SYSTEM = 2**32

Merged = tuple[Tensor, MatrixRecord]


@dataclass(frozen=True)
class Attempt:
    """One way to compute a merge.

    Attributes:
        form: of the closed form.
        dtype: of products, factor and solve.
        noise: of the experts' rounding in X, see `rounding_in_merge`.
    """

    form: Form
    dtype: torch.dtype
    noise: float = 0.0

    def tolerance(self, condition: float) -> float | None:
        """Return the relative error that is allowed in X, see `tolerance`; None in float64."""
        return tolerance(condition, self.noise) if self.dtype == torch.float32 else None


def choose_attempts(
    base: Tensor,
    active: ActiveExperts,
    *,
    refined: bool,
    least_memory: bool = False,
    measured: bool = False,
) -> list[Attempt]:
    """Return the ways to merge a matrix, in the order in which they are to be tried.

    Float32 goes first, as long as that keeps enough digits; the last one is always in float64.

    Args:
        base: W0, (o, i).
        active: the experts.
        refined, least_memory, measured: see `choose_forms`.
    """
    rows, columns = base.shape
    tasks = len(active.experts)
    choose = partial(
        choose_forms, rows, columns, tasks,
        refined=refined, least_memory=least_memory, measured=measured,
    )  # fmt: skip
    form = choose()[0]
    exact = Attempt(form, torch.float64)
    operations = COSTS[form](rows, columns, tasks, refined).operations
    if active.dtype != torch.float32 or operations <= SMALL_SYSTEM:
        return [exact]
    noise = rounding_in_merge(base, active)
    forms = choose(noisy=is_noisy(noise))
    return [*(Attempt(form, torch.float32, noise) for form in forms), exact]


def rounding_in_merge(base: Tensor, active: ActiveExperts) -> float:
    """Estimate how much of a merge X is the rounding of its experts, as a share of its norm.

    X is Σ_t λ_t C_t W_t with Σ_t W_t = I. Independent errors of energy ν_t² in the C_t put
    Σ_t λ_t² ν_t² ‖W_t‖²/i into ‖X‖², and more by way of the W_t. For W_t = w_t I/T, the mean of the
    experts, which is as small as the W_t can be where they are equally noisy, that is

        Σ_t (λ_t w_t ν_t)² / T².

    It is divided by Σ_t ‖Δ_t‖², which ‖X‖² is seldom far above.

    Args:
        base: W0, (o, i).
        active: the experts that changed it, at least one.

    Returns:
        0 for experts in float32, as far as float32 can tell; seldom above 0.5.
    """
    given = zip(active.experts, active.coefficients, active.weights, strict=True)
    noise = [(c * w) ** 2 * estimate_rounding(expert, base) for expert, c, w in given]
    return (math.fsum(noise) / math.fsum(active.tau)) ** 0.5 / len(noise)


def first_success(attempts: Sequence[Attempt], merge: Callable[[Attempt], Merged]) -> Merged:
    """Return the merge by the first attempt that keeps enough digits.

    Args:
        attempts: in the order in which they are to be tried.
        merge: the merge by one of them.

    Raises:
        IllConditionedError: not even the last one does.
    """
    *others, last = attempts
    for attempt in others:
        try:
            return merge(attempt)
        except IllConditionedError:
            pass  # the next attempt keeps more digits; here, or its memory would stay in use
    return merge(last)
