# SPDX-License-Identifier: Apache-2.0
"""Combinations of parameters: few of all, in which any two values meet."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import combinations, product
from typing import Any

import pytest


def covered(strength: int = 2, **values: Iterable[Any]) -> pytest.MarkDecorator:
    """Parametrise a test by combinations in which any `strength` values of arguments meet.

    Where a branch depends on two arguments, pairs reach all that the whole product does.
    """
    listed = [list(each) for each in values.values()]
    rows = list(product(*(range(len(each)) for each in listed)))
    meetings = {row: set(combinations(enumerate(row), strength)) for row in rows}
    left, chosen = set().union(*meetings.values()), []
    while left:
        chosen.append(max(rows, key=lambda row: len(meetings[row] & left)))
        left -= meetings[chosen[-1]]
    combined = [tuple(each[n] for each, n in zip(listed, row, strict=True)) for row in chosen]
    return pytest.mark.parametrize(tuple(values), combined)
