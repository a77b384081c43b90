# SPDX-License-Identifier: Apache-2.0
"""How weights are stored, asked of a model's architecture: (in, out), or as rows to be looked up.

transformers' `Conv1D` (GPT-2 and its kin) stores the transpose of what `torch.nn.Linear` does, and
so do the packed experts of some mixtures (GPT-OSS). Embeddings are no matrix that multiplies what
comes in, but a table of rows. Neither name nor shape tells.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mergekit_ace.algebra.task_vectors import FixedLayout, RelativeLayout, resolve_layout
from mergekit_ace.naming import without_numbers

if TYPE_CHECKING:
    from mergekit.common import ModelReference
    from mergekit.io import ShardedTensorIndex
    from torch import Tensor
    from transformers import PretrainedConfig, PreTrainedModel

Shape = tuple[int, ...]
LOG = logging.getLogger(__name__)
_LOCK = threading.Lock()  # one thread builds, the others wait
# Packed experts stored (E, in, out) whose class does not say so by transformers' `is_transposed`.
_PACKED_TRANSPOSED = {"Llama4TextExperts"}


@dataclass(frozen=True)
class Kinds:
    """Names of weights, layer numbers replaced and the model's prefix removed.

    Attributes:
        transposed: stored as (…, in, out).
        tables: stored as rows to be looked up.
        heads: of the tables, those that multiply as well, being the head (tied).
        convolutional: whether the network has no embeddings of any kind, as a ResNet.
    """

    transposed: frozenset[str] = frozenset()
    tables: frozenset[str] = frozenset()
    heads: frozenset[str] = frozenset()
    convolutional: bool = False


def is_transposed(model: Hashable, tensor_name: str | None) -> bool:
    """Return whether the architecture stores a weight as (…, in, out).

    Layers are told by their kind, not by their number, so that a stack with more layers than
    the base model has is answered too; a prefix that only a checkpoint has is ignored. The first
    question about a model builds its architecture, which must happen on the main thread (mergekit's
    other threads do not know whether remote code is trusted): ask while planning.

    Args:
        model: mergekit's reference to the base model. Anything else (an index into tensors in
            memory) has no architecture: False.
        tensor_name: as in the merged checkpoint.
    """
    return tensor_name is not None and _is_among(_kinds(model).transposed, tensor_name)


def is_table(model: Hashable, tensor_name: str | None) -> bool:
    """Return whether the architecture looks up rows of a weight.

    Arguments and rules are those of `is_transposed`. A matrix that is both the table of embeddings
    and the head (tied) is a table.
    """
    return tensor_name is not None and _is_among(_kinds(model).tables, tensor_name)


def stored_layout(
    chosen: RelativeLayout,
    model: Hashable,
    tensor_name: str | None,
    ndim: int,
    *,
    tables: bool = False,
) -> FixedLayout:
    """Return how a tensor of a checkpoint is read.

    Kernels (o, i, k, k) are matrices (o, i·k·k) in networks of convolutions, which have few other
    weights. Elsewhere they are averaged, as that of a ViT's patches.

    Args:
        chosen: as configured.
        model, tensor_name: see `is_transposed`.
        ndim: of the tensor.
        tables: whether the merge method has a rule for tables of rows. Embeddings that are the
            head as well are matrices, because the head multiplies by them. Those with fewer rows
            than columns, as in toy models only, stay tables, which serves these better.
    """
    rows = tables and is_table(model, tensor_name) and not _is_head(model, tensor_name)
    return resolve_layout(
        chosen,
        tensor_name,
        ndim,
        transposed=is_transposed(model, tensor_name),
        table=rows,
        kernel=_kinds(model).convolutional,
    )


def _is_head(model: Hashable, tensor_name: str | None) -> bool:
    return tensor_name is not None and _is_among(_kinds(model).heads, tensor_name)


def _is_among(templates: frozenset[str], tensor_name: str) -> bool:
    template = without_numbers(tensor_name)
    return any(template == known or template.endswith("." + known) for known in templates)


def _kinds(model: Hashable) -> Kinds:
    from mergekit.common import ModelReference

    if not isinstance(model, ModelReference):
        return Kinds()
    with _LOCK:
        return _known_kinds(model)


@lru_cache(maxsize=16)
def _known_kinds(model: ModelReference) -> Kinds:
    if os.path.isfile(model.model.path):  # mergekit-pytorch: bare tensors, no architecture
        return Kinds()
    try:
        return _read_kinds(model)
    except Exception as error:
        LOG.warning(
            "mergekit-ace: the architecture of %s cannot be built (%s: %s); all its matrices are "
            "taken as stored (out, in). For Conv1D weights set layout: transposed with a filter.",
            model, type(error).__name__, error,
        )  # fmt: skip
        return Kinds()


def empty_network(model: ModelReference) -> PreTrainedModel:
    """Instantiate the architecture of a model on the meta device: names and types, no memory."""
    from mergekit.common import ModelReference
    from mergekit.io.tasks import LoaderCache

    trust = LoaderCache().trust_remote_code
    config = model.config(trust_remote_code=trust)
    if config.architectures == ["Inferred"]:  # what it is called where mergekit goes by the files
        config = ModelReference(model=model.model).config(trust_remote_code=trust)
    return build_empty(config, trust_remote_code=trust)


def build_empty(config: PretrainedConfig, *, trust_remote_code: bool) -> PreTrainedModel:
    """Instantiate the model of a config on the meta device.

    Raises:
        Exception: of transformers, which cannot build it, or may not run the code for it.
    """
    from accelerate import init_empty_weights

    with init_empty_weights(include_buffers=True):
        return model_class(config, trust_remote_code)(config)


def model_class(config: PretrainedConfig, trust_remote_code: bool) -> type[PreTrainedModel]:
    """Return the class that a config names, or what its remote code defines.

    Raises:
        Exception: there is none, or its code is not trusted.
    """
    import torch
    import transformers
    from mergekit.common import get_auto_cls

    name = (config.architectures or [""])[0]
    known = getattr(transformers, name, None)
    if isinstance(known, type) and issubclass(known, transformers.PreTrainedModel):
        return known
    with torch.device("meta"):
        built = get_auto_cls(name).from_config(config, trust_remote_code=trust_remote_code)
    return type(built)


def _read_kinds(model: ModelReference) -> Kinds:
    from torch.nn import Embedding
    from transformers.pytorch_utils import Conv1D

    network = empty_network(model)
    transposed, tables, heads = set(), set(), set()
    head: Tensor | None = getattr(network.get_output_embeddings(), "weight", None)
    for path, module in network.named_modules():
        if isinstance(module, Conv1D):
            transposed.add(f"{path}.weight")
        elif isinstance(module, Embedding):
            tables.add(f"{path}.weight")
            if head is not None and module.weight is head and len(head) >= head.shape[1]:
                heads.add(f"{path}.weight")
        elif getattr(module, "is_transposed", False) or type(module).__name__ in _PACKED_TRANSPOSED:
            packed = (name for name, p in module.named_parameters() if p.ndim == 3)
            transposed.update(f"{path}.{name}" for name in packed)
    prefix = f"{network.base_model_prefix}."

    def templates(names: set[str]) -> frozenset[str]:
        return frozenset(without_numbers(name.removeprefix(prefix)) for name in names)

    return Kinds(
        templates(transposed),
        templates(tables),
        templates(heads),
        not tables and lacks_embeddings(network),
    )


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
    """Compare each model's tensor of this name with the base's.

    Differing vocabularies are no error here, since only mergekit knows whether a `tokenizer:`
    section will align them: they are reported once per model. Nor is a tensor whose expected shape
    the model has in another layer: under `slices:` that layer may be the one that is merged, and
    mergekit names the tensor when its turn comes.

    Raises:
        RuntimeError: naming the tensor, the model and both shapes. (mergekit asks from within a
            pydantic validator, which would bury a ValueError in a report of its own.)
    """
    expected = _shape(base, tensor_name)
    if expected is None:
        return
    for model in models:
        shape = _shape(model, tensor_name)
        if shape is None or shape == expected:
            continue
        if shape and shape[1:] == expected[1:] and _is_vocabulary(model, shape, base, expected):
            _warn_once(
                f"{method}: {model} has a vocabulary of {shape[0]}, the base model {base} one of "
                f"{expected[0]}. They merge only when the config aligns them, e.g. by\n"
                "    tokenizer: {source: base}\n(or union; if yours does, all is well).",
                "vocabularies",
            )
            continue
        message = shape_mismatch(tensor_name, model, shape, base, expected)
        if not _in_another_layer(model, tensor_name, expected):
            raise RuntimeError(f"{method}: {message}")
        _warn_once(f"{method}: {message}", "shapes")


def shape_mismatch(
    tensor_name: str | None, model: Hashable, shape: Shape, base: Hashable, expected: Shape
) -> str:
    """Return what to say of a tensor of another shape than the base's."""
    return (
        f"tensor {tensor_name} has shape {shape} in {model}, but {expected} in the base "
        f"model {base}. Experts must be fine-tuned from this base model: replace or remove "
        f"{model}, or set base_model to the one that it comes from. (Heads that take no part: "
        "read the models without them by override_architecture.)"
    )


@lru_cache(maxsize=256)
def _warn_once(message: str, subject: str) -> None:
    """Warn; cached, so that what is asked for every tensor is said once."""
    LOG.warning("%s", message, extra={"subject": subject})


def _in_another_layer(model: Hashable, tensor_name: str, expected: Shape) -> bool:
    """Return whether a tensor of the same kind has the expected shape."""
    kind, index = without_numbers(tensor_name), _index(model)
    return any(
        without_numbers(name) == kind and _shape(model, name) == expected
        for name in (index.tensor_paths if index else ())
    )


def _is_vocabulary(model: Hashable, shape: Shape, base: Hashable, base_shape: Shape) -> bool:
    """Return whether the first axis counts tokens, which may differ between experts."""
    return shape[0] == _vocabulary_size(model) and base_shape[0] == _vocabulary_size(base)


@lru_cache(maxsize=64)
def _vocabulary_size(model: ModelReference) -> int | None:
    from mergekit.io.tasks import LoaderCache

    try:
        config: Any = model.config(trust_remote_code=LoaderCache().trust_remote_code)
        return config.get_text_config().vocab_size
    except Exception:  # no config, no vocabulary: a bare tensor file
        return None


def _index(model: Hashable) -> ShardedTensorIndex | None:
    """Return where the tensors of a checkpoint folder lie; None for anything else."""
    from mergekit.common import ModelReference
    from mergekit.io.tasks import LoaderCache

    if not isinstance(model, ModelReference) or os.path.isfile(model.model.path):
        return None
    try:
        return LoaderCache().get(model).index
    except Exception:  # mergekit reports a missing model itself, when it needs it
        return None


def _shape(model: Hashable, tensor_name: str) -> Shape | None:
    """Return the tensor's shape by the checkpoint's header; None where it cannot be known."""
    from mergekit.common import ModelReference

    if not isinstance(model, ModelReference):
        return None
    path = model.model.path
    if not os.path.isfile(path):
        index = _index(model)
        if index is None or tensor_name not in index.tensor_paths:
            return None
        path = os.path.join(index.base_path, index.tensor_paths[tensor_name])
    if not os.path.exists(path):
        return None
    return _header(path, os.stat(path).st_mtime_ns).get(tensor_name)


@lru_cache(maxsize=256)
def _header(path: str, changed: int) -> dict[str, Shape]:
    """Return the shapes in one file. Cached until it changes: all tensors of a shard ask."""
    from mergekit_ace.files.headers import DamagedFileError, read_file_header

    try:
        return {name: header.shape for name, header in read_file_header(Path(path)).items()}
    except DamagedFileError:
        if path.endswith(".safetensors"):
            raise
        return {}  # mergekit says it when it reads the file
