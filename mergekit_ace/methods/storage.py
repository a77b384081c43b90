# SPDX-License-Identifier: Apache-2.0
"""How a model stores its weights: layouts, shapes, names in files and in memory.

transformers' `Conv1D` (GPT-2 and its kin) stores the transpose of what `torch.nn.Linear` does, and
so do the packed experts of some mixtures (GPT-OSS). Neither name nor shape tells.
"""

from __future__ import annotations

import logging
import os
import re
import threading
from collections.abc import Collection, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
import transformers
from accelerate import init_empty_weights
from mergekit.architecture.auto import infer_vocabulary_axes
from mergekit.architecture.conversion import _expanded_target_keys
from mergekit.common import ModelPath, ModelReference, get_auto_cls
from mergekit.io import ShardedTensorIndex
from mergekit.io.tasks import LoaderCache
from transformers import PretrainedConfig, PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import WeightRenaming, rename_source_key
from transformers.pytorch_utils import Conv1D

from mergekit_ace.algebra.task_vectors import FixedLayout, StoredKind, TableLayout, resolve_layout
from mergekit_ace.files.checkpoints import read_file_header
from mergekit_ace.naming import without_numbers

LOG = logging.getLogger(__name__)
_LOCK = threading.Lock()
_PACKED_TRANSPOSED = {"Llama4TextExperts"}  # whose class does not say so by `is_transposed`


def is_table(model: Hashable, tensor_name: str | None) -> bool:
    """Return whether rows of a weight are looked up, also where it is the head.

    The first question about a model, which builds it, must come from the main thread: others do not
    know whether remote code is trusted.
    """
    return _kind(model, tensor_name) in ("table", "head")


def stored_layout(
    chosen: TableLayout,
    model: Hashable,
    tensor_name: str | None,
    ndim: int,
    *,
    tables: bool = False,
) -> FixedLayout:
    """Return how a tensor of a checkpoint is read, from the ``layout`` that is configured.

    Where a method has a rule for `tables`, embeddings are such unless they are the head as well,
    with no fewer rows than columns.
    """
    kind = _kind(model, tensor_name)
    if kind == "table" and not tables:
        kind = None
    return resolve_layout(chosen, tensor_name, ndim, kind)


def _kind(model: Hashable, tensor_name: str | None) -> StoredKind | None:
    names = model_names(model)
    return names.kind(tensor_name) if names else None


def empty_network(model: ModelReference) -> PreTrainedModel:
    """Instantiate the architecture of a model on the meta device: names and types, no memory."""
    trust = LoaderCache().trust_remote_code
    config = ModelReference(model=model.model).config(trust_remote_code=trust)
    with init_empty_weights(include_buffers=True):
        return model_class(config, trust)(config)


def model_class(config: PretrainedConfig, trust_remote_code: bool) -> type[PreTrainedModel]:
    """Return the class that a config names, or what its remote code, if trusted, defines."""
    name = (config.architectures or [""])[0]
    known = getattr(transformers, name, None)
    if isinstance(known, type) and issubclass(known, transformers.PreTrainedModel):
        return known
    with torch.device("meta"):
        built = get_auto_cls(name).from_config(config, trust_remote_code=trust_remote_code)
    return type(built)


def lacks_embeddings(network: PreTrainedModel) -> bool:
    """Return whether a model is one that mergekit does not infer: a ResNet has no embeddings."""
    try:
        network.base_model.get_input_embeddings()  # pyright: ignore
    except NotImplementedError:
        return True
    return False


def tensor_names(model: Hashable) -> Collection[str]:
    """Return the names of all tensors in a checkpoint's files; none where it cannot be read."""
    index = _index(model)
    return index.tensor_paths.keys() if index else ()


def check_shapes(
    tensor_name: str, models: Sequence[Hashable], base: Hashable, *, method: str = "ace"
) -> None:
    """Raise an error where a model's header has another shape of a tensor than the base's.

    Differing vocabularies are none: a `tokenizer:` section may align them. (mergekit asks from
    within a pydantic validator, which would bury a `ValueError` in a report of its own.)
    """
    expected = _shape(base, tensor_name)
    if expected is None:
        return
    for model in models:
        shape = _shape(model, tensor_name)
        if shape is None or shape == expected:
            continue
        names = model_names(base)
        rows_are_tokens = names and names.memory.get(tensor_name) in names.vocabulary
        if rows_are_tokens and shape[1:] == expected[1:]:
            continue
        raise RuntimeError(
            f"{method}: tensor {tensor_name} has shape {shape} in {model}, but {expected} in the "
            f"base model {base}. Experts must be fine-tuned from this base model: replace or "
            f"remove {model}, or set base_model to the one that it comes from"
        )


def _index(model: Hashable) -> ShardedTensorIndex | None:
    """Return where the tensors of a checkpoint folder lie; None for anything else."""
    if not isinstance(model, ModelReference) or os.path.isfile(model.model.path):
        return None
    try:
        return LoaderCache().get(model).index
    except Exception:  # mergekit reports a missing model itself, when it needs it
        return None


def _shape(model: Hashable, tensor_name: str) -> tuple[int, ...] | None:
    """Return the tensor's shape by the checkpoint's header; None where it cannot be known."""
    if not isinstance(model, ModelReference):
        return None
    index, path = _index(model), Path(model.model.path)
    if index is not None and tensor_name in index.tensor_paths:
        path = Path(index.base_path, index.tensor_paths[tensor_name])
    if path.suffix != ".safetensors" or not path.is_file():
        return None
    header = _header(path).get(tensor_name)
    return header.shape if header else None


_header = lru_cache(maxsize=256)(read_file_header)  # all tensors of a shard ask


@dataclass(frozen=True)
class StoredNames:
    """What transformers makes of the tensors in a checkpoint's files."""

    memory: Mapping[str, str]  # names in memory by names in files, of what is loaded as it is
    converted: frozenset[str]  # names in files of what is packed, split or turned when loaded
    ties: Mapping[str, str]  # of names in memory that are tied, the tensor that they are one with
    lacking: frozenset[str]  # names in memory that nothing in the files fills
    vocabulary: Mapping[str, int]  # axes with an entry per token, by names in memory
    kinds: Mapping[str, StoredKind]  # by names without numbers and the model's prefix
    convolutional: bool  # whether the network has no embeddings, as a ResNet

    def kind(self, tensor_name: str | None) -> StoredKind | None:
        """Return the kind of a weight; None for one that is a matrix as it is stored."""
        template = without_numbers(tensor_name or "") if self.kinds else ""
        for known, kind in self.kinds.items():
            if template == known or template.endswith("." + known):
                return kind
        return "kernel" if self.convolutional else None


def loaded_names(
    network: PreTrainedModel, names: Iterable[str]
) -> Iterator[tuple[str, set[str], bool]]:
    """Yield names in files, those in memory that are filled by them, and whether as they are."""
    mapping = get_model_conversion_mapping(network)
    renamings = [entry for entry in mapping if isinstance(entry, WeightRenaming)]
    converters: list[Any] = [one for one in mapping if not isinstance(one, WeightRenaming)]
    state, prefix = network.state_dict(), network.base_model_prefix
    for name in names:
        target, pattern = rename_source_key(name, renamings, converters, prefix, state)
        if target not in state:
            target, pattern = rename_source_key(name, [], [], prefix, state)
        if target not in state:
            continue
        if pattern is None:
            yield name, {target}, True
        else:
            converter = next(one for one in converters if pattern in one.source_patterns)
            yield name, _expanded_target_keys(target, converter.target_patterns), False


def read_names(network: PreTrainedModel, names: Iterable[str]) -> StoredNames:
    """Find out what transformers fills a model, on the meta device, with, by names in files."""
    kinds = _kinds_in_memory(network)
    convolutional = not {"table", "head"} & {*kinds.values()} and lacks_embeddings(network)
    found = list(loaded_names(network, names))
    memory = {name: target for name, targets, whole in found if whole for target in targets}
    kinds |= {name: kinds[known] for name, known in memory.items() if known in kinds}
    prefix = f"{network.base_model_prefix}."
    filled = {target for _, targets, _ in found for target in targets}
    state = network.state_dict()
    network.tie_weights()
    ties = dict(network.all_tied_weights_keys)
    optional = getattr(network, "_keys_to_ignore_on_load_missing", None) or ()
    lacking = (
        name
        for name in state.keys() - filled - ties.keys()
        if not any(re.search(pattern, name) for pattern in optional)
    )
    try:
        vocabulary = infer_vocabulary_axes(network)
    except NotImplementedError:  # of networks for images, and of two towers
        vocabulary = {}
    return StoredNames(
        memory,
        converted=frozenset(name for name, _, whole in found if not whole),
        ties=ties,
        lacking=frozenset(lacking),
        vocabulary=vocabulary,
        kinds={without_numbers(name.removeprefix(prefix)): kind for name, kind in kinds.items()},
        convolutional=convolutional,
    )


def _kinds_in_memory(network: PreTrainedModel) -> dict[str, StoredKind]:
    kinds: dict[str, StoredKind] = {}
    head: torch.Tensor | None = getattr(network.get_output_embeddings(), "weight", None)
    for path, module in network.named_modules():
        if isinstance(module, Conv1D):
            kinds[f"{path}.weight"] = "transposed"
        elif isinstance(module, torch.nn.Embedding):
            tied = head is not None and module.weight is head and len(head) >= head.shape[1]
            kinds[f"{path}.weight"] = "head" if tied else "table"
        elif getattr(module, "is_transposed", False) or type(module).__name__ in _PACKED_TRANSPOSED:
            for name, parameter in module.named_parameters():
                if parameter.ndim == 3:
                    kinds[f"{path}.{name}"] = "transposed"
    return kinds


def model_names(model: Hashable) -> StoredNames | None:
    """Do what `read_names` does for a model; None for tensors that are no model of transformers."""
    if not isinstance(model, ModelReference) or os.path.isfile(model.model.path):
        return None
    index = _index(model)
    known = vars(index) if index else {}  # of which there may be two, if the model is quantised
    if "stored_names" not in known:
        with _LOCK:  # one thread builds, the others wait
            known["stored_names"] = _stored_names(model.model, frozenset(tensor_names(model)))
    return known["stored_names"]


@lru_cache(maxsize=16)
def _stored_names(model: ModelPath, names: frozenset[str]) -> StoredNames | None:
    try:
        return read_names(empty_network(ModelReference(model=model)), names)
    except Exception as error:  # whatever a config or a model's constructor raises
        LOG.warning(
            "mergekit-ace: the architecture of %s cannot be built (%s: %s); all its matrices are "
            "taken as stored (out, in). For Conv1D weights set layout: transposed with a filter.",
            model, type(error).__name__, error,
        )  # fmt: skip
        return None
