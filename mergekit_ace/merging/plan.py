# SPDX-License-Identifier: Apache-2.0
"""The plan of a merge that is run: models found, tensors planned, and what must not be replaced."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from pickle import UnpicklingError

import yaml
from mergekit.architecture import WeightInfo
from mergekit.common import ModelReference
from mergekit.config import MergeConfiguration
from mergekit.io.tasks import LoaderCache
from mergekit.options import MergeOptions

from mergekit_ace.adapters.merge import show_bases, use_adapters
from mergekit_ace.adapters.read import Adapter, base_of, read_adapters
from mergekit_ace.check.check import check_merge
from mergekit_ace.check.loading import Treatment, check_labels, treat_unplanned
from mergekit_ace.files.models import Checkpoint, Checkpoints, checkpoint_of
from mergekit_ace.files.quantised import open_quantised
from mergekit_ace.merge_config import shown_errors
from mergekit_ace.merging.shards import MergeError
from mergekit_ace.methods.parameters import FILE_PARAMETERS
from mergekit_ace.naming import listed
from mergekit_ace.planning import (
    PlannedMerge,
    UnplannedTensor,
    find_models,
    model_folders,
    plan_merge,
    read_merge_config,
)


class OrderedConfiguration(MergeConfiguration):
    """A configuration that lists its models by their names.

    mergekit's own takes them from a set, so that their order changes from process to process. A
    model card depends on it, and, where there is no base, which model gives the config.
    """

    def referenced_models(self) -> list[ModelReference]:
        """Return all models, in the order of their names."""
        return sorted(super().referenced_models(), key=str)


@dataclass(frozen=True)
class MergeChecks:
    """What `mergekit-ace merge` checks.

    Attributes:
        strict: check the config and the models first, and stop at errors; a result that is no whole
            model is an error as well, and else a warning.
        unplanned: what to do with tensors that mergekit's architecture does not plan.
        prompt: a text that the result is to continue; None for no trial.
    """

    strict: bool = True
    unplanned: Treatment = "error"
    prompt: str | None = None


def plan_run(
    path: Path, options: MergeOptions, checks: MergeChecks
) -> tuple[PlannedMerge, dict[ModelReference, Checkpoint]]:
    """Check a merge, find its models, and plan as `mergekit-yaml` does.

    Returns:
        The plan, and the headers of all models.

    Raises:
        DamagedFileError: a file of a model is missing or damaged.
        MergeError: something is wrong, or mergekit leaves out tensors, and nobody has said what to
            do with them; the message names all of it, with the remedies.
        RuntimeError, ValueError, OSError: whatever mergekit, or a merge method, says to the plan.
    """
    if checks.strict:
        findings = check_merge(path, options, unplanned=checks.unplanned).findings
        if errors := shown_errors(findings, quiet=options.quiet):
            raise MergeError(f"{errors}\nNothing was merged; --no-check leaves this check out")
    _, source = read_merge_config(path)
    config = OrderedConfiguration.model_validate(yaml.safe_load(source))
    adapters = _load_models(config, options)
    checkpoints = {
        model: checkpoint_of(model, LoaderCache().get(model).index)
        for model in config.referenced_models()
    }
    open_quantised(checkpoints)
    plan = _plan_with_adapters(config, source, options, adapters, checkpoints)
    extra, findings = treat_unplanned(plan, checkpoints, checks.unplanned)
    if extra:
        plan = _plan_with_adapters(config, source, options, adapters, checkpoints, extra)
    findings += check_labels(plan, checks.unplanned)
    if errors := shown_errors(findings, quiet=checks.strict or options.quiet):
        raise MergeError(f"{errors}\nNothing was merged")
    return plan, checkpoints


def _load_models(
    config: MergeConfiguration, options: MergeOptions
) -> dict[ModelReference, Adapter]:
    """Find, download and check all models, before any worker needs them; return the adapters."""
    cache = LoaderCache()
    cache.setup(options)
    find_models(config)
    models = config.referenced_models()
    for model in models:
        for known in (model, base_of(model)):
            cache.loaders.pop(known, None)  # of another merge in this process
    adapters = read_adapters([model for model in models if model.lora is not None])
    for model, adapter in adapters.items():
        adapter.check_ties()
        _check_places(model, adapter)
    show_bases(adapters)
    for model in models:
        try:
            cache.get(model)
        except UnpicklingError as error:  # its own advice is to trust the file
            raise MergeError(
                f"a .bin file of {model} holds more than tensors, which is never executed here; "
                "download it again, or the model's safetensors files"
            ) from error
    return adapters


def _check_places(model: ModelReference, adapter: Adapter) -> None:
    """Raise a `MergeError` if an adapter changes what the files of its base do not hold."""
    base = base_of(model)
    names = LoaderCache().get(base).index.tensor_paths
    found = [adapter.find_change(WeightInfo(name=name), base) for name in names]
    held = {change.name for change in found if change is not None}
    homeless = [name for name in adapter.changes if name not in held]
    if homeless:
        raise MergeError(
            f"{model.lora} has {listed(homeless)}, which {base} does not; merge the adapter into "
            "its base by peft's merge_and_unload, and give the model that save_pretrained writes"
        )


def _plan_with_adapters(
    config: MergeConfiguration,
    source: str,
    options: MergeOptions,
    adapters: dict[ModelReference, Adapter],
    checkpoints: Checkpoints,
    unplanned: Sequence[UnplannedTensor] = (),
) -> PlannedMerge:
    """Plan a merge whose adapters are added to their bases tensor by tensor."""
    plan = plan_merge(config, source, options, unplanned, checkpoints=checkpoints, as_run=True)
    saves = {
        name: save.model_copy(update={"tensor_task": use_adapters(save.tensor_task, adapters)})
        for name, save in plan.saves.items()
    }
    return replace(plan, saves=saves)


def needed_files(config: Path, plan: PlannedMerge) -> set[Path]:
    """Return what a merge reads: config, models, and files that parameters name."""
    needed = {config, *(Path(p).expanduser() for p in plan.named_paths(*FILE_PARAMETERS))}
    loaders = (LoaderCache().get(model) for model in plan.config.referenced_models())
    folders = {*model_folders(plan.config), *(Path(one.index.base_path) for one in loaders)}
    files = (path for folder in folders if folder.is_dir() for path in folder.iterdir())
    return {*needed, *folders, *files}
