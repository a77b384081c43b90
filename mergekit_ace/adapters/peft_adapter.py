# SPDX-License-Identifier: Apache-2.0
"""A LoRA adapter that PEFT wrote, as changes of the base's tensors."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import torch
from mergekit.common import ModelPath
from peft import LoraConfig
from torch import Tensor, nn

from mergekit_ace.adapters.lora_config import (
    MERGE_MODELS,
    OtherAdapterError,
    is_targeted,
    read_lora_config,
    scale_at,
)
from mergekit_ace.adapters.tensor_file import Content, Factors, Kind, TensorFile, from_peft
from mergekit_ace.algebra.low_rank import LowRank
from mergekit_ace.checkpoint_files import (
    adapter_files,
    check_adapter_folder,
    existing_folder,
    hub_file,
)
from mergekit_ace.headers import DamagedFileError

_WRAPPER = ".base_layer"
# Tasks for which a language model gets a head that its checkpoint does not have.
_TASKS_WITH_HEADS = ("SEQ_CLS", "TOKEN_CLS", "QUESTION_ANS")


@dataclass(frozen=True)
class Change:
    """One tensor of the base that an adapter changes.

    Attributes:
        name: of the tensor as the model has it in memory.
        module: that holds it; of a saved tensor, the module that `modules_to_save` names.
        kind: `transposed` is a Conv1D, `parameter` one of `target_parameters`, `bias` what is added
            to a bias (`lora_bias`), and `saved` a whole tensor that takes the place of the base's
            (`modules_to_save`, trained biases).
        shape: of the tensor as the base stores it.
        rank: of the change; None where it is no product.
        swapped: whether a packed parameter is stored (E, i, o).
    """

    name: str
    module: str
    kind: Kind
    shape: tuple[int, ...]
    rank: int | None
    swapped: bool = False


@dataclass(frozen=True)
class _Source:
    """Where a change is in the file.

    Attributes:
        scale: by which it counts.
        tensors: names of A and B, or of the one tensor.
        swapped: whether the factors are those of a packed parameter (E, i, o).
    """

    scale: float
    tensors: tuple[str, ...]
    swapped: bool = False


@dataclass(frozen=True)
class Adapter:
    """An adapter, whose tensors are read when they are asked for.

    Attributes:
        name: as the user wrote it.
        folder: where it is.
        config: read by PEFT's own class.
        changes: by `Change.name`.
        network: the base without its weights, if it was given.
    """

    name: str
    folder: Path
    config: LoraConfig
    changes: Mapping[str, Change]
    network: nn.Module | None
    file: TensorFile = field(repr=False)
    sources: Mapping[str, _Source] = field(repr=False)

    def low_rank(self, name: str) -> LowRank:
        """Return the change of a tensor as factors in float64, with PEFT's scale within.

        Raises:
            DamagedFileError: a factor holds NaN or infinite numbers.
        """
        change, source = self.changes[name], self.sources[name]
        first, second = (tensor.to(torch.float64) for tensor in self.file.read(*source.tensors))
        return from_peft(change.kind, first, source.scale * second, change.shape, source.swapped)

    def full(self, name: str) -> Tensor:
        """Return what is added to a bias, in float64, or a saved tensor as it is stored.

        Raises:
            DamagedFileError: it holds NaN or infinite numbers.
        """
        source = self.sources[name]
        (tensor,) = self.file.read(*source.tensors)
        if self.changes[name].kind == "saved":
            return tensor
        return source.scale * tensor.to(torch.float64)


def read_adapter(reference: ModelPath | str, network: nn.Module | None = None) -> Adapter:
    """Read what an adapter changes, by its config and the header of its tensors.

    Args:
        reference: a folder, or a name on the Hub, of which the adapter's files are downloaded.
        network: the base on the meta device, by which every module is known for certain. Without
            it, Conv1D is told by `fan_in_fan_out` alone, and `target_parameters` cannot be read.

    Raises:
        DamagedFileError: what is wrong with the adapter, and what to do about it.
    """
    if isinstance(reference, str):
        reference = ModelPath.model_validate(reference)
    folder = adapter_folder(reference)
    check_adapter_folder(folder)
    config = read_lora_config(folder)
    file = TensorFile(*adapter_files(folder))
    if network is not None:
        _follow_transformers(config, file, network)
    try:
        changes = list(_Reading(folder, config, file, network).changes())
    except (re.error, TypeError, ValueError) as error:  # of PEFT's comparisons
        raise DamagedFileError(
            f"{folder / 'adapter_config.json'} holds what PEFT cannot compare with the names of "
            f"modules ({error}); correct it, or save the adapter again"
        ) from error
    found = {}
    for change, source in changes:
        if change.name in found:
            raise DamagedFileError(
                f"{file.path} changes {change.name} twice, by {', '.join(source.tensors)} and by "
                f"{', '.join(found[change.name][1].tensors)}; save the adapter with one of them"
            )
        found[change.name] = change, source
    if not found:
        raise DamagedFileError(
            f"{file.path} changes nothing of its base; download or save the adapter again"
        )
    return Adapter(
        name=str(reference),
        folder=folder,
        config=config,
        changes={name: change for name, (change, _) in found.items()},
        network=network,
        file=file,
        sources={name: source for name, (_, source) in found.items()},
    )


def adapter_folder(reference: ModelPath) -> Path:
    """Return where an adapter's files are, once they are downloaded.

    Raises:
        DamagedFileError: there is no such adapter.
    """
    return existing_folder(reference.path) or _download(reference)


def _download(reference: ModelPath) -> Path:
    config = hub_file(reference, "adapter_config.json")
    try:
        hub_file(reference, "adapter_model.safetensors")
    except DamagedFileError:
        hub_file(reference, "adapter_model.bin")
    return Path(config).parent


def _follow_transformers(config: LoraConfig, file: TensorFile, network: nn.Module) -> None:
    """Convert an adapter of transformers 4 where the model is built otherwise now, as PEFT does.

    Above all these are mixtures of experts, whose matrices are packed since.
    """
    from peft.utils import transformers_weight_conversion as conversion

    if not hasattr(getattr(network, "config", None), "model_type"):
        return
    try:
        conversion.convert_peft_config_for_transformers(config, network, None)
        file.convert(
            lambda tensors: conversion.convert_peft_adapter_state_dict_for_transformers(
                network, config, tensors
            )
        )
    except Exception as error:  # of many kinds: expressions, lookups, shapes
        raise DamagedFileError(
            f"{file.path} was made for transformers 4, and PEFT cannot convert it: {error}; merge "
            "full models with mergekit-yaml, made by peft's merge_and_unload with transformers 4"
        ) from error


_Found = tuple[Change, _Source]


@dataclass
class _Reading:
    """What is known while the tensors of one adapter are told apart."""

    folder: Path
    config: LoraConfig
    file: TensorFile
    network: nn.Module | None

    def __post_init__(self) -> None:
        self.config_path = self.folder / "adapter_config.json"
        self.modules = dict(self.network.named_modules()) if self.network is not None else {}
        self.targets = _targeted_parameters(self.modules, self.config)

    def changes(self) -> Iterator[_Found]:
        """Return what is changed, and by what."""
        content = self.file.content()
        if self.config.target_parameters and self.network is None:
            raise DamagedFileError(
                f"{self.config_path} has `target_parameters`, whose order only the base tells; "
                "name the adapter as BASE+ADAPTER"
            )
        self._check_ties(content)
        for place, factors in content.factors.items():
            yield from self._changes_at(place, factors)
        yield from self._saved(content)

    def _changes_at(self, place: str, factors: Factors) -> Iterator[_Found]:
        module, depth = place, 0
        while module.endswith(_WRAPPER):
            module, depth = module.removesuffix(_WRAPPER), depth + 1
        if _WRAPPER in module:
            raise OtherAdapterError(
                f"{self.file.path} changes {place}, part of torch's MultiheadAttention, which "
                f"cannot be merged as an adapter; {MERGE_MODELS}"
            )
        if self.network is not None and module not in self.modules:
            raise DamagedFileError(
                f"{self.file.path} changes {module}, which the base does not have; give the base "
                "that the adapter was trained on"
            )
        parameters = self.targets.get(module, [])
        if depth >= max(1, len(parameters)):
            raise DamagedFileError(
                f"{self.file.path} changes {place}, where the base has nothing that the "
                "adapter's config targets; give the base that the adapter was trained on"
            )
        if parameters:
            yield self._parameter(module, parameters[-1 - depth], factors)
            return
        self._check_targeted(module)
        yield self._weight(module, factors)
        if factors.bias is not None:
            yield self._bias(module, factors)

    def _weight(self, module: str, factors: Factors) -> _Found:
        """Return the change of the weight of a module."""
        kind = self._kind(module, factors)
        first, second = self._shapes(factors)
        scale = scale_at(self.config_path, self.config, module)
        self._check_rank(module, first[0], scale.rank)
        if kind in ("transposed", "embedding"):
            shape = (first[1], second[0])
        else:
            shape = (second[0], *first[1:])
        if self.network is not None:
            self._check_shape(f"{module}.weight", shape, self.modules[module].weight)
        change = Change(f"{module}.weight", module, kind, shape, scale.rank)
        return change, _Source(scale.factor, (factors.first, factors.second))

    def _parameter(self, module: str, parameter: str, factors: Factors) -> _Found:
        """Return the change of a parameter of `target_parameters`."""
        holder = self.modules[module]
        shape = tuple(getattr(holder, parameter).shape)
        name = f"{module}.{parameter}"
        if len(shape) not in (2, 3):
            raise DamagedFileError(
                f"{self.file.path} changes {name}, whose shape is {shape}; PEFT changes matrices "
                "and stacks of them only"
            )
        count = shape[0] if len(shape) == 3 else 1
        swapped = len(shape) == 3 and getattr(holder, "is_transposed", False)
        scale = scale_at(self.config_path, self.config, name)
        found, ranks = self._shapes(factors), scale.rank * count
        plain, other = (
            ((ranks, inputs), (outputs, ranks)) for outputs, inputs in (shape[-2:], shape[:-3:-1])
        )
        # PEFT before 0.19 took all stacks for (E, i, o)
        old = len(shape) == 3 and not swapped and found == other != plain
        if not old and found != (other if swapped else plain):
            raise DamagedFileError(
                f"{self.file.path} has A and B of {name} in the shapes {found}, where the base and "
                f"the rank {scale.rank} of the config ask for {other if swapped else plain}; give "
                "the base that the adapter was trained on"
            )
        change = Change(name, module, "parameter", shape, scale.rank, swapped)
        return change, _Source(scale.factor, (factors.first, factors.second), swapped or old)

    def _bias(self, module: str, factors: Factors) -> _Found:
        """Return what `lora_bias` adds to the bias of a module."""
        if self.network is not None and getattr(self.modules[module], "bias", None) is None:
            raise DamagedFileError(
                f"{self.file.path} adds to the bias of {module}, which has none in the base; train "
                "the adapter without `lora_bias`"
            )
        scale = scale_at(self.config_path, self.config, module)
        shape = self.file.shapes[factors.bias]
        change = Change(f"{module}.bias", module, "bias", shape, None)
        return change, _Source(scale.factor, (factors.bias,))

    def _saved(self, content: Content) -> Iterator[_Found]:
        """Return the tensors that the adapter holds whole."""
        known = self.network.state_dict() if self.network is not None else None
        for name, key in content.full.items():
            module, _, leaf = name.rpartition(".")
            if leaf == "weight" and module in content.factors:
                continue  # the table below its factors, which PEFT saves as the base has it
            own_head = self.config.task_type in _TASKS_WITH_HEADS
            if known is not None and name not in known and not own_head:
                raise DamagedFileError(
                    f"{self.file.path} holds {key}, and the base has no {name}; give the base that "
                    "the adapter was trained on"
                )
            shape = self.file.shapes[key]
            if known is not None and name in known:
                self._check_shape(name, shape, known[name])
            yield Change(name, self._saved_module(name), "saved", shape, None), _Source(1, (key,))

    def _saved_module(self, name: str) -> str:
        """Return the module that PEFT keeps whole, of which a tensor is part."""
        module = name.rpartition(".")[0]
        parts = module.split(".")
        for count in range(1, len(parts) + 1):
            outer = ".".join(parts[:count])
            if any(outer.endswith(ending) for ending in self.config.modules_to_save or ()):
                return outer
        return module

    def _kind(self, module: str, factors: Factors) -> Kind:
        """Return what a module is, by the base if it is there."""
        window = len(self._shapes(factors)[0]) > 2
        if factors.embedding or window:
            kind: Kind = "embedding" if factors.embedding else "convolution"
        else:
            kind = "transposed" if self.config.fan_in_fan_out else "linear"
        if self.network is None:
            return kind
        known = _module_kind(self.modules[module])
        if known is None or {known, kind} not in ({kind}, {"linear", "transposed"}):
            raise DamagedFileError(
                f"{self.file.path} has factors of {module} for a layer of the kind {kind}, and the "
                f"base has a {type(self.modules[module]).__name__} there; give the base that the "
                "adapter was trained on, or merge full models with mergekit-yaml"
            )
        return known

    def _shapes(self, factors: Factors) -> tuple[tuple[int, ...], tuple[int, ...]]:
        return self.file.shapes[factors.first], self.file.shapes[factors.second]

    def _check_targeted(self, module: str) -> None:
        """Raise for factors that PEFT would leave aside, as the config does not target them."""
        if not is_targeted(self.config, module):
            raise DamagedFileError(
                f"{self.file.path} changes {module}, which `target_modules` of {self.config_path} "
                "does not name, so that PEFT would leave it aside; correct the config"
            )

    def _check_rank(self, module: str, held: int, told: int) -> None:
        if held != told:
            raise DamagedFileError(
                f"{self.file.path} has factors of rank {held} for {module}, but {self.config_path} "
                f"says {told}; correct `r` or `rank_pattern`, or save the adapter again"
            )

    def _check_shape(self, name: str, shape: tuple[int, ...], tensor: Tensor) -> None:
        if tuple(tensor.shape) != shape:
            raise DamagedFileError(
                f"{self.file.path} has {name} in the shape {shape}, but the base's is "
                f"{tuple(tensor.shape)}; give the base that the adapter was trained on, with the "
                "vocabulary that it had then"
            )

    def _check_ties(self, content: Content) -> None:
        """Raise for factors of a table and of a head that are one tensor.

        Of these PEFT's model uses each in its place, and PEFT's merge adds both to the one tensor.
        """
        ties = getattr(self.network, "all_tied_weights_keys", {})
        for head, table in ties.items():
            both = [name.removesuffix(".weight") for name in (table, head)]
            if all(module in content.factors for module in both):
                raise DamagedFileError(
                    f"{self.file.path} has factors of {both[0]} and of {both[1]}, which are one "
                    "tensor in the base, so that no merge can do what the adapter does; train it "
                    "on one of them, or on a base with `tie_word_embeddings`: false"
                )


def _module_kind(module: nn.Module) -> Kind | None:
    """Return what PEFT takes a module for; None if it is none whose weight it changes."""
    from transformers.pytorch_utils import Conv1D

    kinds = {
        nn.Embedding: "embedding",
        Conv1D: "transposed",
        nn.Linear: "linear",
        (nn.Conv1d, nn.Conv2d, nn.Conv3d): "convolution",
    }
    return next((kind for types, kind in kinds.items() if isinstance(module, types)), None)


def _targeted_parameters(
    modules: Mapping[str, nn.Module], config: LoraConfig
) -> dict[str, list[str]]:
    """Return the parameters of `target_parameters` by module, in the order of PEFT's wrappers.

    The innermost wrapper comes first: it is that of the parameter that the module has first.
    """
    targets = config.target_parameters or []
    found: dict[str, list[str]] = {}
    for place, module in modules.items() if targets else ():
        for name, _ in module.named_parameters(recurse=False):
            key = f"{place}.{name}"
            if any(key == target or key.endswith(f".{target}") for target in targets):
                found.setdefault(place, []).append(name)
    return found
