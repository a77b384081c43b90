# SPDX-License-Identifier: Apache-2.0
"""The configs that merge with learned coefficients."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml
from mergekit.architecture import arch_info_for_config
from mergekit.common import ModelReference
from transformers import AutoConfig

from mergekit_ace.coefficients.file import CoefficientFile
from mergekit_ace.files import write_text
from mergekit_ace.preflight.checkpoints import read_checkpoint
from mergekit_ace.training.config import LanguageTask


def merge_config(
    file: CoefficientFile,
    path: Path,
    *,
    task: str,
    out_dtype: str | None,
    folders: Sequence[str] = (),
    infer: bool = False,
) -> dict[str, Any]:
    """`merge.yml`: looks the coefficients up in the file at `path`.

    Args:
        file: the coefficients.
        path: where they are.
        task: what the models do.
        out_dtype: of the merge, float32 by default.
        folders: what is merged instead of the models named in the file, the base first.
        infer: let mergekit find out which tensors there are, see `is_misread`.
    """
    base, *experts = _models(file, folders, infer)
    pairs = zip(experts, file.contents.experts, strict=True)
    contents = file.contents
    method = "statsmerging" if contents.basis == "task_vector" else contents.basis
    return {
        **_frame(base, task, out_dtype),
        "merge_method": method,
        "models": [
            {"model": model, "parameters": {"task": expert.task}} for model, expert in pairs
        ],
        "parameters": {**contents.parameters, "coefficients": str(path.resolve())},
    }


def inline_config(
    file: CoefficientFile,
    *,
    task: str,
    out_dtype: str | None,
    folders: Sequence[str] = (),
    infer: bool = False,
) -> dict[str, Any]:
    """`inline.yml`: the same merge with every coefficient in it.

    Where coefficients sum to one, mergekit's own `linear` makes the same of it: it counts the base
    model among the inputs, whose weight is therefore given, 0 except where nothing is merged.
    """
    columns = file.columns
    untouched = dict.fromkeys(file.contents.frozen, 0.0)
    base, *experts = _models(file, folders, infer)
    models = []
    for expert, row in zip(experts, file.coefficients.tolist(), strict=True):
        values = {name: row[column] for name, column in columns.items()} | untouched
        parameters = {"weight": _filters(values, 0.0)}
        models.append({"model": expert, "parameters": parameters})
    frozen = dict.fromkeys(file.contents.frozen, 1.0)
    merged = dict.fromkeys((n for n in columns if any(f in n for f in frozen)), 0.0)
    return {
        **_frame(base, task, out_dtype),
        "models": models,
        "parameters": {"weight": _filters(merged | frozen, 0.0)},
    }


def _filters(values: dict[str, float], other: float) -> list[dict[str, Any]]:
    """A mergekit setting with a value per tensor.

    mergekit takes the first filter that is part of a tensor's name, so longer names come first.
    """
    names = sorted(values, key=lambda name: (-len(name), name))
    return [{"filter": name, "value": values[name]} for name in names] + [{"value": other}]


def write_config(path: Path, config: dict[str, Any], notes: Sequence[str]) -> None:
    """A config with comments on top."""
    text = "".join(f"# {note}\n" for note in notes) + yaml.safe_dump(config, sort_keys=False)
    write_text(path, text)


def is_misread(folder: str, *, trust_remote_code: bool = False) -> bool:
    """Whether mergekit's own list of tensors asks for some that a checkpoint does not have.

    That of BERT asks for a pooler, which a masked language model lacks.
    """
    config = AutoConfig.from_pretrained(folder, trust_remote_code=trust_remote_code)
    known = arch_info_for_config(config)
    checkpoint = read_checkpoint(ModelReference.model_validate(folder))
    return known is not None and any(
        not weight.optional and checkpoint.source(weight) is None
        for weight in known.all_weights(config)
    )


def _models(file: CoefficientFile, folders: Sequence[str], infer: bool) -> list[Any]:
    """The base and the experts, such that a config works from every folder.

    Experts of an architecture that mergekit 0.1.5 does not know make it take the tensors that it
    finds. So it is told for backbones, which have fewer than a whole model, and where its own list
    is wrong.
    """
    named = (file.contents.base_model, *(expert.model for expert in file.contents.experts))
    base, *experts = folders or map(_reference, named)
    if not folders and not infer:
        return [base, *experts]
    return [base, *(_to_be_inferred(expert) for expert in experts)]


def _to_be_inferred(reference: str) -> dict[str, Any]:
    parsed = ModelReference.model_validate(reference)
    parts = {"model": parsed.model, "lora": parsed.lora}
    given = {part: path.model_dump(exclude_none=True) for part, path in parts.items() if path}
    return {**given, "override_architecture": "Inferred"}


def _frame(base: str, task: str, out_dtype: str | None) -> dict[str, Any]:
    config: dict[str, Any] = {
        "merge_method": "statsmerging",
        "base_model": base,
        "dtype": "float32",
    }
    if out_dtype is not None:
        config["out_dtype"] = out_dtype
    if task in LanguageTask:
        config["tokenizer"] = {"source": "base"}
    return config


def _reference(model: str) -> str:
    """A model such that the config works from every folder."""
    paths = [os.path.abspath(part) if os.path.isdir(part) else part for part in model.split("+")]
    return "+".join(paths)
