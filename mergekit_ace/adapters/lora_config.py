# SPDX-License-Identifier: Apache-2.0
"""The `adapter_config.json` of a LoRA adapter, and whether it can be merged."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path

import peft
from peft import LoraConfig

from mergekit_ace.files.headers import DamagedFileError, read_json

MERGE_MODELS = "merge full models with mergekit-yaml, made by peft's merge_and_unload"
# Settings by which an adapter is more than scaled products of A and B, added to weights: those that
# PEFT itself calls variants, but for one of the training alone, and some others.
_VARIANTS = {field.name for field in fields(LoraConfig) if field.metadata.get("is_lora_variant")}
_REFUSED = (_VARIANTS - {"velora_config"}) | {
    "use_qalora", "lora_bias", "trainable_token_indices", "layer_replication", "megatron_config",
}  # fmt: skip
# Initializations that take A · B out of the base before the training.
_CHANGED_BASES = ("pissa", "olora", "corda", "lora_ga", "loftq")


class OtherAdapterError(DamagedFileError):
    """An adapter whose changes are no products of two factors; PEFT may merge it into its base."""


def read_lora_config(folder: Path) -> LoraConfig:
    """Return the config of a LoRA adapter, read by PEFT's own class.

    Raises:
        DamagedFileError: the file is missing or damaged, PEFT does not read it, or the adapter is
            of a type whose changes are not products of two factors.
    """
    path = folder / "adapter_config.json"
    content = read_json(path)
    kind = content.get("peft_type")
    if kind is None:
        raise DamagedFileError(
            f"{path} has no `peft_type`, which tells what kind of adapter this is; save the "
            "adapter again by peft's save_pretrained"
        )
    if kind != "LORA":
        raise OtherAdapterError(
            f"{path} is of an adapter of the type {kind}, and only LoRA can be merged as an "
            f"adapter; {MERGE_MODELS}"
        )
    content.pop("runtime_config", None)
    newer = sorted(
        key
        for key in content.keys() - {field.name for field in fields(LoraConfig)}
        if content[key] and (key.startswith("use_") or key.endswith("_config"))
    )
    if newer:
        raise DamagedFileError(
            f"{path} sets {', '.join(newer)}, which peft {peft.__version__} does not know, and "
            "which may change what the adapter does; update peft"
        )
    try:
        config = LoraConfig.from_peft_type(**content)  # warns of settings of a newer PEFT
    except Exception as error:  # of many kinds
        raise DamagedFileError(
            f"{path} is no config that peft {peft.__version__} reads: {error}; correct it, or save "
            "the adapter again"
        ) from error
    config.rank_pattern = config.rank_pattern or {}
    config.alpha_pattern = config.alpha_pattern or {}
    _check_variant(path, config)
    return config


def _check_variant(path: Path, config: LoraConfig) -> None:
    """Raise for adapters that are more than a scaled product of A and B added to a weight."""
    for key in sorted(_REFUSED):
        if getattr(config, key, None):
            raise OtherAdapterError(
                f"{path} sets `{key}`, so that the adapter is more than products of two factors; "
                f"{MERGE_MODELS}"
            )
    start = config.init_lora_weights
    if isinstance(start, str) and start.lower().startswith(_CHANGED_BASES):
        raise OtherAdapterError(
            f"{path} has `init_lora_weights`: {start}, which changed the base before the training, "
            "so that the adapter means nothing on the original; save it by peft's save_pretrained "
            "with path_initial_model_for_weight_conversion"
        )
