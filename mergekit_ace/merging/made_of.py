# SPDX-License-Identifier: Apache-2.0
"""What makes a merge the merge that it is: config, flags, versions, inputs."""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Iterable
from importlib.metadata import version
from pathlib import Path
from typing import Any

from mergekit.common import ModelReference
from mergekit.io.tasks import LoaderCache

from mergekit_ace.files import file_states
from mergekit_ace.merging.job import MergeJob, MergePlan

PACKAGES = ("mergekit", "mergekit-ace", "torch", "transformers", "safetensors")
# Flags that change neither a tensor nor which files there are.
FREE_FLAGS = set(
    """
    quiet verbosity lazy_unpickle async_write write_threads gpu_rich multi_gpu cuda num_threads
    transformers_cache lora_merge_cache
    """.split()
)
# Parameters that name files whose content goes into the result.
FILE_PARAMETERS = ("coefficients", "learner")


def merge_identity(job: MergeJob, plan: MergePlan) -> dict[str, Any]:
    """All that the result depends on, as JSON has it.

    Files are named by their model, so that a family may be moved as a whole. The number of threads
    counts as a flag: the last bits of a sum depend on it.
    """
    config = job.config()
    flags = {name: value for name, value in job.options.items() if name not in FREE_FLAGS}
    return {
        "config": config.model_dump(mode="json", exclude_defaults=True),
        "flags": {**flags, "num_threads": job.threads},
        "versions": versions(),
        "inputs": {str(model): _model_files(model) for model in config.referenced_models()},
        "files": file_states(named_paths(plan, FILE_PARAMETERS)),
    }


def versions() -> dict[str, str]:
    """Of the packages that a result depends on."""
    return {name: version(name) for name in PACKAGES}


def named_paths(plan: MergePlan, parameters: Iterable[str]) -> list[str]:
    """Paths that parameters of tensors name, each once."""
    found: dict[str, None] = {}
    for save in plan.saves.values():
        values = dict(save.tensor_task.parameters.items())
        found |= {values[n]: None for n in parameters if isinstance(values.get(n), str)}
    return list(found)


def _model_files(model: ModelReference) -> dict[str, list[Any]]:
    """Size, time of change, and hash of the header, by file name."""
    folders = {"": Path(LoaderCache().get(model).index.base_path)}
    for part, path in (("base/", model.model), ("adapter/", model.lora)):
        folder = Path(path.path).expanduser() if path else None
        if model.lora and folder and folder.is_dir():
            folders[part] = folder
    return {
        prefix + path.name: _state(path)
        for prefix, folder in folders.items()
        for path in sorted(folder.iterdir())
        if path.is_file()
    }


def _state(path: Path) -> list[Any]:
    status = path.stat()
    state: list[Any] = [status.st_size, status.st_mtime_ns]
    return [*state, _header_hash(path)] if path.suffix == ".safetensors" else state


def _header_hash(path: Path) -> str:
    with open(path, "rb") as file:
        start = file.read(8)
        length = struct.unpack("<Q", start)[0] if len(start) == 8 else 0
        return hashlib.sha256(start + file.read(min(length, 2**27))).hexdigest()
