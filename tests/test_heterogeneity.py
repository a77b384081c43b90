# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import math

from mergekit_ace.algebra.task_vectors import measure_heterogeneity


def test_mean_log_of_exactly_zero():
    assert measure_heterogeneity([0.5, 2.0]).gamma == math.inf
    assert measure_heterogeneity([1.0, 1.0]).gamma == 0


def test_extreme_values_stay_finite():
    got = measure_heterogeneity([1e-300, 1e300])
    assert math.isfinite(got.log_variance)
