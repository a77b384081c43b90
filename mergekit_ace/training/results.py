# SPDX-License-Identifier: Apache-2.0
"""Results of a training: the coefficient file, the config that merges, scores and pictures."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import yaml
from mergekit.architecture import arch_info_for_config
from mergekit.common import ModelReference
from torch import Tensor
from transformers import AutoConfig

import mergekit_ace
from mergekit_ace.algebra.learner import Learner, LearnerInputs
from mergekit_ace.files.models import read_checkpoint
from mergekit_ace.files.saving import write_text
from mergekit_ace.files.statistics import Expert, MergedTensor
from mergekit_ace.methods.architecture import lacks_embeddings
from mergekit_ace.methods.coefficients import CoefficientFile, Contents
from mergekit_ace.methods.lookup import METHODS_OF_BASES
from mergekit_ace.naming import short_names
from mergekit_ace.report.card import markdown_text
from mergekit_ace.training.config import LanguageTask
from mergekit_ace.training.family import Family
from mergekit_ace.training.mapped_weights import stored_headers
from mergekit_ace.training.models import write_statistics_of_batches

Log = Sequence[Mapping[str, Any]]  # a line per step and evaluation


@dataclass(frozen=True)
class TrainedLearner:
    """Result of a training: the kept network, what it reads, its λ per group (K, G), the log."""

    learner: Learner
    inputs: LearnerInputs
    coefficients: Tensor
    log: Log


@dataclass(frozen=True)
class Score:
    """Loss and accuracy of a merge on one split.

    Attributes:
        loss: mean over teachers (the experts, and the base where it rehearses) of the mean loss per
            position, weighted as in training; None where it was not measured.
        accuracy: share of right answers per expert, 0 to 1: against the truth where the data has
            it, else against the expert's own answers. Of numbers it is the correlation.
        rehearsal: likewise for the base's; None without rehearsal.
    """

    loss: float | None
    accuracy: tuple[float, ...]
    rehearsal: float | None = None

    @property
    def mean_accuracy(self) -> float:
        """Mean over experts."""
        return sum(self.accuracy) / len(self.accuracy)


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
    file: CoefficientFile, family: Family, log: Log, scores: Mapping[str, Score]
) -> None:
    """Write the output folder; the coefficients last, so that they mean it is complete."""
    config, run = family.config, family.run
    tasks = [expert.task for expert in config.models]
    table = scores_table(scores, tasks, [len(t.splits["test"]) for t in family.teachers])
    write_text(run.path / "scores.md", table + "\n")
    write_text(run.path / "training.jsonl", "".join(json.dumps(line) + "\n" for line in log))
    if family.folders.kind.has_heads:
        write_statistics_of_batches(family.module.base_model, family.backbones)
    path = run.path / "coefficients.safetensors"
    method = "task vectors" if config.options is None else config.basis
    note = f"# {method} with learned coefficients: mergekit-yaml THIS_FILE OUTPUT_FOLDER"
    merge = yaml.safe_dump(merge_config(family, file, path), sort_keys=False)
    write_text(run.path / "merge.yml", f"{note}\n{merge}")
    drawn = draw_training(file, log, run.path)
    file.save(path)
    if not run.quiet:
        print(f"\n{table}\n\n{drawn}\nmergekit-yaml {run.path / 'merge.yml'} OUTPUT_FOLDER")


def merge_config(family: Family, file: CoefficientFile, path: Path) -> dict[str, Any]:
    """Return a config that merges with the coefficients, from whatever folder it is run in.

    Args:
        path: where they are looked up.
    """
    contents, basis = file.contents, file.contents.basis
    base, *experts = _models(family)
    config: dict[str, Any] = {
        "merge_method": METHODS_OF_BASES.get(basis, basis),
        "base_model": base,
        "dtype": "float32",
    }
    stored = str(next(iter(family.base.values())).dtype).removeprefix("torch.")
    if stored != "float32":
        config["out_dtype"] = stored
    if family.config.task in LanguageTask:
        config["tokenizer"] = {"source": "base"}
    config["models"] = [
        {"model": model, "parameters": {"task": one.task}}
        for model, one in zip(experts, contents.experts, strict=True)
    ]
    known = {name: value for name, value in contents.parameters.items() if value is not None}
    config["parameters"] = {**known, "coefficients": str(path.resolve())}
    return config


def _models(family: Family) -> list[Any]:
    """Return the base and the experts, as backbones where they are classifiers.

    Experts of an architecture that mergekit 0.1.5 does not know make it take the tensors that it
    finds. So it is told for backbones, which have fewer than a whole model, and where its own list
    is wrong.
    """
    config = family.config
    if family.folders.kind.has_heads:
        base, *experts = (str(folder.resolve()) for folder in family.backbones)
        inferred = [_to_be_inferred(expert) for expert in experts]
        return [_to_be_inferred(base) if lacks_embeddings(family.module) else base, *inferred]
    named = (config.base_model, *(expert.model for expert in config.models))
    base, *experts = (
        "+".join(os.path.abspath(part) if os.path.isdir(part) else part for part in one.split("+"))
        for one in named
    )
    if is_misread(family.folders.base, trust_remote_code=config.trust_remote_code):
        experts = [_to_be_inferred(expert) for expert in experts]
    return [base, *experts]


def _to_be_inferred(reference: str) -> dict[str, Any]:
    inferred = {"override_architecture": "Inferred"}
    parsed = ModelReference.model_validate(reference).model_copy(update=inferred)
    return parsed.model_dump(exclude_none=True)


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


def draw_training(file: CoefficientFile, log: Log, folder: Path) -> str:
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
