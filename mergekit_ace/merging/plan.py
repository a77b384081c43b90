# SPDX-License-Identifier: Apache-2.0
"""The plan of a merge that is run, and what its result depends on."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import yaml
from mergekit.architecture import WeightInfo
from mergekit.common import ModelReference
from mergekit.io.tasks import LoaderCache
from mergekit.options import MergeOptions

from mergekit_ace.adapters.merge import use_adapters
from mergekit_ace.adapters.read import (
    Adapter,
    adapter_folder,
    base_of,
    find_changes,
    read_adapters,
)
from mergekit_ace.check.check import Treatment, check_merge, plan_whole
from mergekit_ace.files.checkpoints import check_references
from mergekit_ace.files.models import Checkpoint, checkpoint_of
from mergekit_ace.files.quantised import open_quantised
from mergekit_ace.files.saving import file_states, package_versions
from mergekit_ace.merge_config import shown_errors
from mergekit_ace.merging.shards import MERGE_PACKAGES
from mergekit_ace.methods.base import FILE_PARAMETERS
from mergekit_ace.naming import ConfigError, listed
from mergekit_ace.planning import PlannedMerge, read_merge_config

# Flags that change neither a tensor nor which files there are.
_FREE_FLAGS = set(
    """
    quiet verbosity lazy_unpickle async_write write_threads gpu_rich multi_gpu cuda num_threads
    transformers_cache lora_merge_cache
    """.split()
)


@dataclass(frozen=True)
class MergeSettings:
    """What the command line of `mergekit-ace merge` says beside mergekit's flags."""

    workers: int = 1  # processes that compute; 1 without a cluster: this one
    ray: str | None = None  # address of a Ray cluster, `auto` for the one at hand
    overwrite: bool = False  # drop whatever merge or model is there, instead of going on with it
    strict: bool = True  # stop at errors of the check before and after the merge
    unplanned: Treatment = "error"  # of tensors that mergekit's architecture does not plan
    prompt: str | None = None  # a text that the result is to continue


def plan_run(
    path: Path, options: MergeOptions, settings: MergeSettings
) -> tuple[PlannedMerge, dict[ModelReference, Checkpoint]]:
    """Check a merge, find or download its models, and plan; also return their headers.

    A `ConfigError` names all that is wrong, or that mergekit leaves out, with the remedies.
    """
    if settings.strict:
        findings = check_merge(path, options, unplanned=settings.unplanned).findings
        if errors := shown_errors(findings, quiet=options.quiet):
            raise ConfigError(f"{errors}\nNothing was merged; --no-check leaves this check out")
    config, source = read_merge_config(path)
    cache, models = LoaderCache(), config.referenced_models()
    cache.setup(options)
    check_references(models)
    adapters = read_adapters(models)
    for model, adapter in adapters.items():
        adapter.check_ties()
        _check_places(model, adapter)
        cache.loaders[model] = cache.get(base_of(model))  # mergekit would merge the adapter
    folders = {model: Path(cache.get(model).index.base_path) for model in models}
    checkpoints = {model: checkpoint_of(model, folder) for model, folder in folders.items()}
    open_quantised(checkpoints)
    plan, findings = plan_whole(
        config, source, options, checkpoints, settings.unplanned, as_run=True
    )
    if errors := shown_errors(findings, quiet=settings.strict or options.quiet):
        raise ConfigError(f"{errors}\nNothing was merged")
    saves = {
        name: save.model_copy(update={"tensor_task": use_adapters(save.tensor_task, adapters)})
        for name, save in plan.saves.items()
    }
    return replace(plan, saves=saves), checkpoints


def _check_places(model: ModelReference, adapter: Adapter) -> None:
    """Raise a `ConfigError` if an adapter changes what the files of its base do not hold."""
    base = base_of(model)
    names = LoaderCache().get(base).index.tensor_paths
    found = [find_changes({model: WeightInfo(name=name)}, {model: adapter}) for name in names]
    held = {changes[model].name for changes in found if changes}
    homeless = [name for name in adapter.changes if name not in held]
    if homeless:
        raise ConfigError(
            f"{model.lora} has {listed(homeless)}, which {base} does not; merge the adapter into "
            "its base by peft's merge_and_unload, and give the model that save_pretrained writes"
        )


def input_files(plan: PlannedMerge) -> set[Path]:
    """Return what the workers read: folders of models, their files, and what parameters name."""
    folders = {Path(LoaderCache().get(m).index.base_path) for m in plan.config.referenced_models()}
    folders |= {adapter_folder(m.lora) for m in plan.config.referenced_models() if m.lora}
    files = (path for folder in folders for path in folder.iterdir())
    named = (Path(path).expanduser() for path in plan.named_paths(*FILE_PARAMETERS))
    return {*folders, *files, *named}


def fingerprint(plan: PlannedMerge) -> dict[str, Any]:
    """Return what a merge depends on, as JSON; where it has changed, the merge is not resumed.

    The number of threads counts as a flag: the last bits of a sum depend on it.
    """
    reports = {Path(path).expanduser().resolve() for path in plan.named_paths("report")}
    files = {path for path in input_files(plan) if path.is_file() and path.resolve() not in reports}
    named = plan.named_paths(*FILE_PARAMETERS)
    flags = plan.options.model_dump(exclude=_FREE_FLAGS)
    return {
        # mergekit's own dump to JSON fails where the name of a model holds a space or quotes
        "config": json.loads(json.dumps(yaml.safe_load(plan.source), default=str)),
        "flags": flags | {"num_threads": torch.get_num_threads()},
        "versions": package_versions(*MERGE_PACKAGES),
        "inputs": file_states(sorted({*map(str, files), *named})),
        "unplanned": sorted({"merge" if t.merged else "base" for t in plan.unplanned}) or None,
    }
