# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import math
import statistics

import pytest

from mergekit_ace.algebra.task_vectors import measure_heterogeneity


def test_sample_variance_over_squared_mean():
    tau = [0.5, 3.0, 20.0]
    logs = [math.log(value) for value in tau]
    got = measure_heterogeneity(tau)
    assert got.log_variance == pytest.approx(statistics.variance(logs))
    assert got.gamma == pytest.approx(statistics.variance(logs) / statistics.mean(logs) ** 2)


def test_mean_log_of_exactly_zero():
    assert measure_heterogeneity([0.5, 2.0]).gamma == math.inf
    assert measure_heterogeneity([1.0, 1.0]).gamma == 0


def test_extreme_values_stay_finite():
    got = measure_heterogeneity([1e-300, 1e300])
    assert math.isfinite(got.log_variance)
