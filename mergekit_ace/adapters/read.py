# SPDX-License-Identifier: Apache-2.0
"""LoRA adapters as changes of their base's tensors, read by PEFT's own classes.

PEFT changes a weight (o, i) by B · A with B (o, r) and A (r, i); see `Change` for other layouts.
"""

from __future__ import annotations

import copy
import logging
import warnings
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields, replace
from functools import lru_cache, reduce
from pathlib import Path
from typing import Any, cast

import peft
import torch
from mergekit.architecture import WeightInfo
from mergekit.common import ModelPath, ModelReference
from peft import LoraConfig, PeftModel, get_peft_model_state_dict
from peft.tuners.lora import LoraLayer, ParamWrapper
from safetensors import safe_open
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from mergekit_ace.algebra.low_rank import LowRank
from mergekit_ace.files import checkpoints as files
from mergekit_ace.files.checkpoints import DTYPES, FLOATING, read_file_header, read_json
from mergekit_ace.methods.architecture import empty_network, model_names
from mergekit_ace.naming import ConfigError, FileError

Shapes = dict[str, tuple[int, ...]]  # by the names of tensors in an adapter's file

MERGE_MODELS = "merge full models, made by peft's merge_and_unload"
_RESAVE = "load the adapter by peft's PeftModel.from_pretrained, and save it by save_pretrained"
_NAME = "default"  # of the adapter, within PEFT
# Settings by which an adapter is more than scaled products of A and B, added to weights: those that
# PEFT itself calls variants, but for one of the training alone, and some others.
_REFUSED = {field.name for field in fields(LoraConfig) if field.metadata.get("is_lora_variant")}
_REFUSED -= {"velora_config"}
_REFUSED |= {"bias", "ensure_weight_tying", "layer_replication", "lora_bias", "megatron_config"}
_REFUSED |= {"trainable_token_indices", "use_qalora"}
# Initializations that take A · B out of the base before the training.
_CHANGED_BASES = ("pissa", "olora", "corda", "lora_ga", "loftq")


@dataclass(frozen=True)
class Change:
    """One tensor of the base that an adapter changes.

    Conv1D and embeddings store the transpose. The matrices of a packed parameter lie side by side:
    A (E · r, i) by matrix first, B (o, r · E) by rank first.
    """

    name: str  # of the tensor in memory
    shape: tuple[int, ...]  # of it, too
    tensors: tuple[str, ...]  # names of A and B, or of the one whole tensor, in the adapter's file
    rank: int = 0  # 0 of a whole tensor that takes the base's place (`modules_to_save`)
    scale: float = 1.0  # by which the product counts
    parameter: bool = False  # whether it is one of `target_parameters`
    flipped: bool = False  # whether A and B are factors of the transpose
    file: Path | None = None  # with the tensors; None of an adapter that is not written yet

    @property
    def whole(self) -> bool:
        """Whether the adapter holds the tensor itself, and no factors of a change."""
        return self.rank == 0

    @property
    def is_stack(self) -> bool:
        """Whether it is of a stack of matrices, with a product for each."""
        return self.parameter and len(self.shape) == 3

    def factors(self) -> LowRank:
        """Return the change as factors in float64, with PEFT's scale within."""
        right, left = (self._read(tensor).double() for tensor in self.tensors)
        left = self.scale * left
        if self.is_stack:
            count = self.shape[0]
            left = left.reshape(left.shape[0], -1, count).permute(2, 0, 1)
            right = right.reshape(count, -1, right.shape[1])
        if self.flipped:
            left, right = right.mT, left.mT
        return LowRank(left, right, self.shape)

    def apply(self, base: Tensor) -> Tensor:
        """Return a tensor of the base with the change, in the base's dtype and on its device."""
        if self.whole:
            return self._read(self.tensors[0]).to(base.device, base.dtype)
        return self.factors().added_to(base)

    def _read(self, name: str) -> Tensor:
        with safe_open(self.file, framework="pt") as file:  # which lets go what was read before
            tensor = file.get_tensor(name)
        if not torch.isfinite(tensor).all():
            raise FileError(
                f"tensor {name} of {self.file} holds NaN or infinite numbers: the training went "
                "wrong, or the file is damaged; take an earlier checkpoint of it"
            )
        return tensor

    def to_peft(self, factors: LowRank) -> tuple[Tensor, Tensor]:
        """Return A and B, as PEFT stores them, of a product that counts as it is."""
        left, right = factors.left, factors.right
        if self.flipped:
            left, right = right.mT, left.mT
        if self.is_stack:
            return right.flatten(0, 1), left.permute(1, 2, 0).flatten(1)
        return right, left


@dataclass(frozen=True)
class Adapter:
    """An adapter by its config and the header of its tensors."""

    name: str  # as the user wrote it
    folder: Path
    config: LoraConfig
    changes: Mapping[str, Change]  # by the name of the base's tensor
    network: nn.Module  # the base on the meta device
    file: Path  # with the adapter's tensors
    dtype: torch.dtype  # the widest of these

    def check_ties(self) -> None:
        """Raise if the adapter changes one of two tensors that are one (tied) in the base.

        A merge changes both. Of whole tensors it is a `ConfigError`: PEFT's merge unties.
        """
        for head, table in getattr(self.network, "all_tied_weights_keys", {}).items():
            known = [self.changes[name] for name in (table, head) if name in self.changes]
            if known:
                whole = all(change.whole for change in known)
                raise (ConfigError if whole else FileError)(
                    f"{self.file} changes {known[0].name}, and the base has {table} and {head} "
                    "tied, as one tensor; put the adapter onto a copy of the base with "
                    f"`tie_word_embeddings`: false and {table} once more as {head}, and merge with "
                    "that as the base"
                )

    def find_change(self, weight: WeightInfo, base: ModelReference | None = None) -> Change | None:
        """Return what the adapter changes of a tensor.

        Args:
            base: in whose files the tensor has its name; None for one with its name in memory.
        """
        names = [weight.name, *(weight.aliases or ())]
        stored = model_names(base) if base else None
        names += [stored.memory[name] for name in names if stored and name in stored.memory]
        return next((self.changes[name] for name in names if name in self.changes), None)


def base_of(model: ModelReference) -> ModelReference:
    """Return the model that an adapter is put onto, or the model itself without one."""
    return ModelReference(model=model.model)


def adapter_folder(reference: ModelPath) -> Path:
    """Return where an adapter's files are, once they are downloaded."""
    folder = files.existing_folder(reference.path)
    if folder is None:
        folder = Path(files.hub_file(reference, "adapter_config.json")).parent
        try:
            files.hub_file(reference, "adapter_model.safetensors")
        except FileError as error:
            raise FileError(f"{error}; if it has only a .bin file, {_RESAVE}") from error
    return folder


def read_adapters(models: Iterable[ModelReference]) -> dict[ModelReference, Adapter]:
    """Read the adapters of models that have one, see `read_adapter`."""
    adapted = ((model, model.lora) for model in models)
    return {
        model: read_adapter(lora, base_network(base_of(model))) for model, lora in adapted if lora
    }


@lru_cache(maxsize=4)  # it takes a second, and is asked for again and again
def base_network(base: ModelReference) -> nn.Module:
    """Return a base on the meta device; a `ConfigError` says that its config is none."""
    try:
        return empty_network(base)
    except Exception as error:  # of transformers: no config, an unknown architecture, no network
        first = (str(error).splitlines() or [""])[0]
        raise ConfigError(
            f"the config of the base model {base} cannot be used ({type(error).__name__}: "
            f"{first}); its config.json is needed, its weights are not"
        ) from error


def read_adapter(reference: ModelPath | str, network: nn.Module) -> Adapter:
    """Read what an adapter in a folder or on the Hub changes of a base on the meta device."""
    folder = adapter_folder(ModelPath.model_validate(reference))
    file = files.check_adapter_folder(folder)
    config, headers = _read_config(folder), read_file_header(file)
    if not headers:
        raise FileError(f"{file} holds no tensors; download or save the adapter again")
    try:
        possible, shapes = possible_changes(network, config)
    except ConfigError as error:
        raise ConfigError(f"{file} {error}") from None
    except Exception as error:  # of many kinds: expressions, lookups, shapes
        raise FileError(
            f"PEFT cannot put the adapter in {folder} onto its base: {error}; correct its config, "
            f"give the base that it was trained on, or {MERGE_MODELS}"
        ) from error
    for name, header in sorted(headers.items()):
        if wrong := _wrong_tensor(header.dtype, tuple(header.shape), shapes.get(name)):
            raise FileError(f"tensor {name} of {file} {wrong}")
    changes = {
        name: replace(change, file=file)
        for name, change in possible.items()
        if headers.keys() & change.tensors
    }
    for lacking in {name for one in changes.values() for name in one.tensors} - headers.keys():
        raise FileError(
            f"{file} lacks {lacking}, the other factor of a product that it has; download or save "
            "the adapter again"
        )
    zero = next((name for name, one in changes.items() if one.rank and one.scale == 0), None)
    if zero is not None:
        logging.getLogger(__name__).warning(
            "%s has a `lora_alpha` or an `alpha_pattern` of 0, so that %s stays as it is; set it "
            "to that of the training", folder / "adapter_config.json", zero,
        )  # fmt: skip
    dtype = reduce(torch.promote_types, (DTYPES[header.dtype] for header in headers.values()))
    return Adapter(str(reference), folder, config, changes, network, file, dtype)


def _wrong_tensor(dtype: str, shape: tuple[int, ...], expected: tuple[int, ...] | None) -> str:
    """Return what is wrong with a tensor of an adapter, and what to do about it; else nothing."""
    if dtype not in FLOATING:
        return f"is in {dtype}, as quantised adapters are; give it in bfloat16, float16 or float32"
    if 0 in shape:
        return (
            "is empty, as DeepSpeed's ZeRO-3 leaves parameters that are not gathered; save the "
            "adapter with `stage3_gather_16bit_weights_on_model_save`: true"
        )
    if expected is None:
        return (
            "is none that PEFT loads onto the base, which has no such module, or not among those "
            "that the config targets; give the base that the adapter was trained on"
        )
    if shape != expected:
        return (
            f"has the shape {shape}, and config and base ask for {expected}; correct `r` or "
            "`rank_pattern`, or give the base that the adapter was trained on, with its vocabulary"
        )
    return ""


def _read_config(folder: Path) -> LoraConfig:
    """Return the config of an adapter that is only scaled products of A and B, added to weights."""
    path = folder / "adapter_config.json"
    content = read_json(path)
    kind, known = content.get("peft_type"), {field.name for field in fields(LoraConfig)}
    newer = [name for name, value in sorted(content.items()) if value and name not in known]
    newer = [name for name in newer if name.startswith("use_") or name.endswith("_config")]
    if kind == "LORA" and newer:
        raise FileError(
            f"{path} sets {', '.join(newer)}, which peft {peft.__version__} does not know, and "
            "which may change what the adapter does; update peft"
        )
    refused = ["peft_type"] if kind != "LORA" else []
    refused += [name for name in sorted(_REFUSED) if content.get(name) not in (None, False, "none")]
    if refused:
        raise ConfigError(
            f"{path} has `{refused[0]}`: {content.get(refused[0])}, which is more than products of "
            f"two factors; convert it by peft's save_as_lora, or {MERGE_MODELS}"
        )
    start = content.get("init_lora_weights")
    if isinstance(start, str) and start.lower().startswith(_CHANGED_BASES):
        raise ConfigError(
            f"{path} has `init_lora_weights`: {start}, which changed the base before the training, "
            "so that the adapter means nothing on the original; save it by peft's save_pretrained "
            "with path_initial_model_for_weight_conversion"
        )
    try:
        return cast(LoraConfig, LoraConfig.from_pretrained(str(folder)))  # warns of newer settings
    except Exception as error:  # of many kinds
        raise FileError(
            f"{path} is no config that peft {peft.__version__} reads: {error}; correct it, or save "
            "the adapter again"
        ) from error


def possible_changes(network: nn.Module, config: LoraConfig) -> tuple[dict[str, Change], Shapes]:
    """Return all that an adapter may change, by names, and the shapes of all tensors of its file.

    PEFT puts its layers onto a copy of the base without memory, and so tells both.
    """
    own = copy.deepcopy(config)
    # What decides on values alone, and what names code or files.
    own.init_lora_weights, own.lora_dropout, own.velora_config = True, 0.0, None
    own.base_model_name_or_path = own.revision = own.auto_mapping = own.task_type = None
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = PeftModel(copy.deepcopy(network), own, _NAME, low_cpu_mem_usage=True)
        stored = get_peft_model_state_dict(model, save_embedding_layers=True)
    modules = model.get_base_model().named_modules()
    layers = [_layer_change(place, one) for place, one in modules if isinstance(one, LoraLayer)]
    changes = {change.name: change for change in layers}
    for key, tensor in stored.items():
        if ".lora_" not in key:
            # PEFT saves the table below its factors as the base has it: it changes nothing.
            name = key.removeprefix(files.PEFT_PREFIX).replace(".base_layer.", ".")
            changes.setdefault(name, Change(name, tuple(tensor.shape), (key,)))
    return changes, {key: tuple(tensor.shape) for key, tensor in stored.items()}


def _layer_change(place: str, layer: Any) -> Change:
    """Return what one of PEFT's layers changes: the weight of a module, or a packed parameter."""
    base, module, packed = layer.get_base_layer(), place, isinstance(layer, ParamWrapper)
    while module.endswith(".base_layer"):  # several parameters of a module wrap one another
        module = module.removesuffix(".base_layer")
    if not packed and not isinstance(base, nn.Linear | nn.Embedding | Conv1D):
        raise ConfigError(
            f"changes {place}, a {type(base).__name__}, and only matrices, tables and packed "
            f"experts can be merged as an adapter; {MERGE_MODELS}"
        )
    name, weight = "weight", cast(Tensor, None if packed else base.weight)
    flipped = not isinstance(base, nn.Linear)
    if packed:
        name, weight = layer.parameter_name, layer.get_param()
        flipped = weight.ndim == 3 and getattr(base, "is_transposed", False)
    # A and B, named as in the file: within PEFT's layer it is `lora_A.default.weight`
    tensors = tuple(
        f"{files.PEFT_PREFIX}{place}.{name.replace(f'.{_NAME}', '')}"
        for name, _ in layer.named_parameters()
        if name.startswith("lora_")
    )
    rank, scale, shape = layer.r[_NAME], layer.scaling[_NAME], tuple(weight.shape)
    return Change(f"{module}.{name}", shape, tensors, rank, scale, packed, flipped)
