# SPDX-License-Identifier: Apache-2.0
"""The closed form against a least squares on all rows, stacked."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from stacked import stacked_least_squares

from mergekit_ace.algebra.least_squares import mean_product, ridge_factor, solve_from


@pytest.mark.parametrize("ridge", [1e-3, 1.0])
def test_the_closed_form_is_the_least_squares(rng, ridge):
    draw = partial(torch.randn, generator=rng)
    start = draw(5, 8)
    rows = [(draw(40, 8), draw(40, 5), 0.3), (draw(30, 8), draw(30, 5), 0.7)]
    gram = sum(w * mean_product(x, x) for x, _, w in rows)
    cross = sum(w * mean_product(y, x) for x, y, w in rows)
    found = solve_from(start, gram, cross, ridge_factor(gram, ridge))
    assert torch.allclose(found, stacked_least_squares(rows, start, ridge), atol=1e-6)


def test_products_of_many_rows_are_added_in_float64(rng):
    rows = 1 + 1e-3 * torch.randn(20000, 2, generator=rng)
    expected = rows.double().mT @ rows.double() / len(rows)
    assert torch.allclose(mean_product(rows, rows), expected, rtol=1e-6)


def test_inputs_that_are_zero_keep_the_start(rng):
    start = torch.randn(3, 4, generator=rng)
    nothing = torch.zeros(4, 4, dtype=torch.float64)
    found = solve_from(start, nothing, torch.zeros(3, 4), ridge_factor(nothing, 1.0))
    assert torch.equal(found, start.double())
