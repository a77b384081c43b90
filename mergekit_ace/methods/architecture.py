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
from collections.abc import Hashable
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING

from mergekit_ace.algebra.layouts import resolve_layout
from mergekit_ace.algebra.records import FixedLayout, RelativeLayout
from mergekit_ace.naming import without_numbers

if TYPE_CHECKING:
    from mergekit.common import ModelReference
    from transformers import PretrainedConfig, PreTrainedModel

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
    head = getattr(network.get_output_embeddings(), "weight", None)
    for path, module in network.named_modules():
        if isinstance(module, Conv1D):
            transposed.add(f"{path}.weight")
        elif isinstance(module, Embedding):
            tables.add(f"{path}.weight")
            if module.weight is head and len(head) >= head.shape[1]:
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
    try:
        network.base_model.get_input_embeddings()
    except NotImplementedError:
        return True
    return False
