# SPDX-License-Identifier: Apache-2.0
"""A whole training: labels, statistics, the loop, the comparison, the files."""

from __future__ import annotations

import os
from typing import Any

from mergekit_ace.coefficients.file import CoefficientFile
from mergekit_ace.files import file_states
from mergekit_ace.training.config import TrainConfig
from mergekit_ace.training.family import Family, Models
from mergekit_ace.training.loop import train
from mergekit_ace.training.results import coefficient_file, compare, write_results
from mergekit_ace.training.state import RunFolder, new_accelerator


def run_training(
    config: TrainConfig, out: str | os.PathLike, *, overwrite: bool = False, quiet: bool = False
) -> CoefficientFile:
    """Learn the coefficients that `config` asks for, or go on with that; the files go to `out`.

    Raises:
        TrainingError: something about the config, the models or the data is wrong.
    """
    accelerator = new_accelerator(config.mixed_precision)
    quiet = quiet or not accelerator.is_main_process
    folder = RunFolder(out)
    models = Models.find(config, folder, accelerator)
    if accelerator.is_main_process:
        folder.claim(_identity(config, models, accelerator.num_processes), overwrite=overwrite)
    accelerator.wait_for_everyone()
    family = Family.prepare(config, models, folder, accelerator, quiet=quiet)
    session = family.session(accelerator)
    statistics, depths = family.statistics(folder, accelerator, quiet=quiet)
    trained = train(
        session,
        config.learner,
        statistics,
        depths,
        folder.state / "learner.safetensors",
        quiet=quiet,
    )
    rows = compare(session, trained, family, statistics, depths, folder, quiet=quiet)
    file = coefficient_file(family, trained, statistics, depths, rows)
    if accelerator.is_main_process:
        write_results(file, family, trained, rows, folder, quiet=quiet)
    accelerator.wait_for_everyone()
    return file


def _identity(config: TrainConfig, models: Models, processes: int) -> dict[str, Any]:
    """Config and files: what makes two runs the same."""
    data = [source.path for _, source in config.sources]
    return {
        "config": config.model_dump(mode="json"),
        "processes": processes,
        "files": file_states([models.base, *models.experts, *data]),
    }
