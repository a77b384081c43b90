# SPDX-License-Identifier: Apache-2.0
"""What can be wrong with the config of a merge: keys, values, and what they reach."""

from __future__ import annotations

import difflib
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal

import click
import jinja2
import yaml
from mergekit import merge_methods
from mergekit.common import ModelReference
from mergekit.config import (
    ConditionalParameter,
    InputModelDefinition,
    InputSliceDefinition,
    MergeConfiguration,
    OutputModuleDefinition,
    OutputSliceDefinition,
)
from mergekit.merge import _set_chat_template
from mergekit.merge_methods.base import MergeMethodSpec, ParameterScope
from mergekit.tokenizer.config import ModelTokenEmbedding, TokenEmbeddingConfig, TokenizerConfig
from pydantic import BaseModel, ValidationError

from mergekit_ace.methods.base import TaskVectorMethod
from mergekit_ace.methods.coefficients import CoefficientFileError
from mergekit_ace.naming import listed, without_numbers
from mergekit_ace.planning import PlannedMerge, PlannedTensor

RESULT_DTYPES = ("bfloat16", "float16", "float32", "float64")
HEADS = ("lm_head.weight", "embed_out.weight", "output.weight")  # which may be tied
# What mergekit reads a mapping as, by the key that leads to it.
KINDS: dict[str, type[BaseModel]] = {
    "models": InputModelDefinition,
    "slices": OutputSliceDefinition,
    "sources": InputSliceDefinition,
    "modules": OutputModuleDefinition,
    "parameters": ConditionalParameter,
    "tokenizer": TokenizerConfig,
    "tokens": TokenEmbeddingConfig,
    "source": ModelTokenEmbedding,
    "model": ModelReference,
    "base_model": ModelReference,
}


@dataclass(frozen=True)
class Finding:
    """Something that is wrong, or may be.

    Attributes:
        level: an error makes the merge fail, or be another one than the config says.
        subject: what it is about: ``config``, ``tensors``, ``tokenizers``, …
    """

    level: Literal["error", "warning"]
    subject: str
    message: str
    remedy: str = ""

    @classmethod
    def error(cls, subject: str, message: str, remedy: str = "") -> Finding:
        """Return something because of which the merge fails, or is not what the config says."""
        return cls("error", subject, message, remedy)

    @classmethod
    def warning(cls, subject: str, message: str, remedy: str = "") -> Finding:
        """Return something that may not be what is wanted."""
        return cls("warning", subject, message, remedy)

    @property
    def text(self) -> str:
        """All of it, for people."""
        remedy = f"\n    → {self.remedy}" if self.remedy else ""
        return f"{self.level}: {self.subject}: {self.message}{remedy}"


def shown_errors(findings: Iterable[Finding], *, quiet: bool) -> str:
    """Show warnings, unless `quiet`, and return all errors with their remedies; empty if none."""
    errors = []
    for finding in findings:
        if finding.level == "error":
            errors.append(finding.text.removeprefix("error: "))
        elif not quiet:
            click.echo(finding.text, err=True)
    return "\n".join(errors)


def check_config(config: MergeConfiguration, source: str) -> list[Finding]:
    """Find what can be told from a config alone.

    Args:
        source: its text.
    """
    try:
        spec = merge_methods.get(config.merge_method).spec
    except RuntimeError:
        name = config.merge_method
        wrong = [Finding.error("config", f"there is no method {name!r}", _nearest_method(name))]
        return [*wrong, *check_keys(source), *_check_values(config)]
    return [
        *check_keys(source, spec),
        *_check_parameters(config, spec),
        *_check_values(config),
    ]


def _nearest_method(name: str) -> str:
    known = sorted(method.spec.name for method in merge_methods.registered_methods())
    name = name.replace("-", "_")
    stem = re.sub("_?merg(e|ing)$", "", name.lower())  # what papers add: ACE-Merging, TIES-Merging
    return _nearest(stem if stem in known else name, known)


def _nearest(name: str, known: Iterable[str]) -> str:
    """Return what may have been meant, or all that there is."""
    names = {other.lower(): other for other in known}
    close = difflib.get_close_matches(name.lower(), names, n=2, cutoff=0.8)
    if close:
        return f"did you mean {' or '.join(repr(names[other]) for other in close)}?"
    return f"there are: {', '.join(sorted(names.values())) or 'none'}"


def check_keys(source: str, spec: MergeMethodSpec | None = None) -> Iterator[Finding]:
    """Find keys of a config that mergekit, or YAML, would ignore without a word.

    Args:
        spec: of its merge method; None where that is not known.
    """
    yield from repeated_keys(source)
    content = yaml.safe_load(source)
    for place, name in _unknown_keys(content):
        kind = next((KINDS[key] for key in reversed(place) if key in KINDS), MergeConfiguration)
        where = ".".join(map(str, place)) or "the config"
        yield Finding.error(
            "config",
            f"{where}: there is no setting {name!r}; mergekit would ignore it without a word",
            _right_place(name, kind, spec),
        )


def repeated_keys(source: str) -> Iterator[Finding]:
    """Find keys that stand twice in one mapping of a YAML text."""
    pending = [yaml.compose(source, Loader=yaml.SafeLoader)]
    while pending:
        node = pending.pop()
        if isinstance(node, yaml.SequenceNode):
            pending += node.value
        if not isinstance(node, yaml.MappingNode):
            continue
        lines: dict[str, int] = {}
        for key, value in node.value:
            name, line = str(key.value), key.start_mark.line + 1
            if name in lines and name != "<<":
                yield Finding.error(
                    "config",
                    f"the key {name!r} stands in line {lines[name]} and again in line {line}; YAML "
                    "takes the last one without a word",
                    "remove one of them",
                )
            lines[name] = line
            pending.append(value)


def _unknown_keys(content: Any) -> Iterator[tuple[tuple[str | int, ...], str]]:
    """Yield what pydantic has no setting for: the place, and the key."""
    try:
        MergeConfiguration.model_validate(content, extra="forbid")
        return
    except ValidationError as error:
        wrong = [(detail["loc"], detail["type"]) for detail in error.errors()]
    except RuntimeError:  # of mergekit's own validators, which read_merge_config tells
        return
    # For a mapping that may be of several kinds, pydantic tells what is wrong with it as each of
    # them; the one with the fewest mistakes is meant.
    alternatives: dict[tuple, dict[tuple, list[str]]] = defaultdict(dict)
    for path, kind in wrong:
        if kind == "extra_forbidden":
            kinds = alternatives[_place(path[:-1], content)]
            kinds.setdefault(path[:-1], []).append(str(path[-1]))
    for place, kinds in alternatives.items():
        mistakes = {own: sum(path[: len(own)] == own for path, _ in wrong) for own in kinds}
        for name in kinds[min(kinds, key=lambda own: mistakes[own])]:
            yield place, name


def _place(path: Sequence[str | int], content: Any) -> tuple[str | int, ...]:
    """Return a path without pydantic's names for one of several alternatives."""
    place = []
    for key in path:
        try:
            content = content[key]
        except (LookupError, TypeError):
            continue
        place.append(key)
    return tuple(place)


def _right_place(name: str, kind: type[BaseModel], spec: MergeMethodSpec | None) -> str:
    """Return where a key belongs that nothing reads in a mapping of a kind, or what was meant."""
    scopes = {parameter.name: parameter.scope for parameter in spec.parameters} if spec else {}
    if name in scopes and "parameters" in kind.model_fields:
        top = "model" in kind.model_fields and scopes[name] == ParameterScope.SHARED
        place = "the `parameters:` at the top level" if top else "`parameters:`, one level deeper"
        return f"write it under {place}"
    if name in MergeConfiguration.model_fields and kind is not MergeConfiguration:
        return "write it at the top level of the config"
    return _nearest(name, kind.model_fields)


def _check_parameters(config: MergeConfiguration, spec: MergeMethodSpec) -> Iterator[Finding]:
    """Find parameters that the method does not read, or not where they stand."""
    scopes = {parameter.name: parameter.scope for parameter in spec.parameters}
    for where, model, name, _ in _settings(config):
        if name not in scopes:
            top = name in MergeConfiguration.model_fields
            yield Finding.error(
                "config",
                f"{where}: there is no parameter {name!r} of {spec.name}; mergekit would ignore it "
                "without a word",
                "write it at the top level of the config" if top else _nearest(name, scopes),
            )
        elif model is not None and scopes[name] == ParameterScope.SHARED:
            yield Finding.error(
                "config",
                f"{where}: {name} is a parameter of whole tensors, and not read under a model",
                "move it to the parameters: at the top level",
            )
        elif model == config.base_model is not None and scopes[name] == ParameterScope.NON_BASE:
            yield Finding.warning(
                "config",
                f"{where}: {name} is a parameter of experts, and not read under the base model",
                "leave it out there",
            )


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
    for key in ("models", "slices", "sources"):
        for n, member in enumerate(getattr(part, key, None) or ()):
            yield from _config_parts(member, f"{where}{key}.{n}.")
    for name, module in (getattr(part, "modules", None) or {}).items():
        yield from _config_parts(module, f"{where}modules.{name}.")


def _check_values(config: MergeConfiguration) -> Iterator[Finding]:
    """Find values that mergekit stumbles over late, or follows to something nobody means."""
    for key, name in (("dtype", config.dtype), ("out_dtype", config.out_dtype)):
        # mergekit takes int64, which rounds weights to 0, and writes `torch.float32` into a
        # config.json that transformers does not load then
        if name and name not in RESULT_DTYPES:
            yield Finding.error(
                "config",
                f"{key}: {name!r} is no dtype that a merged model can have",
                f"write one of {', '.join(RESULT_DTYPES)}",
            )
    yield from _check_chat_template(config)
    for where, part in _config_parts(config):
        for key in ("models", "sources"):
            inputs = getattr(part, key, None) or []
            yield from _check_repeated(f"{where}{key}", inputs, config.base_model)
            yield from _check_layer_ranges(f"{where}{key}", inputs)


def _check_chat_template(config: MergeConfiguration) -> Iterator[Finding]:
    """Ask mergekit for the template, which it refuses only once all weights are merged."""
    if config.chat_template in (None, "auto"):
        return
    holder: Any = SimpleNamespace(chat_template="")
    try:
        _set_chat_template(holder, config)
        jinja2.Environment(extensions=["jinja2.ext.loopcontrols"]).parse(holder.chat_template)
    except (RuntimeError, jinja2.TemplateSyntaxError) as error:
        if "unknown tag" not in str(error):  # transformers has tags of its own
            yield Finding.error(
                "tokenizers",
                f"chat_template is neither the name of a template nor one in Jinja: {error}",
                "write auto, a name that mergekit knows such as chatml, or the text of a template",
            )


def _check_repeated(
    where: str, inputs: Sequence[Any], base: ModelReference | None
) -> Iterator[Finding]:
    """Find models that stand twice in one list, however they are spelt."""
    spellings: dict[tuple[str, ...], list[str]] = defaultdict(list)
    for one in inputs:
        spellings[_identity(one.model)].append(str(one.model))
    for identity, names in spellings.items():
        as_written = [*dict.fromkeys(names)]
        if base and identity == _identity(base) and str(base) not in names:
            yield Finding.warning(
                "config",
                f"{where}: {as_written[0]} is the base model {base} in another spelling, and "
                "counts as an expert that changed nothing",
                "remove it from the experts",
            )
        elif len(names) > 1:
            other = f", as {' and '.join(as_written)}" if len(as_written) > 1 else ""
            yield Finding.error(
                "config",
                f"{where}: {names[0]} is listed {len(names)} times{other}",
                "list it once; `weight` under its parameters lets it count more",
            )


def _identity(model: ModelReference) -> tuple[str, ...]:
    """Return what two spellings of one model have in common."""
    parts = (model.model, model.lora) if model.lora else (model.model,)
    return tuple(
        str(Path(part.path).resolve()) if Path(part.path).is_dir() else str(part) for part in parts
    )


def _check_layer_ranges(where: str, inputs: Sequence[Any]) -> Iterator[Finding]:
    """Find ranges without a layer, which mergekit leaves out of the result without a word."""
    for n, source in enumerate(inputs):
        first, end = getattr(source, "layer_range", (0, 1))
        if not 0 <= first < end:
            yield Finding.error(
                "config",
                f"{where}.{n}: the layer_range [{first}, {end}] holds no layer",
                "write the first layer, counted from 0, and the one after the last",
            )


def check_settings(plan: PlannedMerge) -> Iterator[Finding]:
    """Find settings that are allowed, and reach no tensor, or nothing but the base.

    What our methods would say at the first tensor that settings do not fit is said here.
    """
    known = {parameter.name for parameter in plan.method.spec.parameters}
    of_experts = {parameter.name for parameter in plan.method.spec.input_parameters}
    experts = max((len(tensor.experts) for tensor in plan.tensors), default=0)
    for where, model, name, setting in _settings(plan.config):
        if name in known:
            yield from _check_filters(f"{where}.{name}", setting, _names(plan.tensors, model))
        if name in of_experts and model is None and _is_gradient(setting, experts):
            yield Finding.warning(
                "config",
                f"{where}.{name}: a list runs through the layers, and is the same for all models; "
                f"it has as many values as there are experts ({experts})",
                f"for a {name} of each expert, write it under the `parameters:` of its entry",
            )
    yield from _check_shares(plan)
    if isinstance(plan.method, TaskVectorMethod):
        yield from _check_method(plan, plan.method)


def _names(tensors: Sequence[PlannedTensor], model: ModelReference | None) -> list[str]:
    """Return the names that mergekit compares filters with: a model's own, or those of all."""
    names: dict[str, None] = {}
    for tensor in tensors:
        own = {m: weight.name for m, weight in tensor.weights.items()}
        if model is None:
            names |= dict.fromkeys([tensor.name, *own.values()])
        elif model in own:
            names[own[model]] = None
    return list(names)


def _check_filters(where: str, setting: Any, names: Sequence[str]) -> Iterator[Finding]:
    """Find entries of a list that decide for no tensor; the first that matches decides."""
    entries = setting if isinstance(setting, list) else [setting]
    if not entries:
        yield _empty(where)
    left, ended = set(names), False
    for n, entry in enumerate(entries):
        if not isinstance(entry, ConditionalParameter):
            return
        place = f"{where}.{n}" if isinstance(setting, list) else where
        if entry.value == []:
            yield _empty(place)
        part = "" if entry.filter in (None, "*") else str(entry.filter)
        default = not part
        matches = {name for name in names if part in name}
        if not matches and not any(part in head for head in HEADS):
            kinds = listed(list(dict.fromkeys(map(without_numbers, names))), 3)
            yield Finding.error(
                "config",
                f"{place}: the filter {part!r} matches no tensor of the merge",
                "a filter is a part of tensor names, in the same case and without wildcards; there "
                f"are: {kinds}",
            )
        elif matches and not matches & left and (ended or not default):
            what = "second entry without filter" if default else f"filter {part!r}"
            yield Finding.error(
                "config",
                f"{place}: the {what} is never reached: the entries before it match all of its "
                "tensors, and the first that matches decides",
                "put the entry without filter last, and narrow filters before wide ones",
            )
        left, ended = left - matches, ended or default


def _empty(where: str) -> Finding:
    message = f"{where}: the list is empty, and mergekit takes the default without a word"
    return Finding.error("config", message, "write a value, or leave the parameter out")


def _is_gradient(setting: Any, length: int) -> bool:
    """Tell whether a setting is a list of so many different values, at least two."""
    if not isinstance(setting, list) or len(setting) != length:
        return False
    plain = not any(isinstance(value, ConditionalParameter) for value in setting)
    return plain and len({str(value) for value in setting}) > 1


def _check_shares(plan: PlannedMerge) -> Iterator[Finding]:
    """Find weights of 0 everywhere, and densities in per cent, which mergekit takes for 1."""
    given = [dict(p.items()) for t in plan.tensors for p in t.task.input_parameters.values()]
    weights = [own["weight"] for own in given if "weight" in own]
    if weights and all(weight == 0 for weight in weights):  # not None, for none given
        yield Finding.error(
            "config",
            "the weights of all experts are 0 in every tensor, so that nothing of them is merged",
            "give at least one expert a `weight` above 0, or leave `weight` out",
        )
    densities = (own.get("density", 1) for own in given)
    above = next((value for value in densities if not 0 <= value <= 1), None)
    if above is not None:
        yield Finding.error(
            "config",
            f"density: {above:g} is no share of the entries, from 0 to 1",
            f"write {above / 100:g}, if it is a percentage" if above > 1 else "raise it",
        )


def _check_method(plan: PlannedMerge, method: TaskVectorMethod) -> Iterator[Finding]:
    """Say what a merge would when it comes to the first tensor that its settings do not fit.

    Where they fit, say what is seldom meant.
    """
    weighted: list[str] = []
    doubts: dict[tuple[str, str], list[str]] = {}
    for tensor in plan.tensors:
        settings = tensor.settings
        try:
            method.check_settings(settings)
            learned = method.learned_coefficients(settings)
        except ValueError as error:
            of_file = isinstance(error, CoefficientFileError)
            yield Finding.error("coefficients" if of_file else "config", str(error))
            return
        if learned is not None and len(set(settings.weights)) > 1:
            weighted.append(tensor.name)
        for doubt in method.doubts(settings):
            doubts.setdefault(doubt, []).append(tensor.name)
    if weighted:
        yield Finding.warning(
            "coefficients",
            f"experts have different weights in {listed(weighted)}; the coefficients were learned "
            "for equal ones",
            "leave `weight` out, or expect another merge than the one that was trained",
        )
    for (message, remedy), names in doubts.items():
        kinds = list(dict.fromkeys(without_numbers(name) for name in names))
        where = "" if len(names) == len(plan.tensors) else f": {listed(kinds)}"
        yield Finding.warning("config", message + where, remedy)
