# SPDX-License-Identifier: Apache-2.0
"""Statistics of BatchNorm layers: a merge has inputs of its own, which no expert has seen."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from mergekit_ace.checkpoint_files import weight_files
from mergekit_ace.files import save_tensors
from mergekit_ace.naming import is_counter, is_running_statistic


def normalising_layers(model: nn.Module) -> list[_BatchNorm]:
    """Return the layers that normalise by means and variances of what they have seen."""
    layers = (module for module in model.modules() if isinstance(module, _BatchNorm))
    return [layer for layer in layers if layer.track_running_stats]


@torch.no_grad()
def measure_batch_statistics(
    layers: Sequence[_BatchNorm], passes: Iterable[Callable[[], object]]
) -> None:
    """Set the means and variances of layers to those of what reaches them now.

    Args:
        layers: of a model in evaluation mode; their counters of batches stay as they are.
        passes: each sends a batch through the model. All count alike.
    """
    kept = [(layer.num_batches_tracked, layer.momentum) for layer in layers]
    for layer, (counter, _) in zip(layers, kept, strict=True):
        layer.num_batches_tracked = torch.zeros_like(counter)
        layer.momentum = None  # the mean over all batches
        layer.train()
    for forward in passes:
        forward()
    for layer, (counter, momentum) in zip(layers, kept, strict=True):
        layer.num_batches_tracked, layer.momentum = counter, momentum
        layer.eval()


def write_batch_statistics(model: nn.Module, folders: Iterable[Path]) -> None:
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
