# SPDX-License-Identifier: Apache-2.0
"""`mergekit-ace adapter`: adapters in, one adapter out, planned without a weight of the base."""

from __future__ import annotations

import json
import logging
import os
import re
import shutil
import time
from collections.abc import Collection, Iterable, Mapping, Sequence
from functools import partial, reduce
from pathlib import Path

import click
import torch
import yaml
from mergekit.common import ModelPath, ModelReference, dtype_from_name
from mergekit.config import MergeConfiguration
from mergekit.io.tasks import LoaderCache
from mergekit.options import MergeOptions
from peft import LoraConfig
from torch import Tensor, nn
from tqdm import tqdm
from transformers.pytorch_utils import Conv1D

from mergekit_ace.adapters.merge import leaves_span, merge_changes
from mergekit_ace.adapters.read import (
    Adapter,
    Change,
    base_network,
    base_of,
    find_changes,
    possible_changes,
    read_adapters,
)
from mergekit_ace.files.checkpoints import (
    TOKENIZER_CONFIG,
    TOKENIZER_FILES,
    Checkpoint,
    TensorHeader,
    headers_only,
)
from mergekit_ace.files.saving import (
    flush_to_disk,
    locked,
    occupied,
    package_versions,
    save_tensors,
    write_text,
)
from mergekit_ace.merge_config import (
    MergeConfig,
    check_config,
    check_settings,
    identity_of,
    raise_errors,
    read_merge_config,
)
from mergekit_ace.methods.base import first_that_fits, flush_notices
from mergekit_ace.methods.report_lines import REPORTED_PACKAGES
from mergekit_ace.naming import ConfigError, in_bytes, listed
from mergekit_ace.planning import PlannedMerge, PlannedTensor, UnplannedTensor, plan_merge

LOG = logging.getLogger(__name__)
CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
_VERSIONS = (*REPORTED_PACKAGES, "peft")  # named in the card
# What a result is made of; nobody's is replaced unasked.
_PARTS = (
    CONFIG, WEIGHTS, "adapter_model.bin", "README.md", "mergekit_config.yml", *TOKENIZER_FILES,
)  # fmt: skip
# Planned tensors, each with what adapters change of it.
ChangedTensors = Sequence[tuple[PlannedTensor, Mapping[ModelReference, Change]]]


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
    config = read_merge_config(path)
    raise_errors(check_config(config), quiet=quiet)
    LoaderCache().setup(options)
    base = _common_base(config)
    network, own = base_network(base), read_adapters(one.model for one in config.models or ())
    adapters = list(own.values())
    _check_folder(out, adapters, overwrite=overwrite)
    for one in adapters:
        if other := one.other_base(base.model):
            LOG.warning("the adapter %s was trained on %s, not on %s", one.name, other, base)
    headers = dict.fromkeys(network.state_dict(), TensorHeader("F32", (), ""))  # names will do
    with headers_only([Checkpoint(model, headers) for model in (base, *own)]):
        plan, tensors = _plan_tensors(config, options, base, own)
        result = _result_config(network, tensors, adapters, rank, base.model)
        with locked(out):
            threads = torch.get_num_threads()
            torch.set_num_threads(1)  # factors are small: two threads take twice as long
            try:
                factors, lost = _merge_tensors(plan, tensors, adapters, result)
            finally:
                torch.set_num_threads(threads)
            write_adapter(out, result, factors)
            what = f"{len(tensors)} modules of rank {result.r}"
            if lost > 1e-9:
                what += f", which cuts off {lost:.2%} of ‖X‖²"
            _copy_tokenizer(out, adapters)
            write_text(out / "README.md", _card_text(out.resolve().name, plan, adapters, what))
            write_text(out / "mergekit_config.yml", config.source)
    flush_notices()
    if not quiet:
        size, seconds = (out / WEIGHTS).stat().st_size, time.perf_counter() - start
        click.echo(f"{out}: {what}; {in_bytes(size)}, in {seconds:.0f} s")


def _common_base(config: MergeConfiguration) -> ModelReference:
    """Return the one model that all adapters of a config belong to."""
    models, remedy = config.referenced_models(), "merge full models by mergekit-ace merge"
    bases = [base_of(model) for model in models if model.lora is not None]
    base = config.base_model or next(iter(bases), None)
    if not config.models:
        raise ConfigError(f"slices or modules of layers make no adapter; {remedy}")
    others = [str(m) for m in models if base and identity_of(base_of(m)) != identity_of(base)]
    if others or base is None or base not in bases:
        what = "are no adapters" if len(others) > 1 else "is no adapter"
        said = f"{listed(others or [str(base)])} {what} of {base}"
        raise ConfigError(f"{said}: write `- model: BASE+ADAPTER`, or {remedy}")
    return base


def _check_folder(out: Path, adapters: Sequence[Adapter], *, overwrite: bool) -> None:
    """Raise a `ConfigError` where the result would replace something."""
    merged = any(out.exists() and out.samefile(adapter.file.parent) for adapter in adapters)
    if merged or (out / "config.json").exists():
        raise ConfigError(f"{out} holds a model, or an adapter that is merged; give another folder")
    there = [name for name in _PARTS if (out / name).exists()]
    if there and not overwrite:
        raise occupied(out, listed(there, 3))


def _plan_tensors(
    config: MergeConfig,
    options: MergeOptions,
    base: ModelReference,
    adapters: Mapping[ModelReference, Adapter],
) -> tuple[PlannedMerge, ChangedTensors]:
    """Plan a merge of adapters, and return the tensors that they change.

    A `ConfigError` says what of it makes no adapter.
    """
    plan = plan_merge(config, options)
    outputs = [tensor.task.output_weight for tensor in plan.tensors]
    known = {name for weight in outputs for name in (weight.name, *(weight.aliases or ()))}
    changed = dict.fromkeys(name for one in adapters.values() for name in one.changes)
    models = tuple(dict.fromkeys([base, *config.referenced_models()]))
    extra = [UnplannedTensor(name, models, merged=True) for name in changed if name not in known]
    plan = plan.extended(extra)  # which mergekit's architecture lacks
    found = [(tensor, find_changes(tensor.weights, adapters)) for tensor in plan.tensors]
    tensors = [(tensor, changes) for tensor, changes in found if changes]
    for tensor, changes in tensors:
        if reason := leaves_span(tensor, changes.values()):
            said = f"merge_method: {config.merge_method} makes no adapter: {reason}"
            raise ConfigError(f"{said}; merge full models by mergekit-ace merge")
    raise_errors(check_settings(plan), quiet=options.quiet)
    return plan, tensors


def _result_config(
    network: nn.Module,
    tensors: ChangedTensors,
    adapters: Collection[Adapter],
    rank: int | None,
    base: ModelPath,
) -> LoraConfig:
    """Return the config of an adapter of one rank, whose every factor counts as it is stored."""
    most = max(sum(change.rank for change in changes.values()) for _, changes in tensors)
    rank = min(rank or most, most)
    firsts = [next(iter(changes.values())) for _, changes in tensors]
    own = [change.name.rpartition(".")[0] for change in firsts if not change.parameter]
    parameters = [change.name for change in firsts if change.parameter]
    modules, kinds = dict(network.named_modules()), {one.config.task_type for one in adapters}
    config = LoraConfig(
        r=rank,
        lora_alpha=rank,
        target_modules=_shortest(own, modules) or "|".join(map(re.escape, own)) or None,
        fan_in_fan_out=any(isinstance(modules[place], Conv1D) for place in own),
        base_model_name_or_path=base.path,
        revision=base.revision,
        inference_mode=True,
        task_type=kinds.pop() if len(kinds) == 1 else None,
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


def _merge_tensors(
    plan: PlannedMerge, tensors: ChangedTensors, adapters: Sequence[Adapter], result: LoraConfig
) -> tuple[dict[str, Tensor], float]:
    """Return the factors of all tensors as PEFT stores them, and what share of ‖X‖² is cut off."""
    config, options = plan.config, plan.options
    device = torch.device(options.device or "cpu")
    widest = reduce(torch.promote_types, (adapter.dtype for adapter in adapters))
    dtype = dtype_from_name(config.out_dtype or config.dtype) or widest
    places, shapes = possible_changes(adapters[0].network, result)
    merged, kept, lost = dict[str, Tensor](), 0.0, 0.0
    for planned, changes in tqdm(tensors, "merging", disable=options.quiet, leave=False):
        place = places[next(iter(changes.values())).name]
        work = partial(merge_changes, planned, changes, rank=result.r)
        delta, cut = first_that_fits(device, work, planned.method.spec.name, planned.name)
        lost += cut
        factors: Sequence[Tensor] = [torch.zeros(shapes[name]) for name in place.tensors]
        if delta is not None:
            kept += delta.energy
            factors = place.to_peft(delta.padded(place.rank))
        for name, factor in zip(place.tensors, factors, strict=True):
            merged[name] = factor.to("cpu", dtype).contiguous()
            if not torch.isfinite(merged[name]).all():
                raise ValueError(
                    f"the merged {place.name} holds NaN, or numbers that {dtype} cannot; write the "
                    "adapter in bfloat16 or float32"
                )
    if kept == 0:
        raise ValueError("the adapters change nothing that could be written")
    return merged, lost / (kept + lost)


def write_adapter(folder: Path, config: LoraConfig, tensors: Mapping[str, Tensor]) -> None:
    """Write an adapter into a folder; an earlier one stays until all tensors are on the disk."""
    staged = folder / f"{WEIGHTS}.new"
    save_tensors(staged, tensors, {"format": "pt"})
    flush_to_disk(staged)
    for name in (CONFIG, "adapter_model.bin"):
        (folder / name).unlink(missing_ok=True)
    os.replace(staged, folder / WEIGHTS)
    text = json.dumps(config.to_dict(), indent=2, sort_keys=True, default=sorted)
    write_text(folder / CONFIG, f"{text}\n", durable=True)


def _copy_tokenizer(out: Path, adapters: Iterable[Adapter]) -> None:
    """Copy the tokenizer of the first adapter that carries one; that of an earlier result goes."""
    folders = [one.file.parent for one in adapters]
    donor = next((folder for folder in folders if (folder / TOKENIZER_CONFIG).is_file()), None)
    for name in TOKENIZER_FILES:
        (out / name).unlink(missing_ok=True)
        if donor and (donor / name).is_file():
            shutil.copyfile(donor / name, out / name)


def _card_text(name: str, plan: PlannedMerge, adapters: Sequence[Adapter], what: str) -> str:
    """Return the model card; `what` tells modules and ranks."""
    method, base = plan.method, plan.config.referenced_models()[0].model.path  # of all the same
    tags = ["mergekit", "mergekit-ace", "merge", "lora", "peft"]
    head = yaml.safe_dump({"base_model": base, "library_name": "peft", "tags": tags})
    title, versions = method.spec.pretty_name or method.spec.name, package_versions(*_VERSIONS)
    parts = [
        f"---\n{head}---",
        f"# {name}",
        f"A LoRA adapter of `{base}`: {what}. `mergekit-ace adapter` made it by {title} from",
        "\n".join(f"* `{one.name}`, rank {one.config.r}" for one in adapters),
        f"({', '.join(map(' '.join, versions.items()))}), with this configuration:",
        f"```yaml\n{plan.config.source.strip()}\n```",
        *(f"```bibtex\n{one}\n```" for one in getattr(method, "citations", ())),
    ]
    return "\n\n".join(parts) + "\n"
