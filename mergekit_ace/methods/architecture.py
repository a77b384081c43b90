# SPDX-License-Identifier: Apache-2.0
"""How a model stores its weights: layouts, shapes, names in files and in memory, plans by these.

transformers' `Conv1D` (GPT-2 and its kin) stores the transpose of what `torch.nn.Linear` does, and
so do the packed experts of some mixtures (GPT-OSS). Neither name nor shape tells. What mergekit has
no fitting description of is merged under the names that the base's files give.
"""

from __future__ import annotations

import logging
import os
import re
import threading
from collections.abc import Collection, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
import transformers
from accelerate import init_empty_weights
from mergekit.architecture import ModelArchitecture, ModuleDefinition, WeightInfo
from mergekit.architecture import arch_info_for_config as described_architecture
from mergekit.architecture.auto import infer_vocabulary_axes
from mergekit.architecture.conversion import _expanded_target_keys
from mergekit.architecture.json_definitions import (
    JsonLayerTemplates,
    JsonModuleArchDef,
    JsonModuleArchitecture,
)
from mergekit.common import ModelPath, ModelReference, get_auto_cls
from mergekit.io import ShardedTensorIndex
from mergekit.io.tasks import LoaderCache
from mergekit.options import MergeOptions
from transformers import PretrainedConfig, PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import WeightRenaming, rename_source_key
from transformers.pytorch_utils import Conv1D

from mergekit_ace.algebra.task_vectors import FixedLayout, StoredKind, TableLayout, resolve_layout
from mergekit_ace.files.checkpoints import names_of, read_file_header
from mergekit_ace.naming import natural_order, without_numbers

LOG = logging.getLogger(__name__)
_LOCK = threading.Lock()
_PACKED_TRANSPOSED = {"Llama4TextExperts"}  # whose class does not say so by `is_transposed`
BY_FILES = "by the names in files"  # the kind of an architecture that mergekit does not infer
_LAYER = re.compile(r"\.(\d+)\.")  # the first number in a name, as mergekit reads it
# What old checkpoints hold though any program computes it anew.
BUFFER = re.compile(r"(inv_freq|(cos|sin)_cached|masked_bias|position_ids|(attn|attention)\.bias)$")
_TEXT_PART = re.compile(r"\b(language_model|text_model)\.")


def is_table(model: Hashable, tensor_name: str | None) -> bool:
    """Return whether rows of a weight are looked up, also where it is the head.

    The first question about a model, which builds it, must come from the main thread: others do not
    know whether remote code is trusted.
    """
    return _kind(model, tensor_name) in ("table", "head")


def stored_layout(
    chosen: TableLayout,
    model: Hashable,
    tensor_name: str | None,
    ndim: int,
    *,
    tables: bool = False,
) -> FixedLayout:
    """Return how a tensor of a checkpoint is read, from the ``layout`` that is configured.

    Where a method has a rule for `tables`, embeddings are such unless they are the head as well,
    with no fewer rows than columns.
    """
    kind = _kind(model, tensor_name)
    if kind == "table" and not tables:
        kind = None
    return resolve_layout(chosen, tensor_name, ndim, kind)


def _kind(model: Hashable, tensor_name: str | None) -> StoredKind | None:
    names = model_names(model)
    return names.kind(tensor_name) if names else None


def empty_network(model: ModelReference) -> PreTrainedModel:
    """Instantiate the architecture of a model on the meta device: names and types, no memory."""
    trust = LoaderCache().trust_remote_code
    config = ModelReference(model=model.model).config(trust_remote_code=trust)
    with init_empty_weights(include_buffers=True):
        return model_class(config, trust)(config)


def model_class(config: PretrainedConfig, trust_remote_code: bool) -> type[PreTrainedModel]:
    """Return the class that a config names, or what its remote code, if trusted, defines."""
    name = (config.architectures or [""])[0]
    known = getattr(transformers, name, None)
    if isinstance(known, type) and issubclass(known, transformers.PreTrainedModel):
        return known
    with torch.device("meta"):
        built = get_auto_cls(name).from_config(config, trust_remote_code=trust_remote_code)
    return type(built)


def lacks_embeddings(network: PreTrainedModel) -> bool:
    """Return whether a model is one that mergekit does not infer: a ResNet has no embeddings."""
    try:
        network.base_model.get_input_embeddings()  # pyright: ignore
    except NotImplementedError:
        return True
    return False


def tensor_names(model: Hashable) -> Collection[str]:
    """Return the names of all tensors in a checkpoint's files; none where it cannot be read."""
    index = _index(model)
    return index.tensor_paths.keys() if index else ()


def check_shapes(
    tensor_name: str, models: Sequence[Hashable], base: Hashable, *, method: str = "ace"
) -> None:
    """Raise an error where a model's header has another shape of a tensor than the base's.

    Differing vocabularies are none: a `tokenizer:` section may align them. (mergekit asks from
    within a pydantic validator, which would bury a `ValueError` in a report of its own.)
    """
    expected = _shape(base, tensor_name)
    if expected is None:
        return
    for model in models:
        shape = _shape(model, tensor_name)
        if shape is None or shape == expected:
            continue
        names = model_names(base)
        rows_are_tokens = names and names.memory.get(tensor_name) in names.vocabulary
        if rows_are_tokens and shape[1:] == expected[1:]:
            continue
        raise RuntimeError(
            f"{method}: tensor {tensor_name} has shape {shape} in {model}, but {expected} in the "
            f"base model {base}. Experts must be fine-tuned from this base model: replace or "
            f"remove {model}, or set base_model to the one that it comes from"
        )


def _index(model: Hashable) -> ShardedTensorIndex | None:
    """Return where the tensors of a checkpoint folder lie; None for anything else."""
    if not isinstance(model, ModelReference) or os.path.isfile(model.model.path):
        return None
    try:
        return LoaderCache().get(model).index
    except Exception:  # mergekit reports a missing model itself, when it needs it
        return None


def _shape(model: Hashable, tensor_name: str) -> tuple[int, ...] | None:
    """Return the tensor's shape by the checkpoint's header; None where it cannot be known."""
    if not isinstance(model, ModelReference):
        return None
    index, path = _index(model), Path(model.model.path)
    if index is not None and tensor_name in index.tensor_paths:
        path = Path(index.base_path, index.tensor_paths[tensor_name])
    if path.suffix != ".safetensors" or not path.is_file():
        return None
    header = _header(path).get(tensor_name)
    return header.shape if header else None


_header = lru_cache(maxsize=256)(read_file_header)  # all tensors of a shard ask


@dataclass(frozen=True)
class StoredNames:
    """What transformers makes of the tensors in a checkpoint's files."""

    memory: Mapping[str, str]  # names in memory by names in files, of what is loaded as it is
    converted: frozenset[str]  # names in files of what is packed, split or turned when loaded
    ties: Mapping[str, str]  # of names in memory that are tied, the tensor that they are one with
    lacking: frozenset[str]  # names in memory that nothing in the files fills
    vocabulary: Mapping[str, int]  # axes with an entry per token, by names in memory
    kinds: Mapping[str, StoredKind]  # by names without numbers and the model's prefix
    convolutional: bool  # whether the network has no embeddings, as a ResNet

    def kind(self, tensor_name: str | None) -> StoredKind | None:
        """Return the kind of a weight; None for one that is a matrix as it is stored."""
        template = without_numbers(tensor_name or "") if self.kinds else ""
        for known, kind in self.kinds.items():
            if template == known or template.endswith("." + known):
                return kind
        return "kernel" if self.convolutional else None


def loaded_names(
    network: PreTrainedModel, names: Iterable[str]
) -> Iterator[tuple[str, set[str], bool]]:
    """Yield names in files, those in memory that are filled by them, and whether as they are."""
    mapping = get_model_conversion_mapping(network)
    renamings = [entry for entry in mapping if isinstance(entry, WeightRenaming)]
    converters: list[Any] = [one for one in mapping if not isinstance(one, WeightRenaming)]
    state, prefix = network.state_dict(), network.base_model_prefix
    for name in names:
        target, pattern = rename_source_key(name, renamings, converters, prefix, state)
        if target not in state:
            target, pattern = rename_source_key(name, [], [], prefix, state)
        if target not in state:
            continue
        if pattern is None:
            yield name, {target}, True
        else:
            converter = next(one for one in converters if pattern in one.source_patterns)
            yield name, _expanded_target_keys(target, converter.target_patterns), False


def read_names(network: PreTrainedModel, names: Iterable[str]) -> StoredNames:
    """Find out what transformers fills a model, on the meta device, with, by names in files."""
    kinds = _kinds_in_memory(network)
    convolutional = not {"table", "head"} & {*kinds.values()} and lacks_embeddings(network)
    found = list(loaded_names(network, names))
    memory = {name: target for name, targets, whole in found if whole for target in targets}
    kinds |= {name: kinds[known] for name, known in memory.items() if known in kinds}
    prefix = f"{network.base_model_prefix}."
    filled = {target for _, targets, _ in found for target in targets}
    state = network.state_dict()
    network.tie_weights()
    ties = dict(network.all_tied_weights_keys)
    optional = getattr(network, "_keys_to_ignore_on_load_missing", None) or ()
    lacking = (
        name
        for name in state.keys() - filled - ties.keys()
        if not any(re.search(pattern, name) for pattern in optional)
    )
    try:
        vocabulary = infer_vocabulary_axes(network)
    except NotImplementedError:  # of networks for images, and of two towers
        vocabulary = {}
    return StoredNames(
        memory,
        converted=frozenset(name for name, _, whole in found if not whole),
        ties=ties,
        lacking=frozenset(lacking),
        vocabulary=vocabulary,
        kinds={without_numbers(name.removeprefix(prefix)): kind for name, kind in kinds.items()},
        convolutional=convolutional,
    )


def _kinds_in_memory(network: PreTrainedModel) -> dict[str, StoredKind]:
    kinds: dict[str, StoredKind] = {}
    head: torch.Tensor | None = getattr(network.get_output_embeddings(), "weight", None)
    for path, module in network.named_modules():
        if isinstance(module, Conv1D):
            kinds[f"{path}.weight"] = "transposed"
        elif isinstance(module, torch.nn.Embedding):
            tied = head is not None and module.weight is head and len(head) >= head.shape[1]
            kinds[f"{path}.weight"] = "head" if tied else "table"
        elif getattr(module, "is_transposed", False) or type(module).__name__ in _PACKED_TRANSPOSED:
            for name, parameter in module.named_parameters():
                if parameter.ndim == 3:
                    kinds[f"{path}.{name}"] = "transposed"
    return kinds


def model_names(model: Hashable) -> StoredNames | None:
    """Do what `read_names` does for a model; None for tensors that are no model of transformers."""
    if not isinstance(model, ModelReference) or os.path.isfile(model.model.path):
        return None
    index = _index(model)
    known = vars(index) if index else {}  # of which there may be two, if the model is quantised
    if "stored_names" not in known:
        with _LOCK:  # one thread builds, the others wait
            known["stored_names"] = _stored_names(model.model, frozenset(tensor_names(model)))
    return known["stored_names"]


@lru_cache(maxsize=16)
def _stored_names(model: ModelPath, names: frozenset[str]) -> StoredNames | None:
    try:
        return read_names(empty_network(ModelReference(model=model)), names)
    except Exception as error:  # whatever a config or a model's constructor raises
        LOG.warning(
            "mergekit-ace: the architecture of %s cannot be built (%s: %s); all its matrices are "
            "taken as stored (out, in). For Conv1D weights set layout: transposed with a filter.",
            model, type(error).__name__, error,
        )  # fmt: skip
        return None


def find_architecture(
    models: Sequence[ModelReference], donor: ModelReference, options: MergeOptions
) -> ModelArchitecture:
    """Return mergekit's description of the models; by the names in the donor's files without one.

    A `RuntimeError` says if architectures have no names in common.
    """
    configs = {model: model.config(trust_remote_code=options.trust_remote_code) for model in models}
    described = {model: described_architecture(config) for model, config in configs.items()}
    known, config, names = described[donor], configs[donor], model_names(donor)
    mixed = [model for model in models if configs[model].architectures != config.architectures]
    held = {*tensor_names(donor), *(names.memory.values() if names else ())}
    for model in () if options.allow_crimes else mixed:
        apart = held.isdisjoint(tensor_names(model))
        if known and described[model]:
            apart = described[model] != known
        if apart:
            own, other = (_describe_model(one, configs[one]) for one in (model, donor))
            raise RuntimeError(
                f"{model} is {own}; {donor}, whose config the result gets, is {other}. Set "
                "base_model to the model that the experts were fine-tuned from, or give "
                "--allow-crimes, which merges tensors whose names are the same but for "
                "`language_model.`"
            )
    crimes = mixed if options.allow_crimes else []
    if known and not crimes and _fits(known, donor, config, names):
        return known
    return _architecture_by_files(donor, config, names, crimes)


def _describe_model(model: ModelReference, config: PretrainedConfig) -> str:
    layers = filter(_LAYER.search, tensor_names(model))
    first = min(layers, key=natural_order, default="")
    return f"a {(config.architectures or ['?'])[0]} with tensors such as {first}"


def _fits(
    architecture: ModelArchitecture,
    donor: ModelReference,
    config: PretrainedConfig,
    names: StoredNames | None,
) -> bool:
    """Tell whether a description names what the files hold, or the files are to blame."""
    stored = {*tensor_names(donor)}
    try:
        weights = architecture.all_weights(config)
    except Exception:  # it reads settings that the config of today's transformers lacks
        return False
    lacking = any(not w.optional and stored.isdisjoint(names_of(w)) for w in weights)
    return not lacking or names is None or bool(names.lacking)


def _architecture_by_files(
    donor: ModelReference,
    config: PretrainedConfig,
    names: StoredNames | None,
    mixed: Sequence[ModelReference],
) -> ModelArchitecture:
    """Return an architecture of all tensors in the donor's files, with a module for each stack.

    Tensors that only some layers have are optional, as are those that transformers does not load.
    """
    held = tensor_names(donor)
    needed, kind = {*held}, BY_FILES
    if names:
        whole = {name for name, target in names.memory.items() if target not in names.ties}
        needed = whole | names.converted
        same = all(name == known for name, known in names.memory.items()) and not names.converted
        kind = "" if same and names.vocabulary else BY_FILES  # mergekit infers the same
    text_names = [_by_text_name(model) for model in mixed]
    loose: list[WeightInfo] = []
    stacks: dict[str, dict[str, dict[int, WeightInfo]]] = {}  # by stack, template and layer
    for name in sorted(held, key=natural_order):
        if name not in needed and BUFFER.search(name):
            continue
        weight = _describe(name, names, text_names, name not in needed or bool(mixed))
        layer = _layer_number(weight)
        if layer is None:
            loose.append(weight)
            continue
        templates = stacks.setdefault(_LAYER.split(name, 1)[0], {})
        templates.setdefault(_template(name), {})[layer] = weight
    alone = len(stacks) == 1
    modules = {} if alone else {"default": _module(loose, [], 0, None)}
    for stack, templates in stacks.items():
        count = 1 + max(map(max, templates.values()))
        firsts = ((next(iter(own.values())), len(own) < count) for own in templates.values())
        weights = [_as_template(weight, partial) for weight, partial in firsts]
        key = _config_key(config, "num_hidden_layers", count) if alone else None
        modules["default" if alone else stack] = _module(
            loose if alone else [], weights, count, key
        )
    return ModelArchitecture(
        modules=modules,
        architectures=[],
        model_type=kind,
        vocab_size_config_key=_config_key(config, "vocab_size"),
    )


def _describe(
    name: str, names: StoredNames | None, text_names: Sequence[Mapping[str, str]], optional: bool
) -> WeightInfo:
    memory = names.memory.get(name, name) if names else name
    text = _TEXT_PART.sub("", memory, count=1)
    found = [memory, *(other.get(text, name) for other in text_names)]
    tied: list[str] = []
    if names and (target := names.ties.get(memory)):
        tied = [other for other, known in names.memory.items() if known == target]
    return WeightInfo(
        name=name,
        vocabulary_axis=names.vocabulary.get(memory) if names else None,
        optional=optional,
        aliases=tuple(dict.fromkeys(other for other in found if other != name)) or None,
        tied_names=tuple(tied) or None,
    )


def _by_text_name(model: ModelReference) -> dict[str, str]:
    """Return the names in a model's files by those that a model of text has in memory."""
    names = model_names(model)
    held = names.memory if names else {name: name for name in tensor_names(model)}
    return {_TEXT_PART.sub("", memory, count=1): name for name, memory in held.items()}


def _layer_number(weight: WeightInfo) -> int | None:
    """Return a weight's layer; None where, as in some projectors, memory has no such number."""
    found = [_LAYER.search(name) for name in (weight.name, *(weight.aliases or ()))]
    numbers = {match and int(match[1]) for match in found}
    return numbers.pop() if len(numbers) == 1 else None


def _template(name: str) -> str:
    return _LAYER.sub(".${layer_index}.", name, count=1)


def _as_template(weight: WeightInfo, partial: bool) -> WeightInfo:
    aliases = tuple(map(_template, weight.aliases or ())) or None
    changed = {"name": _template(weight.name), "aliases": aliases}
    return weight.model_copy(update=changed | {"optional": weight.optional or partial})


def _module(
    loose: list[WeightInfo], layer: list[WeightInfo], count: int, key: str | None
) -> ModuleDefinition:
    definition = JsonModuleArchDef(
        model_type="",
        architectures=[],
        pre_weights=loose,
        layer_templates=JsonLayerTemplates(weights=layer),
        post_weights=[],
        num_layers_config_key=key,
        override_num_layers=count,
    )
    return ModuleDefinition(architecture=JsonModuleArchitecture(definition=definition))


def _config_key(config: PretrainedConfig, name: str, value: int | None = None) -> str | None:
    """Return where in a config, or the part for text in it, a number stands."""
    text = config.get_text_config()
    if not hasattr(text, name) or value not in (None, getattr(text, name)):
        return None
    parts = [part for part in ("text_config", "llm_config") if getattr(config, part, None) is text]
    return ".".join([*parts, name])
