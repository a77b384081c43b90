# SPDX-License-Identifier: Apache-2.0
"""The config of a merge: how it is read, and what can be wrong with it."""

from __future__ import annotations

import difflib
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, Literal, TypeVar

import click
import jinja2
import torch
import yaml
from mergekit import config as schema
from mergekit import merge_methods
from mergekit.common import ModelReference
from mergekit.config import ConditionalParameter, MergeConfiguration
from mergekit.merge import _set_chat_template
from mergekit.merge_methods.base import MergeMethodSpec, ParameterScope
from mergekit.tokenizer.config import ModelTokenEmbedding, TokenEmbeddingConfig, TokenizerConfig
from pydantic import BaseModel, PrivateAttr, ValidationError

from mergekit_ace.files.checkpoints import DTYPES, FLOATING
from mergekit_ace.methods.base import TaskVectorMethod
from mergekit_ace.naming import ConfigError, FileError, listed, without_numbers

if TYPE_CHECKING:
    from mergekit_ace.planning import PlannedMerge, PlannedTensor

M = TypeVar("M", bound=BaseModel)
# The command that takes a config, by a key that tells its kind; the first that is there counts.
_COMMANDS = {
    "merge_method": "merge",
    "teacher": "distill",
    "merges": "score",
    "search": "search",
    "merged_model": "calibrate",
    "measure": "statistics",
    "task": "train",
}
# What to write where mergekit reads another type, by key.
_EXPECTED = {
    "tokenizer": "write `tokenizer: {source: base}`",
    "models": "write a list of lines `- model: PATH`",
    "parameters": "write lines `name: value` below it",
}
# What mergekit reads a mapping as, by the key that leads to it.
_KINDS: dict[str, type[BaseModel]] = {
    "models": schema.InputModelDefinition,
    "slices": schema.OutputSliceDefinition,
    "sources": schema.InputSliceDefinition,
    "modules": schema.OutputModuleDefinition,
    "parameters": ConditionalParameter,
    "tokenizer": TokenizerConfig,
    "tokens": TokenEmbeddingConfig,
    "source": ModelTokenEmbedding,
    "model": ModelReference,
    "base_model": ModelReference,
}
# Settings of transformers' configs with an entry per layer.
_LAYER_LISTS = ("layer_types", "mlp_layer_types", "no_rope_layers")
_RESULT_DTYPES = ("bfloat16", "float16", "float32", "float64")
HEADS = ("lm_head.weight", "embed_out.weight", "output.weight")  # which may be tied
_UNREAD = "mergekit would ignore it without a word"
_TOP_LEVEL = "write it at the top level of the config"
_REWEIGHTED = (
    "experts have different weights, and the coefficients were learned for equal ones",
    "leave `weight` out, or expect another merge than the one that was trained",
)


class UniqueKeyLoader(yaml.SafeLoader):
    """Reads YAML, and refuses a key that stands twice in one mapping."""

    def compose_mapping_node(self, anchor: Any) -> yaml.MappingNode:
        """Raise a `YAMLError` for a key of which YAML would take the last value."""
        node = super().compose_mapping_node(anchor)
        lines: dict[str, int] = {}
        for key, _ in node.value:
            name, line = str(key.value), key.start_mark.line + 1
            if name in lines and name != "<<":
                raise yaml.YAMLError(
                    f"the key {name!r} stands in line {lines[name]} and again in line {line}; "
                    "remove one of them"
                )
            lines[name] = line
        return node


def read_yaml(path: Path) -> tuple[Any, str]:
    """Return the content of a YAML file, and its text."""
    try:
        source = path.read_text(encoding="utf-8")
        documents = list(yaml.load_all(source, UniqueKeyLoader))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise ConfigError(f"{path} cannot be read as YAML: {error}") from error
    if len(documents) > 1:
        raise ConfigError(f"{path} is a file of several merge configs, which mergekit-multi takes")
    return documents[0] if documents else None, source


def validate_config(path: Path, content: Any, kind: type[M]) -> M:
    """Return the content of a config file as settings; a `ConfigError` names all that is wrong."""
    found = [key for key in _COMMANDS if isinstance(content, dict) and key in content]
    if found and found[0] not in kind.model_fields:
        raise ConfigError(f"{path} is a config for `mergekit-ace {_COMMANDS[found[0]]}`")
    try:
        return kind.model_validate(content)
    except ValidationError as error:
        raise ConfigError("\n    ".join([f"{path}:", *_explain(error, content)])) from error
    except RuntimeError as error:  # of mergekit's own validators
        raise ConfigError(f"{path}: {error}") from error


class MergeConfig(MergeConfiguration):
    """A configuration from a file, which lists its models in an order that is no chance."""

    _source: str = PrivateAttr("")

    @property
    def source(self) -> str:
        """The text of the file."""
        return self._source

    def referenced_models(self) -> list[ModelReference]:
        """Return all models, in the order of their names."""
        return sorted(super().referenced_models(), key=str)


def read_merge_config(path: Path) -> MergeConfig:
    """Return a mergekit configuration, or raise a `ConfigError`."""
    content, source = read_yaml(path)
    config = validate_config(path, content, MergeConfig)
    config._source = source
    return config


def layer_lists(config: MergeConfiguration, trust_remote_code: bool) -> dict[str, list[Any]]:
    """Return the settings with an entry per layer that the result of a merge in slices has to have.

    mergekit leaves the base's there, and transformers saves no config that contradicts itself.
    """
    found: dict[str, list[Any]] = {}
    modules = (config.modules or {}).values()
    for piece in config.slices or next((m.slices for m in modules if m.slices), ()):
        source = piece.sources[0]
        settings = source.model.config(trust_remote_code=trust_remote_code).get_text_config()
        for name in _LAYER_LISTS:
            entries = getattr(settings, name, None)
            if isinstance(entries, list):
                found.setdefault(name, []).extend(entries[slice(*source.layer_range)])
    return found


def safetensors_dtype(name: str | None) -> str:
    """Return what a safetensors file calls a dtype that a config names; empty for none of these."""
    dtype = getattr(torch, (name or "").removeprefix("torch."), None)
    return next((own for own in FLOATING if DTYPES[own] == dtype), "")


def _explain(error: ValidationError, content: Any) -> list[str]:
    """Return what is wrong, once for every place in a config: pydantic tells every alternative."""
    told: dict[tuple[str, ...], str] = {}
    for detail in error.errors():
        places, what = detail["loc"], detail["msg"].removeprefix("Value error, ")
        if detail["type"] == "missing":
            what = f"there is no `{places[-1]}:`"
        if detail["type"] == "extra_forbidden":
            what = "there is no such setting"
        if "parameters" in places[:-1]:
            places = places[: places.index("parameters") + 2]
            what = "a parameter is a value, a list of values, or a list of {filter: …, value: …}"
        path, found = _find_place(places, content)
        if path and path[-1] in _EXPECTED:
            what = f"{what}; {_EXPECTED[path[-1]]}"
        place = path or (what,)  # of all that is missing at the top level
        told.setdefault(place, f"{'.'.join(path) or 'the config'}: {what} (found: {found!r:.60})")
    return list(told.values())


def _find_place(places: Sequence[str | int], content: Any) -> tuple[tuple[str, ...], Any]:
    """Return a path without pydantic's names for one of several alternatives, and what is there."""
    path = []
    for place in places:
        if isinstance(content, str):  # given where a list of one was meant
            break
        try:
            content = content[place]
        except (LookupError, TypeError):
            continue
        path.append(str(place))
    return tuple(path), content


@dataclass(frozen=True)
class Finding:
    """Something because of which a merge fails or is not what its config says; or may be."""

    level: Literal["error", "warning"]
    message: str
    remedy: str = ""

    @classmethod
    def error(cls, message: str, remedy: str = "") -> Finding:
        return cls("error", message, remedy)

    @classmethod
    def warning(cls, message: str, remedy: str = "") -> Finding:
        return cls("warning", message, remedy)

    @property
    def text(self) -> str:
        remedy = f"\n    → {self.remedy}" if self.remedy else ""
        return f"{self.level}: {self.message}{remedy}"


def raise_errors(findings: Iterable[Finding], *, quiet: bool, end: str = "") -> None:
    """Show warnings, unless `quiet`, and raise a `ConfigError` with all errors and an `end`."""
    errors = []
    for finding in findings:
        if finding.level == "error":
            errors.append(finding.text.removeprefix("error: "))
        elif not quiet:
            click.echo(finding.text, err=True)
    if errors:
        raise ConfigError("\n".join([*errors, end]).rstrip())


def check_file(path: Path) -> tuple[MergeConfig | None, list[Finding]]:
    """Read a config, and find what can be told from it alone; None where it cannot be read."""
    try:
        config = read_merge_config(path)
    except ConfigError as error:
        findings = [Finding.error(str(error))]
        if isinstance(error.__cause__, ValidationError | RuntimeError):  # keys may be misspelt
            findings += _check_keys(read_yaml(path)[0])
        return None, findings
    return config, [*check_config(config)]


def check_config(config: MergeConfig) -> Iterator[Finding]:
    """Find what can be told from a config alone."""
    yield from _check_keys(yaml.safe_load(config.source))
    name = config.merge_method
    try:
        yield from _check_parameters(config, merge_methods.get(name).spec)
    except RuntimeError:
        known = sorted(method.spec.name for method in merge_methods.registered_methods())
        meant = re.sub("_?merg(e|ing)$", "", name.replace("-", "_").lower())  # ACE-Merging
        yield Finding.error(f"there is no method {name!r}", _nearest(meant, known))
    for key in ("dtype", "out_dtype"):
        # mergekit takes int64, which rounds weights to 0, and writes `torch.float32` into a
        # config.json that transformers does not load then
        if (dtype := getattr(config, key)) and dtype not in _RESULT_DTYPES:
            message = f"{key}: {dtype!r} is no dtype that a merged model can have"
            yield Finding.error(message, f"write one of {', '.join(_RESULT_DTYPES)}")
    yield from _check_chat_template(config)
    counts = [len(piece.sources) for piece in config.slices or ()]
    if counts and counts[0] < counts[-1]:
        message = f"slices: the head is merged from the last slice's first {counts[0]} models"
        yield Finding.warning(message, "list all its models in the first slice, with `weight: 0`")
    for where, part in _config_parts(config):
        for key in ("models", "sources"):
            inputs = getattr(part, key, None) or []
            yield from _check_inputs(f"{where}{key}", inputs, config.base_model)


def _nearest(name: str, known: Iterable[str]) -> str:
    """Return what may have been meant, or all that there is."""
    names = {other.lower(): other for other in known}
    close = difflib.get_close_matches(name.lower(), names, n=2, cutoff=0.8)
    if close:
        return f"did you mean {' or '.join(repr(names[other]) for other in close)}?"
    return f"there are: {', '.join(sorted(names.values())) or 'none'}"


def _check_keys(content: Any) -> Iterator[Finding]:
    """Find keys in the content of a config that mergekit has no setting for."""
    # For a mapping that may be of several kinds, pydantic tells what each of them forbids.
    forbidden: dict[tuple, dict[tuple, set[str]]] = defaultdict(lambda: defaultdict(set))
    try:
        MergeConfiguration.model_validate(content, extra="forbid")
    except ValidationError as error:
        for detail in error.errors():
            if detail["type"] == "extra_forbidden":
                *path, name = detail["loc"]
                forbidden[_find_place(path, content)[0]][tuple(path)].add(str(name))
    except RuntimeError:  # of mergekit's own validators, which `read_merge_config` tells
        pass
    for place, kinds in forbidden.items():
        for name in sorted(set.intersection(*kinds.values())):
            message = f"{'.'.join(place) or 'the config'}: there is no setting {name!r}; {_UNREAD}"
            yield Finding.error(message, _right_place(name, place, content.get("merge_method")))


def _right_place(name: str, place: Sequence[str], method: Any) -> str:
    """Return where a key belongs that nothing reads in its mapping, or what was meant."""
    fields = next((_KINDS[key] for key in reversed(place) if key in _KINDS), MergeConfiguration)
    fields = fields.model_fields
    with suppress(RuntimeError):  # there is no such method
        scopes = {p.name: p.scope for p in merge_methods.get(method).spec.parameters}
        if name in scopes and "parameters" in fields:
            if "model" in fields and scopes[name] == ParameterScope.SHARED:
                return "write it under the `parameters:` at the top level"
            return "write it under `parameters:`, one level deeper"
    if name in MergeConfiguration.model_fields and place:
        return _TOP_LEVEL
    return _nearest(name, fields)


def _check_parameters(config: MergeConfiguration, spec: MergeMethodSpec) -> Iterator[Finding]:
    """Find parameters that the method does not read, or not where they stand."""
    scopes = {parameter.name: parameter.scope for parameter in spec.parameters}
    for where, model, name, _ in _settings(config):
        if name not in scopes:
            top = name in MergeConfiguration.model_fields
            yield Finding.error(
                f"{where}: there is no parameter {name!r} of {spec.name}; {_UNREAD}",
                _TOP_LEVEL if top else _nearest(name, scopes),
            )
        elif model is not None and scopes[name] == ParameterScope.SHARED:
            yield Finding.error(
                f"{where}: {name} is a parameter of whole tensors, and not read under a model",
                "move it to the parameters: at the top level",
            )
        elif model == config.base_model is not None and scopes[name] == ParameterScope.NON_BASE:
            message = f"{where}: {name} is a parameter of experts, not read under the base model"
            yield Finding.warning(message, "leave it out there")


def _settings(
    config: MergeConfiguration,
) -> Iterator[tuple[str, ModelReference | None, str, Any]]:
    """Yield every parameter: where it stands, of which model, its name, and its setting."""
    for where, part in _config_parts(config):
        for name, setting in (part.parameters or {}).items():
            yield f"{where}parameters", getattr(part, "model", None), name, setting


def _config_parts(part: Any, where: str = "") -> Iterator[tuple[str, Any]]:
    """Yield a config and all nested parts of it, each with the path that leads to its keys."""
    yield where, part
    for key in ("models", "slices", "sources", "modules"):
        members = getattr(part, key, None) or ()
        pairs = members.items() if isinstance(members, dict) else enumerate(members)
        for n, member in pairs:
            yield from _config_parts(member, f"{where}{key}.{n}.")


def _check_chat_template(config: MergeConfiguration) -> Iterator[Finding]:
    """Ask mergekit for the template, which it refuses only once all weights are merged."""
    holder: Any = SimpleNamespace(chat_template="")
    try:
        if config.chat_template not in (None, "auto"):
            _set_chat_template(holder, config)
        jinja2.Environment(extensions=["jinja2.ext.loopcontrols"]).parse(holder.chat_template)
    except (RuntimeError, jinja2.TemplateSyntaxError) as error:
        if "unknown tag" not in str(error):  # transformers has tags of its own
            yield Finding.error(
                f"chat_template is neither the name of a template nor one in Jinja: {error}",
                "write auto, a name that mergekit knows such as chatml, or the text of a template",
            )


def _check_inputs(
    where: str, inputs: Sequence[Any], base: ModelReference | None
) -> Iterator[Finding]:
    """Find models that stand twice in one list, however they are spelt, and empty ranges."""
    spellings: dict[str, list[str]] = defaultdict(list)
    for n, one in enumerate(inputs):
        spellings[identity_of(one.model)].append(str(one.model))
        first, end = getattr(one, "layer_range", (0, 1))
        if not 0 <= first < end:  # left out of the result without a word
            yield Finding.error(
                f"{where}.{n}: the layer_range [{first}, {end}] holds no layer",
                "write the first layer, counted from 0, and the one after the last",
            )
    for identity, names in spellings.items():
        if base and identity == identity_of(base) and str(base) not in names:
            message = f"{where}: {names[0]} is the base model {base} in another spelling"
            yield Finding.warning(message, "remove it from the experts, of which it counts as one")
        elif len(names) > 1:
            yield Finding.error(
                f"{where}: {names[0]} is listed {len(names)} times: {', '.join(names)}",
                "list it once; `weight` under its parameters lets it count more",
            )


def identity_of(model: ModelReference) -> str:
    """Return what two spellings of one model have in common."""
    parts = [str(part) for part in (model.model, model.lora) if part]
    return "+".join(str(Path(part).resolve()) if Path(part).is_dir() else part for part in parts)


def check_settings(plan: PlannedMerge) -> Iterator[Finding]:
    """Find settings that are allowed, and reach no tensor, or do not fit one."""
    spec = plan.method.spec
    # without copies, which know nothing of the method's parameters
    tensors = [tensor for tensor in plan.tensors if tensor.method is plan.method]
    known = {parameter.name for parameter in spec.parameters}
    of_experts = {parameter.name for parameter in spec.input_parameters}
    experts = max((len(tensor.experts) for tensor in tensors), default=0)
    for where, model, name, setting in _settings(plan.config):
        if name not in known:
            continue
        entries = setting if isinstance(setting, list) else [setting]
        names = {w.name for t in tensors for m, w in t.weights.items() if model in (None, m)}
        names |= {tensor.name for tensor in tensors if model is None}
        yield from _check_filters(f"{where}.{name}", entries, names)
        plain = not any(isinstance(entry, ConditionalParameter) for entry in entries)
        if plain and name in of_experts and model is None and len({*entries}) == experts > 1:
            yield Finding.warning(
                f"{where}.{name}: a list, which has as many values as there are experts "
                f"({experts}), runs through the layers, and is the same for all models",
                f"for a {name} of each expert, write it under the `parameters:` of its entry",
            )
    given = [dict(own.items()) for t in tensors for own in t.task.input_parameters.values()]
    weights = [own["weight"] for own in given if "weight" in own]
    if weights and all(weight == 0 for weight in weights):  # not None, for none given
        message = "the weights of all experts are 0 in every tensor"
        yield Finding.error(message, "give at least one a `weight` above 0, or leave `weight` out")
    wrong = [own["density"] for own in given if not 0 <= own.get("density", 1) <= 1]
    if wrong:  # mergekit takes it for 1
        yield Finding.error(
            f"density: {wrong[0]:g} is no share of the entries, from 0 to 1",
            f"write {wrong[0] / 100:g}, if it is a percentage" if wrong[0] > 1 else "",
        )
    if isinstance(plan.method, TaskVectorMethod):
        yield from _check_method(tensors, plan.method)


def _check_filters(where: str, entries: Sequence[Any], names: set[str]) -> Iterator[Finding]:
    """Find entries of a list that decide for no tensor; the first that matches decides."""
    if not entries or any(getattr(entry, "value", entry) in (None, []) for entry in entries):
        message = f"{where}: the list is empty, and mergekit takes the default without a word"
        yield Finding.error(message, "write a value, or leave the parameter out")
    left, ended = set(names), False
    for n, entry in enumerate(entries):
        if not isinstance(entry, ConditionalParameter):
            return
        part = "" if entry.filter in (None, "*") else str(entry.filter)
        matches = {name for name in names if part in name}
        if not matches and not any(part in head for head in HEADS):
            kinds = listed(sorted({*map(without_numbers, names)}), 3)
            yield Finding.error(
                f"{where}.{n}: the filter {part!r} matches no tensor of the merge",
                f"write a part of a tensor's name, in the same case, without wildcards: {kinds}",
            )
        elif matches and not matches & left and (part or ended):
            what = f"filter {part!r}" if part else "second entry without filter"
            yield Finding.error(
                f"{where}.{n}: the {what} is never reached: entries before it match its tensors",
                "put the entry without filter last, and narrow filters before wide ones",
            )
        linear = {name for name in matches if "linear_attn" in name}
        if part and part in "linear_attn" and linear and matches - linear:
            message = f"{where}.{n}: the filter {part!r} takes tensors of linear_attn, too"
            yield Finding.warning(message, "write `self_attn` if these are not meant")
        left, ended = left - matches, ended or not part


def _check_method(tensors: Sequence[PlannedTensor], method: TaskVectorMethod) -> Iterator[Finding]:
    """Say what a merge would say at a tensor that its settings do not fit, and what is doubtful."""
    doubts: dict[tuple[str, str], list[str]] = defaultdict(list)
    for tensor in tensors:
        settings = tensor.settings
        try:
            method.check_settings(settings)
            method.coefficients(settings)
        except (ValueError, FileError) as error:
            yield Finding.error(str(error))
            return
        found = [*method.doubts(settings)]
        if settings.parameters.get("coefficients") is not None and len(set(settings.weights)) > 1:
            found.append(_REWEIGHTED)
        for doubt in found:
            doubts[doubt].append(without_numbers(tensor.name))
    for (message, remedy), kinds in doubts.items():
        where = "" if len(kinds) == len(tensors) else f": {listed([*dict.fromkeys(kinds)])}"
        yield Finding.warning(message + where, remedy)
