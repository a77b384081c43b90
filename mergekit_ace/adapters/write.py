# SPDX-License-Identifier: Apache-2.0
"""An adapter written as PEFT, transformers and vLLM load it, one tensor at a time."""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Collection, Iterable, Iterator, Sequence
from pathlib import Path

import torch
from mergekit.common import ModelPath
from peft import LoraConfig
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from mergekit_ace.adapters.read import Change, Shapes, possible_changes
from mergekit_ace.algebra.low_rank import LowRank
from mergekit_ace.files.checkpoints import DTYPE_NAMES
from mergekit_ace.files.saving import flush_to_disk, write_text

WEIGHTS = "adapter_model.safetensors"


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

    Args:
        config: of these changes, see `result_config`.
        merged: of each change, factors in the orientation of the stored tensor, of the config's
            rank at most, to be added as they are; None for no change.

    Raises:
        ValueError: nothing is changed, or a tensor holds NaN, or more than the dtype can.
    """
    known, shapes = possible_changes(network, config)
    places = [known[change.name] for change in changes]
    shapes = {name: shapes[name] for place in places for name in place.tensors}
    staged = folder / f"{WEIGHTS}.partial"
    staged.unlink(missing_ok=True)  # it may be a link
    try:
        with open(staged, "wb") as file:
            file.write(_header(shapes, dtype))
            for tensor in _as_stored(places, merged, shapes, dtype):
                file.write(tensor.contiguous().view(torch.uint8).numpy().data)
        flush_to_disk(staged)
    except BaseException:
        staged.unlink(missing_ok=True)
        raise
    for name in ("adapter_config.json", "adapter_model.bin"):
        (folder / name).unlink(missing_ok=True)  # of an earlier result, which is whole until here
    os.replace(staged, folder / WEIGHTS)
    text = json.dumps(config.to_dict(), indent=2, sort_keys=True, default=sorted)
    write_text(folder / "adapter_config.json", f"{text}\n", durable=True)


def _header(shapes: Shapes, dtype: torch.dtype) -> bytes:
    """Return what a safetensors file of tensors, one after the other, begins with."""
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    start = 0
    for name, shape in shapes.items():
        end = start + math.prod(shape) * dtype.itemsize
        place = {"dtype": DTYPE_NAMES[dtype], "shape": shape, "data_offsets": [start, end]}
        header[name], start = place, end
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def _as_stored(
    places: Sequence[Change], merged: Iterable[LowRank | None], shapes: Shapes, dtype: torch.dtype
) -> Iterator[Tensor]:
    """Yield the tensors of the file in the order of `shapes`."""
    nothing = True
    for place, delta in zip(places, merged, strict=True):
        if delta is None:
            yield from (torch.zeros(shapes[name], dtype=dtype) for name in place.tensors)
            continue
        nothing = False
        for tensor in place.to_peft(delta.padded(place.rank)):
            stored = tensor.to("cpu", dtype)
            if not torch.isfinite(stored).all():
                raise ValueError(
                    f"the merged {place.name} holds NaN, or numbers that {dtype} cannot; write the "
                    "adapter in bfloat16 or float32"
                )
            yield stored
    if nothing:
        raise ValueError("the adapters change nothing that could be written")
