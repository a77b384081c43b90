# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import pytest

from mergekit_ace.algebra.choose import COSTS, MATRICES, choose_forms


@pytest.mark.parametrize(
    ("rows", "columns", "tasks", "refined", "expected"),
    [
        (2048, 8192, 2, False, ["dual"]),  # down-projections of Llama
        (2048, 8192, 3, False, ["dual"]),
        (2048, 8192, 3, True, ["dual"]),
        (512, 2048, 3, False, ["dual"]),  # keys and values
        (2048, 8192, 8, False, ["primal", "lean"]),  # N = 16384 rows
        (2048, 2048, 2, False, ["primal", "tall"]),
        (2048, 2048, 3, False, ["primal", "tall"]),
        (2048, 2048, 8, False, ["primal", "lean"]),
        (2048, 2048, 3, True, ["tall"]),
        (8192, 2048, 3, False, ["tall"]),
        (8192, 2048, 3, True, ["tall"]),
        (128256, 2048, 3, False, ["tall"]),  # an embedding
        (128256, 2048, 8, True, ["tall"]),
        (2, 30, 3, False, ["dual"]),
    ],
)
def test_the_choice(rows, columns, tasks, refined, expected):
    assert choose_forms(rows, columns, tasks, refined=refined) == expected


@pytest.mark.parametrize("shape", [(64, 64), (60, 64), (640, 64), (64, 640), (6400, 64), (10, 999)])
@pytest.mark.parametrize("tasks", [2, 3, 5, 8, 20])
@pytest.mark.parametrize("refined", [False, True])
def test_every_choice_keeps_to_four_matrices(shape, tasks, refined):
    rows, columns = shape
    for form in choose_forms(rows, columns, tasks, refined=refined):
        side = rows * tasks if form == "dual" else columns
        limit = MATRICES * 4 * max(side**2, rows * columns)
        assert COSTS[form](rows, columns, tasks, refined).memory <= limit


def test_operations_of_the_dual_form_by_hand():
    """N = 6: K, its factor, two triangular solves of 2 rows, one product."""
    cost = COSTS["dual"](2, 100, 3, False)
    assert cost.operations == pytest.approx(
        6 * 6 * 100 + 6**3 / 3 + 2 * 6 * 6 * 2 + 2 * 2 * 6 * 100
    )


def test_operations_of_the_primal_form_by_hand():
    """Three symmetric products at half price, two numerators, a factor, a solve of 50 rows."""
    cost = COSTS["primal"](50, 10, 3, False)
    product = 2 * 50 * 10 * 10
    assert cost.operations == pytest.approx(3 * product / 2 + 2 * product + 10**3 / 3 + product)
    refined = COSTS["primal"](50, 10, 3, True)
    assert refined.operations == pytest.approx(cost.operations + product)


def test_operations_of_mixing_by_hand():
    """As many symmetric products, two others; in float64 a factor, and two solves of 10 rows."""
    tall, lean = (COSTS[form](50, 10, 3, False) for form in ("tall", "lean"))
    product = 2 * 50 * 10 * 10
    solves = 2 * 10**3 / 3 + 2 * 2 * 2 * 10**3
    assert tall.operations == pytest.approx(3 * product / 2 + 2 * product + solves)
    assert lean.operations == pytest.approx(tall.operations + product / 2)  # one formed again
    assert COSTS["lean"](50, 10, 3, True).operations == pytest.approx(lean.operations + product)


@pytest.mark.parametrize("shape", [(64, 64), (640, 64), (64, 640), (10, 999)])
@pytest.mark.parametrize("refined", [False, True])
def test_the_lean_choice_takes_the_least_memory(shape, refined):
    (lean,) = choose_forms(*shape, 3, refined=refined, least_memory=True)
    least = COSTS[lean](*shape, 3, refined).memory
    for form in choose_forms(*shape, 3, refined=refined):
        assert least <= COSTS[form](*shape, 3, refined).memory
