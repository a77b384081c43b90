# SPDX-License-Identifier: Apache-2.0
"""What transformers makes of a checkpoint, from its headers alone: is a result a whole model?"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from mergekit.common import ModelPath, ModelReference
from mergekit.io import ShardedTensorIndex
from transformers.utils import logging as transformers_logging

from mergekit_ace.check.findings import listed
from mergekit_ace.files.headers import DTYPES, TensorHeader, read_headers
from mergekit_ace.methods.architecture import model_class
from mergekit_ace.naming import without_numbers

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel


class NotLoadedError(RuntimeError):
    """transformers does not load a model whose result is looked at."""


@dataclass(frozen=True)
class LoadedHeaders:
    """What transformers says when it loads a checkpoint; names are those in memory.

    Attributes:
        missing: what the model has and the checkpoint lacks.
        unexpected: what the checkpoint has and the model has no place for.
        mismatched: shapes in the checkpoint and in the model, by name.
        failure: why the model cannot be built, or stored tensors be put together; empty if so.
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
    """
    tensors = {
        name: torch.empty(
            header.shape, dtype=DTYPES.get(header.dtype, torch.float32), device="meta"
        )
        for name, header in headers.items()
    }
    try:
        with quiet_transformers():
            _, info = model_class(config, trust_remote_code).from_pretrained(
                None,
                config=config,
                state_dict=tensors,
                device_map="meta",
                ignore_mismatched_sizes=True,
                output_loading_info=True,
            )
    except Exception as error:  # of many kinds: no such class, shapes that do not fit together
        return LoadedHeaders(failure=str(error).strip() or type(error).__name__)
    return LoadedHeaders(
        missing=frozenset(info["missing_keys"]),
        unexpected=frozenset(info["unexpected_keys"]),
        mismatched={name: (tuple(a), tuple(b)) for name, a, b in info["mismatched_keys"]},
    )


def verify_model(
    folder: Path, donor: ModelReference, donor_folder: Path, *, trust_remote_code: bool
) -> str:
    """Return what is wrong with a result as transformers would load it; empty for a whole model.

    Only headers are read. What the model that gave its config lacks, or has too many of, the result
    may as well: a backbone without the head that its config names, for example.

    Args:
        donor: the model whose config the result has.
        donor_folder: where its weights are.

    Raises:
        NotLoadedError: transformers does not load the donor either.
    """
    result = _load_folder(merged_model(folder), folder, trust_remote_code)
    if result == LoadedHeaders():
        return ""
    origin = _load_folder(donor, donor_folder, trust_remote_code)
    if origin.failure:
        raise NotLoadedError(f"transformers does not load {donor} either: {origin.failure}")
    return "; ".join(_differences(result, origin))


def merged_model(folder: Path) -> ModelReference:
    """Return mergekit's reference to a folder, whatever its name."""
    return ModelReference(model=ModelPath(path=str(folder)))


def _load_folder(model: ModelReference, folder: Path, trust_remote_code: bool) -> LoadedHeaders:
    config = model.config(trust_remote_code=trust_remote_code)
    index = ShardedTensorIndex.from_disk(str(folder))
    headers = read_headers(index.tensor_paths, index.base_path)
    return load_headers(config, headers, trust_remote_code=trust_remote_code)


def _differences(result: LoadedHeaders, origin: LoadedHeaders) -> Iterator[str]:
    if result.failure:
        yield f"its tensors cannot be put together: {result.failure}"
    missing = _only(result.missing, origin.missing)
    if missing:
        yield f"it lacks {len(missing)} tensors: {listed(missing)}"
    unexpected = _only(result.unexpected, origin.unexpected)
    if unexpected:
        yield f"its config has no place for {len(unexpected)} tensors: {listed(unexpected)}"
    odd = _other_shapes(result.mismatched, origin.mismatched)
    if odd:
        yield f"{len(odd)} tensors have another shape than in its config: {listed(odd, 3)}"


def _only(names: Iterable[str], known: Iterable[str]) -> list[str]:
    """Return names of no kind that is known; a result may have more layers than its origin."""
    kinds = {without_numbers(name) for name in known}
    return sorted(name for name in names if without_numbers(name) not in kinds)


def _other_shapes(result: Mapping, origin: Mapping) -> list[str]:
    return [
        f"{name} {stored} instead of {expected}"
        for name, (stored, expected) in sorted(result.items())
        if origin.get(name) != (stored, expected)
    ]


def wanted_names(model: PreTrainedModel, names: Iterable[str]) -> tuple[set[str], set[str]]:
    """Return those names of a checkpoint from which transformers fills a model.

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
