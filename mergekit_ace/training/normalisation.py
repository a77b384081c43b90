# SPDX-License-Identifier: Apache-2.0
"""Statistics of BatchNorm layers, which are no parameters: a merge has the mean of the experts'."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from mergekit_ace.checkpoint_files import weight_files
from mergekit_ace.files import save_tensors
from mergekit_ace.naming import is_counter, is_running_statistic


def running_statistics(model: nn.Module) -> dict[str, Tensor]:
    """Return the means and variances that BatchNorm layers have seen, by name; copies."""
    buffers = model.named_buffers()
    return {name: buffer.clone() for name, buffer in buffers if is_running_statistic(name)}


def average_statistics(model: nn.Module, experts: Sequence[Mapping[str, Tensor]]) -> None:
    """Give a model the mean of the experts' statistics, as `ace` merges them.

    They do not depend on coefficients. Measured anew for every merge, they cost a pass and learned
    five points less (examples/training/README.md).

    Args:
        model: in which merges are written.
        experts: `running_statistics` of each.
    """
    buffers = dict(model.named_buffers())
    for name in experts[0].keys() & buffers.keys():
        buffers[name].copy_(torch.stack([expert[name].float() for expert in experts]).mean(0))


def write_statistics_of_batches(model: nn.Module, folders: Iterable[Path]) -> None:
    """Give checkpoints the statistics and counters of a model in memory.

    What all of them have in common is in every merge of them, by whatever method.

    Args:
        model: whose tensors have the names in the checkpoints.
        folders: of checkpoints in safetensors files.
    """
    buffers = model.named_buffers()
    known = {name: b for name, b in buffers if is_running_statistic(name) or is_counter(name)}
    for path in (path for folder in folders if known for path in weight_files(folder)):
        tensors = load_file(path)
        own = {name: known[name].to("cpu", tensors[name].dtype) for name in known.keys() & tensors}
        save_tensors(path, tensors | own, {"format": "pt"})
