# SPDX-License-Identifier: Apache-2.0
"""Configs of documentation and examples, checked against what mergekit and the trainer accept."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml
from mergekit import merge_methods
from mergekit.config import MergeConfiguration
from mergekit.merge_methods.base import ParameterScope

from mergekit_ace.calibration.calibrate import CalibrateConfig
from mergekit_ace.score.config import ScoreConfig, SearchConfig
from mergekit_ace.training.config import DistillConfig, TrainConfig
from mergekit_ace.training.statistics import StatisticsConfig

EXAMPLES = Path(__file__).resolve().parents[1] / "examples"


# A key that only configs of one command have, and what reads them; the rest is a `train.yml`.
READERS = {
    "teacher": DistillConfig,
    "merges": ScoreConfig,
    "search": SearchConfig,
    "merged_model": CalibrateConfig,
}


def check_merge_config(source: dict[str, Any]) -> None:
    """Raise unless a merge has only settings and parameters that exist, with values in range.

    mergekit drops what a method did not declare without a word.
    """
    config = MergeConfiguration.model_validate(source)
    assert set(source) <= set(MergeConfiguration.model_fields)
    declared = {p.name: p for p in merge_methods.get(config.merge_method).spec.parameters}
    of_experts = {n: p for n, p in declared.items() if p.scope != ParameterScope.SHARED}
    places = [(declared, config)] + [(of_experts, model) for model in config.models or []]
    for known, place in places:
        for name, setting in (place.parameters or {}).items():
            for value in setting if isinstance(setting, list) else [setting]:
                if name != "report":  # opens the file
                    known[name].validate(getattr(value, "value", value))


def check_config(source: dict[str, Any]) -> None:
    """Raise unless this is a whole config of some command."""
    if "merge_method" in source:
        check_merge_config(source)
        return
    reader = next((kind for key, kind in READERS.items() if key in source), TrainConfig)
    if reader is TrainConfig and all("data" not in model for model in source["models"]):
        reader = StatisticsConfig
    reader.model_validate(source)


def read_config(text: str) -> dict[str, Any]:
    """Return the mapping that a YAML document holds."""
    source = yaml.safe_load(text)
    assert isinstance(source, dict), text
    return source


def write_task(folder: Path, name: str, rows: object, **asked: object) -> None:
    """Write a task of lm-evaluation-harness: several choices, by a file of rows."""
    task = {
        "task": name,
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": {"test": str(rows)}},
        "test_split": "test",
        "output_type": "multiple_choice",
        "metric_list": [{"metric": "acc"}],
        **{f"doc_to_{part}": how for part, how in asked.items()},
    }
    (folder / f"{name}.yaml").write_text(yaml.safe_dump(task))
