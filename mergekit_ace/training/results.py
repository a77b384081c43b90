# SPDX-License-Identifier: Apache-2.0
"""Results of a training: the coefficient file, the config that merges, and scores."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

import yaml
from mergekit.common import ModelReference

import mergekit_ace
from mergekit_ace.algebra.learner import Learner, LearnerInputs
from mergekit_ace.files.saving import write_text
from mergekit_ace.files.statistics import Expert, MergedTensor
from mergekit_ace.methods.architecture import lacks_embeddings
from mergekit_ace.methods.coefficients import CoefficientFile, Contents
from mergekit_ace.methods.lookup import METHODS_OF_BASES
from mergekit_ace.naming import short_names
from mergekit_ace.report.card import markdown_text
from mergekit_ace.training.config import LanguageTask
from mergekit_ace.training.family import Family
from mergekit_ace.training.models import write_statistics_of_batches

Log = Sequence[Mapping[str, Any]]  # a line per step and evaluation


@dataclass(frozen=True)
class Score:
    """Loss and accuracy of a merge on one split.

    Attributes:
        loss: mean over teachers of the mean loss per position, weighted as in training.
        accuracy: share of right answers per expert, 0 to 1: against the truth where the data has
            it, else against the expert's own answers; `rehearsal` likewise for the base's.
    """

    loss: float | None
    accuracy: tuple[float, ...]
    rehearsal: float | None = None


def scores_table(scores: Mapping[str, Score], tasks: Iterable[str], samples: Sequence[int]) -> str:
    """Return a Markdown table: mean accuracy of the experts' tasks, each one's, the loss.

    `samples` are how many each task is scored on; one number more for a rehearsal.
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
        shares = [fmean(score.accuracy), *score.accuracy, *[score.rehearsal] * rehearsal]
        loss = "–" if score.loss is None else f"{score.loss:.4f}"
        lines.append([name, *(f"{share:.3f}" for share in shares), loss])
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def coefficient_file(
    family: Family, learner: Learner, inputs: LearnerInputs, scores: Mapping[str, Score]
) -> CoefficientFile:
    """Return the result, expanded from groups to tensors."""
    config, groups = family.models.config, family.groups
    stored, frozen = _names_on_disk(family)
    experts = []
    for one, folder in zip(config.models, map(Path, family.models.experts), strict=True):
        # The folder of a model in the Hub's cache is called after its commit.
        revision = folder.name if folder.parent.name == "snapshots" else None
        experts.append(Expert(task=one.task, model=one.model, revision=revision))
    contents = Contents(
        **{name: getattr(config, name) for name in ("base_model", "granularity", "basis")},
        experts=tuple(experts),
        tensors=tuple(MergedTensor(name=name, stored=names) for name, names in stored.items()),
        frozen=frozen,
        parameters={} if config.options is None else config.options.model_dump(exclude={"scale"}),
        learner=config.learner,
        config=config.model_dump(mode="json"),
        scores={name: asdict(score) for name, score in scores.items()},
        package=mergekit_ace.__version__,
    )
    statistics, depths = inputs.statistics[:, groups], inputs.depths[groups]
    coefficients, state = learner(*inputs)[:, groups], learner.state_dict()
    return CoefficientFile(contents, coefficients, statistics, depths, state, groups)


def _names_on_disk(family: Family) -> tuple[dict[str, tuple[str, ...]], tuple[str, ...]]:
    """Return the names of every merged parameter on disk, and those that keep the base's values.

    Of classifiers, those of backbones are among them. Of other models mergekit may know what keeps
    the base's values by its name in memory.
    """
    module, stored = family.module, dict(family.stored)
    frozen = set(family.on_disk)
    if family.models.kind.has_heads:
        prefix = f"{module.base_model_prefix}."
        for name, names in stored.items():
            stored[name] = tuple(sorted({*names, name.removeprefix(prefix)}))
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
    config, run = family.models.config, family.models.run
    tasks = [expert.task for expert in config.models]
    table = scores_table(scores, tasks, [len(t.splits["test"]) for t in family.teachers])
    write_text(run.path / "scores.md", table + "\n")
    write_text(run.path / "training.jsonl", "".join(json.dumps(line) + "\n" for line in log))
    if family.models.kind.has_heads:
        write_statistics_of_batches(family.module.base_model, family.backbones)
    path = run.path / "coefficients.safetensors"
    method = "task vectors" if config.options is None else config.basis
    note = f"# {method} with learned coefficients: mergekit-yaml THIS_FILE OUTPUT_FOLDER"
    merge = yaml.safe_dump(merge_config(family, file, path), sort_keys=False)
    write_text(run.path / "merge.yml", f"{note}\n{merge}")
    file.save(path)
    if not run.quiet:
        print(f"\n{table}\n\nmergekit-yaml {run.path / 'merge.yml'} OUTPUT_FOLDER")


def merge_config(family: Family, file: CoefficientFile, path: Path) -> dict[str, Any]:
    """Return a config that merges with the coefficients at `path`, run in whatever folder."""
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
    if family.models.config.task in LanguageTask:
        config["tokenizer"] = {"source": "base"}
    config["models"] = [
        {"model": model, "parameters": {"task": one.task}}
        for model, one in zip(experts, contents.experts, strict=True)
    ]
    known = {name: value for name, value in contents.parameters.items() if value is not None}
    config["parameters"] = {**known, "coefficients": str(path.resolve())}
    return config


def _models(family: Family) -> list[Any]:
    """Return base and experts; as backbones where they are classifiers.

    Backbones have fewer tensors than a whole model, so mergekit is told to take what it finds.
    """
    config = family.models.config
    if not family.models.kind.has_heads:
        named = (config.base_model, *(expert.model for expert in config.models))
        parts = (one.split("+") for one in named)
        return ["+".join(os.path.abspath(p) if os.path.isdir(p) else p for p in one)
                for one in parts]  # fmt: skip
    base, *experts = (str(folder.resolve()) for folder in family.backbones)
    inferred = [
        ModelReference.model_validate(folder)
        .model_copy(update={"override_architecture": "Inferred"})
        .model_dump(exclude_none=True)
        for folder in (base, *experts)
    ]
    return [inferred[0] if lacks_embeddings(family.module) else base, *inferred[1:]]
