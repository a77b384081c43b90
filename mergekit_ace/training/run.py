# SPDX-License-Identifier: Apache-2.0
"""A whole training, and its results: the comparison, the coefficients, configs, pictures."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
import yaml
from mergekit.architecture import arch_info_for_config
from mergekit.common import ModelReference
from transformers import AutoConfig

import mergekit_ace
from mergekit_ace.files.coefficients import CoefficientFile, Contents, Expert, MergedTensor
from mergekit_ace.files.models import read_checkpoint
from mergekit_ace.files.saving import write_text
from mergekit_ace.methods.architecture import lacks_embeddings
from mergekit_ace.methods.lookup import METHODS_OF_BASES
from mergekit_ace.naming import short_names
from mergekit_ace.report.markdown import markdown_text
from mergekit_ace.training.config import LanguageTask, TrainConfig
from mergekit_ace.training.family import Family, ModelFolders
from mergekit_ace.training.mapped_weights import stored_headers
from mergekit_ace.training.models import write_statistics_of_batches
from mergekit_ace.training.objective import Objective, Score, TrainedLearner, train_learner
from mergekit_ace.training.state import Diverged, TrainingError, TrainingRun


def run_training(
    config: TrainConfig, out: str | os.PathLike, *, overwrite: bool = False, quiet: bool = False
) -> CoefficientFile:
    """Learn coefficients, or go on with that; the files go to `out`.

    Raises:
        TrainingError: something about the config, the models or the data is wrong.
    """
    with TrainingRun.start(out, config.mixed_precision, quiet=quiet) as run:
        if config.dtype == "float16" and run.accelerator.device.type == "cpu":
            raise TrainingError("dtype: float16 is too narrow and slow on a CPU; take bfloat16")
        folders = ModelFolders.find(config, run)
        inputs = [folders.base, *folders.experts, *(data.path for _, data in config.sources)]
        run.claim(config, inputs, overwrite=overwrite)
        family = Family(config, folders, run)
        objective, inputs = Objective(family), family.learner_inputs()
        trained = train_learner(objective, config.learner, inputs, "learner")
        scores = compare_merges(objective, trained)
        file = coefficient_file(family, trained, scores)
        if run.is_main:
            write_results(file, family, trained, scores)
        run.wait()
        return file


def compare_merges(objective: Objective, trained: TrainedLearner) -> dict[str, Score]:
    """Score the learned coefficients beside simple ones, on the test split.

    Returns:
        Scores by name, in the order of the final table.
    """
    config, inputs = objective.config, trained.inputs
    scores = {}
    accuracies = [t.accuracy for t in objective.teachers if t.accuracy is not None]
    if len(accuracies) == len(objective.teachers):  # all true labels are known
        rehearsal = None if config.rehearsal is None else accuracies.pop()
        scores["each expert on its own"] = Score(None, tuple(accuracies), rehearsal)
    scores |= _simple_merges(objective, trained.coefficients.shape)
    if config.compare.direct and config.learner.input != "direct":
        direct = config.learner.model_copy(update={"input": "direct"})
        try:
            other = train_learner(objective, direct, inputs, "direct")
            scores["coefficients learned directly"] = objective.score(other.coefficients, "test")
        except Diverged:  # a row less, no reason to lose the others
            pass
    name = "AdaMerging" if config.loss == "entropy" else "StatsMerging"
    name += " of what TIES keeps" if config.basis == "ties" else ""
    name = name if config.options is None else f"{config.basis}, coefficients"
    scores[name] = objective.score(trained.coefficients, "test")
    return scores


def _simple_merges(objective: Objective, shape: torch.Size) -> dict[str, Score]:
    """Score merges with one coefficient for all, which need no training.

    These are the base model, the mean of the experts and task arithmetic; or the merge that
    training starts at and scaled ones. Of several weights it is that with the least loss on the
    validation split.
    """
    basis = objective.config.basis

    def equal(weight: float, split: str = "test") -> Score:
        return objective.score(torch.full(shape, float(weight)), split)

    if objective.config.options is None:
        scores = {"base model": equal(0), "uniform (mean of the experts)": equal(1 / shape[0])}
        weights, tried = objective.config.compare.task_arithmetic, "task arithmetic, weight"
        if basis == "ties":
            del scores["uniform (mean of the experts)"]
            tried = "sum of what TIES keeps, weight"
    else:
        scores = {"base model": equal(0), f"{basis}, without data": equal(1)}
        weights, tried = objective.config.compare.scale, f"{basis}, λ"
    if weights:
        losses = {weight: equal(weight, "validation").loss for weight in weights}
        best = min(weights, key=lambda weight: (math.isnan(losses[weight]), losses[weight]))
        scores[f"{tried} {best:g} (best of {len(weights)})"] = equal(best)
    return scores


def scores_table(scores: Mapping[str, Score], tasks: Iterable[str], samples: Sequence[int]) -> str:
    """Return a Markdown table: mean accuracy of the experts' tasks, each one's, the loss.

    Args:
        samples: how many each task is scored on, which says what the scores are worth; one number
            more if there is a rehearsal, which adds a column for it.
    """
    names = [*map(markdown_text, short_names(list(tasks)))]
    own = samples[: len(names)]
    rehearsal = len(samples) > len(own)
    names += ["rehearsal"] * rehearsal
    lines = [
        ["accuracy on the test split", "mean", *names, "loss"],
        ["---"] * (len(names) + 3),
        ["samples", str(sum(own)), *map(str, samples), ""],
    ]
    for name, score in scores.items():
        shares = [f"{share:.3f}" for share in (score.mean_accuracy, *score.accuracy)]
        if rehearsal:
            shares.append("–" if score.rehearsal is None else f"{score.rehearsal:.3f}")
        loss = "–" if score.loss is None else f"{score.loss:.4f}"
        lines.append([name, *shares, loss])
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def coefficient_file(
    family: Family, trained: TrainedLearner, scores: Mapping[str, Score]
) -> CoefficientFile:
    """Return the result, expanded from groups to tensors."""
    config, groups = family.config, family.groups
    stored, frozen = _names_on_disk(family)
    contents = Contents(
        base_model=config.base_model,
        experts=tuple(
            # The folder of a model in the Hub's cache is called after its commit.
            Expert(
                task=one.task,
                model=one.model,
                revision=p.name if p.parent.name == "snapshots" else None,
            )
            for one, p in zip(config.models, map(Path, family.folders.experts), strict=True)
        ),
        tensors=tuple(MergedTensor(name=name, stored=names) for name, names in stored.items()),
        frozen=frozen,
        granularity=config.granularity,
        basis=config.basis,
        parameters={} if config.options is None else config.options.model_dump(exclude={"scale"}),
        learner=config.learner,
        config=config.model_dump(mode="json"),
        scores={name: asdict(score) for name, score in scores.items()},
        package=mergekit_ace.__version__,
    )
    return CoefficientFile(
        contents,
        trained.coefficients[:, groups],
        trained.inputs.statistics[:, groups],
        trained.inputs.depths[groups],
        trained.learner.state_dict(),
        groups,
    )


def _names_on_disk(family: Family) -> tuple[dict[str, tuple[str, ...]], tuple[str, ...]]:
    """Return the names of every merged parameter on disk, and those that keep the base's values.

    Of classifiers, those of backbones are among them. Of other models mergekit may know what keeps
    the base's values by its name in memory.
    """
    module, stored = family.module, family.stored
    frozen = set(stored_headers(family.folders.base))
    if family.folders.kind.has_heads:
        prefix = f"{module.base_model_prefix}."
        both = {name: {*names, name.removeprefix(prefix)} for name, names in stored.items()}
        stored = {name: tuple(sorted(names)) for name, names in both.items()}
        frozen |= set(module.base_model.state_dict())
    else:
        merged = {id(module.get_parameter(name)) for name in stored}
        everything = module.named_parameters(remove_duplicate=False)
        frozen |= {name for name, parameter in everything if id(parameter) not in merged}
    return stored, tuple(sorted(frozen.difference(*stored.values())))


def write_results(
    file: CoefficientFile, family: Family, trained: TrainedLearner, scores: Mapping[str, Score]
) -> None:
    """Write the output folder; the coefficients last, so that they mean it is complete."""
    config, run = family.config, family.run
    tasks = [expert.task for expert in config.models]
    table = scores_table(scores, tasks, [len(t.splits["test"]) for t in family.teachers])
    write_text(run.path / "scores.md", table + "\n")
    log = (json.dumps(line) + "\n" for line in trained.progress.log)
    write_text(run.path / "training.jsonl", "".join(log))
    stored = str(next(iter(family.base.values())).dtype).removeprefix("torch.")
    options: dict[str, Any] = {
        "task": config.task,
        "out_dtype": stored if stored != "float32" else None,
    }
    if family.folders.kind.has_heads:
        backbones = [run.backbone(row) for row in (None, *range(len(config.models)))]
        write_statistics_of_batches(family.module.base_model, backbones)
        options["folders"] = [str(folder.resolve()) for folder in backbones]
        options["infer"] = lacks_embeddings(family.module)
    else:
        remote = config.trust_remote_code
        options["infer"] = is_misread(family.folders.base, trust_remote_code=remote)
    path = run.path / "coefficients.safetensors"
    method = "task vectors" if config.options is None else config.basis
    note = f"{method} with learned coefficients: mergekit-yaml THIS_FILE OUTPUT_FOLDER"
    write_config(run.path / "merge.yml", merge_config(file, path, **options), note)
    if config.basis == "task_vector":
        note = "The same merge with every coefficient in the config: it needs no other file."
        write_config(run.path / "inline.yml", merge_config(file, **options), note)
    drawn = draw_training(file, trained.progress.log, run.path)
    file.save(path)
    if not run.quiet:
        print(f"\n{table}\n\n{drawn}\nmergekit-yaml {run.path / 'merge.yml'} OUTPUT_FOLDER")


def merge_config(
    file: CoefficientFile,
    path: Path | None = None,
    *,
    task: str,
    out_dtype: str | None,
    folders: Sequence[str] = (),
    infer: bool = False,
) -> dict[str, Any]:
    """Return a config that merges with the coefficients.

    Args:
        path: where they are looked up (`merge.yml`); by default all stand in the config
            (`inline.yml`).
        out_dtype: of the merge, float32 by default.
        folders: what is merged instead of the models named in the file, the base first.
        infer: let mergekit find out which tensors there are, see `is_misread`; of `folders` those
            of the base, too, which has no embeddings.
    """
    contents = file.contents
    base, *experts = _models(file, folders, infer)
    config: dict[str, Any] = {
        "merge_method": METHODS_OF_BASES.get(contents.basis, contents.basis),
        "base_model": base,
        "dtype": "float32",
    }
    if out_dtype is not None:
        config["out_dtype"] = out_dtype
    if task in LanguageTask:
        config["tokenizer"] = {"source": "base"}
    if path is None:
        return config | _inline_weights(file, experts)
    named = zip(experts, contents.experts, strict=True)
    config["models"] = [{"model": m, "parameters": {"task": one.task}} for m, one in named]
    known = {name: value for name, value in contents.parameters.items() if value is not None}
    config["parameters"] = {**known, "coefficients": str(path.resolve())}
    return config


def _inline_weights(file: CoefficientFile, experts: Sequence[Any]) -> dict[str, Any]:
    """Return `models` and `parameters` with every coefficient in them.

    Where coefficients sum to one, mergekit's own `linear` makes the same of it: it counts the base
    model among the inputs, whose weight is therefore given, 0 except where nothing is merged.
    """
    columns, frozen = file.columns, file.contents.frozen
    models = []
    for expert, row in zip(experts, file.coefficients.tolist(), strict=True):
        values = {name: row[column] for name, column in columns.items()}
        weight = _filters(values | dict.fromkeys(frozen, 0.0), 0.0)
        models.append({"model": expert, "parameters": {"weight": weight}})
    merged = dict.fromkeys((n for n in columns if any(f in n for f in frozen)), 0.0)
    weight = _filters(merged | dict.fromkeys(frozen, 1.0), 0.0)
    return {"models": models, "parameters": {"weight": weight}}


def _filters(values: dict[str, float], other: float) -> list[dict[str, Any]]:
    """Return a mergekit setting with a value per tensor.

    mergekit takes the first filter that is part of a tensor's name, so longer names come first.
    """
    names = sorted(values, key=lambda name: (-len(name), name))
    return [{"filter": name, "value": values[name]} for name in names] + [{"value": other}]


def write_config(path: Path, config: dict[str, Any], note: str) -> None:
    """Write a config with a comment on top."""
    write_text(path, f"# {note}\n{yaml.safe_dump(config, sort_keys=False)}")


def is_misread(folder: str, *, trust_remote_code: bool = False) -> bool:
    """Return whether mergekit's own list of tensors has some that a checkpoint lacks.

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
    """Return the base and the experts such that a config works from every folder.

    Experts of an architecture that mergekit 0.1.5 does not know make it take the tensors that it
    finds. So it is told for backbones, which have fewer than a whole model, and where its own list
    is wrong.
    """
    named = (file.contents.base_model, *(expert.model for expert in file.contents.experts))
    base, *experts = folders or [
        "+".join(os.path.abspath(part) if os.path.isdir(part) else part for part in one.split("+"))
        for one in named
    ]
    if not folders and not infer:
        return [base, *experts]
    inferred = [_to_be_inferred(expert) for expert in experts]
    return [_to_be_inferred(base) if folders and infer else base, *inferred]


def _to_be_inferred(reference: str) -> dict[str, Any]:
    inferred = {"override_architecture": "Inferred"}
    parsed = ModelReference.model_validate(reference).model_copy(update=inferred)
    return parsed.model_dump(exclude_none=True)


def draw_training(file: CoefficientFile, log: list[dict[str, Any]], folder: Path) -> str:
    """Draw the coefficients over depth (Fig. 6) and the training (Fig. 8) into `folder`.

    Returns:
        A line for the user: where the pictures are, or how to get some.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError:
        return "no pictures: pip install matplotlib and run the same command again"
    rows = file.contents.rows
    figure = Figure(figsize=(12, 1.5 + 0.4 * rows))
    axes = figure.subplots()
    values = file.coefficients[:, file.depths.argsort(stable=True)].numpy()  # input on the left
    image = axes.imshow(values, aspect="auto", interpolation="nearest", cmap="viridis")
    tasks = short_names([one.task for one in file.contents.experts])
    axes.set_yticks(range(rows), [*tasks, *["refinement"] * (rows - len(tasks))])
    axes.set(xlabel="tensors, from input to output", title="merging coefficients")
    figure.colorbar(image, ax=axes)
    pictures = [folder / "coefficients.png", folder / "training.png"]
    figure.savefig(pictures[0], dpi=120, bbox_inches="tight")
    figure = Figure(figsize=(7, 4))
    axes = figure.subplots()
    for key, label in (("loss", "training"), ("validation_loss", "validation")):
        points = [(line["step"], line[key]) for line in log if key in line]
        axes.plot(*zip(*points, strict=True), label=label)
    axes.set(xlabel="step", ylabel="loss")
    axes.legend()
    figure.savefig(pictures[1], dpi=120, bbox_inches="tight")
    return f"pictures: {pictures[0]}, {pictures[1]}"
