# SPDX-License-Identifier: Apache-2.0
"""Coefficients for the rows that learn them: the package's own trainer, on unlabelled samples."""

from __future__ import annotations

import shutil
from pathlib import Path

from evidence.families import FOLDER, Family
from evidence.rows import Row

from mergekit_ace.training.config import TrainConfig
from mergekit_ace.training.run import run_training


def learn(family: Family, row: Row) -> Path:
    """The coefficient file of a row that learns; trained unless it is there.

    Args:
        family: one with `unlabelled` samples.
        row: one with `learn`, what a `train.yml` says beside models and data.
    """
    assert row.learn is not None
    name = f"{family.name}-{family.seed}-{len(family.tasks)}-{row.name}".replace(" ", "-")
    folder = FOLDER / "learned" / name
    file = folder / "coefficients.safetensors"
    if not file.exists():
        given = dict(row.learn)
        config = family.unlabelled(given.pop("samples"), given.pop("rehearsed", 0)) | {
            "compare": {"direct": False, "task_arithmetic": []},
            **given,
        }
        config["training"] = {**given["training"], "seed": family.seed}
        run_training(TrainConfig.model_validate(config), folder, quiet=True)
        shutil.rmtree(folder / "state", ignore_errors=True)
    return file
