# SPDX-License-Identifier: Apache-2.0
"""The architecture that models share: mergekit's description of it, or one by the names in files.

What mergekit has no fitting description of is merged under the names that the base's files give.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence

from mergekit.architecture import ModelArchitecture, ModuleDefinition, WeightInfo
from mergekit.architecture import arch_info_for_config as described_architecture
from mergekit.architecture.json_definitions import (
    JsonLayerTemplates,
    JsonModuleArchDef,
    JsonModuleArchitecture,
)
from mergekit.common import ModelReference
from mergekit.options import MergeOptions
from transformers import PretrainedConfig

from mergekit_ace.files.checkpoints import names_of
from mergekit_ace.methods.storage import StoredNames, model_names, tensor_names
from mergekit_ace.naming import natural_order

BY_FILES = "by the names in files"  # the kind of an architecture that mergekit does not infer
# What old checkpoints hold though any program computes it anew.
BUFFER = re.compile(r"(inv_freq|(cos|sin)_cached|masked_bias|position_ids|(attn|attention)\.bias)$")
_LAYER = re.compile(r"\.(\d+)\.")  # the first number in a name, as mergekit reads it
_TEXT_PART = re.compile(r"\b(language_model|text_model)\.")


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
            own, other = (
                _describe_model(one, configs[one], tensor_names(another))
                for one, another in ((model, donor), (donor, model))
            )
            raise RuntimeError(
                f"{model} is {own}; {donor}, whose config the result gets, is {other}. Set "
                "base_model to the model that the experts were fine-tuned from, or give "
                "--allow-crimes, which merges tensors whose names are the same but for "
                "`language_model.`"
            )
    crimes = mixed if options.allow_crimes else []
    if known and not crimes and _fits(known, donor, config, names):
        return known
    return _architecture_by_files(donor, config, names, crimes, described=known is not None)


def _describe_model(
    model: ModelReference, config: PretrainedConfig, others: Collection[str]
) -> str:
    """Return the class of a model, and the name of a tensor that the other model lacks."""
    own = (name for name in tensor_names(model) if name not in others and _LAYER.search(name))
    first = min(own, key=natural_order, default="")
    kind = f"a {(config.architectures or ['?'])[0]}"
    return f"{kind} with tensors such as {first}" if first else kind


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
    *,
    described: bool,
) -> ModelArchitecture:
    """Return an architecture of all tensors in the donor's files, with a module for each stack.

    Of `described` ones mergekit has a description, which does not fit.

    Tensors that only some layers have are optional, as are those that transformers does not load.
    """
    held = tensor_names(donor)
    needed, kind = {*held}, BY_FILES
    if names:
        whole = {name for name, target in names.memory.items() if target not in names.ties}
        needed = whole | names.converted
        same = all(name == known for name, known in names.memory.items()) and not names.converted
        inferred = not described and same and names.vocabulary  # mergekit infers the same
        kind = "" if inferred else BY_FILES
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
