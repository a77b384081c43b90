# SPDX-License-Identifier: Apache-2.0
"""Coefficients for tensors that the training did not have (A.5.2): resampled by relative depth."""

from __future__ import annotations

import torch
from torch import Tensor

from mergekit_ace.coefficients import CoefficientFile
from mergekit_ace.depth import block_of


def resample(file: CoefficientFile, name: str, depth: float) -> Tensor:
    """The coefficients, (K,), that a tensor of another network gets at its relative depth.

    Interpolated linearly between the tensors of the same kind (`mlp.up_proj.weight` in every
    block) where the file has such, else between the means of all tensors of a depth; constant
    beyond the ends.

    Args:
        file: whose coefficients are carried over.
        name: of the tensor.
        depth: see `depth.relative_depths`.
    """
    with torch.device("cpu"):  # also inside of mergekit's own `with torch.device(…)`
        return _interpolated(file, _kind(name), depth)


def _interpolated(file: CoefficientFile, kind: str, depth: float) -> Tensor:
    alike = [
        column
        for column, tensor in enumerate(file.contents.tensors)
        if any(_kind(known) == kind for known in (tensor.name, *tensor.stored))
    ]
    columns = torch.tensor(alike or range(len(file.contents.tensors)))
    depths, places = file.depths[columns].unique(return_inverse=True)  # ascending
    values = torch.zeros(len(file.coefficients), len(depths))
    values.index_add_(1, places, file.coefficients[:, columns])
    values /= places.bincount(minlength=len(depths))
    above = int(torch.searchsorted(depths, torch.tensor(depth)).clamp(1, max(len(depths) - 1, 1)))
    if len(depths) == 1:
        return values[:, 0]
    low, high = float(depths[above - 1]), float(depths[above])
    share = min(max((depth - low) / (high - low), 0.0), 1.0)
    return torch.lerp(values[:, above - 1], values[:, above], share)


def _kind(name: str) -> str:
    """What is left of a name without its block."""
    block = block_of(name)
    return name[len(block) :] if block[-1:].isdigit() else name
