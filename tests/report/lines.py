# SPDX-License-Identifier: Apache-2.0
"""Lines of reports, made by hand where a test needs certain numbers."""

from __future__ import annotations

import math
from typing import Any

from mergekit_ace.methods.report_lines import Record
from mergekit_ace.report.summary import Report


def made_line(
    name: str | None, tau: list[float], rule: str = "ace", **changes: Any
) -> dict[str, Any]:
    """A matrix of 10 × 20 that was looked at, W0 of norm 100, task vectors all orthogonal."""
    count = len(tau)
    identity = [[float(a == b) for b in range(count)] for a in range(count)]
    line: dict[str, Any] = {
        "tensor": name,
        "method": "ace",
        "shape": [10, 20],
        "layout": "matrix",
        "models": [f"org/expert-{t}" for t in range(count)],
        "relative_size": [math.sqrt(value) / 100 for value in tau],
        "base_norm": 100.0,
        "norm": [math.sqrt(value) for value in tau],
        "unchanged": [0.0] * count,
        "cosine": identity,
        "rule": rule,
        "weight": [1.0] * count,
        "tau": tau,
        "changed": [1] * count,
    }
    if rule != "mean":  # what a line has only where a closed form was solved
        line |= {
            "gamma": 0.01,
            "log_variance": 0.02,
            "statistic": "gamma",
            "threshold": 0.3,
            "heterogeneous": False,
            "refined": False,
            "ridge": 0.5,
            "amplification": 1.0,
        }
    return line | changes


def layers(count: int, tau: list[float], **changes: Any) -> list[dict[str, Any]]:
    return [made_line(f"model.layers.{n}.mlp.up_proj.weight", tau, **changes) for n in range(count)]


def report_of(lines: list[dict[str, Any]]) -> Report:
    return Report([Record.model_validate(line) for line in lines])
