# SPDX-License-Identifier: Apache-2.0
"""What is ready before any worker starts: adapters, and the list of what a merge reads."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterable, Iterator
from pathlib import Path

from filelock import FileLock
from mergekit.architecture import WeightInfo
from mergekit.architecture.conversion import can_convert_checkpoint_keys
from mergekit.common import ModelReference
from mergekit.io.tasks import LoaderCache
from mergekit.options import MergeOptions

from mergekit_ace.adapters.adapter_plan import base_of
from mergekit_ace.adapters.adapter_tasks import find_stored_change, read_adapters
from mergekit_ace.adapters.peft_adapter import Adapter
from mergekit_ace.files.checkpoints import check_model_folder
from mergekit_ace.files.headers import DamagedFileError
from mergekit_ace.merging.job import MergeError
from mergekit_ace.methods.parameters import FILE_PARAMETERS
from mergekit_ace.naming import listed
from mergekit_ace.planning import ConfigError, PlannedMerge, model_folders


def prepare_adapters(
    models: Iterable[ModelReference], options: MergeOptions
) -> Iterator[tuple[ModelReference, str]]:
    """Yield models with adapters, and why one has to be merged into its base first; it is then.

    Raises:
        MergeError: nobody has said where to merge such an adapter.
    """
    for model in models:
        if model.lora is None:
            continue
        reason = _why_first(model)
        if reason and not options.lora_merge_cache:
            raise MergeError(
                f"{reason}. With --lora-merge-cache DIR, PEFT merges {model} into a full model "
                "first, if it can"
            )
        if reason:
            _merge_adapter(model, options)
        yield model, reason


def _why_first(model: ModelReference) -> str:
    """Return why what an adapter changes cannot be added to the base's tensors one by one."""
    try:
        adapter = read_adapters([model])[model]
    except (DamagedFileError, ConfigError) as error:
        return str(error)
    base = base_of(model)
    homeless = _homeless(adapter, set(LoaderCache().get(base).index.tensor_paths))
    return f"{model.lora} has {listed(homeless)}, which {base} does not" if homeless else ""


def _homeless(adapter: Adapter, stored: set[str]) -> list[str]:
    """Return what an adapter changes and the files of its base do not hold."""
    prefix, kind = f"{adapter.network.base_model_prefix}.", adapter.network.config.model_type
    names = {*stored, *(prefix + name for name in stored)}
    held = {find_stored_change(adapter, WeightInfo(name=name)) for name in names}
    return [
        name
        for name, change in adapter.changes.items()
        if change not in held and not can_convert_checkpoint_keys(kind, stored, name)
    ]


def _merge_adapter(model: ModelReference, options: MergeOptions) -> None:
    """Merge an adapter into its model, in the folder where mergekit looks for the result.

    The folder appears when it is complete, and has the time of the newest file that went into it,
    so that it is the same one whenever it is made. mergekit merges into it directly, and takes
    whatever is there for the model: what a killed run has left, or what was made before the
    adapter was trained further. Both are replaced.
    """
    cache = Path(options.lora_merge_cache)
    name = f"{model.model._unique_id()}_{model.lora._unique_id()}"
    newest = _newest_weights(model)
    if _is_whole(cache / name, newest):  # such a cache may be one that nobody can write to
        return
    cache.mkdir(parents=True, exist_ok=True)
    lock, partial = cache / f".{name}.lock", cache / f".{name}.partial"
    with FileLock(lock):  # another merge may be making it
        if not _is_whole(cache / name, newest):
            shutil.rmtree(partial, ignore_errors=True)
            merged = model.merged(str(partial), options.trust_remote_code, options.lora_merge_dtype)
            for path in Path(merged.model.path).iterdir() if newest else ():
                os.utime(path, ns=(newest, newest))
            shutil.rmtree(cache / name, ignore_errors=True)
            os.replace(merged.model.path, cache / name)
            partial.rmdir()
        lock.unlink(missing_ok=True)


def _newest_weights(model: ModelReference) -> int:
    """Return when a file of weights last changed, in ns; 0 for a model and adapter on the Hub."""
    folders = [Path(part.path) for part in (model.model, model.lora) if part is not None]
    kinds = ("*.safetensors", "*.bin", "adapter_config.json")
    files = [path for folder in folders for kind in kinds for path in folder.glob(kind)]
    return max((path.stat().st_mtime_ns for path in files), default=0)


def _is_whole(folder: Path, newest: int) -> bool:
    """Tell whether a folder holds a config and all weights of its index, none of them outdated."""
    try:
        check_model_folder(folder)
        return (folder / "config.json").stat().st_mtime_ns >= newest
    except (DamagedFileError, OSError):
        return False


def needed_files(config: Path, plan: PlannedMerge) -> dict[Path, str]:
    """Return the files and caches that a merge reads, with what they are to it."""
    options = plan.options
    needed = {config: "the config"}
    for parameter in FILE_PARAMETERS:
        paths = map(Path, plan.named_paths(parameter))
        needed |= {path.expanduser(): f"`{parameter}:` of the config" for path in paths}
    for cache in filter(None, (options.lora_merge_cache, options.transformers_cache)):
        needed[Path(cache)] = "the cache of models"
    models = plan.config.referenced_models()
    merged = (Path(LoaderCache().get(model).index.base_path) for model in models)
    for folder in (*model_folders(plan.config), *merged):
        files = folder.iterdir() if folder.is_dir() else ()
        needed |= dict.fromkeys((folder, *files), "a file of a model to be merged")
    return needed
