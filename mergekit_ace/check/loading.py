# SPDX-License-Identifier: Apache-2.0
"""Whether a result is whole, by what transformers makes of its headers."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch
from mergekit.common import ModelPath, ModelReference
from transformers import PretrainedConfig
from transformers.utils import logging as transformers_logging

from mergekit_ace.files.checkpoints import (
    DTYPES,
    Checkpoints,
    TensorHeader,
    config_donor,
    read_headers,
)
from mergekit_ace.merge_config import Finding
from mergekit_ace.methods.storage import model_class
from mergekit_ace.naming import ConfigError, listed, without_numbers
from mergekit_ace.planning import PlannedMerge

_FAILURE = "its tensors cannot be put together"
Faults = Mapping[str, Sequence[str]]  # names of tensors by what is wrong with them


def verify_model(folder: Path, donor: Path, *, trust_remote_code: bool) -> str:
    """Return what is wrong with a result as transformers would load it; empty for a whole model.

    Only headers are read. `donor` holds the model of the result's config, see `_new_faults`.
    """
    config = merged_model(folder).config(trust_remote_code=trust_remote_code)
    result = _loading_faults(config, read_headers(folder), trust_remote_code)
    if not result:
        return ""
    return _new_faults(result, merged_model(donor), read_headers(donor), trust_remote_code)


def check_loading(plan: PlannedMerge, checkpoints: Checkpoints) -> Iterator[Finding]:
    """Find what the config of a result asks for, or has no place for, before it is merged."""
    donor, trust = checkpoints[config_donor(plan.config)], plan.options.trust_remote_code
    planned = {tensor.name: tensor.headers(checkpoints) for tensor in plan.tensors}
    headers = {
        name: own.get(donor.model, next(iter(own.values()))) for name, own in planned.items() if own
    }
    result = _loading_faults(plan.out_config, headers, trust)
    with suppress(ConfigError):  # transformers does not load the models either
        if text := _new_faults(result, donor.model, donor.headers, trust):
            yield Finding.error(
                f"the result would be no model that transformers loads whole: {text}",
                "see what `slices:` and `modules:` of the config leave out, and what "
                "`mergekit-ace merge --unplanned` carries over",
            )


def _new_faults(
    result: Faults, donor: ModelReference, headers: Mapping[str, TensorHeader], trust: bool
) -> str:
    """Return in words what is wrong with a result, and with no layer of the donor of its config.

    What the donor lacks or has too many of, such as a head, the result may as well. A `ConfigError`
    says that transformers does not load the donor either.
    """
    origin = _loading_faults(donor.config(trust_remote_code=trust), headers, trust)
    if _FAILURE in origin:
        raise ConfigError(f"transformers does not load {donor} either: {origin[_FAILURE][0]}")
    texts = []
    for what, names in result.items():
        known = {without_numbers(name) for name in origin.get(what, ())}
        new = [name for name in names if without_numbers(name) not in known]
        if new:
            texts.append(f"{what.format(len(new))}: {listed(new)}")
    return "; ".join(texts)


def _loading_faults(
    config: PretrainedConfig, headers: Mapping[str, TensorHeader], trust_remote_code: bool
) -> Faults:
    """Load a checkpoint without its values by transformers; return names by what is wrong."""
    config = copy.deepcopy(config)
    vars(config).pop("quantization_config", None)  # headers are of what is read
    empty = {
        name: torch.empty(header.shape, dtype=DTYPES.get(header.dtype), device="meta")
        for name, header in headers.items()
    }
    try:
        kind: Any = model_class(config, trust_remote_code)
        with quiet_transformers():
            _, info = kind.from_pretrained(
                None,
                config=config,
                state_dict=empty,
                device_map="meta",
                ignore_mismatched_sizes=True,
                output_loading_info=True,
            )
    except Exception as error:  # of many kinds: no such class, shapes that do not fit together
        return {_FAILURE: [str(error).strip() or type(error).__name__]}
    faults = {
        "it lacks {} tensors": sorted(info["missing_keys"]),
        "its config has no place for {} tensors": sorted(info["unexpected_keys"]),
        "{} tensors have another shape than in its config": [
            f"{name} {tuple(stored)} instead of {tuple(expected)}"
            for name, stored, expected in sorted(info["mismatched_keys"])
        ],
    }
    return {what: names for what, names in faults.items() if names}


def merged_model(folder: Path) -> ModelReference:
    """Return mergekit's reference to a folder, whatever its name."""
    return ModelReference(model=ModelPath(path=str(folder)))


@contextmanager
def quiet_transformers() -> Iterator[None]:
    """Silence transformers' bars and all that it says below errors."""
    verbosity = transformers_logging.get_verbosity()
    bars = transformers_logging.is_progress_bar_enabled()
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    try:
        yield
    finally:
        transformers_logging.set_verbosity(verbosity)
        if bars:
            transformers_logging.enable_progress_bar()
