# SPDX-License-Identifier: Apache-2.0
"""Covariances of the inputs of linear layers, and counts of looked-up rows, summed up by hooks.

Samples pass one by one: then there is no padding that would have to be left out, in whatever way an
architecture arranges its inputs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from mergekit_ace.algebra.linalg import add_product_, full_precision
from mergekit_ace.algebra.measured import pack

LINEAR, TABLE = (nn.Linear, Conv1D), (nn.Embedding,)
Modules = dict[str, list[nn.Module]]  # of one kind, by the names of their weights in memory
Hook = Callable[[str, Tensor], None]  # of a parameter's name, and of what its module was given
Read = Callable[[], None]  # lets a model read samples


def modules_of(model: nn.Module, names: Iterable[str], types: tuple[type, ...]) -> Modules:
    """Return the modules of some types whose weights are among the named parameters.

    A weight may have several of them, such as a tied head.
    """
    known = {id(model.get_parameter(name)): name for name in names}
    found: Modules = {}
    for module in model.modules():
        name = known.get(id(getattr(module, "weight", None)))
        if name is not None and isinstance(module, types):
            found.setdefault(name, []).append(module)
    return found


@contextmanager
def watched(modules: Modules, hook: Hook) -> Iterator[None]:
    """Call a hook with every input of some modules."""
    handles = []
    for name, members in modules.items():

        def call(module: nn.Module, args: tuple, kwargs: dict, name: str = name) -> None:
            hook(name, args[0] if args else next(iter(kwargs.values())))

        handles += [m.register_forward_pre_hook(call, with_kwargs=True) for m in members]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def input_size(linear: nn.Module) -> int:
    """Return i of a linear layer."""
    return linear.weight.shape[0 if isinstance(linear, Conv1D) else 1]


def shared_inputs(linear: Modules, read: Read) -> dict[str, str]:
    """Return the first of the linear layers with the same inputs, by the name of each.

    Layers share their inputs if in every call they are given the very tensor that the one before
    was given, as queries, keys and values are. Layers that nothing came to share none.
    """
    calls: dict[str, list[int]] = {}
    last: list[Any] = [None, 0]

    def note(name: str, given: Tensor) -> None:
        if given is not last[0]:
            last[:] = given, last[1] + 1
        calls.setdefault(name, []).append(last[1])

    with watched(linear, note):
        read()
    first: dict[tuple[int, ...], str] = {}
    alike = {name: first.setdefault(tuple(numbers), name) for name, numbers in calls.items()}
    return alike | {name: name for name in linear if name not in alike}


@torch.no_grad()
@full_precision()
def sum_inputs(
    model: PreTrainedModel, leaders: Sequence[str], tables: Sequence[str], read: Read
) -> dict[str, Tensor]:
    """Return X_tᵀX_t/n_t of linear layers, packed, and counts of tables, while a model reads.

    Args:
        model: on its device.

    Returns:
        `covariance/NAME`, (i (i + 1)/2,) in float32, and `counts/NAME`, (n,) in int64, on the CPU.
        A layer that nothing came to has zeros.
    """
    linear, looked_up = modules_of(model, leaders, LINEAR), modules_of(model, tables, TABLE)
    rows, sums, counts = dict.fromkeys(leaders, 0), {}, {}
    for name, (module, *_) in linear.items():
        sums[name] = torch.zeros(2 * [input_size(module)], device=model.device)
    for name, (module, *_) in looked_up.items():
        counts[name] = torch.zeros(len(module.weight), dtype=torch.int64, device=model.device)

    def add(name: str, given: Tensor) -> None:
        inputs = given.reshape(-1, given.shape[-1]).float()
        total = sums[name]
        inputs = inputs.to(total.device)
        add_product_(total, inputs.mT, inputs)
        rows[name] += len(inputs)

    def count(name: str, given: Tensor) -> None:
        total = counts[name]
        total += given.reshape(-1).to(total.device).bincount(minlength=len(total))

    with watched(linear, add), watched(looked_up, count):
        read()
    found = {f"counts/{name}": total.cpu() for name, total in counts.items()}
    for name in leaders:
        total = sums.pop(name).div_(max(1, rows[name]))
        found[f"covariance/{name}"] = pack(total.cpu())
    return found


def sum_fisher(
    model: PreTrainedModel,
    names: Sequence[str],
    samples: Sequence[Any],
    logits: Callable[[Any], Tensor],
    seed: int,
) -> dict[str, Tensor]:
    """Return the diagonal of the Fisher information of some parameters, a mean over samples.

    That is the mean of (∂ log p(y | x)/∂θ)², with answers y drawn from the model's own distribution
    at every supervised position (departure: the paper takes the exact expectation where there are
    few classes). Answers at different positions are independent, so that their squares add up.

    Args:
        model: on its device, without gradients.
        logits: of a sample, (P, C) at its P supervised positions.
        seed: of the answers; with the same, they are the same.

    Returns:
        `fisher/NAME`, shaped as the parameter, in float32 on the CPU.
    """
    named = dict(model.named_parameters())
    parameters = [named[name] for name in names]
    sums = [torch.zeros_like(p, dtype=torch.float32) for p in parameters]
    generator = torch.Generator("cpu").manual_seed(seed)
    try:
        for parameter in parameters:
            parameter.requires_grad_(True)
        for sample in samples:
            scores = logits(sample).float().log_softmax(-1)
            drawn = torch.multinomial(scores.detach().exp().cpu(), 1, generator=generator)
            chosen = scores.gather(-1, drawn.to(scores.device)).sum()
            gradients = torch.autograd.grad(chosen, parameters, allow_unused=True)
            for total, gradient in zip(sums, gradients, strict=True):
                if gradient is not None:
                    total.add_(gradient.float().square_())
    finally:
        model.requires_grad_(False)
    return {
        f"fisher/{name}": total.div_(len(samples)).cpu()
        for name, total in zip(names, sums, strict=True)
    }
