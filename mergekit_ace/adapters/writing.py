# SPDX-License-Identifier: Apache-2.0
"""An adapter written as PEFT, transformers and vLLM load it."""

from __future__ import annotations

import json
import os
import re
from collections import Counter
from collections.abc import Collection, Container, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig
from torch import Tensor, nn

from mergekit_ace.adapters.lora_config import MERGE_MODELS
from mergekit_ace.adapters.peft_adapter import Adapter, Change
from mergekit_ace.adapters.tensor_file import to_peft
from mergekit_ace.algebra.low_rank import LowRank
from mergekit_ace.files.checkpoints import PEFT_PREFIX
from mergekit_ace.files.saving import flush_to_disk, save_tensors, write_text

_NO_MODULES = "dummy-target-modules"  # PEFT's word for an adapter of saved modules alone
Part = tuple[Change, str, Tensor]  # A, B, or nothing for a whole tensor


def write_adapter(
    folder: Path,
    adapters: Sequence[Adapter],
    merged: Iterable[tuple[Change, LowRank | Tensor]],
    base: str,
    dtype: torch.dtype,
    revision: str | None = None,
) -> None:
    """Write an adapter into a folder, once everything that belongs to it is known.

    An adapter that was in the folder before stays until then; without `adapter_config.json`, which
    comes last, the folder is none that anything loads.

    Args:
        folder: made if it is not there. What is no part of an adapter stays.
        merged: what is changed: factors in the orientation of the stored tensor, to be added as
            they are, or a saved tensor. A rank of 0 is written as a
            rank of 1 that is zero, as PEFT knows no other.
        base: the model that the result belongs to, as its config names it.

    Raises:
        ValueError: nothing is changed, or a tensor holds NaN, or more than the dtype can.
    """
    parts = [part for change, made in merged for part in _parts(change, made, dtype)]
    if not parts:
        raise ValueError("the adapters change nothing that could be written")
    tensors = _named(parts, adapters[0].network)
    folder.mkdir(parents=True, exist_ok=True)
    weights, config = folder / "adapter_model.safetensors", folder / "adapter_config.json"
    staged = weights.with_suffix(".new")
    save_tensors(staged, tensors, {"format": "pt"})
    flush_to_disk(staged)
    for path in (config, folder / "adapter_model.bin"):
        path.unlink(missing_ok=True)  # of an earlier result, which is whole until here
    os.replace(staged, weights)
    write_text(config, _config_text(parts, adapters, base, revision), durable=True)


def _parts(change: Change, made: LowRank | Tensor, dtype: torch.dtype) -> Iterator[Part]:
    if isinstance(made, LowRank):
        first, second = to_peft(change.kind, made.padded(1), change.swapped)
        tensors = {"A": first, "B": second}
    else:
        tensors = {"": made}
    for letter, tensor in tensors.items():
        stored = tensor.to("cpu", dtype).clone(memory_format=torch.contiguous_format)
        if not torch.isfinite(stored).all():
            raise ValueError(
                f"the merged {change.name} holds NaN, or numbers that {dtype} cannot; write the "
                "adapter in bfloat16 or float32"
            )
        yield change, letter, stored


def _named(parts: Sequence[Part], network: nn.Module) -> dict[str, Tensor]:
    """Return tensors by their names in PEFT's file."""
    names = {change.name for change, *_ in parts}
    with_factors = {change.module for change, letter, _ in parts if letter == "A"}
    found = {}
    for change, letter, tensor in parts:
        if letter and change.kind == "embedding":
            name = f"{change.module}.lora_embedding_{letter}"
        elif letter:
            name = f"{change.module}{_wrappers(change, names, network)}.lora_{letter}.weight"
        else:
            wrapped = change.module in with_factors
            name = f"{change.module}.base_layer.bias" if wrapped else change.name
        found[PEFT_PREFIX + name] = tensor
    assert len(found) == len(parts), "a change was added twice"
    return found


def _wrappers(change: Change, names: Container[str], network: nn.Module) -> str:
    """Return what PEFT puts behind the module of a parameter, one for every later parameter.

    Of several parameters of one module, the last one has the outermost wrapper.
    """
    if change.kind != "parameter":
        return ""
    holder = network.get_submodule(change.module)
    own = [f"{change.module}.{name}" for name, _ in holder.named_parameters(recurse=False)]
    later = own[own.index(change.name) + 1 :]
    return ".base_layer" * sum(name in names for name in later)


def check_together(adapters: Sequence[Adapter]) -> None:
    """Raise for adapters that no single one can hold, before they are merged.

    Raises:
        ValueError: they change a tensor in different ways.
    """
    found: dict[str, tuple[Change, Adapter]] = {}
    for adapter in adapters:
        for name, change in adapter.changes.items():
            first, its = found.setdefault(name, (change, adapter))
            if (first.kind, first.shape) != (change.kind, change.shape):
                raise ValueError(
                    f"{name} is {first.kind} {first.shape} in the adapter {its.name} and "
                    f"{change.kind} {change.shape} in {adapter.name}, which cannot be one adapter; "
                    f"{MERGE_MODELS}"
                )


def _config_text(
    parts: Sequence[Part], adapters: Sequence[Adapter], base: str, revision: str | None
) -> str:
    """Return the config of an adapter whose every factor counts as it is stored.

    `r` is the largest rank, which vLLM takes for all, or that of most parameters: PEFT warns of a
    `rank_pattern` for these, though it follows it. Modules have short names where these are exact.
    """
    network = adapters[0].network
    first = [(change, len(tensor)) for change, letter, tensor in parts if letter == "A"]
    modules = {change.module: rank for change, rank in first if change.kind != "parameter"}
    parameters = {
        change.name: rank // (change.shape[0] if change.is_stack else 1)
        for change, rank in first
        if change.kind == "parameter"
    }
    whole = [change for change, *_ in parts if change.kind == "saved"]
    saved = {change.module for change in whole if not change.name.endswith(".bias")}
    biases = {change.module for change in whole} - saved
    rank = max(modules.values(), default=1)
    if parameters:
        rank = Counter(parameters.values()).most_common(1)[0][0]
    patterns = _rank_pattern({**modules, **parameters}, rank)
    targets: list[str] | str | None = None if parameters else _NO_MODULES
    if modules:
        everything = [name for name, _ in network.named_modules()]
        targets = _shortest(modules, everything) or "|".join(map(re.escape, modules))
    config = LoraConfig(
        r=rank,
        lora_alpha=rank,
        rank_pattern=patterns,
        alpha_pattern=dict(patterns),
        target_modules=targets,
        modules_to_save=sorted(saved) or None,
        bias="none" if not biases else "lora_only" if biases <= modules.keys() else "all",
        fan_in_fan_out=any(change.kind == "transposed" for change, _ in first),
        task_type=_same(adapter.config.task_type for adapter in adapters),
        auto_mapping=_same(adapter.config.auto_mapping for adapter in adapters),
        base_model_name_or_path=base,
        revision=revision,
        inference_mode=True,
    )
    if saved and all(adapter.config.ensure_weight_tying for adapter in adapters):
        config.ensure_weight_tying = True
    if parameters:
        everything = [name for name, _ in network.named_parameters()]
        config.target_parameters = _shortest(parameters, everything) or sorted(parameters)
    return json.dumps(config.to_dict(), indent=2, sort_keys=True, default=sorted) + "\n"


def _shortest(chosen: Collection[str], everything: Iterable[str]) -> list[str] | None:
    """Return the last parts of names where nothing but chosen names ends in them; else None."""
    ends = {name.rpartition(".")[2] for name in chosen}
    meant = {name for name in everything if name.rpartition(".")[2] in ends}
    return sorted(ends) if meant == set(chosen) else None


def _rank_pattern(ranks: Mapping[str, int], common: int) -> dict[str, int]:
    """Return the ranks that differ from `r`, by expressions that match no other module.

    PEFT matches a key with the end of a name, in the order of the keys.
    """
    pattern = {}
    for rank in sorted(set(ranks.values()) - {common}):
        names = [name for name, own in ranks.items() if own == rank]
        whole = [f"^{re.escape(name)}" for name in names]
        pattern.update(dict.fromkeys(_shortest(names, ranks) or whole, rank))
    return pattern


def _same(values: Iterable[Any]) -> Any:
    """Return what all adapters have, or None."""
    first, *others = values
    return first if all(other == first for other in others) else None
