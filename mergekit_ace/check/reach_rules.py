# SPDX-License-Identifier: Apache-2.0
"""What settings of a config come to in the plan: filters that reach no tensor, what methods say."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from mergekit.common import ModelReference
from mergekit.config import ConditionalParameter, MergeConfiguration

from mergekit_ace.check.checkpoint_rules import HEADS
from mergekit_ace.check.findings import Finding, listed
from mergekit_ace.check.value_rules import config_parts
from mergekit_ace.files.coefficients import CoefficientFileError
from mergekit_ace.methods.base import TaskVectorMethod
from mergekit_ace.naming import without_numbers
from mergekit_ace.planning import PlannedMerge, PlannedTensor


def check_reach(plan: PlannedMerge) -> Iterator[Finding]:
    """Find settings that are allowed, and reach nothing, or nothing but the base."""
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


def _settings(
    config: MergeConfiguration,
) -> Iterator[tuple[str, ModelReference | None, str, Any]]:
    """Yield every parameter: where it stands, of which model, its name, and its setting."""
    for where, part in config_parts(config):
        for name, setting in (part.parameters or {}).items():
            yield f"{where}parameters", getattr(part, "model", None), name, setting


def _names(tensors: Sequence[PlannedTensor], model: ModelReference | None) -> list[str]:
    """Return the names that mergekit compares filters with: a model's own, or those of all."""
    names: dict[str, None] = {}
    for tensor in tensors:
        own = {m: weight.name for m, weight in tensor.gather.weight_info.items()}
        if model is not None:
            names |= {own[model]: None} if model in own else {}
        else:
            names |= dict.fromkeys([tensor.name, *own.values()])
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
        default = entry.filter in (None, "*")
        matches = {name for name in names if default or entry.filter in name}
        if not matches and not any(entry.filter in head for head in HEADS):  # heads may be tied
            kinds = listed(list(dict.fromkeys(map(without_numbers, names))), 3)
            yield Finding.error(
                "config",
                f"{place}: the filter {entry.filter!r} matches no tensor of the merge",
                "a filter is a part of tensor names, in the same case and without wildcards; there "
                f"are: {kinds}",
            )
        elif matches and not matches & left and (ended or not default):
            what = "second entry without filter" if default else f"filter {entry.filter!r}"
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
    """Return whether a setting is a list of so many different values, at least two."""
    if not isinstance(setting, list) or len(setting) != length:
        return False
    plain = not any(isinstance(value, ConditionalParameter) for value in setting)
    return plain and len({str(value) for value in setting}) > 1


def _check_shares(plan: PlannedMerge) -> Iterator[Finding]:
    """Find weights of 0 everywhere, and densities in per cent, which mergekit takes for 1."""
    given = [dict(p.items()) for t in plan.tensors for p in t.task.input_parameters.values()]
    weights = [own["weight"] for own in given if "weight" in own]
    if weights and all(weight == 0 for weight in weights):
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


def check_method_settings(plan: PlannedMerge) -> Iterator[Finding]:
    """Say what a merge would when it comes to the first tensor that its settings do not fit.

    Where they fit, say what is seldom meant; what a method knows of its own.
    """
    method = plan.method
    if not isinstance(method, TaskVectorMethod):
        return
    weighted: list[str] = []
    doubts: dict[tuple[str, str], list[str]] = {}
    for tensor in plan.tensors:
        settings = tensor.settings
        try:
            method.check_settings(settings)
            known = method.learned_coefficients(settings)
        except ValueError as error:
            learned = isinstance(error, CoefficientFileError)
            yield Finding.error("coefficients" if learned else "config", str(error))
            return
        if known is not None and len(set(settings.weights)) > 1:
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
