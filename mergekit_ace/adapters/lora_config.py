# SPDX-License-Identifier: Apache-2.0
"""The `adapter_config.json` of a LoRA adapter: whether it can be merged, and ranks and scales."""

from __future__ import annotations

import logging
import math
import warnings
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import peft
from peft import LoraConfig
from peft.tuners.tuners_utils import check_target_module_exists
from peft.utils.other import get_pattern_key

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
    "trainable_token_indices": ("new rows of an embedding for some tokens", MERGE_MODELS),
    "layer_replication": ("layers that the model has oftener than the base", MERGE_MODELS),
    "megatron_config": ("layers of Megatron", "convert it to the layers of transformers"),
}  # fmt: skip
# Initializations that take A · B out of the base before the training.
_CHANGED_BASES = ("pissa", "olora", "corda", "lora_ga", "loftq")


class OtherAdapterError(DamagedFileError):
    """An adapter whose changes are no products of two factors; PEFT may merge it into its base."""


@dataclass(frozen=True)
class Scale:
    """The rank of an adapter's factors at one module, and what their product is multiplied by."""

    rank: int
    factor: float


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
    _check_variant(path, config)
    return config


def scale_at(path: Path, config: LoraConfig, key: str) -> Scale:
    """Return rank and factor at a module, as PEFT finds them.

    Args:
        path: of the config, for messages.
        config: of the adapter.
        key: name of the module, or of the parameter of `target_parameters`.

    Raises:
        DamagedFileError: they are no positive rank and no number.
    """
    rank_key = get_pattern_key(config.rank_pattern.keys(), key)
    alpha_key = get_pattern_key(config.alpha_pattern.keys(), key)
    rank = config.rank_pattern.get(rank_key, config.r)
    alpha = config.alpha_pattern.get(alpha_key, config.lora_alpha)
    if type(rank) is not int or rank < 1 or type(alpha) not in (int, float):
        raise DamagedFileError(
            f"{path} gives {key} the rank {rank!r} and the alpha {alpha!r}; correct `r`, "
            "`lora_alpha`, `rank_pattern` or `alpha_pattern` to numbers above 0"
        )
    return Scale(rank, alpha / (math.sqrt(rank) if config.use_rslora else rank))


def is_targeted(config: LoraConfig, module: str) -> bool:
    """Tell whether PEFT gives a module factors; it leaves aside those of other modules."""
    if config.target_modules is None or config.target_modules == "all-linear":
        return True  # the architecture tells
    return bool(check_target_module_exists(config, module))


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
