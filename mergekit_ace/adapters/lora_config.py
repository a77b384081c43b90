# SPDX-License-Identifier: Apache-2.0
"""The `adapter_config.json` of a LoRA adapter, and whether it can be merged."""

from __future__ import annotations

import logging
import warnings
from dataclasses import fields
from pathlib import Path
from typing import Any

import peft
from peft import LoraConfig

from mergekit_ace.headers import DamagedFileError, read_json

LOG = logging.getLogger(__name__)

MERGE_MODELS = "merge full models with mergekit-yaml, made by peft's merge_and_unload"
# What makes a change of a weight other than a scaled product of A and B, by the key of a config.
_REFUSED = {
    "use_dora": ("DoRA, which also rescales the columns of the base", MERGE_MODELS),
    "use_qalora": ("QA-LoRA, on a quantized base", "train a plain LoRA adapter"),
    "use_bdlora": ("BD-LoRA, whose factors are stored in blocks", MERGE_MODELS),
    "arrow_config": ("Arrow, which routes between adapters", "merge those adapters"),
    "kasa_config": ("KaSA, which also truncates the base", MERGE_MODELS),
    "monteclora_config": ("MonteCLoRA, which samples around its factors", MERGE_MODELS),
    "alora_invocation_tokens": (
        "aLoRA, which is off until certain tokens come and has no merged form",
        "train a plain LoRA adapter",
    ),
    "lora_bias": ("changes of biases", MERGE_MODELS),
    "trainable_token_indices": ("new rows of an embedding for some tokens", MERGE_MODELS),
    "layer_replication": ("layers that the model has oftener than the base", MERGE_MODELS),
    "megatron_config": ("layers of Megatron", "convert it to the layers of transformers"),
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
    _check_unknown_keys(path, content)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # on keys that are looked at here
            config = LoraConfig.from_peft_type(**content)
    except Exception as error:  # of many kinds
        raise DamagedFileError(
            f"{path} is no config that peft {peft.__version__} reads: {error}; correct it, or save "
            "the adapter again"
        ) from error
    config.rank_pattern = config.rank_pattern or {}
    config.alpha_pattern = config.alpha_pattern or {}
    _check_numbers(path, config)
    _check_variant(path, config)
    return config


def _check_unknown_keys(path: Path, content: dict[str, Any]) -> None:
    """Refuse switches of a newer PEFT, and warn of its other settings as PEFT does."""
    known = {field.name for field in fields(LoraConfig)}
    unknown = {key: value for key, value in content.items() if key not in known and value}
    switches = [
        key
        for key, value in unknown.items()
        if (key.startswith("use_") and value is True) or key.endswith("_config")
    ]
    if switches:
        raise DamagedFileError(
            f"{path} sets {', '.join(sorted(switches))}, which peft {peft.__version__} does not "
            "know, and which may change what the adapter does; update peft"
        )
    if unknown:
        LOG.warning(
            "%s sets %s, which peft %s does not know and ignores; update peft if that matters",
            path, ", ".join(sorted(unknown)), peft.__version__,
        )  # fmt: skip


def _check_numbers(path: Path, config: LoraConfig) -> None:
    ranks = [config.r, *config.rank_pattern.values()]
    alphas = [config.lora_alpha, *config.alpha_pattern.values()]
    wrong = [f"rank {rank!r}" for rank in ranks if type(rank) is not int or rank < 1]
    wrong += [f"alpha {alpha!r}" for alpha in alphas if type(alpha) not in (int, float)]
    if wrong:
        raise DamagedFileError(
            f"{path} has the {wrong[0]}; correct `r`, `lora_alpha`, `rank_pattern` or "
            "`alpha_pattern` to numbers above 0"
        )


def _check_variant(path: Path, config: LoraConfig) -> None:
    """Raise for adapters that are more than a scaled product of A and B added to a weight."""
    for key, (what, remedy) in _REFUSED.items():
        if getattr(config, key, None):
            raise OtherAdapterError(f"{path} sets `{key}`: {what}; {remedy}")
    start = config.init_lora_weights
    if isinstance(start, str) and start.lower().startswith(_CHANGED_BASES):
        raise OtherAdapterError(
            f"{path} has `init_lora_weights`: {start}, which changed the base before the training, "
            "so that the adapter means nothing on the original; save it by peft's save_pretrained "
            "with path_initial_model_for_weight_conversion"
        )
