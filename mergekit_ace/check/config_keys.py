# SPDX-License-Identifier: Apache-2.0
"""What is written in a config and nobody reads: unknown keys, keys elsewhere, keys twice."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Iterator, Mapping
from types import UnionType
from typing import Any, Union, get_args, get_origin

import yaml
from mergekit import merge_methods
from mergekit.config import MergeConfiguration
from mergekit.merge_methods.base import MergeMethodSpec, ParameterScope
from pydantic import BaseModel

from mergekit_ace.check.findings import Finding

SETTINGS = frozenset(MergeConfiguration.model_fields)


def check_keys(source: str, spec: MergeMethodSpec | None) -> Iterator[Finding]:
    """Find keys and parameters that mergekit, or YAML, would ignore without a word.

    Args:
        spec: of its merge method; None where that is not known.
    """
    yield from repeated_keys(source)
    content = yaml.safe_load(source)
    for where, part, model in _parts(content, MergeConfiguration, ""):
        for key in part:
            if key not in model.model_fields:
                yield _unknown_setting(where.rstrip(".") or "the config", str(key), model, spec)
        given = part.get("parameters")
        if spec is not None and "parameters" in model.model_fields and isinstance(given, Mapping):
            yield from _parameters(f"{where}parameters", given, part, content, spec)


def repeated_keys(source: str) -> Iterator[Finding]:
    """Find keys that stand twice in one mapping of a YAML text."""
    yield from _repeated_keys(yaml.compose(source, Loader=yaml.SafeLoader))


def _repeated_keys(node: yaml.Node | None) -> Iterator[Finding]:
    if isinstance(node, yaml.SequenceNode):
        for member in node.value:
            yield from _repeated_keys(member)
    if not isinstance(node, yaml.MappingNode):
        return
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
        yield from _repeated_keys(value)


def _parts(
    content: Any, kind: Any, where: str
) -> Iterator[tuple[str, Mapping[str, Any], type[BaseModel]]]:
    """Yield nested mappings: where they stand, they, and the model that mergekit reads them as."""
    kinds = list(_alternatives(kind))
    if isinstance(content, list):
        members = [get_args(k)[0] for k in kinds if get_origin(k) in (list, tuple)]
        for n, member in enumerate(content if members else ()):
            yield from _parts(member, Union[tuple(members)], f"{where}{n}.")  # noqa: UP007
    if not isinstance(content, Mapping):
        return
    models = [k for k in kinds if isinstance(k, type) and issubclass(k, BaseModel)]
    if models:
        model = max(models, key=lambda m: len(m.model_fields.keys() & content.keys()))
        yield where, content, model
        for name, field in model.model_fields.items():
            yield from _parts(content.get(name), field.annotation, f"{where}{name}.")
        return
    for value_kind in (get_args(k)[1] for k in kinds if get_origin(k) is dict):
        for name, value in content.items():
            yield from _parts(value, value_kind, f"{where}{name}.")


def _alternatives(kind: Any) -> Iterator[Any]:
    if get_origin(kind) in (Union, UnionType):
        for part in get_args(kind):
            yield from _alternatives(part)
    else:
        yield kind


def _unknown_setting(
    where: str, name: str, model: type[BaseModel], spec: MergeMethodSpec | None
) -> Finding:
    scopes = {parameter.name: parameter.scope for parameter in spec.parameters} if spec else {}
    if name in scopes and "parameters" in model.model_fields:
        top = "model" in model.model_fields and scopes[name] == ParameterScope.SHARED
        place = "the `parameters:` at the top level" if top else "`parameters:`, one level deeper"
        remedy = f"write it under {place}"
    elif name in SETTINGS and model is not MergeConfiguration:
        remedy = "write it at the top level of the config"
    else:
        remedy = _nearest(name, model.model_fields)
    message = f"{where}: there is no setting {name!r}; mergekit would ignore it without a word"
    return Finding.error("config", message, remedy)


def _parameters(
    where: str,
    given: Mapping[str, Any],
    part: Mapping[str, Any],
    content: Mapping[str, Any],
    spec: MergeMethodSpec,
) -> Iterator[Finding]:
    """Find parameters that are not read there.

    Args:
        part: the mapping that holds them; what belongs to the whole tensor is not read where it is
            that of a model.
        spec: of the merge method.
    """
    scopes = {parameter.name: parameter.scope for parameter in spec.parameters}
    under_base = "model" in part and part["model"] == content.get("base_model")
    for name in map(str, given):
        if name not in scopes:
            yield _unknown_parameter(where, name, spec)
        elif "model" in part and scopes[name] == ParameterScope.SHARED:
            yield Finding.error(
                "config",
                f"{where}: {name} is a parameter of whole tensors, and not read under a model",
                "move it to the parameters: at the top level",
            )
        elif under_base and scopes[name] == ParameterScope.NON_BASE:
            yield Finding.warning(
                "config",
                f"{where}: {name} is a parameter of experts, and not read under the base model",
                "leave it out there",
            )


def _unknown_parameter(where: str, name: str, spec: MergeMethodSpec) -> Finding:
    remedy = (
        "write it at the top level of the config"
        if name in SETTINGS
        else _nearest(name, [parameter.name for parameter in spec.parameters])
    )
    return Finding.error(
        "config",
        f"{where}: there is no parameter {name!r} of {spec.name}; mergekit would ignore it without "
        "a word",
        remedy,
    )


def _nearest(name: str, known: Iterable[str]) -> str:
    """Return what may have been meant, or all that there is."""
    names = {other.lower(): other for other in known}
    close = difflib.get_close_matches(name.lower(), names, n=2, cutoff=0.8)
    if close:
        return f"did you mean {' or '.join(repr(names[other]) for other in close)}?"
    return f"there are: {', '.join(sorted(names.values())) or 'none'}"


def nearest_method(name: str) -> str:
    """Return the merge method that may have been meant, or all that there are."""
    known = sorted(method.spec.name for method in merge_methods.registered_methods())
    name = name.replace("-", "_")
    stem = re.sub("_?merg(e|ing)$", "", name.lower())  # what papers add: ACE-Merging, TIES-Merging
    return _nearest(stem if stem in known else name, known)
