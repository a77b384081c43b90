# SPDX-License-Identifier: Apache-2.0
"""Whether adapters can be merged, and fit the models that they are put onto."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from mergekit.architecture import arch_info_for_config
from mergekit.common import ModelReference
from mergekit.options import MergeOptions

from mergekit_ace.adapters.adapter_tasks import read_adapters
from mergekit_ace.adapters.lora_config import OtherAdapterError
from mergekit_ace.check.checkpoint_rules import same_name
from mergekit_ace.check.checkpoints import Checkpoints
from mergekit_ace.check.findings import Finding, listed
from mergekit_ace.files.headers import DamagedFileError, json_or_empty
from mergekit_ace.planning import ConfigError


def check_adapters(
    checkpoints: Checkpoints, options: MergeOptions, *, merged_first: bool
) -> Iterator[Finding]:
    """Find what hinders adapters, or does not fit the models that they are put onto.

    Args:
        merged_first: whether each is merged into its base first, as `mergekit-yaml` does.
    """
    uncached: list[str] = []
    for model in checkpoints:
        if model.lora is None:
            continue
        if merged_first and not options.lora_merge_cache:
            uncached.append(str(model.lora))
        elif merged_first and _is_inferred(model, options):
            yield Finding.error(
                "adapters",
                f"mergekit has to infer the architecture of {model.model}, and infers none of "
                "adapters",
                "merge by mergekit-ace merge",
            )
        yield from _check_fit(model)
        made_for = json_or_empty(Path(model.lora.path, "adapter_config.json")).get(
            "base_model_name_or_path"
        )
        if made_for and not same_name(made_for, model.model.path):
            yield Finding.warning(
                "adapters",
                f"the adapter {model.lora} was trained on {made_for}, not on {model.model}",
                "put it onto the model that it was trained on",
            )
    if uncached:
        yield Finding.warning(
            "adapters",
            f"mergekit-yaml merges adapters into their base first: {listed(uncached)}",
            "merge by mergekit-ace merge, which need not; or give --lora-merge-cache DIR and "
            "--lora-merge-dtype float32 to mergekit-yaml and to this check",
        )


def _is_inferred(model: ModelReference, options: MergeOptions) -> bool:
    """Tell whether mergekit has no description of a model's architecture."""
    try:
        return arch_info_for_config(model.config(options.trust_remote_code)) is None
    except Exception:  # of transformers and the Hub; told elsewhere
        return False


def _check_fit(model: ModelReference) -> Iterator[Finding]:
    """Find an adapter of a model of other width or depth, by the headers of both."""
    try:
        read_adapters([model])
    except (OtherAdapterError, ConfigError):  # only PEFT can tell
        return
    except DamagedFileError as error:
        yield Finding.error("adapters", str(error))
