# SPDX-License-Identifier: Apache-2.0
"""Components of the experts in a merge, on disk, for training to combine."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from mergekit.common import ModelReference
from safetensors import safe_open
from torch import Tensor
from tqdm import tqdm

from mergekit_ace.algebra.closed_form import IllConditionedError
from mergekit_ace.algebra.components import split_tensor
from mergekit_ace.algebra.records import FixedLayout
from mergekit_ace.files import save_tensors
from mergekit_ace.methods.architecture import stored_layout
from mergekit_ace.training.config import TrainConfig
from mergekit_ace.training.mapped_weights import MappedWeights, stored_tensors
from mergekit_ace.training.state import TrainingError

SIZES = {"float32": 4, "bfloat16": 2}


def write_components(
    config: TrainConfig,
    folder: str,
    stored: Mapping[str, tuple[str, ...]],
    base: MappedWeights,
    experts: Sequence[MappedWeights],
    state: Path,
    *,
    device: torch.device,
    quiet: bool,
) -> list[MappedWeights]:
    """Split the merge that training starts at; what is on disk already is not computed again.

    Args:
        config: with a basis of components.
        folder: of the base model.
        stored: names on disk of every merged parameter.
        base, experts: weights by names in memory.
        state: the files go to its subfolder `components`, one per tensor.
        device: where they are computed, one tensor at a time.
        quiet: neither the size nor a progress bar.

    Returns:
        Per row of coefficients, the component of every parameter.

    Raises:
        TrainingError: a matrix is too ill-conditioned.
    """
    known = stored_tensors(folder)
    layouts = {
        name: _layout(config, folder, {other: known[other] for other in stored[name]}, name, weight)
        for name, weight in base.items()
    }
    rows = len(experts) + (config.basis == "ace")
    target = state / "components"
    target.mkdir(parents=True, exist_ok=True)
    if not quiet:
        size = sum(math.prod(base[name].shape) for name in base) * rows
        size *= SIZES[config.component_dtype]
        print(
            f"components of {len(layouts)} tensors, {rows} each, in {config.component_dtype}: "
            f"{size / 1e9:.2f} GB in {target}"
        )
    dtype = getattr(torch, config.component_dtype)
    files = {}
    for number, (name, layout) in enumerate(
        tqdm(layouts.items(), desc="components", unit="tensor", disable=quiet)
    ):
        files[name] = target / f"{number:05d}.safetensors"
        if files[name].exists():
            continue
        try:
            versions = [weights[name].to(device) for weights in (base, *experts)]
            parts = split_tensor(versions[0], versions[1:], config.options, layout)
        except (IllConditionedError, OverflowError) as error:
            raise TrainingError(
                f"{name} cannot be merged by {config.basis}: {error}. Raise its epsilon"
            ) from error
        tensors = {str(row): part.to("cpu", dtype, copy=True) for row, part in enumerate(parts)}
        tensors = {row: tensor.contiguous() for row, tensor in tensors.items()}
        save_tensors(files[name], tensors)
    return [
        MappedWeights({name: (str(file), str(row)) for name, file in files.items()})
        for row in range(rows)
    ]


def _layout(
    config: TrainConfig,
    folder: str,
    stored: Mapping[str, tuple[str, str]],
    name: str,
    weight: Tensor,
) -> FixedLayout:
    """As the merge method reads the tensor.

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
