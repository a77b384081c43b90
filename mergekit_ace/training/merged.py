# SPDX-License-Identifier: Apache-2.0
"""Weights of checkpoints, mapped from disk, and a model whose weights are their merge.

The merge θ_0 + Σ_k λ_k s_k Δ_k is linear in the coefficients, so for any loss
∂L/∂λ_k^l = s_k^l ⟨∂L/∂θ^l, Δ_k^l⟩. s_k tells whether the expert changed the tensor at all, and is
0 where it is the base in another precision. As soon as a parameter's gradient is ready, its K inner
products with the experts' task vectors are taken and the gradient is freed. Task vectors are formed
in blocks from the mapped weights, so that beyond the model, its activations and one gradient there
is one block of each expert in memory.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from mergekit_ace.algebra.task_vectors import select_active
from mergekit_ace.files.checkpoints import weight_files
from mergekit_ace.files.saving import save_tensors
from mergekit_ace.naming import ConfigError
from mergekit_ace.training.state import open_tensors

if TYPE_CHECKING:
    from transformers import PreTrainedModel

Weights = Mapping[str, Tensor]  # mapped from disk, by names in memory

# Entries that are read at once: 1 MiB in float32 stays in a core's cache. On a GPU every operation
# has to be launched, and every copy started.
BLOCK, DEVICE_BLOCK = 2**18, 2**22


def map_tensors(sources: Mapping[str, tuple[str, str]]) -> dict[str, Tensor]:
    """Map tensors of safetensors files, (file, name in it), under names of our own.

    They are read when used. What is mapped is the system's cache, not memory of this process.
    """
    files = {path: open_tensors(path) for path in {path for path, _ in sources.values()}}
    # All views at once, before anything large: what little memory they take would otherwise pin
    # that of the gradients between which it lies.
    return {name: files[path].get_tensor(stored) for name, (path, stored) in sources.items()}


def map_folder(folder: str | os.PathLike) -> dict[str, Tensor]:
    """Map all tensors in the safetensors files of a checkpoint."""
    mapped: dict[str, Tensor] = {}
    for path in weight_files(Path(folder)):
        with open_tensors(path) as file:
            mapped |= {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    return mapped


def rewrite_tensors(source: Path, target: Path, changed: Callable[[str], Tensor | None]) -> None:
    """Write a safetensors file, which may be the source, with what `changed` has by name.

    New tensors get the dtype of the old ones.
    """
    with open_tensors(source) as file:
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        metadata = file.metadata()
    for name, tensor in tensors.items():
        new = changed(name)
        tensors[name] = tensor if new is None else new.to("cpu", tensor.dtype)
    save_tensors(target, tensors, metadata)


def map_weights(
    model: PreTrainedModel, names: Iterable[str], folder: str | os.PathLike, copy: Path
) -> dict[str, Tensor]:
    """Map parameters of a model from the files it was loaded from, or from a converted copy.

    transformers stores some models under other names, or packed otherwise, than it holds them in
    memory. So the files are used only if every parameter is in them, equal to the one in memory.
    """
    parameters = {name: model.get_parameter(name).detach() for name in names}
    stored = map_folder(folder)
    found = {name: _same_name(name, model, stored) for name in parameters}
    mapped = {name: stored[own] for name, own in found.items() if own is not None}
    for name, tensor in mapped.items():
        if not tensor.is_floating_point():
            raise ConfigError(
                f"tensor {name} of model {folder} is stored as {tensor.dtype}, which cannot be "
                "merged; get the model in bfloat16, float16 or float32"
            )
    pairs = ((tensor, parameters[name].cpu()) for name, tensor in mapped.items())
    if len(mapped) == len(parameters) and all(
        one.shape == other.shape and torch.equal(one, other.to(one.dtype)) for one, other in pairs
    ):
        return mapped
    if not copy.exists():
        save_tensors(copy, {name: p.cpu().contiguous() for name, p in parameters.items()})
    return map_tensors({name: (str(copy), name) for name in parameters})


def _same_name(name: str, model: PreTrainedModel, stored: Mapping[str, object]) -> str | None:
    """Return the stored name that differs at most by the prefix of the backbone."""
    prefix = f"{model.base_model_prefix}."
    candidates = (name, name.removeprefix(prefix), prefix + name)
    return next((candidate for candidate in candidates if candidate in stored), None)


def stored_names(
    model: PreTrainedModel, names: Iterable[str], stored: Mapping[str, object]
) -> dict[str, tuple[str, ...]]:
    """Find the names under which a checkpoint on disk holds parameters in memory.

    Every parameter is replaced by one number, and transformers' own way of saving is followed;
    where a number ends up, that parameter is stored.
    """
    from transformers.core_model_loading import revert_weight_conversion

    names = list(names)
    numbers = {id(model.get_parameter(name)): number for number, name in enumerate(names)}
    # Tied parameters have several names and are one: all of them lead to it.
    tags = {
        name: torch.tensor(float(numbers[id(parameter)])).expand(parameter.shape)
        for name, parameter in model.named_parameters(remove_duplicate=False)
        if id(parameter) in numbers
    }
    try:
        saved = revert_weight_conversion(model, dict(tags))
    except Exception:  # a conversion that needs real tensors: names in memory must do
        saved = tags
    found: dict[str, set[str]] = {name: set() for name in names}
    for name, tag in (*tags.items(), *saved.items()):
        own = _same_name(name, model, stored)
        if own is not None and tag.numel():
            found[names[int(tag.flatten()[0])]].add(own)
    return {name: tuple(sorted(own)) for name, own in found.items()}


class MergedModel:
    """Model that is written anew for given coefficients and collects their gradient.

    Attributes:
        module: the model; only the L merged parameters, `names`, require gradients.
        products: (K, L), float64: ∂L/∂λ, summed over backward passes since `clear`.
    """

    def __init__(
        self, module: nn.Module, base: Weights, experts: Sequence[Weights], names: Sequence[str],
        *, components: bool = False,
    ):  # fmt: skip
        """Take weights by name; as `components`, those of `experts` are the Δ_k themselves."""
        self.module = module
        self.products = torch.zeros(len(experts), len(names), dtype=torch.float64)
        self._base, self._experts, self._names = base, experts, tuple(names)
        self._components = components
        self._parameters = [module.get_parameter(name) for name in names]
        self._changed = torch.ones(len(experts), len(names))  # s_k, as `merge_entries` has them
        for column, name in enumerate(names if not components else ()):
            versions = [expert[name] for expert in experts]
            active = select_active(base[name], versions, [1.0] * len(versions), torch.float32)
            self._changed[:, column] = torch.tensor(active.changed)
        # On the devices, until `collect`: a copy from there would end the overlap of their work.
        self._sums: dict[int, Tensor] = {}
        module.requires_grad_(False)
        for column, parameter in enumerate(self._parameters):
            parameter.requires_grad_(True)
            parameter.register_post_accumulate_grad_hook(partial(self._reduce, column))

    @torch.no_grad()
    def write(self, coefficients: Tensor) -> None:
        """Set every merged parameter to θ_0 + Σ_k λ_k s_k Δ_k for λ, (K, L)."""
        used = (coefficients.detach().float().cpu() * self._changed).T.contiguous()
        for column, parameter in enumerate(self._parameters):
            flat, row = parameter.data.view(-1), used[column].to(parameter.device)
            for part, base, deltas in self._blocks(column, parameter.device):
                flat[part].copy_(base + row @ deltas)

    def clear(self) -> None:
        """Forget the gradient."""
        self.products.zero_()

    def collect(self) -> None:
        """Add what the last backward pass left on the devices to `products`."""
        for column, sums in self._sums.items():
            self.products[:, column] += sums.cpu().double() * self._changed[:, column]
        self._sums.clear()

    @torch.no_grad()
    def _reduce(self, column: int, parameter: nn.Parameter) -> None:
        """Take the inner products of a gradient with all Δ_k, and free it."""
        gradient = parameter.grad.reshape(-1)
        # Apple's devices have no float64.
        wide = torch.float32 if parameter.device.type == "mps" else torch.float64
        nothing = torch.zeros(len(self._experts), dtype=wide, device=parameter.device)
        sums = self._sums.setdefault(column, nothing)
        for part, _, deltas in self._blocks(column, parameter.device):
            sums += deltas @ gradient[part].float()
        parameter.grad = None

    def _blocks(self, column: int, device: torch.device) -> Iterator[tuple[slice, Tensor, Tensor]]:
        """Yield blocks of a parameter in float32: where, θ_0 there, (n,), and all Δ_k, (K, n)."""
        name = self._names[column]
        base, *experts = (w[name].reshape(-1) for w in (self._base, *self._experts))
        length = BLOCK if device.type == "cpu" else DEVICE_BLOCK
        for start in range(0, len(base), length):
            part = slice(start, min(start + length, len(base)))
            origin = base[part].to(device, torch.float32)
            deltas = torch.stack([expert[part].to(device, torch.float32) for expert in experts])
            yield part, origin, deltas if self._components else deltas.sub_(origin)
