# SPDX-License-Identifier: Apache-2.0
"""What the linears of a whole model read and write, as hooks see it."""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor
from transformers import PreTrainedModel


class Watched(NamedTuple):
    """Inputs, outputs without bias, and the residual stream of a linear, a row for each token."""

    inputs: Tensor
    outputs: Tensor
    stream: Tensor


@torch.no_grad()
def watch(model: PreTrainedModel, ids: Tensor) -> dict[str, Watched]:
    """Return what all linears of the decoder layers do, by name."""
    seen: dict[str, Watched] = {}
    stream = torch.tensor(0.0)

    def keep_stream(module, given):
        nonlocal stream
        stream = given[0].flatten(0, 1)

    def keep(name, module, given, output):
        seen[name] = Watched(given[0].flatten(0, 1), output.flatten(0, 1), stream)

    hooks = []
    for name, module in model.model.layers.named_modules():
        if name.endswith("layernorm"):
            hooks.append(module.register_forward_pre_hook(keep_stream))
        if name.endswith("_proj"):
            hooks.append(module.register_forward_hook(partial(keep, name)))
    model(ids)
    for hook in hooks:
        hook.remove()
    return seen
