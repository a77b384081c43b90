# SPDX-License-Identifier: Apache-2.0
"""Which weights of a model are stored (in, out), asked of its architecture.

transformers' `Conv1D` (GPT-2 and its kin) stores the transpose of what `torch.nn.Linear` does, and
so do the packed experts of some mixtures (GPT-OSS). Neither name nor shape tells.
"""

from __future__ import annotations

import logging
import os
import re
import threading
from collections.abc import Hashable
from functools import lru_cache
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from mergekit.common import ModelReference
    from transformers import PretrainedConfig, PreTrainedModel

LOG = logging.getLogger(__name__)
_LOCK = threading.Lock()  # one thread builds, the others wait
# Packed experts stored (E, in, out) whose class does not say so by transformers' `is_transposed`.
_PACKED_TRANSPOSED = {"Llama4TextExperts"}
_NUMBER = re.compile(r"(?<=\.)\d+(?=\.)")


def is_transposed(model: Hashable, tensor_name: str | None) -> bool:
    """Whether the architecture of `model` stores the weight `tensor_name` as (…, in, out).

    Layers are told by their kind, not by their number, so that a stack with more layers than
    the base model has is answered too; a prefix that only a checkpoint has is ignored. The first
    question about a model builds its architecture, which must happen on the main thread (mergekit's
    other threads do not know whether remote code is trusted): ask while planning.

    Args:
        model: mergekit's reference to the base model. Anything else (an index into tensors in
            memory) has no architecture: False.
        tensor_name: as in the merged checkpoint.
    """
    from mergekit.common import ModelReference

    if tensor_name is None or not isinstance(model, ModelReference):
        return False
    with _LOCK:
        templates = _transposed_templates(model)
    template = _NUMBER.sub("*", tensor_name)
    return any(template == known or template.endswith("." + known) for known in templates)


@lru_cache(maxsize=16)
def _transposed_templates(model: ModelReference) -> frozenset[str]:
    """Names of the transposed weights, layer numbers replaced and the model's prefix removed."""
    if os.path.isfile(model.model.path):  # mergekit-pytorch: bare tensors, no architecture
        return frozenset()
    try:
        return _read_templates(model)
    except Exception as error:
        LOG.warning(
            "ace: the architecture of %s cannot be built (%s: %s); all its matrices are taken as "
            "stored (out, in). For Conv1D weights set layout: transposed with a filter.",
            model, type(error).__name__, error,
        )  # fmt: skip
        return frozenset()


def _read_templates(model: ModelReference) -> frozenset[str]:
    """Instantiate the architecture on the meta device: names and types, no memory."""
    from accelerate import init_empty_weights
    from mergekit.io.tasks import LoaderCache
    from transformers.pytorch_utils import Conv1D

    trust = LoaderCache().trust_remote_code
    config = model.config(trust_remote_code=trust)
    with init_empty_weights(include_buffers=True):
        network = _instantiate(config, trust)
    names: set[str] = set()
    for path, module in network.named_modules():
        if isinstance(module, Conv1D):
            names.add(f"{path}.weight")
        elif getattr(module, "is_transposed", False) or type(module).__name__ in _PACKED_TRANSPOSED:
            names.update(f"{path}.{name}" for name, p in module.named_parameters() if p.ndim == 3)
    prefix = f"{network.base_model_prefix}."
    return frozenset(_NUMBER.sub("*", name.removeprefix(prefix)) for name in names)


def _instantiate(config: PretrainedConfig, trust_remote_code: bool) -> PreTrainedModel:
    """The class that the config names, or what mergekit takes for it when it is remote code."""
    import transformers
    from mergekit.common import get_auto_cls

    name = (config.architectures or [""])[0]
    known = getattr(transformers, name, None)
    if known is not None:
        return known(config)
    return get_auto_cls(name).from_config(config, trust_remote_code=trust_remote_code)
