# SPDX-License-Identifier: Apache-2.0
"""Values of a config that mergekit stumbles over late, or follows to something nobody means."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jinja2
from mergekit.common import ModelReference
from mergekit.config import (
    InputModelDefinition,
    InputSliceDefinition,
    MergeConfiguration,
)
from mergekit.merge import _set_chat_template

from mergekit_ace.check.findings import Finding

DTYPES_OF_RESULTS = ("bfloat16", "float16", "float32", "float64")


def check_values(config: MergeConfiguration) -> Iterator[Finding]:
    """Find values that can be judged without any file of weights."""
    yield from _check_dtype_names(config)
    yield from _check_chat_template(config)
    yield from _check_model_list(config)
    yield from _check_layer_ranges(config)


def _check_dtype_names(config: MergeConfiguration) -> Iterator[Finding]:
    """Find dtypes that mergekit does not know, or that no weights can have."""
    for key, name in (("dtype", config.dtype), ("out_dtype", config.out_dtype)):
        if name and name not in DTYPES_OF_RESULTS:
            # mergekit takes int64, which rounds weights to 0, and writes `torch.float32` into a
            # config.json that transformers does not load then
            yield Finding.error(
                "config",
                f"{key}: {name!r} is no dtype that a merged model can have",
                f"write one of {', '.join(DTYPES_OF_RESULTS)}",
            )


def _check_chat_template(config: MergeConfiguration) -> Iterator[Finding]:
    """Ask mergekit for the template, which it refuses only once all weights are merged."""
    if config.chat_template in (None, "auto"):
        return
    holder = SimpleNamespace(chat_template="")
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


def _check_model_list(config: MergeConfiguration) -> Iterator[Finding]:
    """Find models that stand twice in one list, however they are spelt."""
    for where, inputs in _input_lists(config):
        spellings: dict[tuple[str, ...], list[str]] = defaultdict(list)
        for one in inputs:
            spellings[_identity(one.model)].append(str(one.model))
        base = _identity(config.base_model) if config.base_model else None
        for identity, names in spellings.items():
            as_written = [*dict.fromkeys(names)]
            if identity == base and str(config.base_model) not in names:
                yield Finding.warning(
                    "config",
                    f"{where}: {as_written[0]} is the base model {config.base_model} in another "
                    "spelling, and counts as an expert that changed nothing",
                    "remove it from the experts",
                )
            elif len(names) > 1:
                other = f", as {' and '.join(as_written)}" if len(as_written) > 1 else ""
                yield Finding.error(
                    "config",
                    f"{where}: {names[0]} is listed {len(names)} times{other}",
                    "list it once; `weight` under its parameters lets it count more",
                )


def _check_layer_ranges(config: MergeConfiguration) -> Iterator[Finding]:
    """Find ranges without a layer, which mergekit leaves out of the result without a word."""
    for where, inputs in _input_lists(config):
        for n, source in enumerate(inputs):
            first, end = getattr(source, "layer_range", (0, 1))
            if not 0 <= first < end:
                yield Finding.error(
                    "config",
                    f"{where}.{n}: the layer_range [{first}, {end}] holds no layer",
                    "write the first layer, counted from 0, and the one after the last",
                )


def _input_lists(
    config: MergeConfiguration,
) -> Iterator[tuple[str, list[InputModelDefinition] | list[InputSliceDefinition]]]:
    """Yield the lists of inputs that are merged with each other, and where they stand."""
    for where, part in config_parts(config):
        for key in ("models", "sources"):
            if inputs := getattr(part, key, None):
                yield f"{where}{key}", inputs


def config_parts(part: Any, where: str = "") -> Iterator[tuple[str, Any]]:
    """Yield a config and all nested parts of it, each with the path that leads to its keys."""
    yield where, part
    for key in ("models", "slices", "sources"):
        for n, member in enumerate(getattr(part, key, None) or ()):
            yield from config_parts(member, f"{where}{key}.{n}.")
    for name, module in (getattr(part, "modules", None) or {}).items():
        yield from config_parts(module, f"{where}modules.{name}.")


def _identity(model: ModelReference) -> tuple[str, ...]:
    """Return what two spellings of one model have in common."""
    parts = (model.model, model.lora) if model.lora else (model.model,)
    return tuple(
        str(Path(part.path).resolve()) if Path(part.path).is_dir() else str(part) for part in parts
    )
