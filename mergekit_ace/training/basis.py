# SPDX-License-Identifier: Apache-2.0
"""Components of the experts in a merge, on disk, for training to combine."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch
from mergekit.common import ModelReference
from torch import Tensor
from tqdm import tqdm

from mergekit_ace.algebra.components import split_tensor
from mergekit_ace.algebra.election import elected_task_vectors
from mergekit_ace.algebra.records import IllConditionedError
from mergekit_ace.files import save_tensors
from mergekit_ace.methods.architecture import stored_layout
from mergekit_ace.training.mapped_weights import map_tensors, stored_headers
from mergekit_ace.training.state import TrainingError

if TYPE_CHECKING:
    from mergekit_ace.headers import TensorHeader
    from mergekit_ace.training.family import Family


def write_components(family: Family) -> list[dict[str, Tensor]]:
    """Split the merge that training starts at; what is on disk already is not computed again.

    The files go to `components` in the state of the run, one per tensor.

    Returns:
        Per row of coefficients, the component of every parameter, mapped from disk.

    Raises:
        TrainingError: a matrix is too ill-conditioned.
    """
    config, base, quiet = family.config, family.base, family.run.quiet
    rows = len(family.experts) + (config.basis == "ace")
    target = family.run.state / "components"
    target.mkdir(parents=True, exist_ok=True)
    dtype = getattr(torch, config.component_dtype)
    if not quiet:
        size = sum(weight.numel() for weight in base.values()) * rows * dtype.itemsize
        print(
            f"components of {len(base)} tensors, {rows} each, in {config.component_dtype}: "
            f"{size / 1e9:.2f} GB in {target}"
        )
    headers = stored_headers(family.folders.base)
    files = {name: target / f"{number:05d}.safetensors" for number, name in enumerate(base)}
    for name, path in tqdm(files.items(), "components", unit="tensor", disable=quiet):
        if not path.exists():
            parts = [part.to("cpu", dtype, copy=True) for part in _split(family, name, headers)]
            save_tensors(path, {str(row): part.contiguous() for row, part in enumerate(parts)})
    return [
        map_tensors({name: (str(path), str(row)) for name, path in files.items()})
        for row in range(rows)
    ]


def _split(family: Family, name: str, headers: Mapping[str, TensorHeader]) -> list[Tensor]:
    """Return the components of one parameter, in the order of their rows.

    mergekit merges what is packed from several tensors on disk as transformers packs it in memory;
    so that is how the layout is found.
    """
    config, device = family.config, family.run.accelerator.device
    base, *experts = (weights[name].to(device) for weights in (family.base, *family.experts))
    if config.options is None:
        return list(elected_task_vectors(base, experts))
    shape, stored = tuple(base.shape), family.stored[name]
    own = name if any(headers[n].shape != shape for n in stored) else stored[0]
    model = ModelReference.model_validate(family.folders.base)
    tables = config.basis == "ace_relative"
    layout = stored_layout("auto", model, own, len(shape), tables=tables)
    try:
        return list(split_tensor(base, experts, config.options, layout))
    except (IllConditionedError, OverflowError) as error:
        raise TrainingError(
            f"{name} cannot be merged by {config.basis}: {error}. Raise its epsilon"
        ) from error
