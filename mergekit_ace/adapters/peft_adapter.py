# SPDX-License-Identifier: Apache-2.0
"""A LoRA adapter that PEFT wrote, as changes of the base's tensors."""

from __future__ import annotations

import copy
import json
import re
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from mergekit.common import ModelPath
from peft import LoraConfig, inject_adapter_in_model
from peft.tuners.lora import LoraLayer, ParamWrapper
from torch import Tensor, nn

from mergekit_ace.adapters.lora_config import MERGE_MODELS, OtherAdapterError, read_lora_config
from mergekit_ace.adapters.tensor_file import Kind, TensorFile, from_peft
from mergekit_ace.algebra.low_rank import LowRank
from mergekit_ace.files.checkpoints import (
    PEFT_PREFIX,
    adapter_files,
    check_adapter_folder,
    existing_folder,
    hub_file,
)
from mergekit_ace.files.headers import DamagedFileError

_NAME = "default"  # of the adapter, within PEFT
_COPY = re.compile(r"\.(?:original_module|modules_to_save)\.")
_WRAPPER = ".base_layer"
# Tasks for which a language model gets a head that its checkpoint does not have.
_TASKS_WITH_HEADS = ("SEQ_CLS", "TOKEN_CLS", "QUESTION_ANS")


@dataclass(frozen=True)
class Change:
    """One tensor of the base that an adapter changes.

    Attributes:
        name: of the tensor as the model has it in memory.
        module: that holds it; of a saved tensor, the module that `modules_to_save` names.
        kind: `transposed` is a Conv1D, `parameter` one of `target_parameters`, and `saved` a whole
            tensor that takes the place of the base's (`modules_to_save`, trained biases).
        shape: of the tensor as the base stores it.
        rank: of the change; None where it is no product.
        swapped: whether a packed parameter is stored (E, i, o).
        tensors: names of A and B, or of the one tensor, in the adapter's file.
        scale: by which they count there.
        old: whether A and B lie there as PEFT before 0.19 put them, which took every packed
            parameter for (E, i, o).
    """

    name: str
    module: str
    kind: Kind
    shape: tuple[int, ...]
    rank: int | None
    swapped: bool = False
    tensors: tuple[str, ...] = ()
    scale: float = 1.0
    old: bool = False

    @property
    def is_stack(self) -> bool:
        """Whether it is of a stack of matrices, with a product for each."""
        return self.kind == "parameter" and len(self.shape) == 3


@dataclass(frozen=True)
class Adapter:
    """An adapter, whose tensors are read when they are asked for.

    Attributes:
        name: as the user wrote it.
        config: read by PEFT's own class.
        changes: by `Change.name`.
    """

    name: str
    folder: Path
    config: LoraConfig
    changes: Mapping[str, Change]
    network: nn.Module
    file: TensorFile = field(repr=False)

    def __getstate__(self) -> dict[str, Any]:
        """Leave out the network, whose code a worker may not have: it only reads tensors."""
        return {**vars(self), "network": None}

    def low_rank(self, name: str) -> LowRank:
        """Return the change of a tensor as factors in float64, with PEFT's scale within.

        Raises:
            DamagedFileError: a factor holds NaN or infinite numbers.
        """
        change = self.changes[name]
        first, second = (tensor.to(torch.float64) for tensor in self.file.read(*change.tensors))
        swapped = change.swapped or change.old
        return from_peft(change.kind, first, change.scale * second, change.shape, swapped)

    def full(self, name: str) -> Tensor:
        """Return a saved tensor as it is stored.

        Raises:
            DamagedFileError: it holds NaN or infinite numbers.
        """
        return self.file.read(*self.changes[name].tensors)[0]


def read_adapter(reference: ModelPath | str, network: nn.Module) -> Adapter:
    """Read what an adapter changes, by its config and the header of its tensors.

    PEFT puts its layers into a copy of the base, none of which has memory: these tell which tensors
    the file may hold, in which shapes, and by which scale they count.

    Args:
        reference: a folder, or a name on the Hub, of which the adapter's files are downloaded.
        network: the base on the meta device.

    Raises:
        DamagedFileError: what is wrong with the adapter, and what to do about it.
    """
    if isinstance(reference, str):
        reference = ModelPath.model_validate(reference)
    folder = adapter_folder(reference)
    check_adapter_folder(folder)
    config = read_lora_config(folder)
    file = TensorFile(*adapter_files(folder))
    wrapped = _with_layers(config, file, network)
    _check_ties(file, network)
    found: dict[str, Change] = {}
    factors = list(_factors(wrapped, file))
    for change in (*factors, *_saved(config, file, network, factors)):
        if change.name in found:
            raise DamagedFileError(
                f"{file.path} changes {change.name} twice, by {', '.join(change.tensors)} and by "
                f"{', '.join(found[change.name].tensors)}; save the adapter with one of them"
            )
        found[change.name] = change
    if not found:
        raise DamagedFileError(
            f"{file.path} changes nothing of its base; download or save the adapter again"
        )
    return Adapter(str(reference), folder, config, found, network, file)


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


def _with_layers(config: LoraConfig, file: TensorFile, network: nn.Module) -> nn.Module:
    """Return a copy of the base with PEFT's layers, and convert a file made for transformers 4.

    Mixtures of experts, whose matrices are packed since, are what PEFT converts.
    """
    from peft.utils import transformers_weight_conversion as conversion

    own = copy.deepcopy(config)
    # What decides on values alone, which nobody reads here; Conv1D is told by the base.
    own.init_lora_weights, own.lora_dropout, own.velora_config = True, 0.0, None
    own.fan_in_fan_out, own.modules_to_save, own.ensure_weight_tying = False, None, False
    own.base_model_name_or_path = own.revision = own.auto_mapping = own.task_type = None
    try:
        text = json.dumps(own.to_dict(), sort_keys=True, default=sorted)
        wrapped, own = _inject(network, text)
        file.convert(
            lambda tensors: conversion.convert_peft_adapter_state_dict_for_transformers(
                network, own, tensors
            )
        )
    except Exception as error:  # of many kinds: expressions, lookups, shapes
        raise DamagedFileError(
            f"PEFT cannot put the adapter in {file.path.parent} onto its base: {error}; correct "
            f"its config, give the base that it was trained on, or {MERGE_MODELS}"
        ) from error
    return wrapped


@lru_cache(maxsize=8)  # adapters of one base mostly have the same layers, and are read repeatedly
def _inject(network: nn.Module, config: str) -> tuple[nn.Module, LoraConfig]:
    """Return a copy of the base with PEFT's layers, and the config as PEFT converts it."""
    own = LoraConfig.from_peft_type(**json.loads(config))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        wrapped = inject_adapter_in_model(
            own, copy.deepcopy(network), _NAME, low_cpu_mem_usage=True
        )
    return wrapped, own


def _factors(wrapped: nn.Module, file: TensorFile) -> Iterator[Change]:
    """Yield what is changed by factors; PEFT leaves layers without any in the file as they are."""
    for place, layer in wrapped.named_modules():
        if not isinstance(layer, LoraLayer):
            continue
        # A and B, named as in the file: within PEFT's layer it is `lora_A.default.weight`
        shapes = {
            f"{PEFT_PREFIX}{place}.{name.replace(f'.{_NAME}', '')}": tuple(parameter.shape)
            for name, parameter in layer.named_parameters()
            if name.startswith("lora_")
        }
        lacking = [name for name in shapes if name not in file.shapes]
        if 0 < len(lacking) < len(shapes):
            (held,) = (name.rpartition(".lora_")[2] for name in shapes if name not in lacking)
            raise DamagedFileError(
                f"{file.path} has lora_{held} of {place} without "
                f"lora_{lacking[0].rpartition('.lora_')[2]}; download or save the adapter again"
            )
        if not lacking:
            yield _layer_change(place, layer, shapes, file)


def _layer_change(
    place: str, layer: LoraLayer, shapes: Mapping[str, tuple[int, ...]], file: TensorFile
) -> Change:
    """Return what one of PEFT's layers changes: the weight of a module, or a packed parameter.

    Args:
        place: of the layer, behind `.base_layer` where another parameter is wrapped around it.
        shapes: of A and B in PEFT's layer, by their names in the file.
    """
    base, module = layer.get_base_layer(), place
    while module.endswith(_WRAPPER):
        module = module.removesuffix(_WRAPPER)
    packed = isinstance(layer, ParamWrapper)
    kind = "parameter" if packed else _module_kind(base)
    if kind is None:
        raise OtherAdapterError(
            f"{file.path} changes {place}, a {type(base).__name__}({base.extra_repr()}), which "
            f"cannot be merged as an adapter; {MERGE_MODELS}"
        )
    name = layer.parameter_name if packed else "weight"
    weight = layer.get_param() if packed else base.weight
    stack = packed and weight.ndim == 3
    (ranks, inputs), (outputs, _) = (shape[:2] for shape in shapes.values())
    stored = [file.shapes[tensor] for tensor in shapes]
    old = stack and stored == [(ranks, outputs), (inputs, ranks)] != list(shapes.values())
    for tensor, shape in shapes.items() if not old else ():
        if file.shapes[tensor] != shape or tensor in file.odd:
            raise DamagedFileError(
                f"tensor {tensor} of {file.path} has the shape {file.shapes[tensor]}, and config "
                f"and base ask for fractions in the shape {shape}; correct `r` or `rank_pattern`, "
                "give the base that the adapter was trained on, or save it again with all shards "
                "gathered"
            )
    swapped = stack and getattr(base, "is_transposed", False)
    return Change(
        f"{module}.{name}", module, kind, tuple(weight.shape), layer.r[_NAME], swapped,
        tuple(shapes), layer.scaling[_NAME], old,
    )  # fmt: skip


def _module_kind(module: nn.Module) -> Kind | None:
    """Return how a module stores its weight; None if its change is no product of two factors."""
    from transformers.pytorch_utils import Conv1D

    if getattr(module, "groups", 1) > 1:  # a convolution in groups
        return None
    kinds = {
        nn.Embedding: "embedding",
        Conv1D: "transposed",
        nn.Linear: "linear",
        (nn.Conv1d, nn.Conv2d, nn.Conv3d): "convolution",
    }
    return next((kind for types, kind in kinds.items() if isinstance(module, types)), None)


def _saved(
    config: LoraConfig, file: TensorFile, network: nn.Module, factors: Sequence[Change]
) -> Iterator[Change]:
    """Yield the tensors that the adapter holds whole: all that are no factors."""
    known, own_head = network.state_dict(), config.task_type in _TASKS_WITH_HEADS
    claimed = {tensor for change in factors for tensor in change.tensors}
    weights = {change.name for change in factors if change.kind != "parameter"}
    for key in sorted(file.shapes.keys() - claimed):
        # with `bias: all`, PEFT writes the biases of modules that it keeps whole three times
        copied = _COPY.sub(".", key)
        if copied != key and copied in file.shapes:
            continue
        name = key.removeprefix(PEFT_PREFIX).replace(".base_layer.", ".")
        if name in weights and name.endswith(".weight"):
            continue  # the table below its factors, which PEFT saves as the base has it
        parts = ".lora_" in key or ".token_adapter." in key
        if not key.startswith(PEFT_PREFIX) or parts or not (name in known or own_head):
            raise DamagedFileError(
                f"tensor {key} of {file.path} is none that PEFT loads onto the base, which has no "
                "such module, or not among those that the config targets; give the base that the "
                "adapter was trained on, or save the adapter again by peft's save_pretrained"
            )
        shape = file.shapes[key]
        if name in known and tuple(known[name].shape) != shape:
            raise DamagedFileError(
                f"{file.path} has {name} in the shape {shape}, but the base's is "
                f"{tuple(known[name].shape)}; give the base that the adapter was trained on, with "
                "the vocabulary that it had then"
            )
        yield Change(name, _saved_module(config, name), "saved", shape, None, tensors=(key,))


def _saved_module(config: LoraConfig, name: str) -> str:
    """Return the module that PEFT keeps whole, of which a tensor is part."""
    module = name.rpartition(".")[0]
    parts = module.split(".")
    outer = (".".join(parts[:count]) for count in range(1, len(parts) + 1))
    endings = tuple(config.modules_to_save or ())
    return next((place for place in outer if place.endswith(endings)), module)


def _check_ties(file: TensorFile, network: nn.Module) -> None:
    """Raise for factors of a table and of a head that are one tensor.

    Of these PEFT's model uses each in its place, and PEFT's merge adds both to the one tensor.
    """
    changed = {key.removeprefix(PEFT_PREFIX).partition(".lora_")[0] for key in file.shapes}
    for head, table in getattr(network, "all_tied_weights_keys", {}).items():
        both = [name.removesuffix(".weight") for name in (table, head)]
        if changed.issuperset(both):
            raise DamagedFileError(
                f"{file.path} has factors of {both[0]} and of {both[1]}, which are one tensor in "
                "the base, so that no merge can do what the adapter does; train it on one of "
                "them, or on a base with `tie_word_embeddings`: false"
            )
