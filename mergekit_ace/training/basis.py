# SPDX-License-Identifier: Apache-2.0
"""Components of the experts in a merge, on disk, for training to combine."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from mergekit.common import ModelReference
from safetensors import safe_open
from torch import Tensor
from tqdm import tqdm

from mergekit_ace.algebra.components import split_tensor
from mergekit_ace.algebra.election import elected_task_vectors
from mergekit_ace.algebra.records import FixedLayout, IllConditionedError
from mergekit_ace.files import save_tensors
from mergekit_ace.methods.architecture import stored_layout
from mergekit_ace.training.config import TrainConfig
from mergekit_ace.training.mapped_weights import StoredTensor, map_tensors, stored_tensors
from mergekit_ace.training.state import TrainingError, TrainingRun


def write_components(
    config: TrainConfig,
    folder: str,
    stored: Mapping[str, tuple[str, ...]],
    base: Mapping[str, Tensor],
    experts: Sequence[Mapping[str, Tensor]],
    run: TrainingRun,
) -> list[dict[str, Tensor]]:
    """Split the merge that training starts at; what is on disk already is not computed again.

    Args:
        config: with a basis of components.
        folder: of the base model.
        stored: names on disk of every merged parameter.
        base, experts: weights by names in memory.
        run: the files go to `components` in its state, one per tensor.

    Returns:
        Per row of coefficients, the component of every parameter, mapped from disk.

    Raises:
        TrainingError: a matrix is too ill-conditioned.
    """
    rows = len(experts) + (config.basis == "ace")
    target = run.state / "components"
    target.mkdir(parents=True, exist_ok=True)
    dtype = getattr(torch, config.component_dtype)
    if not run.quiet:
        size = sum(weight.numel() for weight in base.values()) * rows * dtype.itemsize
        print(
            f"components of {len(base)} tensors, {rows} each, in {config.component_dtype}: "
            f"{size / 1e9:.2f} GB in {target}"
        )
    known = stored_tensors(folder)
    files = {name: target / f"{number:05d}.safetensors" for number, name in enumerate(base)}
    for name, path in tqdm(files.items(), "components", unit="tensor", disable=run.quiet):
        if not path.exists():
            places = {other: known[other] for other in stored[name]}
            layout = _layout(config, folder, places, name, base[name])
            versions = [weights[name].to(run.accelerator.device) for weights in (base, *experts)]
            _write(path, name, versions, config, layout)
    return [
        map_tensors({name: (str(path), str(row)) for name, path in files.items()})
        for row in range(rows)
    ]


def _write(
    path: Path, name: str, versions: Sequence[Tensor], config: TrainConfig, layout: FixedLayout
) -> None:
    """Write the components of one tensor, called by their rows; the base comes first."""
    try:
        if config.options is None:
            components = elected_task_vectors(versions[0], versions[1:])
        else:
            components = split_tensor(versions[0], versions[1:], config.options, layout)
    except (IllConditionedError, OverflowError) as error:
        raise TrainingError(
            f"{name} cannot be merged by {config.basis}: {error}. Raise its epsilon"
        ) from error
    dtype = getattr(torch, config.component_dtype)
    owned = [component.to("cpu", dtype, copy=True).contiguous() for component in components]
    save_tensors(path, {str(row): tensor for row, tensor in enumerate(owned)})


def _layout(
    config: TrainConfig,
    folder: str,
    stored: Mapping[str, StoredTensor],
    name: str,
    weight: Tensor,
) -> FixedLayout:
    """Return how the merge method reads the tensor.

    mergekit merges what is packed from several tensors on disk as transformers packs it in memory.

    Args:
        stored: its names on disk, with the file and the name in it.
        name, weight: of the parameter in memory.
    """
    shape = tuple(weight.shape)
    packed = any(_stored_shape(*place) != shape for place in stored.values())
    model = ModelReference.model_validate(folder)
    own = name if packed else next(iter(stored))
    tables = config.basis == "ace_relative"
    return stored_layout("auto", model, own, len(shape), tables=tables)


def _stored_shape(path: str, key: str) -> tuple[int, ...]:
    with safe_open(path, framework="pt") as file:
        return tuple(file.get_slice(key).get_shape())
