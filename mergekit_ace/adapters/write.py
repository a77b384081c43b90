# SPDX-License-Identifier: Apache-2.0
"""An adapter written as PEFT, transformers and vLLM load it."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path

import torch
from peft import LoraConfig
from torch import Tensor

from mergekit_ace.adapters.read import (
    Adapter,
    Change,
    possible_changes,
    put_layers,
)
from mergekit_ace.algebra.low_rank import LowRank
from mergekit_ace.files.saving import flush_to_disk, save_tensors, write_text

_NO_MODULES = "dummy-target-modules"  # PEFT's word for an adapter of saved modules alone
Merged = Mapping[str, tuple[Change, LowRank | Tensor]]  # by `Change.name`


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
            they are, or a saved tensor. A rank of 0 is written as a rank of 1 that is zero, as PEFT
            knows no other.
        base: the model that the result belongs to, as its config names it.

    Raises:
        ValueError: nothing is changed, or a tensor holds NaN, or more than the dtype can.
    """
    parts = {change.name: (change, _as_written(change, made, dtype)) for change, made in merged}
    if not parts:
        raise ValueError("the adapters change nothing that could be written")
    config = _config(parts, adapters, base, revision)
    tensors = _named(parts, adapters[0], config)
    folder.mkdir(parents=True, exist_ok=True)
    weights, settings = folder / "adapter_model.safetensors", folder / "adapter_config.json"
    staged = weights.with_suffix(".new")
    save_tensors(staged, tensors, {"format": "pt"})
    flush_to_disk(staged)
    for path in (settings, folder / "adapter_model.bin"):
        path.unlink(missing_ok=True)  # of an earlier result, which is whole until here
    os.replace(staged, weights)
    text = json.dumps(config.to_dict(), indent=2, sort_keys=True, default=sorted)
    write_text(settings, f"{text}\n", durable=True)


def _as_written(change: Change, made: LowRank | Tensor, dtype: torch.dtype) -> LowRank | Tensor:
    """Return what is merged, in the dtype of the file."""
    if isinstance(made, Tensor):
        return _stored(change, made, dtype)
    left, right = _stored(change, made.left, dtype), _stored(change, made.right, dtype)
    return LowRank(left, right, change.shape).padded(1)


def _stored(change: Change, tensor: Tensor, dtype: torch.dtype) -> Tensor:
    stored = tensor.to("cpu", dtype)
    if not torch.isfinite(stored).all():
        raise ValueError(
            f"the merged {change.name} holds NaN, or numbers that {dtype} cannot; write the "
            "adapter in bfloat16 or float32"
        )
    return stored


def _named(parts: Merged, adapter: Adapter, config: LoraConfig) -> dict[str, Tensor]:
    """Return tensors as PEFT stores them, by their names in its file."""
    places, _ = possible_changes(put_layers(adapter.network, config))
    tensors: dict[str, Tensor] = {}
    for name, (_, made) in parts.items():
        place = places[name]
        whole = isinstance(made, Tensor)
        stored = (made,) if whole else place.to_peft(made.padded(place.rank))
        tensors |= {k: t.contiguous() for k, t in zip(place.tensors, stored, strict=True)}
    return tensors


def _config(
    parts: Merged, adapters: Sequence[Adapter], base: str, revision: str | None
) -> LoraConfig:
    """Return the config of an adapter whose every factor counts as it is stored.

    `r` is the largest rank, which vLLM takes for all. Parameters have it too: PEFT warns of a
    `rank_pattern` for these, though it follows it. Modules have short names where these are exact.
    """
    network = adapters[0].network
    changes = dict(parts.values())
    products = {c: made.rank for c, made in changes.items() if isinstance(made, LowRank)}
    modules = {c.module: rank for c, rank in products.items() if c.kind != "parameter"}
    parameters = [change.name for change in products if change.kind == "parameter"]
    rank = max(products.values(), default=1)
    patterns = _rank_pattern(modules, rank)
    targets: list[str] | str | None = None if parameters else _NO_MODULES
    if modules:
        names = [name for name, _ in network.named_modules()]
        targets = _shortest(modules, names) or "|".join(map(re.escape, modules))
    task_types = {adapter.config.task_type for adapter in adapters}
    config = LoraConfig(
        r=rank,
        lora_alpha=rank,
        rank_pattern=patterns,
        alpha_pattern=dict(patterns),
        target_modules=targets,
        modules_to_save=sorted({c.module for c in changes if c.kind == "saved"}) or None,
        fan_in_fan_out=any(change.kind == "transposed" for change in changes),
        task_type=task_types.pop() if len(task_types) == 1 else None,
        base_model_name_or_path=base,
        revision=revision,
        inference_mode=True,
    )
    if parameters:
        names = [name for name, _ in network.named_parameters()]
        config.target_parameters = _shortest(parameters, names) or sorted(parameters)
    return config


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
