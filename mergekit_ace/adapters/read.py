# SPDX-License-Identifier: Apache-2.0
"""A LoRA adapter, as changes of its base's tensors.

PEFT reads the config, puts its layers onto a copy of the base without memory, and so tells which
tensors the file holds, in which shapes and with which scale. Only their values are read here.

PEFT's linear layers change a weight (o, i) by B · A with B (o, r) and A (r, i). Conv1D and
embeddings store the transpose. The matrices of a packed parameter lie side by side: A (E · r, i) by
matrix first, B (o, r · E) by rank first.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, Literal

import peft
import torch
from mergekit.common import ModelPath
from peft import LoraConfig, PeftConfig, PeftModel, get_peft_model_state_dict
from peft.tuners.lora import LoraLayer, ParamWrapper
from peft.utils import ModulesToSaveWrapper
from safetensors import safe_open
from safetensors.torch import load_file
from torch import Tensor, nn

from mergekit_ace.algebra.low_rank import LowRank
from mergekit_ace.files.checkpoints import (
    PEFT_PREFIX,
    adapter_files,
    check_adapter_folder,
    existing_folder,
    hub_file,
)
from mergekit_ace.files.headers import (
    DTYPES,
    FLOATING,
    DamagedFileError,
    read_file_header,
    read_json,
)
from mergekit_ace.naming import listed

Kind = Literal["linear", "transposed", "embedding", "parameter", "saved"]
Shapes = dict[str, tuple[int, ...]]  # by the names of tensors in an adapter's file

MERGE_MODELS = "merge full models, made by peft's merge_and_unload"
_CONVERT = f"convert it by peft's save_as_lora, or {MERGE_MODELS}"
_RESAVE = "load the adapter by peft's PeftModel.from_pretrained, and save it by save_pretrained"
_NAME = "default"  # of the adapter, within PEFT
# Settings by which an adapter is more than scaled products of A and B, added to weights: those that
# PEFT itself calls variants, but for one of the training alone, and some others.
_REFUSED = {field.name for field in fields(LoraConfig) if field.metadata.get("is_lora_variant")}
_REFUSED -= {"velora_config"}
_REFUSED |= {
    "use_qalora", "lora_bias", "trainable_token_indices", "layer_replication", "megatron_config",
    "ensure_weight_tying",
}  # fmt: skip
# Initializations that take A · B out of the base before the training.
_CHANGED_BASES = ("pissa", "olora", "corda", "lora_ga", "loftq")


class OtherAdapterError(DamagedFileError):
    """An adapter whose changes are no products of two factors; PEFT may merge it into its base."""


@dataclass(frozen=True)
class Change:
    """One tensor of the base that an adapter changes.

    Attributes:
        name: of the tensor as the model has it in memory.
        module: that holds it; of a saved tensor, the module that `modules_to_save` names.
        kind: `transposed` is a Conv1D, `parameter` one of `target_parameters`, and `saved` a whole
            tensor that takes the place of the base's (`modules_to_save`).
        shape: of the tensor as the base stores it.
        tensors: names of A and B, or of the one tensor, in the adapter's file.
        rank: of the change; 0 where it is no product.
        scale: by which the product counts.
        swapped: whether a packed parameter is stored (E, i, o).
    """

    name: str
    module: str
    kind: Kind
    shape: tuple[int, ...]
    tensors: tuple[str, ...]
    rank: int = 0
    scale: float = 1.0
    swapped: bool = False

    @property
    def is_stack(self) -> bool:
        """Whether it is of a stack of matrices, with a product for each."""
        return self.kind == "parameter" and len(self.shape) == 3

    def from_peft(self, first: Tensor, second: Tensor) -> LowRank:
        """Return the change from A and B as PEFT stores them, with the scale within."""
        left, right = self.scale * second, first
        if self.is_stack:
            count = self.shape[0]
            left = left.reshape(left.shape[0], -1, count).permute(2, 0, 1)
            right = right.reshape(count, -1, right.shape[1])
        if self.kind in ("transposed", "embedding") or self.swapped:
            left, right = right.mT, left.mT
        return LowRank(left, right, self.shape)

    def to_peft(self, factors: LowRank) -> tuple[Tensor, Tensor]:
        """Return A and B, as PEFT stores them, of a product that counts as it is."""
        left, right = factors.left, factors.right
        if self.kind in ("transposed", "embedding") or self.swapped:
            left, right = right.mT, left.mT
        if self.is_stack:
            return right.flatten(0, 1), left.permute(1, 2, 0).flatten(1)
        return right, left


@dataclass(frozen=True)
class Adapter:
    """An adapter, whose tensors are read when they are asked for.

    Attributes:
        name: as the user wrote it.
        changes: by `Change.name`.
        network: the base on the meta device.
        file: with the adapter's tensors.
        dtypes: of these.
        converted: tensors of an adapter made for transformers 4, as PEFT converts them; empty where
            those of the file fit the base.
    """

    name: str
    folder: Path
    config: LoraConfig
    changes: Mapping[str, Change]
    network: nn.Module
    file: Path
    dtypes: frozenset[torch.dtype]
    converted: Mapping[str, Tensor] = field(repr=False)

    def __getstate__(self) -> dict[str, Any]:
        """Leave out the network, whose code a worker may not have: it only reads tensors."""
        return {**vars(self), "network": None}

    @property
    def without_effect(self) -> str:
        """What is wrong with scales of zero, and what to do about it; empty where none is."""
        products = [change for change in self.changes.values() if change.rank]
        zero = [change.name for change in products if change.scale == 0]
        if not zero:
            return ""
        return (
            f"{self.folder / 'adapter_config.json'} has a `lora_alpha` or an `alpha_pattern` of 0, "
            f"so that the adapter leaves {len(zero)} of its {len(products)} tensors as they are "
            f"({listed(zero, 3)}); set it to that of the training"
        )

    def check_ties(self) -> None:
        """Raise if the adapter changes one of two tensors that are one (tied) in the base.

        PEFT's model changes it in its place alone, and a merge into the one tensor changes both.

        Raises:
            OtherAdapterError: it holds the tensor whole, where PEFT's own merge unties them.
            DamagedFileError: it has factors, which PEFT, too, merges into both.
        """
        for head, table in getattr(self.network, "all_tied_weights_keys", {}).items():
            known = [self.changes[name] for name in (table, head) if name in self.changes]
            if known:
                factors = any(change.rank for change in known)
                raise (DamagedFileError if factors else OtherAdapterError)(
                    f"{self.file} changes {known[0].name}, and the base has {table} and {head} "
                    "tied, as one tensor, so that a merge would change both; put the adapter onto "
                    f"a copy of the base with `tie_word_embeddings`: false and {table} once more "
                    f"as {head}, and merge with that as the base"
                )

    def low_rank(self, name: str) -> LowRank:
        """Return the change of a tensor as factors in float64, with PEFT's scale within.

        Raises:
            DamagedFileError: a factor holds NaN or infinite numbers.
        """
        change = self.changes[name]
        first, second = (self._read(tensor).double() for tensor in change.tensors)
        return change.from_peft(first, second)

    def full(self, name: str) -> Tensor:
        """Return a saved tensor as it is stored.

        Raises:
            DamagedFileError: it holds NaN or infinite numbers.
        """
        return self._read(self.changes[name].tensors[0])

    def _read(self, name: str) -> Tensor:
        tensor = self.converted.get(name)
        if tensor is None:
            with safe_open(self.file, framework="pt") as file:  # which lets go what was read before
                tensor = file.get_tensor(name)
        if not torch.isfinite(tensor).all():
            raise DamagedFileError(
                f"tensor {name} of {self.file} holds NaN or infinite numbers: the training went "
                "wrong, or the file is damaged; take an earlier checkpoint of it"
            )
        return tensor


def read_adapter(reference: ModelPath | str, network: nn.Module) -> Adapter:
    """Read what an adapter changes, by its config and the header of its tensors.

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
    (file,) = adapter_files(folder)
    dtypes, shapes = _read_header(file)
    try:
        model = put_layers(network, config)
        converted = _convert(file, shapes, network, model.peft_config[_NAME])
        known, expected = possible_changes(model)
    except OtherAdapterError as error:
        raise OtherAdapterError(f"{file} {error}") from None
    except Exception as error:  # of many kinds: expressions, lookups, shapes
        raise DamagedFileError(
            f"PEFT cannot put the adapter in {folder} onto its base: {error}; correct its config, "
            f"give the base that it was trained on, or {MERGE_MODELS}"
        ) from error
    shapes = {name: tuple(t.shape) for name, t in converted.items()} or shapes
    _check_shapes(file, shapes, expected)
    changes = {name: change for name, change in known.items() if shapes.keys() & change.tensors}
    for lacking in {t for change in changes.values() for t in change.tensors} - shapes.keys():
        raise DamagedFileError(
            f"{file} lacks {lacking}, the other factor of a product that it has; download or save "
            "the adapter again"
        )
    return Adapter(str(reference), folder, config, changes, network, file, dtypes, converted)


def adapter_folder(reference: ModelPath) -> Path:
    """Return where an adapter's files are, once they are downloaded.

    Raises:
        DamagedFileError: there is no such adapter.
    """
    folder = existing_folder(reference.path)
    if folder is None:
        folder = Path(hub_file(reference, "adapter_config.json")).parent
        try:
            hub_file(reference, "adapter_model.safetensors")
        except DamagedFileError as error:
            raise DamagedFileError(f"{error}; if it has only a .bin file, {_RESAVE}") from error
    return folder


def read_lora_config(folder: Path) -> LoraConfig:
    """Return the config of a LoRA adapter, read by PEFT's own class.

    Raises:
        DamagedFileError: the file is missing or damaged, PEFT does not read it, or the adapter is
            of a type whose changes are not products of two factors.
    """
    path = folder / "adapter_config.json"
    content = read_json(path)
    if content.get("peft_type") != "LORA":
        raise OtherAdapterError(
            f"{path} has `peft_type`: {content.get('peft_type')}, and only LORA can be merged as "
            f"an adapter; {_CONVERT}"
        )
    unknown = {name for name, value in content.items() if value}
    unknown -= {field.name for field in fields(LoraConfig)}
    newer = sorted(name for name in unknown if name.startswith("use_") or name.endswith("_config"))
    if newer:
        raise DamagedFileError(
            f"{path} sets {', '.join(newer)}, which peft {peft.__version__} does not know, and "
            "which may change what the adapter does; update peft"
        )
    try:
        config = LoraConfig.from_pretrained(str(folder))  # warns of settings of a newer PEFT
    except Exception as error:  # of many kinds
        raise DamagedFileError(
            f"{path} is no config that peft {peft.__version__} reads: {error}; correct it, or save "
            "the adapter again"
        ) from error
    assert isinstance(config, LoraConfig)
    _check_variant(path, config)
    return config


def _check_variant(path: Path, config: LoraConfig) -> None:
    """Raise for adapters that are more than a scaled product of A and B added to a weight."""
    refused = sorted(name for name in _REFUSED if getattr(config, name, None))
    if refused:
        raise OtherAdapterError(
            f"{path} sets `{refused[0]}`, so that the adapter is more than products of two "
            f"factors; {_CONVERT}"
        )
    if config.bias != "none":
        raise OtherAdapterError(
            f"{path} has `bias`: {config.bias}, so that the adapter is more than products of two "
            f"factors; {MERGE_MODELS}"
        )
    start = config.init_lora_weights
    if isinstance(start, str) and start.lower().startswith(_CHANGED_BASES):
        raise OtherAdapterError(
            f"{path} has `init_lora_weights`: {start}, which changed the base before the training, "
            "so that the adapter means nothing on the original; save it by peft's save_pretrained "
            "with path_initial_model_for_weight_conversion"
        )


def _read_header(file: Path) -> tuple[frozenset[torch.dtype], Shapes]:
    """Return the dtypes and the shapes of a file's tensors."""
    if file.suffix != ".safetensors":
        raise DamagedFileError(
            f"{file} is of an old format, which may hold more than tensors; {_RESAVE}"
        )
    headers = read_file_header(file)
    if not headers:
        raise DamagedFileError(f"{file} holds no tensors; download or save the adapter again")
    for name, header in headers.items():
        if header.dtype not in FLOATING:
            raise DamagedFileError(
                f"tensor {name} of {file} is in {header.dtype}, as quantised adapters are; give "
                "the adapter that it was made from, in bfloat16, float16 or float32"
            )
        if 0 in header.shape:
            raise DamagedFileError(
                f"tensor {name} of {file} is empty, as DeepSpeed's ZeRO-3 leaves parameters that "
                "are not gathered; save the adapter again from a checkpoint of the training, with "
                "`stage3_gather_16bit_weights_on_model_save`: true"
            )
    shapes = {name: tuple(header.shape) for name, header in headers.items()}
    return frozenset(DTYPES[header.dtype] for header in headers.values()), shapes


def put_layers(network: nn.Module, config: LoraConfig) -> PeftModel:
    """Return a copy of a base on the meta device with PEFT's layers.

    Raises:
        Exception: of PEFT, whatever is wrong with the config.
    """
    own = copy.deepcopy(config)
    # What decides on values alone, and what names code or files.
    own.init_lora_weights, own.lora_dropout, own.velora_config = True, 0.0, None
    own.base_model_name_or_path = own.revision = own.auto_mapping = own.task_type = None
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return PeftModel(copy.deepcopy(network), own, _NAME, low_cpu_mem_usage=True)


def _convert(
    file: Path, shapes: Shapes, network: nn.Module, config: PeftConfig
) -> dict[str, Tensor]:
    """Return the tensors of an adapter that was made for transformers 4; else nothing.

    Mixtures of experts, whose matrices are packed since, are what PEFT converts.
    """
    from peft.utils.transformers_weight_conversion import (
        convert_peft_adapter_state_dict_for_transformers as convert,
    )

    empty = {name: torch.empty(shape, device="meta") for name, shape in shapes.items()}
    if convert(network, config, empty).keys() == shapes.keys():
        return {}
    return convert(network, config, load_file(file))


def possible_changes(model: PeftModel) -> tuple[dict[str, Change], Shapes]:
    """Return all that an adapter may change, by names, and the shapes of all tensors of its file.

    Raises:
        OtherAdapterError: the change of a module is no product of two factors.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        stored = get_peft_model_state_dict(model, save_embedding_layers=True)
    modules = dict(model.get_base_model().named_modules())
    layers = {place: m for place, m in modules.items() if isinstance(m, LoraLayer)}
    changes = {change.name: change for change in map(_layer_change, layers, layers.values())}
    whole = [place for place, m in modules.items() if isinstance(m, ModulesToSaveWrapper)]
    for key, tensor in stored.items():
        if ".lora_" in key:
            continue
        # PEFT saves the table below its factors as the base has it: `setdefault` passes it over.
        name = key.removeprefix(PEFT_PREFIX).replace(".base_layer.", ".")
        module = next((p for p in whole if name.startswith(f"{p}.")), name.rpartition(".")[0])
        changes.setdefault(name, Change(name, module, "saved", tuple(tensor.shape), (key,)))
    return changes, {key: tuple(tensor.shape) for key, tensor in stored.items()}


def _layer_change(place: str, layer: Any) -> Change:
    """Return what one of PEFT's layers changes: the weight of a module, or a packed parameter.

    Args:
        place: of the layer, behind `.base_layer` where another parameter is wrapped around it.
    """
    base, module = layer.get_base_layer(), place
    while module.endswith(".base_layer"):
        module = module.removesuffix(".base_layer")
    packed = isinstance(layer, ParamWrapper)
    kind = "parameter" if packed else _module_kind(base)
    if kind is None:
        raise OtherAdapterError(
            f"changes {place}, a {type(base).__name__}, and only matrices, tables and packed "
            f"experts can be merged as an adapter; {MERGE_MODELS}"
        )
    weight = layer.get_param() if packed else base.weight
    # A and B, named as in the file: within PEFT's layer it is `lora_A.default.weight`
    tensors = tuple(
        f"{PEFT_PREFIX}{place}.{name.replace(f'.{_NAME}', '')}"
        for name, _ in layer.named_parameters()
        if name.startswith("lora_")
    )
    return Change(
        f"{module}.{layer.parameter_name if packed else 'weight'}",
        module,
        kind,
        tuple(weight.shape),
        tensors,
        rank=layer.r[_NAME],
        scale=layer.scaling[_NAME],
        swapped=packed and weight.ndim == 3 and getattr(base, "is_transposed", False),
    )


def _module_kind(module: nn.Module) -> Kind | None:
    """Return how a module stores its weight; None of one that cannot be merged here."""
    from transformers.pytorch_utils import Conv1D

    kinds: dict[type, Kind] = {
        nn.Embedding: "embedding",
        Conv1D: "transposed",
        nn.Linear: "linear",
    }
    return next((kind for known, kind in kinds.items() if isinstance(module, known)), None)


def _check_shapes(file: Path, shapes: Shapes, expected: Shapes) -> None:
    """Raise unless a file holds only tensors that PEFT loads."""
    for name in sorted(shapes.keys() - expected.keys()):
        raise DamagedFileError(
            f"tensor {name} of {file} is none that PEFT loads onto the base, which has no such "
            "module, or not among those that the config targets; give the base that the adapter "
            "was trained on, or save the adapter again by peft's save_pretrained"
        )
    for name, shape in shapes.items():
        if shape != expected[name]:
            raise DamagedFileError(
                f"tensor {name} of {file} has the shape {shape}, and config and base ask for "
                f"{expected[name]}; correct `r` or `rank_pattern`, or give the base that the "
                "adapter was trained on, with the vocabulary that it had then"
            )
