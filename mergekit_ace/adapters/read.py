# SPDX-License-Identifier: Apache-2.0
"""LoRA adapters as changes of their base's tensors, read by PEFT's own classes.

PEFT changes a weight (o, i) by B · A with B (o, r) and A (r, i); see `Change` for other layouts.
"""

from __future__ import annotations

import copy
import logging
import re
import warnings
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, fields, replace
from functools import lru_cache, reduce
from pathlib import Path, PurePath
from typing import Any, cast

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
from mergekit_ace.files.checkpoints import DTYPES, FLOATING, Checkpoints, TensorHeader
from mergekit_ace.merge_config import Finding
from mergekit_ace.methods.storage import empty_network, model_names
from mergekit_ace.naming import ConfigError, FileError, listed

Shapes = dict[str, tuple[int, ...]]  # by the names of tensors in an adapter's file

MERGE_MODELS = "merge full models, made by peft's merge_and_unload"
_NAME = "default"  # of the adapter, within PEFT
_QUANTISED_NAME = re.compile(r"(-unsloth)?(-bnb)?-[48]bit$", re.IGNORECASE)
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

    def to_peft(self, factors: LowRank) -> tuple[Tensor, Tensor]:
        """Return A and B, as PEFT stores them, of a product that counts as it is."""
        left, right = factors.left, factors.right
        if self.flipped:
            left, right = right.mT, left.mT
        if self.is_stack:
            return right.flatten(0, 1), left.permute(1, 2, 0).flatten(1)
        return right, left

    def apply(self, base: Tensor) -> Tensor:
        """Return a tensor of the base with the change, in the base's dtype and on its device."""
        if self.whole:
            return self._read(self.tensors[0]).to(base.device, base.dtype)
        return self.factors().added_to(base)

    def _read(self, name: str) -> Tensor:
        with safe_open(self.file, framework="pt") as file:  # which lets go what was read before
            tensor = file.get_tensor(name)
        if not torch.isfinite(tensor).all():
            said = f"tensor {name} of {self.file} holds NaN or infinite numbers"
            raise FileError(f"{said}; take an earlier checkpoint")
        return tensor


@dataclass(frozen=True)
class Adapter:
    """An adapter by its config and the header of its tensors."""

    name: str  # as the user wrote it
    config: LoraConfig
    changes: Mapping[str, Change]  # by the name of the base's tensor
    network: nn.Module  # the base on the meta device
    file: Path  # with the adapter's tensors
    dtype: torch.dtype  # the widest of these

    def other_base(self, base: ModelPath) -> str:
        """Return what the adapter was trained on, if its config names another model or revision."""
        named, revision = self.config.base_model_name_or_path, self.config.revision
        own = PurePath(_QUANTISED_NAME.sub("", named or base.path)).name
        if named and own.lower() != PurePath(base.path).name.lower():
            return named
        known = revision in (None, "main", base.revision)  # PEFT seldom writes it
        return "" if known or Path(base.path).is_dir() else f"{base.path}@{revision}"

    def check_ties(self) -> None:
        """Raise if the adapter changes one of two tensors that are one (tied) in the base.

        A merge changes both. Of whole tensors it is a `ConfigError`: PEFT's merge unties.
        """
        for head, table in getattr(self.network, "all_tied_weights_keys", {}).items():
            tied = [self.changes[name] for name in (table, head) if name in self.changes]
            if tied:
                raise (ConfigError if all(change.whole for change in tied) else FileError)(
                    f"{self.file} changes {tied[0].name}, and the base has {table} and {head} "
                    "tied, as one tensor; merge with a copy of the base that has "
                    f"`tie_word_embeddings`: false, and {table} once more as {head}"
                )

    def check_places(self, model: ModelReference, names: Iterable[str]) -> None:
        """Raise a `ConfigError` if the adapter changes what the base of `model` does not hold.

        `names` are those of the tensors in the base's files.
        """
        found = [find_changes({model: WeightInfo(name=name)}, {model: self}) for name in names]
        held = {changes[model].name for changes in found if changes}
        if homeless := [name for name in self.changes if name not in held]:
            said = f"{model.lora} has {listed(homeless)}, which {base_of(model)} does not"
            remedy = "give the model that peft's merge_and_unload makes of both"
            raise ConfigError(f"{said}; {remedy}, or merge by mergekit-ace adapter")


def base_of(model: ModelReference) -> ModelReference:
    """Return the model that an adapter is put onto, or the model itself without one."""
    return ModelReference(model=model.model)


def find_changes(
    weights: Mapping[ModelReference, WeightInfo], adapters: Mapping[ModelReference, Adapter]
) -> dict[ModelReference, Change]:
    """Return what adapters change of a tensor, given its names in memory or in their bases' files.

    The bases are those that mergekit's loaders have.
    """
    found = {}
    for model, weight in weights.items():
        changes = adapters[model].changes if model in adapters else {}
        names = [weight.name, *(weight.aliases or ())]
        if changes and (stored := model_names(base_of(model))):
            names += [stored.memory[name] for name in names if name in stored.memory]
        if own := [changes[name] for name in names if name in changes]:
            found[model] = own[0]
    return found


def adapter_folder(reference: ModelPath) -> Path:
    """Return where an adapter's files are, once they are downloaded."""
    wanted = ["adapter_config.json", "adapter_model.safetensors", *files.TOKENIZER_FILES]
    return files.downloaded(reference, wanted)


def read_adapters(models: Iterable[ModelReference]) -> dict[ModelReference, Adapter]:
    """Read the adapters of models that have one, see `read_adapter`."""
    return {
        model: read_adapter(model.lora, base_network(base_of(model)))
        for model in models
        if model.lora is not None
    }


@lru_cache(maxsize=4)  # it takes a second, and is asked for again and again
def base_network(base: ModelReference) -> nn.Module:
    """Return a base on the meta device; a `ConfigError` says that its config is none."""
    try:
        return empty_network(base)
    except Exception as error:  # of transformers: no config, an unknown architecture, no network
        why = ": ".join((type(error).__name__, *str(error).splitlines()[:1]))
        said = f"the config.json of the base model {base} cannot be used ({why})"
        raise ConfigError(said) from error


def read_adapter(reference: ModelPath | str, network: nn.Module) -> Adapter:
    """Read what an adapter in a folder or on the Hub changes of a base on the meta device."""
    folder = adapter_folder(ModelPath.model_validate(reference))
    file = files.check_adapter_folder(folder)
    settings, headers = folder / "adapter_config.json", files.read_file_header(file)
    _check_settings(settings)
    try:
        config = cast(LoraConfig, LoraConfig.from_pretrained(str(folder)))
        possible, shapes = possible_changes(network, config)
    except Exception as error:  # of many kinds: expressions, lookups, shapes
        raise (ConfigError if isinstance(error, ConfigError) else FileError)(
            f"PEFT cannot put the adapter in {folder} onto its base: {error}; correct its config, "
            f"give the base that it was trained on, or {MERGE_MODELS}"
        ) from error
    _check_tensors(file, headers, shapes)
    changes = {
        name: replace(change, file=file)
        for name, change in possible.items()
        if headers.keys() & change.tensors
    }
    for lacking in {name for one in changes.values() for name in one.tensors} - headers.keys():
        raise FileError(f"{file} lacks {lacking}; download or save the adapter again")
    unscaled = [name for name, change in changes.items() if change.scale == 0]
    if unscaled:
        text = "%s has a `lora_alpha` or an `alpha_pattern` of 0, so that %s stays as it is"
        logging.getLogger(__name__).warning(text, settings, unscaled[0])
    dtype = reduce(torch.promote_types, (DTYPES[header.dtype] for header in headers.values()))
    return Adapter(str(reference), config, changes, network, file, dtype)


def _check_settings(path: Path) -> None:
    """Raise unless an adapter is only scaled products of A and B, added to weights.

    A `ConfigError` names what PEFT itself can merge, a `FileError` what it would ignore.
    """
    content = files.read_json(path)
    unknown = content.keys() - {field.name for field in fields(LoraConfig)}
    newer = {name for name in unknown if name.startswith("use_") or name.endswith("_config")}
    refused = [n for n in sorted(_REFUSED | newer) if content.get(n) not in (None, False, "none")]
    if content.get("peft_type") != "LORA":
        refused = ["peft_type"]
    for name in refused:
        raise (FileError if name in newer else ConfigError)(
            f"{path} has `{name}`: {content.get(name)}, which is more than products of factors; "
            f"convert it by peft's save_as_lora, {MERGE_MODELS}, or update peft"
        )
    start = content.get("init_lora_weights")
    if isinstance(start, str) and start.lower().startswith(_CHANGED_BASES):
        raise ConfigError(
            f"{path} has `init_lora_weights`: {start}, which changed the base; save it by peft's "
            "save_pretrained with path_initial_model_for_weight_conversion"
        )


def _check_tensors(file: Path, headers: Mapping[str, TensorHeader], shapes: Shapes) -> None:
    """Raise a `FileError` unless a file holds tensors that PEFT loads, by their shapes."""
    if not headers:
        raise FileError(f"{file} holds no tensors; download or save the adapter again")
    for name, header in sorted(headers.items()):
        shape, expected = tuple(header.shape), shapes.get(name, "no such tensor")
        if header.dtype not in FLOATING:
            wrong = f"is in {header.dtype}, as quantised adapters are"
            remedy = "give it in bfloat16, float16 or float32"
        elif 0 in shape:
            wrong = "is empty, as DeepSpeed's ZeRO-3 leaves parameters that are not gathered"
            remedy = "save the adapter with `stage3_gather_16bit_weights_on_model_save`: true"
        elif shape != expected:
            wrong = f"has the shape {shape}, and config and base ask for {expected}"
            remedy = "correct `r`, `rank_pattern`, the targets, or the base and its vocabulary"
        else:
            continue
        raise FileError(f"tensor {name} of {file} {wrong}; {remedy}")


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
        try:
            stored = get_peft_model_state_dict(model, save_embedding_layers=True)
        except NotImplementedError:  # of a whole CLIP, which has no one table
            stored = get_peft_model_state_dict(model, save_embedding_layers=False)
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
    if packed:
        name, weight = layer.parameter_name, layer.get_param()
        flipped = weight.ndim == 3 and getattr(base, "is_transposed", False)
    elif isinstance(base, nn.Linear | nn.Embedding | Conv1D):
        name, weight, flipped = "weight", base.weight, not isinstance(base, nn.Linear)
    else:
        said = f"{place} is a {type(base).__name__}, not a matrix, a table or packed experts"
        raise ConfigError(said)
    # A and B, named as in the file: within PEFT's layer it is `lora_A.default.weight`
    tensors = tuple(
        f"{files.PEFT_PREFIX}{place}.{name.replace(f'.{_NAME}', '')}"
        for name, _ in layer.named_parameters()
        if name.startswith("lora_")
    )
    rank, scale, shape = layer.r[_NAME], layer.scaling[_NAME], tuple(weight.shape)
    return Change(f"{module}.{name}", shape, tensors, rank, scale, packed, flipped)


def check_adapters(checkpoints: Checkpoints, bare: bool) -> Iterator[Finding]:
    """Find what hinders adapters, or does not fit the models that they are put onto.

    `bare` are merged into their base first, and into no cache.
    """
    adapted = [(model, model.lora) for model in checkpoints if model.lora is not None]
    ours = "merge by mergekit-ace merge, which need not; or "
    for model, lora in adapted:
        try:
            adapter = read_adapters([model])[model]
            if other := adapter.other_base(model.model):
                yield Finding.warning(
                    f"the adapter {lora} was trained on {other}, not on {model.model}",
                    "put it onto the model that it was trained on",
                )
            adapter.check_ties()
            if base_of(model) in checkpoints:
                adapter.check_places(model, checkpoints[model].headers)
        except ConfigError as error:  # mergekit merges it by PEFT
            ours = ""
            yield Finding.warning(f"merged by mergekit-yaml only: {error}")
        except FileError as error:
            yield Finding.error(str(error))
    if adapted and bare:
        names = listed([str(lora) for _, lora in adapted])
        yield Finding.warning(
            f"mergekit-yaml merges adapters into their base first: {names}",
            f"{ours}give --lora-merge-cache DIR and --lora-merge-dtype float32 to "
            "mergekit-yaml and to this check",
        )
