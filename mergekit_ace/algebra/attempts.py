# SPDX-License-Identifier: Apache-2.0
"""The solve of one matrix: in float32 as long as that keeps enough digits, then in float64."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from mergekit_ace.algebra.closed_form import IllConditionedError, Solution
from mergekit_ace.algebra.covariance import Covariances
from mergekit_ace.algebra.dual import solve_dual
from mergekit_ace.algebra.forms import COSTS, Form
from mergekit_ace.algebra.mixing import solve_lean, solve_tall
from mergekit_ace.algebra.primal import solve_primal
from mergekit_ace.algebra.records import MatrixRecord
from mergekit_ace.algebra.spectrum import WeakDirectionsError
from mergekit_ace.algebra.task_vectors import ActiveExperts

SOLVERS = {"primal": solve_primal, "tall": solve_tall, "lean": solve_lean, "dual": solve_dual}
# Below this many operations float64 costs milliseconds on anything.
SMALL_SYSTEM = 2**32

Merge = Callable[[Form, torch.dtype], tuple[Tensor, MatrixRecord]]


def solve(covariances: Covariances, form: Form, *, prior: bool, refined: bool) -> Solution:
    """The closed form, by one of its forms; see there."""
    return SOLVERS[form](covariances, prior=prior, refined=refined)


def attempt(
    merge: Merge,
    forms: Sequence[Form],
    shape: Sequence[int],
    active: ActiveExperts,
    *,
    refined: bool,
) -> tuple[Tensor, MatrixRecord]:
    """The merge by the first form and dtype that keep enough digits.

    Args:
        merge: by a form and a dtype of products, factor and solve.
        forms: in the order in which they are to be tried in float32, see `choose_forms`.
        shape: of the matrix, (o, i).
        active: its experts.
        refined: whether a refinement follows.

    Raises:
        IllConditionedError: even float64 was not enough.
    """
    *attempts, last = _attempts(forms, shape, active, refined)
    for form, dtype in attempts:
        try:
            return merge(form, dtype)
        except (IllConditionedError, WeakDirectionsError):
            pass  # the next attempt keeps more digits
    return merge(*last)


def _attempts(
    forms: Sequence[Form], shape: Sequence[int], active: ActiveExperts, refined: bool
) -> list[tuple[Form, torch.dtype]]:
    """Forms and dtypes to be tried in turn; the last one is always in float64."""
    exact: tuple[Form, torch.dtype] = (forms[0], torch.float64)
    rows, columns = shape
    operations = COSTS[forms[0]](rows, columns, len(active.experts), refined).operations
    if active.dtype != torch.float32 or operations <= SMALL_SYSTEM:
        return [exact]
    return [*((form, torch.float32) for form in forms), exact]
