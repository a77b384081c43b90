# SPDX-License-Identifier: Apache-2.0
"""The plan of a merge that is run, and what its result depends on."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import reduce
from pathlib import Path
from typing import Any, cast

import torch
import yaml
from mergekit.io.tasks import LoaderCache
from mergekit.merge_methods.task_adapter import ExecuteMergeMethodTask
from mergekit.options import MergeOptions
from mergekit.tokenizer import TokenizerInfo

from mergekit_ace.adapters.merge import GatherAdapted, use_adapters
from mergekit_ace.adapters.read import adapter_folder, base_of, read_adapters
from mergekit_ace.check.check import check_merge
from mergekit_ace.files.checkpoints import DTYPES, Checkpoints, open_models, tokenizer_donor
from mergekit_ace.files.saving import file_states, package_versions
from mergekit_ace.merge_config import raise_errors
from mergekit_ace.merging.shards import MERGE_PACKAGES
from mergekit_ace.methods.base import FILE_PARAMETERS
from mergekit_ace.planning import PlannedMerge, PlannedTensor, Treatment

# Flags that change neither a tensor nor which files there are. The number of threads is one that
# does: the last bits of a sum depend on it.
_FREE_FLAGS = """quiet verbosity lazy_unpickle async_write write_threads gpu_rich multi_gpu cuda
    transformers_cache lora_merge_cache lora_merge_dtype num_threads""".split()


def plan_run(
    path: Path, options: MergeOptions, unplanned: Treatment, *, strict: bool, end: str = ""
) -> tuple[PlannedMerge, Checkpoints]:
    """Find or download the models of a merge, and plan it; also return their headers.

    A `ConfigError` names all that mergekit leaves out and, where `strict`, all that is wrong by the
    check, with the remedies and `end`.
    """
    preflight = check_merge(path, options, unplanned=unplanned, strict=strict)
    raise_errors(preflight.findings, quiet=options.quiet, end=end)
    plan, checkpoints = preflight.plan, preflight.checkpoints
    assert plan is not None  # else there are errors
    cache, models = LoaderCache(), plan.config.referenced_models()
    adapters = read_adapters(models)
    open_models(dict.fromkeys((*map(base_of, models), *(m for m in models if not m.lora)), ""))
    for model, adapter in adapters.items():
        adapter.check_ties()
        adapter.check_places(model, cache.get(base_of(model)).index.tensor_paths)
        cache.loaders[model] = cache.get(base_of(model))  # mergekit would merge the adapter
    saves = {}
    for name, save in plan.saves.items():
        task = use_adapters(cast(ExecuteMergeMethodTask, save.tensor_task), adapters)
        planned, dtype = PlannedTensor(task), save.dtype
        if plan.config.dtype is None and getattr(planned.gather, "changes", ()):
            stored = (DTYPES[header.dtype] for header in planned.headers(checkpoints).values())
            dtype = dtype or str(reduce(torch.promote_types, stored)).removeprefix("torch.")
            task = in_float32(task)  # bfloat16 would round changes away
        saves[name] = save.model_copy(update={"tensor_task": task, "dtype": dtype})
    return replace(plan, saves=saves), checkpoints


def build_tokenizer(plan: PlannedMerge) -> TokenizerInfo | None:
    """Build a result's tokenizer; mergekit forgets tokens that a model's table has no row of."""
    if plan.tokenizer_task is None:
        return None
    built = plan.tokenizer_task.execute()
    lacking = dict.fromkeys(built.tokenizer.get_vocab().values(), -1)
    built.permutations |= {model: lacking | rows for model, rows in built.permutations.items()}
    return built


def in_float32(task: ExecuteMergeMethodTask) -> ExecuteMergeMethodTask:
    """Return the task of a tensor that takes adapters in float32, as their merge does."""
    gather: Any = PlannedTensor(task).gather
    if isinstance(gather, GatherAdapted):
        wide = gather.model_copy(update={"dtype": "float32"})
        if gather is not task.gather_tensors:
            wide = task.gather_tensors.model_copy(update={"gather_tensors": wide})
        task = task.model_copy(update={"gather_tensors": wide})
    return task


def input_files(plan: PlannedMerge) -> set[Path]:
    """Return what the workers read: folders of models, their files, and what parameters name."""
    models = plan.config.referenced_models()
    folders = {Path(LoaderCache().get(model).index.base_path) for model in models}
    folders |= {adapter_folder(model.lora) for model in models if model.lora}
    donor = Path(tokenizer_donor(plan.config).model.path)
    folders |= {donor} if donor.is_dir() else set()
    files = (path for folder in folders for path in folder.iterdir() if path.name[0] != ".")
    named = (Path(path).expanduser() for path in plan.named_paths(*FILE_PARAMETERS))
    return {*folders, *files, *named}


def fingerprint(plan: PlannedMerge) -> dict[str, Any]:
    """Return what a merge depends on, as JSON; where it has changed, the merge is not resumed."""
    reports = [Path(path).expanduser().resolve() for path in plan.named_paths("report")]
    written = {*reports, *(path.with_name(f"{path.name}.partial") for path in reports)}
    files = {path for path in input_files(plan) if path.is_file() and path.resolve() not in written}
    named = plan.named_paths(*FILE_PARAMETERS)  # folders among them
    flags = plan.options.model_dump(exclude=set(_FREE_FLAGS))
    return {
        # mergekit's own dump to JSON fails where the name of a model holds a space or quotes
        "config": json.loads(json.dumps(yaml.safe_load(plan.config.source), default=str)),
        "flags": flags | {"num_threads": torch.get_num_threads()},
        "versions": package_versions(*MERGE_PACKAGES),
        "inputs": file_states(sorted({*map(str, files), *named})),
        "unplanned": sorted({"merge" if t.merged else "base" for t in plan.unplanned}) or None,
    }
