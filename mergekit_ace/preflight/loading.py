# SPDX-License-Identifier: Apache-2.0
"""What transformers makes of a checkpoint, told from its headers on the meta device: no memory."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
import transformers
from mergekit.common import get_auto_cls
from transformers.utils import logging as transformers_logging

from mergekit_ace.headers import DTYPES, TensorHeader

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel


class UnknownArchitectureError(RuntimeError):
    """transformers cannot build the model of a config."""


@dataclass(frozen=True)
class LoadedHeaders:
    """What transformers says when it loads a checkpoint; names are those in memory.

    Attributes:
        missing: what the model has and the checkpoint lacks.
        unexpected: what the checkpoint has and the model has no place for.
        mismatched: shapes in the checkpoint and in the model, by name.
        failure: why stored tensors cannot be put together; empty where they can.
    """

    missing: frozenset[str] = frozenset()
    unexpected: frozenset[str] = frozenset()
    mismatched: Mapping[str, tuple[tuple[int, ...], tuple[int, ...]]] = field(default_factory=dict)
    failure: str = ""


def load_headers(
    config: PretrainedConfig, headers: Mapping[str, TensorHeader], *, trust_remote_code: bool
) -> LoadedHeaders:
    """Load a checkpoint without its values, by transformers' own machinery.

    That renames and packs tensors as it does on a real load.

    Args:
        config: of the model; its first architecture is built.
        headers: of the checkpoint, by name.
        trust_remote_code: as in transformers.

    Raises:
        UnknownArchitectureError: transformers cannot build the architecture at all.
    """
    skeleton(config, trust_remote_code=trust_remote_code)  # what fails from here is the checkpoint
    tensors = {
        name: torch.empty(
            header.shape, dtype=DTYPES.get(header.dtype, torch.float32), device="meta"
        )
        for name, header in headers.items()
    }
    try:
        _, info = _from_tensors(config, tensors, trust_remote_code)
    except Exception as error:  # of many kinds: from shapes that do not fit together
        return LoadedHeaders(failure=str(error).strip() or type(error).__name__)
    return LoadedHeaders(
        missing=frozenset(info["missing_keys"]),
        unexpected=frozenset(info["unexpected_keys"]),
        mismatched={name: (tuple(a), tuple(b)) for name, a, b in info["mismatched_keys"]},
    )


def skeleton(config: PretrainedConfig, *, trust_remote_code: bool) -> PreTrainedModel:
    """Build the model of a config on the meta device.

    Raises:
        UnknownArchitectureError: transformers cannot build it, or may not run the code for it.
    """
    try:
        return _from_tensors(config, {}, trust_remote_code)[0]
    except Exception as error:  # whatever a model's constructor raises
        name = (config.architectures or ["no architecture"])[0]
        raise UnknownArchitectureError(f"{name}: {error}") from error


def wanted_names(model: PreTrainedModel, names: Iterable[str]) -> tuple[set[str], set[str]]:
    """Return those names of a checkpoint from which transformers fills a model.

    Args:
        model: as `skeleton` builds it.
        names: of tensors in the checkpoint.

    Returns:
        What the model needs; and what it ties to something else, so that it can do without.
    """
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import WeightRenaming, rename_source_key

    mapping = get_model_conversion_mapping(model)
    renamings = [entry for entry in mapping if isinstance(entry, WeightRenaming)]
    converters = [entry for entry in mapping if not isinstance(entry, WeightRenaming)]
    state, prefix = model.state_dict(), model.base_model_prefix

    def in_memory(name: str) -> str:
        renamed = rename_source_key(name, renamings, converters, prefix, state)[0]
        return renamed if renamed in state else rename_source_key(name, [], [], prefix, state)[0]

    targets = {name: in_memory(name) for name in names}
    tied = {name for name, target in targets.items() if target in model.all_tied_weights_keys}
    return {name for name, target in targets.items() if target in state} - tied, tied


def _from_tensors(
    config: PretrainedConfig, tensors: Mapping[str, torch.Tensor], trust_remote_code: bool
) -> tuple[PreTrainedModel, dict[str, Any]]:
    with quiet_transformers():
        return model_class(config, trust_remote_code).from_pretrained(
            None,
            config=config,
            state_dict=dict(tensors),
            device_map="meta",
            ignore_mismatched_sizes=True,
            output_loading_info=True,
        )


def model_class(config: PretrainedConfig, trust_remote_code: bool) -> type[PreTrainedModel]:
    """Return the class that a config names, or what its remote code defines.

    Raises:
        Exception: there is none, or its code is not trusted.
    """
    name = (config.architectures or [""])[0]
    known = getattr(transformers, name, None)
    if isinstance(known, type) and issubclass(known, transformers.PreTrainedModel):
        return known
    with torch.device("meta"):
        built = get_auto_cls(name).from_config(config, trust_remote_code=trust_remote_code)
    return type(built)


@contextmanager
def quiet_transformers() -> Iterator[None]:
    """Silence transformers' bars and all that it says below errors."""
    verbosity, bars = (
        transformers_logging.get_verbosity(),
        transformers_logging.is_progress_bar_enabled(),
    )
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    try:
        yield
    finally:
        transformers_logging.set_verbosity(verbosity)
        if bars:
            transformers_logging.enable_progress_bar()
