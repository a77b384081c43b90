# SPDX-License-Identifier: Apache-2.0
"""How statistics of a family are measured."""

from __future__ import annotations

from pathlib import Path

from mergekit_ace.files.statistics import Statistics, load_statistics
from mergekit_ace.training.measuring import StatisticsConfig, measure_statistics


def measure(config: dict, out: Path, *kinds: str, **options) -> Statistics:
    settings = StatisticsConfig.model_validate({**config, "measure": kinds or ["covariances"]})
    return load_statistics(str(measure_statistics(settings, out, quiet=True, **options)))
