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
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mergekit_ace.files.headers import DamagedFileError, read_file_header
from mergekit_ace.naming import without_numbers

if TYPE_CHECKING:
    from mergekit.common import ModelReference
    from mergekit.io import ShardedTensorIndex

LOG = logging.getLogger(__name__)
Shape = tuple[int, ...]


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
    try:
        return {name: header.shape for name, header in read_file_header(Path(path)).items()}
    except DamagedFileError:
        if path.endswith(".safetensors"):
            raise
        return {}  # mergekit says it when it reads the file
