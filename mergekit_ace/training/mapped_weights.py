# SPDX-License-Identifier: Apache-2.0
"""Parameters of checkpoints, mapped from disk.

transformers stores some models under other names, or packed otherwise, than it holds them in
memory. So a checkpoint's own files are used only after every parameter has been found in them,
equal to the one in memory; else a converted copy is written once.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Container, Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from mergekit_ace.check.models import AS_NUMBERS
from mergekit_ace.files.checkpoints import (
    FLOATING,
    TensorHeader,
    read_file_header,
    weight_files,
)
from mergekit_ace.files.saving import save_tensors
from mergekit_ace.training.state import TrainingError, open_tensors

if TYPE_CHECKING:
    from transformers import PreTrainedModel

StoredTensor = tuple[str, str]  # file, and name in it


def map_tensors(sources: Mapping[str, StoredTensor]) -> dict[str, Tensor]:
    """Map tensors of safetensors files under names of our own; they are read when used.

    What is mapped is the system's cache of the file, not memory of this process.
    """
    files = {path: open_tensors(path) for path in {path for path, _ in sources.values()}}
    # All views at once, before anything large: what little memory they take would otherwise pin
    # that of the gradients between which it lies.
    return {name: files[path].get_tensor(stored) for name, (path, stored) in sources.items()}


def rewrite_tensors(source: Path, target: Path, changed: Callable[[str], Tensor | None]) -> None:
    """Write a safetensors file with some tensors changed.

    Args:
        target: may be the source.
        changed: returns a tensor by its name, which gets the dtype of the old one, or None.
    """
    with open_tensors(source) as file:
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        metadata = file.metadata()
    for name, tensor in tensors.items():
        new = changed(name)
        tensors[name] = tensor if new is None else new.to("cpu", tensor.dtype)
    save_tensors(target, tensors, metadata)


def stored_headers(folder: str | os.PathLike) -> dict[str, TensorHeader]:
    """Return the headers of the tensors in the files of a checkpoint, by name."""
    files = weight_files(Path(folder))
    return {name: header for path in files for name, header in read_file_header(path).items()}


def map_folder(folder: str | os.PathLike) -> dict[str, Tensor]:
    """Map all tensors in the safetensors files of a checkpoint."""
    return map_tensors({n: (header.file, n) for n, header in stored_headers(folder).items()})


def check_stored_dtypes(reference: str, folder: str | os.PathLike, names: Container[str]) -> None:
    """Raise a `TrainingError` unless a checkpoint holds what is merged as floating numbers."""
    for name, header in stored_headers(folder).items():
        if name in names and header.dtype not in FLOATING:
            raise TrainingError(
                f"tensor {name} of model {reference} is stored as {header.dtype}, which cannot be "
                f"merged; {AS_NUMBERS}"
            )


def map_weights(
    model: PreTrainedModel, names: Iterable[str], folder: str | os.PathLike, copy: Path
) -> dict[str, Tensor]:
    """Map parameters of a model from the files it was loaded from, or from a converted copy.

    Args:
        model: loaded from `folder`, in the dtype it is stored in.
        copy: file that a converted copy goes to where the stored tensors are not the parameters.
    """
    parameters = {name: model.get_parameter(name).detach() for name in names}
    sources = map_folder(folder)
    direct = {name: _same_name(name, model, sources) for name in parameters}
    if all(stored is not None for stored in direct.values()):
        mapped = {name: sources[stored] for name, stored in direct.items() if stored}
        pairs = ((mapped[name], parameter.cpu()) for name, parameter in parameters.items())
        if all(one.shape == p.shape and torch.equal(one, p.to(one.dtype)) for one, p in pairs):
            return mapped
    if not copy.exists():
        save_tensors(copy, {name: p.cpu().contiguous() for name, p in parameters.items()})
    return map_tensors({name: (str(copy), name) for name in parameters})


def _same_name(name: str, model: PreTrainedModel, sources: Mapping[str, object]) -> str | None:
    """Return the stored name that differs at most by the prefix of the backbone."""
    prefix = f"{model.base_model_prefix}."
    candidates = (name, name.removeprefix(prefix), prefix + name)
    return next((candidate for candidate in candidates if candidate in sources), None)


def stored_names(
    model: PreTrainedModel, names: Iterable[str], folder: str | os.PathLike
) -> dict[str, tuple[str, ...]]:
    """Find the names under which a checkpoint on disk holds parameters in memory.

    Every parameter is replaced by one number, and transformers' own way of saving is followed;
    where a number ends up, that parameter is stored.

    Returns:
        Stored names per parameter; empty for one that the checkpoint does not have.
    """
    from transformers.core_model_loading import revert_weight_conversion

    names = list(names)
    known = stored_headers(folder)
    numbers = {id(model.get_parameter(name)): number for number, name in enumerate(names)}
    # Tied parameters have several names and are one: all of them lead to it.
    tags = {
        name: torch.tensor(float(numbers[id(parameter)])).expand(parameter.shape)
        for name, parameter in model.named_parameters(remove_duplicate=False)
        if id(parameter) in numbers
    }
    found: dict[str, set[str]] = {name: set() for name in names}
    try:
        saved = revert_weight_conversion(model, dict(tags))
    except Exception:  # a conversion that needs real tensors: names in memory must do
        saved = tags
    for renamed in (tags, saved):
        for name, tag in renamed.items():
            stored = _same_name(name, model, known)
            if stored is not None and tag.numel():
                found[names[int(tag.flatten()[0])]].add(stored)
    return {name: tuple(sorted(stored)) for name, stored in found.items()}
