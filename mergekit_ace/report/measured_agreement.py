# SPDX-License-Identifier: Apache-2.0
"""What a report says of estimated and measured covariances, by kind of tensor and in words."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import Any

from mergekit_ace.naming import without_numbers
from mergekit_ace.report.tables import Report, Row


def own_cosines(row: Row) -> list[float]:
    """Return the cosines between the estimates of a matrix and their own tasks' covariances."""
    rows = row.matrix["agreement"]["cosine"]
    return [value for t, values in enumerate(rows) if (value := values[t]) is not None]


def other_cosines(row: Row) -> list[float]:
    """Return the cosines between the estimates of a matrix and the covariances of other tasks."""
    rows = row.matrix["agreement"]["cosine"]
    return [v for t, values in enumerate(rows) for s, v in enumerate(values) if s != t and v]


def overlaps(row: Row) -> list[float]:
    """Return the overlaps of leading subspaces, the mean squared cosines of their angles."""
    known = (angles for angles in row.matrix["agreement"]["angles"] if angles is not None)
    return [_mean([math.cos(math.radians(a)) ** 2 for a in angles]) for angles in known]


def agreement_by_kind(report: Report) -> dict[str, dict[str, Any]]:
    """Return means over experts and layers by kind of tensor; empty if nothing was measured.

    Each has `own` and `others`, the mean cosines with the covariance of the own and of the other
    tasks (None without any), and `overlap` of the leading subspaces, with what random ones have as
    `chance`.
    """
    kinds: dict[str, list[Row]] = defaultdict(list)
    for row in report.rows:
        if "agreement" in row.matrix and own_cosines(row):
            kinds[without_numbers(str(row.line["tensor"]))].append(row)
    return {
        kind: {
            "own": _mean([value for row in rows for value in own_cosines(row)]),
            "others": _mean([value for row in rows for value in other_cosines(row)]),
            "overlap": _mean([value for row in rows for value in overlaps(row)]),
            "chance": rows[0].matrix["agreement"]["size"] / rows[0].columns,
        }
        for kind, rows in kinds.items()
    }


def agreement_sentences(report: Report) -> Iterator[str]:
    """Yield how far the estimates agree with what was measured."""
    kinds = agreement_by_kind(report)
    if not kinds:
        return
    own, others = (_mean([k[key] for k in kinds.values() if k[key]]) for key in ("own", "others"))
    best = max(kinds, key=lambda kind: kinds[kind]["own"])
    worst = min(kinds, key=lambda kind: kinds[kind]["own"])
    beside = f", and {others:.2f} with those of the other tasks" if others else ""
    yield (
        f"Estimates ΔᵀΔ have a cosine of {own:.2f} with the measured covariances of their own "
        f"tasks{beside}; {kinds[best]['own']:.2f} in {best}, {kinds[worst]['own']:.2f} in {worst}."
    )


def _mean(values: Sequence[float]) -> float | None:
    return math.fsum(values) / len(values) if values else None
