# SPDX-License-Identifier: Apache-2.0
"""What comes out of a training: the comparison and the files."""

from __future__ import annotations

import os
from typing import Any

from torch import Tensor

import mergekit_ace
from mergekit_ace.coefficients.file import CoefficientFile, Contents, Expert, MergedTensor, expand
from mergekit_ace.files import write_text
from mergekit_ace.training.compare import as_json, as_table, score_coefficients, simple_merges
from mergekit_ace.training.config import TrainConfig
from mergekit_ace.training.errors import Diverged
from mergekit_ace.training.family import Family
from mergekit_ace.training.loop import Trained, train, write_log
from mergekit_ace.training.output import inline_config, is_misread, merge_config, write_config
from mergekit_ace.training.plots import draw
from mergekit_ace.training.session import Score, Session
from mergekit_ace.training.state import RunFolder
from mergekit_ace.training.weights import MappedWeights, stored_tensors


def compare(
    session: Session,
    trained: Trained,
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
    trained: Trained,
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
    trained: Trained,
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
    drawn = draw(file, trained.progress.log, folder.path)
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
