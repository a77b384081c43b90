# SPDX-License-Identifier: Apache-2.0
"""Whether adapters fit the model that they are put onto, by the headers of both."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

from mergekit.architecture import WeightInfo
from mergekit.common import ModelReference

from mergekit_ace.adapters.adapter_tasks import read_adapters
from mergekit_ace.checkpoint_files import PEFT_PREFIX
from mergekit_ace.headers import DamagedFileError, TensorHeader, read_file_header
from mergekit_ace.planning import ConfigError
from mergekit_ace.preflight.checkpoints import Checkpoint
from mergekit_ace.preflight.config_rules import Finding, listed


def check_adapter_shapes(checkpoints: Mapping[ModelReference, Checkpoint]) -> Iterator[Finding]:
    """Find adapters of a model of other width or depth.

    mergekit would stop at the former while it merges the adapter, and drop what has no place.
    """
    for model, checkpoint in checkpoints.items():
        if model.lora is None:
            continue
        path = Path(model.lora.path, "adapter_model.safetensors")
        if not path.is_file() or _is_read(model):  # else on the Hub, or a pickle
            continue
        try:
            stored = read_file_header(path)
        except DamagedFileError as error:
            yield Finding.error("adapters", str(error))
            continue
        odd, homeless, fitting = _compare(stored, checkpoint)
        if odd:
            yield Finding.error(
                "adapters",
                f"the adapter {model.lora} does not fit {model.model}: {listed(odd, 3)}",
                "put it onto the model that it was trained on",
            )
        elif homeless:
            yield Finding(
                "error" if fitting else "warning",
                "adapters",
                f"the adapter {model.lora} changes {len(homeless)} modules that {model.model} does "
                f"not have: {listed(homeless, 3)}",
                "put it onto the model that it was trained on",
            )


def _is_read(model: ModelReference) -> bool:
    """Tell whether an adapter is one that this package merges by itself, which fits its base."""
    try:
        read_adapters([model])
    except (DamagedFileError, ConfigError):
        return False
    return True


def _compare(
    adapter: Mapping[str, TensorHeader], checkpoint: Checkpoint
) -> tuple[list[str], list[str], int]:
    """Return tensors of other shapes, modules that are not there, and how many modules fit."""
    odd, homeless, fitting = [], [], 0
    for name, first in adapter.items():
        module = name.removeprefix(PEFT_PREFIX).removesuffix(".lora_A.weight")
        second = adapter.get(name.replace(".lora_A.", ".lora_B."))
        if not name.endswith(".lora_A.weight") or second is None:
            continue
        weight = checkpoint.source(WeightInfo(name=f"{module}.weight"))
        if weight is None:
            homeless.append(module)
        elif len(weight.shape) == 2 and len(first.shape) == 2:
            made_for = (second.shape[0], first.shape[1])
            if made_for not in (weight.shape, weight.shape[::-1]):  # some store (in, out)
                odd.append(f"{module} is {weight.shape} instead of {made_for}")
            fitting += 1
    return odd, homeless, fitting
