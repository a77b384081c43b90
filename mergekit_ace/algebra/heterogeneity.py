# SPDX-License-Identifier: Apache-2.0
"""How much experts differ in scale (step 1 of ACE-Merging, Eq. 7)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Heterogeneity:
    """Statistics of log τ_t over the active experts.

    Attributes:
        gamma: Var_t[log τ_t] / (mean_t log τ_t)², Eq. 7. It depends on the unit of the weights and
            diverges where the τ_t lie around 1; infinite where their mean log is exactly 0.
        log_variance: Var_t[log τ_t] alone, the same in every unit.

    Both use the sample variance (divisor T − 1); the paper does not say which, its authors'
    implementation does.
    """

    gamma: float
    log_variance: float


def measure_heterogeneity(tau: Sequence[float]) -> Heterogeneity:
    """The statistics for τ_t > 0 of at least two experts."""
    logs = [math.log(value) for value in tau]
    mean = math.fsum(logs) / len(logs)
    variance = math.fsum((value - mean) ** 2 for value in logs) / (len(logs) - 1)
    if variance == 0:
        return Heterogeneity(gamma=0.0, log_variance=0.0)
    square = mean * mean
    return Heterogeneity(gamma=variance / square if square > 0 else math.inf, log_variance=variance)
