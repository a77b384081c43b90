# SPDX-License-Identifier: Apache-2.0
"""`mergekit-ace adapter`: adapters in, one adapter out, planned without a weight of the base."""

from __future__ import annotations

import json
import logging
import os
import re
import shutil
import time
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial, reduce
from pathlib import Path

import click
import torch
import yaml
from mergekit.common import ModelPath, ModelReference, dtype_from_name
from mergekit.config import MergeConfiguration
from mergekit.io import ShardedTensorIndex
from mergekit.io.tasks import LoaderCache
from mergekit.options import MergeOptions
from peft import LoraConfig
from torch import Tensor, nn
from tqdm import tqdm
from transformers.pytorch_utils import Conv1D

from mergekit_ace.adapters.merge import find_changes, leaves_span, merge_changes
from mergekit_ace.adapters.read import (
    Adapter,
    Change,
    base_network,
    base_of,
    possible_changes,
    read_adapters,
)
from mergekit_ace.algebra.low_rank import LowRank
from mergekit_ace.files.checkpoints import DTYPE_NAMES, TensorHeader
from mergekit_ace.files.models import (
    TOKENIZER_CONFIG,
    TOKENIZER_FILES,
    Checkpoint,
    headers_only,
)
from mergekit_ace.files.saving import (
    flush_to_disk,
    locked,
    package_versions,
    save_tensors,
    write_text,
)
from mergekit_ace.merge_config import check_config, check_settings, shown_errors
from mergekit_ace.methods.base import first_that_fits, flush_notices
from mergekit_ace.methods.report_lines import REPORTED_PACKAGES
from mergekit_ace.naming import ConfigError, in_bytes, listed, same_name
from mergekit_ace.planning import (
    PlannedMerge,
    PlannedTensor,
    UnplannedTensor,
    plan_merge,
    read_merge_config,
)

LOG = logging.getLogger(__name__)
WEIGHTS = "adapter_model.safetensors"
# What a result is made of; nobody's is replaced unasked.
_PARTS = (
    "adapter_config.json", WEIGHTS, "adapter_model.bin", "README.md", "mergekit_config.yml",
    *TOKENIZER_FILES,
)  # fmt: skip


@dataclass(frozen=True)
class AdapterPlan:
    """A merge of adapters of one base."""

    merge: PlannedMerge
    base: ModelReference
    adapters: tuple[Adapter, ...]  # in the order of the experts
    tensors: tuple[tuple[PlannedTensor, Mapping[ModelReference, Change]], ...]  # that they change
    checkpoints: tuple[Checkpoint, ...]  # of all models, as they would be


def plan_adapters(config: MergeConfiguration, source: str, options: MergeOptions) -> AdapterPlan:
    """Plan a merge of adapters by configs, and by headers of their files."""
    LoaderCache().setup(options)
    base = _common_base(config)
    models = list(dict.fromkeys([base, *config.referenced_models()]))
    network, adapters = base_network(base), read_adapters(models)
    for adapter in adapters.values():
        named = adapter.config.base_model_name_or_path
        if named and not same_name(named, base.model.path):
            LOG.warning("the adapter %s was trained on %s, not on %s", adapter.name, named, base)
    headers = {
        name: TensorHeader(DTYPE_NAMES.get(tensor.dtype, "F32"), tuple(tensor.shape), "")
        for name, tensor in network.state_dict().items()
    }
    index = ShardedTensorIndex("", True, dict.fromkeys(headers, ""), [])
    checkpoints = tuple(Checkpoint(model, None, index, headers) for model in models)
    with headers_only(checkpoints):
        plan = plan_merge(config, source, options)
        planned = [tensor.task.output_weight for tensor in plan.tensors]
        known = {name for weight in planned for name in (weight.name, *(weight.aliases or ()))}
        changed = dict.fromkeys(name for one in adapters.values() for name in one.changes)
        extra = [UnplannedTensor(n, tuple(models), merged=True) for n in changed if n not in known]
        if extra:  # mergekit's architecture lacks them
            plan = plan_merge(config, source, options, extra)
    found = [(one, find_changes(one.weights, adapters, in_files=False)) for one in plan.tensors]
    tensors = tuple((tensor, changes) for tensor, changes in found if changes)
    experts = dict.fromkeys(model for tensor in plan.tensors for model in tensor.experts)
    merged = tuple(adapters[model] for model in experts if model in adapters)
    return AdapterPlan(plan, base, merged, tensors, checkpoints)


def _common_base(config: MergeConfiguration) -> ModelReference:
    """Return the one model that all adapters of a config belong to."""
    models = config.referenced_models()
    bases = {base_of(model) for model in models if model.lora is not None}
    base = config.base_model or next(iter(bases), None)
    if not config.models:
        raise ConfigError(
            "an adapter fits only the layers that it was trained on, and the config has slices or "
            "modules; merge full models by mergekit-ace merge"
        )
    full = [str(model) for model in models if model.lora is None and model != base]
    if full or not bases or base is None:
        raise ConfigError(
            f"{listed(full or [str(base)])} is no adapter, and only adapters merge into an "
            "adapter: write `- model: BASE+ADAPTER`, or merge full models by mergekit-ace merge"
        )
    if bases != {base}:
        names = ", ".join(sorted(map(str, bases | {base})))
        raise ConfigError(
            f"the adapters belong to different models ({names}); only adapters of one base merge "
            "into one adapter"
        )
    return base


def merge_adapters(
    path: Path,
    out: Path,
    options: MergeOptions,
    *,
    rank: int | None = None,
    overwrite: bool = False,
) -> None:
    """`mergekit-ace adapter`: merge the adapters of a config into one, of a rank at most."""
    start, quiet = time.perf_counter(), options.quiet
    config, source = read_merge_config(path)
    if errors := shown_errors(check_config(config, source), quiet=quiet):
        raise ConfigError(errors)
    plan = plan_adapters(config, source, options)
    _check_plan(plan, out, overwrite=overwrite)
    changes = [next(iter(own.values())) for _, own in plan.tensors]
    most = max(sum(change.rank for change in own.values()) for _, own in plan.tensors)
    rank = min(most, rank or most)
    network = plan.adapters[0].network
    result = result_config(network, changes, rank, plan.base.model)
    kinds = {adapter.config.task_type for adapter in plan.adapters}
    result.task_type = kinds.pop() if len(kinds) == 1 else None
    dtypes = (adapter.dtype for adapter in plan.adapters)
    dtype = dtype_from_name(config.out_dtype or config.dtype) or reduce(torch.promote_types, dtypes)
    energies: list[tuple[float, float]] = []
    busy = ConfigError(f"another run is writing to {out}; wait for it, or choose another folder")
    with locked(out, ".adapter.lock", busy):
        with headers_only(plan.checkpoints):
            merged = _merge_tensors(plan, rank, energies)
            write_adapter(out, result, network, changes, merged, dtype)
        _copy_tokenizer(out, plan)
        kept, lost = (sum(column) for column in zip(*energies, strict=True))
        what = f"{len(changes)} modules of rank {rank}"
        if lost > 1e-9 * kept:
            what += f", which cuts off {lost / (kept + lost):.2%} of ‖X‖²"
        write_text(out / "README.md", _card_text(out.name, plan, what))
        write_text(out / "mergekit_config.yml", source)
    flush_notices()
    if not quiet:
        size, seconds = (out / WEIGHTS).stat().st_size, time.perf_counter() - start
        click.echo(f"{out}: {what}; {in_bytes(size)}, in {seconds:.0f} s")


def _check_plan(plan: AdapterPlan, out: Path, *, overwrite: bool) -> None:
    """Raise a `ConfigError` where the result is no adapter, or would replace something."""
    if (out / "config.json").exists():
        raise ConfigError(f"{out} holds a model; choose another folder")
    if any(out.exists() and out.samefile(adapter.folder) for adapter in plan.adapters):
        raise ConfigError(f"{out} is an adapter, which is merged; choose another folder")
    there = [name for name in _PARTS if (out / name).exists()]
    if there and not overwrite:
        raise ConfigError(f"{out} holds {listed(there, 3)}; --overwrite replaces what is there")
    with headers_only(plan.checkpoints):
        for planned, changes in plan.tensors:
            if reason := leaves_span(planned, changes.values()):
                raise ConfigError(
                    f"merge_method: {plan.merge.config.merge_method} makes no adapter: {reason}; "
                    "merge full models by mergekit-ace merge"
                )
        if errors := shown_errors(check_settings(plan.merge), quiet=plan.merge.options.quiet):
            raise ConfigError(errors)


def _merge_tensors(
    plan: AdapterPlan, rank: int, energies: list[tuple[float, float]]
) -> Iterator[LowRank | None]:
    """Merge one tensor after the other; add ‖X‖² of what was kept, and of what was cut off."""
    torch.set_num_threads(1)  # factors are small: two threads take twice as long
    options = plan.merge.options
    device = torch.device(options.device or "cpu")
    for planned, changes in tqdm(plan.tensors, "merging", disable=options.quiet, leave=False):
        work = partial(merge_changes, planned, changes, rank=rank)
        delta, lost = first_that_fits(device, work, planned.method.spec.name, planned.name)
        energies.append((delta.energy if delta else 0.0, lost))
        yield delta if energies[-1][0] else None


def _copy_tokenizer(out: Path, plan: AdapterPlan) -> None:
    """Copy the tokenizer of the first adapter that carries one; that of an earlier result goes."""
    for name in TOKENIZER_FILES:
        (out / name).unlink(missing_ok=True)
    folders = [one.folder for one in plan.adapters if (one.folder / TOKENIZER_CONFIG).is_file()]
    files = [folder / name for folder in folders[:1] for name in TOKENIZER_FILES]
    for file in filter(Path.is_file, files):
        shutil.copyfile(file, out / file.name)


def _card_text(name: str, plan: AdapterPlan, what: str) -> str:
    """Return the model card; `what` tells modules and ranks."""
    method, base = plan.merge.method, plan.base.model.path
    tags = ["mergekit", "mergekit-ace", "merge", "lora", "peft"]
    head = yaml.safe_dump({"base_model": base, "library_name": "peft", "tags": tags})
    versions = package_versions(*REPORTED_PACKAGES, "peft")
    experts = "\n".join(f"* `{one.name}`, rank {one.config.r}" for one in plan.adapters)
    parts = [
        f"---\n{head}---",
        f"# {name}",
        f"A LoRA adapter of `{base}`: {what}. `mergekit-ace adapter` made it by "
        f"{method.spec.pretty_name or method.spec.name} from",
        experts,
        f"({', '.join(map(' '.join, versions.items()))}), with this configuration:",
        f"```yaml\n{plan.merge.source.strip()}\n```",
        *(f"```bibtex\n{one}\n```" for one in getattr(method, "citations", ())),
    ]
    return "\n\n".join(parts) + "\n"


def result_config(
    network: nn.Module, changes: Collection[Change], rank: int, base: ModelPath
) -> LoraConfig:
    """Return the config of an adapter of one rank, whose every factor counts as it is stored."""
    modules = dict(network.named_modules())
    own = [change.name.rpartition(".")[0] for change in changes if not change.parameter]
    parameters = [change.name for change in changes if change.parameter]
    config = LoraConfig(
        r=rank,
        lora_alpha=rank,
        target_modules=_shortest(own, modules) or "|".join(map(re.escape, own)) or None,
        fan_in_fan_out=any(isinstance(modules[place], Conv1D) for place in own),
        base_model_name_or_path=base.path,
        revision=base.revision,
        inference_mode=True,
    )
    if parameters:
        known = [name for name, _ in network.named_parameters()]
        config.target_parameters = _shortest(parameters, known) or sorted(parameters)
    return config


def _shortest(chosen: Collection[str], everything: Iterable[str]) -> list[str] | None:
    """Return the last parts of names where nothing but chosen names ends in them; else None."""
    ends = {name.rpartition(".")[2] for name in chosen}
    meant = {name for name in everything if name.rpartition(".")[2] in ends}
    return sorted(ends) if chosen and meant == set(chosen) else None


def write_adapter(
    folder: Path,
    config: LoraConfig,
    network: nn.Module,
    changes: Collection[Change],
    merged: Iterable[LowRank | None],
    dtype: torch.dtype,
) -> None:
    """Write an adapter into a folder; an earlier one stays until all tensors are on the disk.

    `merged` are factors of every change, of the config's rank at most; None for no change.
    """
    known, shapes = possible_changes(network, config)
    tensors: dict[str, Tensor] = {}
    nothing = True
    for change, delta in zip(changes, merged, strict=True):
        place = known[change.name]
        if delta is None:
            tensors |= {name: torch.zeros(shapes[name], dtype=dtype) for name in place.tensors}
            continue
        nothing = False
        factors = place.to_peft(delta.padded(place.rank))
        for name, factor in zip(place.tensors, factors, strict=True):
            tensors[name] = factor.to("cpu", dtype).contiguous()
            if not torch.isfinite(tensors[name]).all():
                raise ValueError(
                    f"the merged {place.name} holds NaN, or numbers that {dtype} cannot; write the "
                    "adapter in bfloat16 or float32"
                )
    if nothing:
        raise ValueError("the adapters change nothing that could be written")
    staged = folder / f"{WEIGHTS}.new"
    save_tensors(staged, tensors, {"format": "pt"})
    flush_to_disk(staged)
    for name in ("adapter_config.json", "adapter_model.bin"):
        (folder / name).unlink(missing_ok=True)  # of an earlier result, which is whole until here
    os.replace(staged, folder / WEIGHTS)
    text = json.dumps(config.to_dict(), indent=2, sort_keys=True, default=sorted)
    write_text(folder / "adapter_config.json", f"{text}\n", durable=True)
