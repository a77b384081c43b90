# SPDX-License-Identifier: Apache-2.0
"""Keys and parameters of a config that mergekit would ignore without a word."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from mergekit.config import (
    InputModelDefinition,
    InputSliceDefinition,
    MergeConfiguration,
    OutputModuleDefinition,
    OutputSliceDefinition,
)
from mergekit.merge_methods.base import MergeMethodSpec, ParameterScope
from pydantic import BaseModel

from mergekit_ace.preflight.findings import Finding


def check_settings(content: Mapping[str, Any], spec: MergeMethodSpec) -> Iterator[Finding]:
    """Findings on a config as YAML has it.

    Args:
        content: of the file.
        spec: of its merge method.
    """
    yield from _unknown_keys(content, MergeConfiguration, "")
    for where, part, model in _parts(content):
        yield from _unknown_keys(part, model, where)
    every = {parameter.name for parameter in spec.parameters}
    of_experts = {p.name for p in spec.parameters if p.scope != ParameterScope.SHARED}
    places = [("", content)] + [(where, part) for where, part, _ in _parts(content)]
    for where, part in places:
        given = part.get("parameters")
        if not isinstance(given, Mapping):
            continue
        # What belongs to the whole tensor is not read where experts have their own.
        own = "model" in part
        for name in given:
            if name not in every:
                yield _unknown(f"{where}parameters", str(name), every, "parameter", spec.name)
            elif own and name not in of_experts:
                yield Finding(
                    "error",
                    "config",
                    f"{where}parameters: {name} is a parameter of whole tensors, and not read "
                    "under a model",
                    "move it to the parameters: at the top level",
                )


def _parts(content: Mapping[str, Any]) -> Iterator[tuple[str, Mapping[str, Any], type[BaseModel]]]:
    """The nested definitions of a config: where they stand, they, and what mergekit reads there."""
    yield from _inputs(content, "")
    modules = content.get("modules")
    for name, module in modules.items() if isinstance(modules, Mapping) else ():
        if isinstance(module, Mapping):
            yield f"modules.{name}.", module, OutputModuleDefinition
            yield from _inputs(module, f"modules.{name}.")


def _inputs(
    part: Mapping[str, Any], where: str
) -> Iterator[tuple[str, Mapping[str, Any], type[BaseModel]]]:
    for n, member in enumerate(_mappings(part.get("models"))):
        yield f"{where}models.{n}.", member, InputModelDefinition
    for n, piece in enumerate(_mappings(part.get("slices"))):
        yield f"{where}slices.{n}.", piece, OutputSliceDefinition
        for m, source in enumerate(_mappings(piece.get("sources"))):
            yield f"{where}slices.{n}.sources.{m}.", source, InputSliceDefinition


def _mappings(value: Any) -> Iterator[Mapping[str, Any]]:
    for member in value if isinstance(value, list) else ():
        if isinstance(member, Mapping):
            yield member


def _unknown_keys(part: Mapping[str, Any], model: type[BaseModel], where: str) -> Iterator[Finding]:
    known = set(model.model_fields)
    for key in part:
        if key not in known:
            yield _unknown(where.rstrip(".") or "the config", str(key), known, "setting", "")


def _unknown(where: str, name: str, known: Iterable[str], what: str, method: str) -> Finding:
    close = difflib.get_close_matches(name, list(known), n=1)
    there_are = ", ".join(sorted(known)) or "none"
    return Finding(
        "error",
        "config",
        f"{where}: there is no {what} {name!r}{' of ' + method if method else ''}; mergekit would "
        "ignore it without a word",
        f"did you mean {close[0]!r}?" if close else f"there are: {there_are}",
    )
