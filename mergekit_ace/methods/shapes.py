# SPDX-License-Identifier: Apache-2.0
"""Compare the shapes of a tensor across checkpoints, from their headers, while a merge is planned.

mergekit itself compares shapes when a tensor's turn comes, maybe hours later, and does not say
which model is the odd one.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Hashable, Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from safetensors import safe_open

if TYPE_CHECKING:
    from mergekit.common import ModelReference

LOG = logging.getLogger(__name__)
Shape = tuple[int, ...]


def check_shapes(tensor_name: str, models: Sequence[Hashable], base: Hashable) -> None:
    """Compare each model's tensor of this name with the base's.

    Only safetensors have a header to read; for pickled checkpoints mergekit's own check stands.
    Differing vocabularies are no error here, since only mergekit knows whether a `tokenizer:`
    section will align them: they are reported once per model.

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
        if shape[1:] == expected[1:] and _is_vocabulary(model, shape, base, expected):
            _report_vocabulary(str(model), shape[0], str(base), expected[0])
            continue
        raise RuntimeError(
            f"ace: tensor {tensor_name} has shape {shape} in {model}, but {expected} in the base "
            f"model {base}. Experts must be fine-tuned from this base model: replace or remove "
            f"{model}, or set base_model to the one that it comes from."
        )


@lru_cache(maxsize=64)
def _report_vocabulary(model: str, rows: int, base: str, base_rows: int) -> None:
    """Cached, so that every pair is reported once."""
    LOG.warning(
        "ace: %s has a vocabulary of %d, the base model %s one of %d. They merge only when the "
        "config aligns them, e.g. by\n    tokenizer: {source: base}\n(or union; if yours does, "
        "all is well).",
        model, rows, base, base_rows,
    )  # fmt: skip


def _is_vocabulary(model: Hashable, shape: Shape, base: Hashable, base_shape: Shape) -> bool:
    """Whether the first axis counts tokens, which is what may differ between experts."""
    return shape[0] == _vocabulary_size(model) and base_shape[0] == _vocabulary_size(base)


@lru_cache(maxsize=64)
def _vocabulary_size(model: ModelReference) -> int | None:
    from mergekit.io.tasks import LoaderCache

    try:
        config: Any = model.config(trust_remote_code=LoaderCache().trust_remote_code)
        return config.get_text_config().vocab_size
    except Exception:  # no config, no vocabulary: a bare tensor file
        return None


def _shape(model: Hashable, tensor_name: str) -> Shape | None:
    """The tensor's shape in the checkpoint's header; None where it cannot be known cheaply."""
    from mergekit.common import ModelReference
    from mergekit.io.tasks import LoaderCache

    if not isinstance(model, ModelReference):
        return None
    path = model.model.path
    if not os.path.isfile(path):
        try:
            index = LoaderCache().get(model).index
            path = os.path.join(index.base_path, index.tensor_paths[tensor_name])
        except Exception:  # mergekit reports a missing model or tensor itself, when it needs it
            return None
    if not path.endswith(".safetensors") or not os.path.exists(path):
        return None
    return _header(path, os.stat(path).st_mtime_ns).get(tensor_name)


@lru_cache(maxsize=64)
def _header(path: str, changed: int) -> dict[str, Shape]:
    """Cached until the file changes: every tensor of a shard asks for the same header."""
    with safe_open(path, framework="pt") as file:
        return {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118
