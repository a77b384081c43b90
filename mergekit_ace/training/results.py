# SPDX-License-Identifier: Apache-2.0
"""Results of a training: the comparison, the coefficient file, configs that merge, pictures."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
import yaml
from mergekit.architecture import arch_info_for_config
from mergekit.common import ModelReference
from torch import Tensor
from transformers import AutoConfig

import mergekit_ace
from mergekit_ace.coefficients.file import CoefficientFile, Contents, Expert, MergedTensor, expand
from mergekit_ace.files import write_text
from mergekit_ace.preflight.checkpoints import read_checkpoint
from mergekit_ace.training.config import LanguageTask, TrainConfig
from mergekit_ace.training.family import Family
from mergekit_ace.training.loop import Objective, Score, TrainedLearner, train, write_log
from mergekit_ace.training.mapped_weights import MappedWeights, stored_tensors
from mergekit_ace.training.state import Diverged, RunFolder


def score_coefficients(session: Objective, coefficients: Tensor, split: str = "test") -> Score:
    """The merge by λ per group, (K, G)."""
    session.write(coefficients)
    return session.evaluate(split)


def simple_merges(session: Objective, shape: Sequence[int]) -> dict[str, Score]:
    """The base model, the mean of the experts, and task arithmetic; or what training starts at.

    Args:
        session: model and data.
        shape: (K, G).

    Returns:
        Scores on the test split by name. Of the weights of task arithmetic, or of λ, that with the
        least loss on the validation split.
    """
    basis = session.config.basis

    def equal(weight: float, split: str = "test") -> Score:
        return score_coefficients(session, torch.full(tuple(shape), float(weight)), split)

    if basis == "task_vector":
        rows = {"base model": equal(0), "uniform (mean of the experts)": equal(1 / shape[0])}
        weights, tried = session.config.compare.task_arithmetic, "task arithmetic, weight"
    else:
        rows = {"base model": equal(0), f"{basis}, without data": equal(1)}
        weights, tried = session.config.compare.scale, f"{basis}, λ"
    if weights:
        losses = {weight: equal(weight, "validation").loss for weight in weights}
        best = min(losses, key=losses.__getitem__)
        rows[f"{tried} {best:g} (best of {len(weights)})"] = equal(best)
    return rows


def as_table(rows: dict[str, Score], tasks: Sequence[str], *, rehearsal: bool = False) -> str:
    """The scores as a Markdown table: mean accuracy of the experts' tasks, each one's, the loss.

    Args:
        rows: by name.
        tasks: of the experts.
        rehearsal: add a column for it.
    """
    header = ["accuracy on the test split", "mean", *map(_short, tasks)]
    header += ["rehearsal"] * rehearsal + ["loss"]
    lines = [header, ["---"] * len(header)]
    for name, score in rows.items():
        shares = [f"{share:.3f}" for share in (score.mean_accuracy, *score.accuracy)]
        if rehearsal:
            shares.append("–" if score.rehearsal is None else f"{score.rehearsal:.3f}")
        loss = "–" if score.loss is None else f"{score.loss:.4f}"
        lines.append([name, *shares, loss])
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def as_json(rows: dict[str, Score]) -> dict[str, dict]:
    """The scores as JSON has them."""
    return {name: asdict(score) for name, score in rows.items()}


def _short(task: str) -> str:
    return task.rstrip("/").rpartition("/")[2] or task


def compare(
    session: Objective,
    trained: TrainedLearner,
    family: Family,
    statistics: Tensor,
    depths: Tensor,
    folder: RunFolder,
    *,
    quiet: bool,
) -> dict[str, Score]:
    """The final table."""
    config = session.config
    rows: dict[str, Score] = {}
    if all(accuracy is not None for accuracy in family.teachers):
        accuracies = [float(accuracy) for accuracy in family.teachers if accuracy is not None]
        rehearsal = None if config.rehearsal is None else accuracies.pop()
        rows["each expert on its own"] = Score(None, tuple(accuracies), rehearsal)
    rows |= simple_merges(session, statistics.shape[:2])
    if config.compare.direct and config.learner.input != "direct":
        direct = config.learner.model_copy(update={"input": "direct"})
        path = folder.state / "direct.safetensors"
        try:
            other = train(session, direct, statistics, depths, path, quiet=quiet)
            rows["coefficients learned directly"] = score_coefficients(session, other.coefficients)
        except Diverged:  # a row less, no reason to lose the others
            pass
    name = "StatsMerging" if config.basis == "task_vector" else f"{config.basis}, coefficients"
    rows[name] = score_coefficients(session, trained.coefficients)
    return rows


def coefficient_file(
    family: Family,
    trained: TrainedLearner,
    statistics: Tensor,
    depths: Tensor,
    rows: dict[str, Score],
) -> CoefficientFile:
    """The result, expanded from groups to tensors."""
    stored = family.stored
    if family.models.kind.has_heads:  # as in the backbones, and in merges of them
        prefix = f"{family.module.base_model_prefix}."
        stored = {n: tuple({*s, n.removeprefix(prefix)}) for n, s in stored.items()}
    merged = {name for names in stored.values() for name in names}
    frozen = set(stored_tensors(family.models.base))
    if family.models.kind.has_heads:
        frozen |= set(family.module.base_model.state_dict())
    else:  # mergekit may know them by their names in memory
        own = {id(family.module.get_parameter(name)) for name in family.names}
        everything = family.module.named_parameters(remove_duplicate=False)
        frozen |= {name for name, parameter in everything if id(parameter) not in own}
    contents = Contents(
        base_model=family.config.base_model,
        experts=tuple(
            Expert(task=expert.task, model=expert.model, revision=_revision(path))
            for expert, path in zip(family.config.models, family.models.experts, strict=True)
        ),
        tensors=tuple(MergedTensor(name=name, stored=stored[name]) for name in family.names),
        frozen=tuple(sorted(frozen - merged)),
        granularity=family.config.granularity,
        basis=family.config.basis,
        parameters=_parameters(family.config),
        learner=family.config.learner,
        config=family.config.model_dump(mode="json"),
        scores=as_json(rows),
        package=mergekit_ace.__version__,
    )
    groups = family.groups
    return CoefficientFile(
        contents,
        expand(trained.coefficients, groups),
        expand(statistics, groups),
        depths[groups],
        trained.learner.state_dict(),
        groups,
    )


def _parameters(config: TrainConfig) -> dict[str, Any]:
    """Of the merge that the components are of; none of task vectors."""
    if config.basis == "task_vector":
        return {}
    return config.options.model_dump(exclude={"scale"})


def write_results(
    file: CoefficientFile,
    family: Family,
    trained: TrainedLearner,
    rows: dict[str, Score],
    folder: RunFolder,
    *,
    quiet: bool,
) -> None:
    """All files of the output folder; the coefficients last, so that they mean it is complete."""
    config = family.config
    tasks = [expert.task for expert in config.models]
    table = as_table(rows, tasks, rehearsal=config.rehearsal is not None)
    write_text(folder.path / "scores.md", table + "\n")
    write_log(folder.path / "training.jsonl", trained.progress)
    path = folder.path / "coefficients.safetensors"
    options: dict[str, Any] = {"task": config.task, "out_dtype": _stored_dtype(family.base)}
    if family.models.kind.has_heads:
        rows_of = range(len(config.models))
        options["folders"] = [str(folder.backbone(row).resolve()) for row in (None, *rows_of)]
    else:
        options["infer"] = is_misread(
            family.models.base, trust_remote_code=config.trust_remote_code
        )
    method = "StatsMerging" if config.basis == "task_vector" else config.basis
    notes = [f"{method} with learned coefficients: mergekit-yaml THIS_FILE OUTPUT_FOLDER"]
    write_config(folder.path / "merge.yml", merge_config(file, path, **options), notes)
    if config.basis == "task_vector":
        notes = ["The same merge with every coefficient in the config: it needs no other file."]
        write_config(folder.path / "inline.yml", inline_config(file, **options), notes)
    drawn = draw_pictures(file, trained.progress.log, folder.path)
    file.save(path)
    if not quiet:
        print(f"\n{table}\n\n{drawn}\nmergekit-yaml {folder.path / 'merge.yml'} OUTPUT_FOLDER")


def _stored_dtype(base: MappedWeights) -> str | None:
    """The dtype of the base's first tensor, where that is not float32."""
    name = str(base[next(iter(base))].dtype).removeprefix("torch.")
    return name if name != "float32" else None


def _revision(folder: str) -> str | None:
    """The commit of a model in the Hub's cache, whose folder is called so."""
    parent, name = os.path.split(os.path.normpath(folder))
    return name if os.path.basename(parent) == "snapshots" else None


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


def draw_pictures(file: CoefficientFile, log: list[dict[str, Any]], folder: Path) -> str:
    """Draw both pictures into `folder`; a line on what was drawn, or how to get the pictures."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        return "no pictures: pip install 'mergekit-ace[plots]' and run the same command again"
    _heatmap(file, Figure(figsize=(12, 1.5 + 0.4 * file.contents.rows))).savefig(
        folder / "coefficients.png", dpi=120, bbox_inches="tight"
    )
    _curve(log, Figure(figsize=(7, 4))).savefig(
        folder / "training.png", dpi=120, bbox_inches="tight"
    )
    return f"pictures: {folder / 'coefficients.png'}, {folder / 'training.png'}"


def _heatmap(file: CoefficientFile, figure: Any) -> Any:
    """Experts by tensors, input on the left."""
    order = file.depths.argsort(stable=True)
    axes = figure.subplots()
    values = file.coefficients[:, order].numpy()
    image = axes.imshow(values, aspect="auto", interpolation="nearest", cmap="viridis")
    tasks = [expert.task.rstrip("/").rpartition("/")[2] for expert in file.contents.experts]
    tasks += ["refinement"] * (file.contents.rows - len(tasks))
    axes.set_yticks(range(len(tasks)), tasks)
    axes.set_xlabel("tensors, from input to output")
    axes.set_title("merging coefficients")
    figure.colorbar(image, ax=axes)
    return figure


def _curve(log: list[dict[str, Any]], figure: Any) -> Any:
    """Training and validation loss by step."""
    axes = figure.subplots()
    for key, label in (("loss", "training"), ("validation_loss", "validation")):
        points = [(line["step"], line[key]) for line in log if key in line]
        axes.plot(*zip(*points, strict=True), label=label)
    axes.set_xlabel("step")
    axes.set_ylabel("loss")
    axes.legend()
    return figure
