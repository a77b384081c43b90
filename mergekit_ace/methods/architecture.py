# SPDX-License-Identifier: Apache-2.0
"""How a model stores its weights: what its architecture says of layouts, and its headers of shapes.

transformers' `Conv1D` (GPT-2 and its kin) stores the transpose of what `torch.nn.Linear` does, and
so do the packed experts of some mixtures (GPT-OSS). Neither name nor shape tells.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
import transformers
from accelerate import init_empty_weights
from mergekit.common import ModelReference, get_auto_cls
from mergekit.io import ShardedTensorIndex
from mergekit.io.tasks import LoaderCache
from transformers import PretrainedConfig, PreTrainedModel
from transformers.pytorch_utils import Conv1D

from mergekit_ace.algebra.task_vectors import FixedLayout, RelativeLayout, resolve_layout
from mergekit_ace.files.checkpoints import read_file_header
from mergekit_ace.naming import without_numbers

LOG = logging.getLogger(__name__)
_LOCK = threading.Lock()  # one thread builds, the others wait
# Packed experts stored (E, in, out) whose class does not say so by transformers' `is_transposed`.
_PACKED_TRANSPOSED = {"Llama4TextExperts"}


@dataclass(frozen=True)
class Kinds:
    """Names of weights, layer numbers replaced and the model's prefix removed."""

    transposed: frozenset[str] = frozenset()  # stored as (…, in, out)
    tables: frozenset[str] = frozenset()  # stored as rows to be looked up
    heads: frozenset[str] = frozenset()  # tables that multiply as well, being the head (tied)
    convolutional: bool = False  # whether the network has no embeddings, as a ResNet


def is_transposed(model: Hashable, tensor_name: str | None) -> bool:
    """Return whether the architecture of a model stores a weight of any layer as (…, in, out).

    The first question about a model builds its architecture: ask it on the main thread, because
    mergekit's others do not know whether remote code is trusted.
    """
    return _is_among(_kinds(model).transposed, tensor_name)


def is_table(model: Hashable, tensor_name: str | None) -> bool:
    """Return whether rows of a weight are looked up, also where it is the head; see above."""
    return _is_among(_kinds(model).tables, tensor_name)


def stored_layout(
    chosen: RelativeLayout,
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
    kinds = _kinds(model)
    table = _is_among(kinds.tables, tensor_name) and not _is_among(kinds.heads, tensor_name)
    return resolve_layout(
        chosen,
        tensor_name,
        ndim,
        transposed=_is_among(kinds.transposed, tensor_name),
        table=tables and table,
        kernel=kinds.convolutional,
    )


def _is_among(templates: frozenset[str], tensor_name: str | None) -> bool:
    if not templates or tensor_name is None:
        return False
    template = without_numbers(tensor_name)
    return any(template == known or template.endswith("." + known) for known in templates)


def _kinds(model: Hashable) -> Kinds:
    if not isinstance(model, ModelReference):
        return Kinds()
    with _LOCK:
        return _read_kinds(model)


@lru_cache(maxsize=16)
def _read_kinds(model: ModelReference) -> Kinds:
    if os.path.isfile(model.model.path):  # mergekit-pytorch: bare tensors, no architecture
        return Kinds()
    try:
        return _kinds_in(empty_network(model), tensor_names(model) or ())
    except Exception as error:
        LOG.warning(
            "mergekit-ace: the architecture of %s cannot be built (%s: %s); all its matrices are "
            "taken as stored (out, in). For Conv1D weights set layout: transposed with a filter.",
            model, type(error).__name__, error,
        )  # fmt: skip
        return Kinds()


def _kinds_in(network: PreTrainedModel, stored: Sequence[str]) -> Kinds:
    from mergekit_ace.methods.stored import read_names

    transposed, tables, heads = set(), set(), set()
    head: torch.Tensor | None = getattr(network.get_output_embeddings(), "weight", None)
    for path, module in network.named_modules():
        if isinstance(module, Conv1D):
            transposed.add(f"{path}.weight")
        elif isinstance(module, torch.nn.Embedding):
            tables.add(f"{path}.weight")
            if head is not None and module.weight is head and len(head) >= head.shape[1]:
                heads.add(f"{path}.weight")
        elif getattr(module, "is_transposed", False) or type(module).__name__ in _PACKED_TRANSPOSED:
            packed = (name for name, p in module.named_parameters() if p.ndim == 3)
            transposed.update(f"{path}.{name}" for name in packed)
    prefix = f"{network.base_model_prefix}."
    in_files = read_names(network, stored).memory.items()

    def templates(names: set[str]) -> frozenset[str]:
        names = names | {name for name, known in in_files if known in names}
        return frozenset(without_numbers(name.removeprefix(prefix)) for name in names)

    convolutional = not tables and lacks_embeddings(network)
    return Kinds(templates(transposed), templates(tables), templates(heads), convolutional)


def empty_network(model: ModelReference) -> PreTrainedModel:
    """Instantiate the architecture of a model on the meta device: names and types, no memory."""
    trust = LoaderCache().trust_remote_code
    config = model.config(trust_remote_code=trust)
    if config.architectures == ["Inferred"]:  # what it is called where mergekit goes by the files
        config = ModelReference(model=model.model).config(trust_remote_code=trust)
    return build_empty(config, trust_remote_code=trust)


def build_empty(config: PretrainedConfig, *, trust_remote_code: bool) -> PreTrainedModel:
    """Instantiate the model of a config on the meta device, or raise what transformers raises."""
    with init_empty_weights(include_buffers=True):
        return model_class(config, trust_remote_code)(config)


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
    inner: Any = network.base_model
    try:
        inner.get_input_embeddings()
    except NotImplementedError:
        return True
    return False


def tensor_names(model: Hashable) -> tuple[str, ...] | None:
    """Return the names of all tensors of a checkpoint; None where it cannot be read."""
    index = _index(model)
    return tuple(index.tensor_paths) if index else None


def check_shapes(
    tensor_name: str, models: Sequence[Hashable], base: Hashable, *, method: str = "ace"
) -> None:
    """Raise a `RuntimeError` where a model's header has another shape of a tensor than the base's.

    Differing vocabularies are no error: a `tokenizer:` section may align them. (mergekit asks from
    within a pydantic validator, which would bury a `ValueError` in a report of its own.)
    """
    expected = _shape(base, tensor_name)
    if expected is None:
        return
    for model in models:
        shape = _shape(model, tensor_name)
        if shape is None or shape == expected:
            continue
        tokens = ((_vocabulary_size(model),), (_vocabulary_size(base),))
        if shape[1:] == expected[1:] and (shape[:1], expected[:1]) == tokens:
            continue
        raise RuntimeError(
            f"{method}: tensor {tensor_name} has shape {shape} in {model}, but {expected} in the "
            f"base model {base}. Experts must be fine-tuned from this base model: replace or "
            f"remove {model}, or set base_model to the one that it comes from. (Heads that take no "
            "part: read the models without them by override_architecture.)"
        )


@lru_cache(maxsize=64)
def _vocabulary_size(model: ModelReference) -> int | None:
    try:
        config: Any = model.config(trust_remote_code=LoaderCache().trust_remote_code)
        return config.get_text_config().vocab_size
    except Exception:  # no config, no vocabulary: a bare tensor file
        return None


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
    path, index = model.model.path, _index(model)
    if index is not None and tensor_name in index.tensor_paths:
        path = os.path.join(index.base_path, index.tensor_paths[tensor_name])
    if not path.endswith(".safetensors") or not os.path.isfile(path):
        return None
    header = _header(Path(path)).get(tensor_name)
    return header.shape if header else None


_header = lru_cache(maxsize=256)(read_file_header)  # all tensors of a shard ask
