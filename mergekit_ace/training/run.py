# SPDX-License-Identifier: Apache-2.0
"""A whole training: labels, statistics, the loop, the comparison, the files."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from tqdm import tqdm

import mergekit_ace
from mergekit_ace.coefficients import CoefficientFile, Contents, Expert, MergedTensor, expand
from mergekit_ace.depth import block_of, relative_depths
from mergekit_ace.statistics import Moments, combine, features, measure_moments
from mergekit_ace.training.compare import as_json, as_table, score_coefficients, simple_merges
from mergekit_ace.training.config import TrainConfig
from mergekit_ace.training.data import load_rows
from mergekit_ace.training.errors import TrainingError
from mergekit_ace.training.examples import load_examples, save_examples
from mergekit_ace.training.loop import Trained, train, write_log
from mergekit_ace.training.merged import MergedModel
from mergekit_ace.training.models import (
    Heads,
    check_expert,
    load_model,
    load_processor,
    local_folder,
    merged_parameters,
    save_backbone,
)
from mergekit_ace.training.output import inline_config, merge_config, write_config
from mergekit_ace.training.plots import draw
from mergekit_ace.training.session import Score, Session
from mergekit_ace.training.state import RunFolder, load_checkpoint, save_checkpoint, write_text
from mergekit_ace.training.tasks import Kind, kind_of
from mergekit_ace.training.teachers import label_rows
from mergekit_ace.training.weights import (
    MappedWeights,
    map_weights,
    stored_names,
    stored_tensors,
)

if TYPE_CHECKING:
    from accelerate import Accelerator
    from transformers import PreTrainedModel


def run_training(
    config: TrainConfig, out: str | os.PathLike, *, overwrite: bool = False, quiet: bool = False
) -> CoefficientFile:
    """Learn the coefficients that `config` asks for, or go on with that; the files go to `out`.

    Raises:
        TrainingError: something about the config, the models or the data is wrong.
    """
    accelerator = _accelerator(config)
    quiet = quiet or not accelerator.is_main_process
    folder = RunFolder(out)
    models = Models.find(config, folder)
    if accelerator.is_main_process:
        folder.claim(_identity(config, models), overwrite=overwrite)
    accelerator.wait_for_everyone()
    family = Family.prepare(config, models, folder, accelerator, quiet=quiet)
    session = family.session(config, accelerator)
    statistics, depths = family.statistics(folder, accelerator, quiet=quiet)
    trained = train(
        session,
        config.learner,
        statistics,
        depths,
        folder.state / "learner.safetensors",
        quiet=quiet,
    )
    rows = _compare(session, trained, family, statistics, depths, folder, quiet=quiet)
    file = family.coefficient_file(trained, statistics, depths, rows)
    if accelerator.is_main_process:
        _write(file, config, family, trained, rows, folder, quiet=quiet)
    accelerator.wait_for_everyone()
    return file


@dataclass(frozen=True)
class Models:
    """Where the models lie, and what they have in common.

    Attributes:
        base, experts: folders.
        processor: tokenizer, or image processor (or None).
        kind: what they do.
    """

    base: str
    experts: tuple[str, ...]
    processor: Any
    kind: Kind

    @classmethod
    def find(cls, config: TrainConfig, folder: RunFolder) -> Models:
        """Find all models before anything is computed."""
        kind = kind_of(config.task)
        adapters = folder.path / "adapters"
        base, *experts = (
            local_folder(reference, adapters, config.trust_remote_code)
            for reference in (config.base_model, *(expert.model for expert in config.models))
        )
        return cls(base, tuple(experts), load_processor([base, *experts], kind, config), kind)


@dataclass
class Family:
    """The base model with its experts, mapped from disk, and their labelled data.

    Attributes:
        config, models: what it was made of.
        module: the model that is written; holds the base at first.
        names: of the L merged parameters, input first.
        base, experts: their weights.
        heads: of the experts.
        data: splits by expert.
        teachers: accuracy of each expert on its own test split, None without true labels.
        groups: (L,), which coefficient each tensor has; 0 … G − 1.
    """

    config: TrainConfig
    models: Models
    module: PreTrainedModel
    names: list[str]
    base: MappedWeights
    experts: list[MappedWeights]
    heads: Heads
    data: list[dict]
    teachers: list[float | None]
    groups: Tensor

    @classmethod
    def prepare(
        cls,
        config: TrainConfig,
        models: Models,
        folder: RunFolder,
        accelerator: Accelerator,
        *,
        quiet: bool,
    ) -> Family:
        """Load one model after the other; label what is not labelled yet."""
        kind = models.kind
        base = load_model(models.base, kind, config)
        names = merged_parameters(base, kind, config.exclude)
        _check_base(base, names, models.base)
        weights = map_weights(base, names, models.base, folder.state / "base.safetensors")
        if kind.has_heads and accelerator.is_main_process:
            save_backbone(base, folder.backbone(None))
        experts, data, teachers, heads = [], [], [], Heads()
        for row, (expert, path) in enumerate(zip(config.models, models.experts, strict=True)):
            model = load_model(path, kind, config)
            check_expert(model, base, names, expert.model)
            copy = folder.state / f"expert-{row}.safetensors"
            if accelerator.is_main_process:
                map_weights(model, names, path, copy)
                if kind.has_heads:
                    save_backbone(model, folder.backbone(row))
                _label(config, models, model, row, folder, accelerator, quiet=quiet)
            accelerator.wait_for_everyone()
            experts.append(map_weights(model, names, path, copy))
            splits, metadata = load_examples(folder.state / f"labels-{row}.safetensors")
            data.append(splits)
            teachers.append(json.loads(metadata["accuracy"]))
            heads.add(model, kind)
            del model
        dtype = getattr(torch, config.dtype)
        if config.device_map is not None:
            base = load_model(models.base, kind, config, dtype, device_map=config.device_map)
        base = base.to(dtype) if config.device_map else base.to(accelerator.device, dtype)
        groups = _groups(names, config)
        return cls(config, models, base, names, weights, experts, heads, data, teachers, groups)

    def session(self, config: TrainConfig, accelerator: Accelerator) -> Session:
        """What training and evaluation work with."""
        storage = config.expert_storage
        merged = MergedModel(self.module, self.base, self.experts, self.names, storage)
        kind = self.models.kind
        return Session(config, kind, accelerator, merged, self.heads, self.data, self.groups)

    def statistics(
        self, folder: RunFolder, accelerator: Accelerator, *, quiet: bool
    ) -> tuple[Tensor, Tensor]:
        """(K, G, F) in float64, and the relative depth of each group, (G,)."""
        path = folder.state / "statistics.safetensors"
        if accelerator.is_main_process and not path.exists():
            save_checkpoint(path, {"statistics": self._measure(quiet=quiet)}, {})
        accelerator.wait_for_everyone()
        known = load_checkpoint(path)
        assert known is not None
        by_name = relative_depths(name for name, _ in self.module.named_parameters())
        depths = torch.tensor([by_name[name] for name in self.names])
        counts = self.groups.bincount()
        grouped = torch.zeros(len(counts)).index_add_(0, self.groups, depths) / counts
        return known[0]["statistics"], grouped

    def _measure(self, *, quiet: bool) -> Tensor:
        learner = self.config.learner
        rank = learner.rank
        bar = tqdm(
            total=len(self.experts) * len(self.names),
            desc="statistics",
            unit="tensor",
            disable=quiet,
        )
        rows = []
        for weights in self.experts:
            parts: list[list[Moments]] = [[] for _ in range(int(self.groups.max()) + 1)]
            for group, name in zip(self.groups.tolist(), self.names, strict=True):
                tensor = weights[name].float()
                if learner.statistics_of == "task_vector":
                    tensor = tensor - self.base[name].float()
                parts[group].append(measure_moments(tensor, rank))
                bar.update()
            groups = [combine(part, rank) if len(part) > 1 else part[0] for part in parts]
            rows.append([features(group, learner.statistics, rank) for group in groups])
        bar.close()
        return torch.tensor(rows, dtype=torch.float64)

    def coefficient_file(
        self, trained: Trained, statistics: Tensor, depths: Tensor, rows: dict[str, Score]
    ) -> CoefficientFile:
        """The result, expanded from groups to tensors."""
        stored = stored_names(self.module, self.names, self.models.base)
        if self.models.kind.has_heads:  # as in the backbones, and in merges of them
            prefix = f"{self.module.base_model_prefix}."
            stored = {n: tuple({*s, n.removeprefix(prefix)}) for n, s in stored.items()}
        merged = {name for names in stored.values() for name in names}
        contents = Contents(
            base_model=self.config.base_model,
            experts=tuple(
                Expert(task=expert.task, model=expert.model, revision=_revision(path))
                for expert, path in zip(self.config.models, self.models.experts, strict=True)
            ),
            tensors=tuple(MergedTensor(name=name, stored=stored[name]) for name in self.names),
            frozen=tuple(sorted(set(stored_tensors(self.models.base)) - merged)),
            granularity=self.config.granularity,
            learner=self.config.learner,
            config=self.config.model_dump(mode="json"),
            scores=as_json(rows),
            package=mergekit_ace.__version__,
        )
        groups = self.groups
        return CoefficientFile(
            contents,
            expand(trained.coefficients, groups),
            expand(statistics, groups),
            depths[groups],
            trained.learner.state_dict(),
            groups,
        )


def _accelerator(config: TrainConfig) -> Accelerator:
    from datetime import timedelta

    from accelerate import Accelerator
    from accelerate.utils import InitProcessGroupKwargs

    # While one process lets the experts answer, the others wait: for hours, if need be.
    patience = InitProcessGroupKwargs(timeout=timedelta(days=7))
    return Accelerator(mixed_precision=config.mixed_precision, kwargs_handlers=[patience])


def _identity(config: TrainConfig, models: Models) -> dict[str, Any]:
    """Config and files: what makes two runs the same."""
    files = {}
    paths = [Path(e.data.path) for e in config.models if os.path.isfile(e.data.path)]
    for folder in (models.base, *models.experts):
        paths += sorted(Path(folder).glob("*.safetensors"))
    for path in paths:
        status = path.stat()
        files[str(path)] = [status.st_size, status.st_mtime_ns]
    return {"config": config.model_dump(mode="json"), "files": files}


def _check_base(base: PreTrainedModel, names: Sequence[str], folder: str) -> None:
    missing = [name for name, stored in stored_names(base, names, folder).items() if not stored]
    if missing:
        raise TrainingError(
            f"the base model {folder} has no {missing[0]} on disk"
            + (f" (nor {len(missing) - 1} others)" if len(missing) > 1 else "")
            + "; leave such tensors out by `exclude`, or use the base that the experts come from"
        )


def _label(
    config: TrainConfig,
    models: Models,
    model: PreTrainedModel,
    row: int,
    folder: RunFolder,
    accelerator: Accelerator,
    *,
    quiet: bool,
) -> None:
    path = folder.state / f"labels-{row}.safetensors"
    if path.exists():
        return
    expert = config.models[row]
    model.to(accelerator.device)
    splits = label_rows(
        model,
        load_rows(expert.data, config.training.seed),
        expert.data,
        models.kind,
        models.processor,
        labels=config.labels,
        top_k=config.top_k,
        batch_size=config.training.batch_size,
        progress=lambda batches, split: tqdm(
            batches, desc=f"labels of {expert.task}, {split}", unit="batch", disable=quiet
        ),
    )
    model.cpu()
    test = splits["test"]
    accuracy = None
    if "true" in test.fields:
        accuracy = float((test.fields["true"][0] == test.fields["hard"][0]).float().mean())
    save_examples(splits, path, {"accuracy": json.dumps(accuracy)})


def _groups(names: Sequence[str], config: TrainConfig) -> Tensor:
    """Which coefficient each tensor has, numbered in order of appearance."""
    if config.granularity == "task":
        keys = [""] * len(names)
    elif config.granularity == "block":
        keys = [block_of(name) for name in names]
    else:
        keys = list(names)
    numbers = {key: number for number, key in enumerate(dict.fromkeys(keys))}
    return torch.tensor([numbers[key] for key in keys])


def _compare(
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
        accuracies = tuple(float(accuracy) for accuracy in family.teachers if accuracy is not None)
        rows["each expert on its own"] = Score(0.0, accuracies)
    rows |= simple_merges(session, statistics.shape[:2])
    if config.compare.direct and config.learner.input != "direct":
        direct = config.learner.model_copy(update={"input": "direct"})
        path = folder.state / "direct.safetensors"
        other = train(session, direct, statistics, depths, path, quiet=quiet)
        rows["coefficients learned directly"] = score_coefficients(session, other.coefficients)
    rows["StatsMerging"] = score_coefficients(session, trained.coefficients)
    return rows


def _write(
    file: CoefficientFile,
    config: TrainConfig,
    family: Family,
    trained: Trained,
    rows: dict[str, Score],
    folder: RunFolder,
    *,
    quiet: bool,
) -> None:
    """All files of the output folder; the coefficients last, so that they mean it is complete."""
    table = as_table(rows, [expert.task for expert in config.models])
    write_text(folder.path / "scores.md", table + "\n")
    write_log(folder.path / "training.jsonl", trained.progress)
    path = folder.path / "coefficients.safetensors"
    options: dict[str, Any] = {"task": config.task, "out_dtype": _stored_dtype(family.base)}
    if family.models.kind.has_heads:
        rows_of = range(len(config.models))
        options["folders"] = [str(folder.backbone(row).resolve()) for row in (None, *rows_of)]
    notes = ["StatsMerging with learned coefficients: mergekit-yaml THIS_FILE OUTPUT_FOLDER"]
    write_config(folder.path / "merge.yml", merge_config(file, path, **options), notes)
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
