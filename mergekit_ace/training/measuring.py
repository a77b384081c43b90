# SPDX-License-Identifier: Apache-2.0
"""`mergekit-ace statistics`: what samples tell of every expert, one model in memory at a time."""

from __future__ import annotations

import json
import math
import os
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Annotated, Any

import click
import torch
from pydantic import BaseModel, Field
from torch import Tensor
from tqdm import tqdm
from transformers import PreTrainedModel

import mergekit_ace
from mergekit_ace.algebra.measured import packed_size
from mergekit_ace.checkpoint_files import weight_files
from mergekit_ace.files import save_tensors, write_text
from mergekit_ace.headers import read_file_header
from mergekit_ace.measurements import (
    INDEX_FILE,
    Measure,
    MeasuredExpert,
    MeasuredTensor,
    StatisticsIndex,
    save_index,
)
from mergekit_ace.methods.inputs import is_finite
from mergekit_ace.training.config import TrainConfig
from mergekit_ace.training.data import Example, read_rows, to_device
from mergekit_ace.training.family import ModelFolders
from mergekit_ace.training.input_sums import MeasuredModules, sum_fisher, sum_inputs
from mergekit_ace.training.limits import (
    check_samples,
    explained_failures,
    fit_to_model,
    warn_of_cuts,
)
from mergekit_ace.training.mapped_weights import stored_names
from mergekit_ace.training.models import check_expert, load_model, load_skeleton, merged_parameters
from mergekit_ace.training.state import TrainingError, TrainingRun, open_tensors
from mergekit_ace.training.teachers import encode_rows
from mergekit_ace.training.zero_shot import attach_zero_shot_head

# Sums of so many bytes are held at once beside a model, or as many as the model itself takes.
LEAST_ROOM = 2**30
_AT_ONCE = 8  # samples whose answers are written at once


class StatisticsConfig(TrainConfig):
    """Settings of a `stats.yml`: those of a `train.yml`, of which models and data are used.

    Attributes:
        measure: ``covariances`` of the inputs of linear layers, with counts of looked-up rows, for
            `regmean`, `ace` and `ace_relative`; ``fisher``, the diagonal of the Fisher information,
            for `fisher`. What was measured before in the same folder stays.
    """

    measure: Annotated[tuple[Measure, ...], Field(min_length=1)] = ("covariances",)


class MeasuringPlan(BaseModel):
    """What is measured of every expert, and in which pass over its samples.

    Attributes:
        tensors: all that a merge may ask for.
        covariances: per pass the linear layers whose inputs are summed up, with their columns.
        tables: rows of the tables of embeddings, by name; counted in the first of these passes.
        fisher: per pass the parameters, with their numbers of entries.
    """

    tensors: tuple[MeasuredTensor, ...]
    covariances: tuple[dict[str, int], ...]
    tables: dict[str, int]
    fisher: tuple[dict[str, int], ...]

    def passes(self, kind: Measure) -> tuple[dict[str, int], ...]:
        """Return the passes for one kind of statistics."""
        return self.covariances if kind == "covariances" else self.fisher

    def size(self, kind: Measure) -> int:
        """Return the bytes that one kind takes on disk, per expert."""
        sizes = [number for part in self.passes(kind) for number in part.values()]
        if kind == "fisher":
            return 4 * sum(sizes)
        return 4 * sum(map(packed_size, sizes)) + 8 * sum(self.tables.values())


@dataclass(frozen=True)
class Measuring:
    """A run of `mergekit-ace statistics`.

    Attributes:
        config, folders, run: of it.
    """

    config: StatisticsConfig
    folders: ModelFolders
    run: TrainingRun

    def file(self, row: int, kind: Measure, number: int) -> Path:
        """Return where what a pass measures of an expert goes."""
        return self.run.experts / f"{row}-{kind}-{number}.safetensors"

    def files(self, plan: MeasuringPlan, row: int, kind: Measure) -> list[Path]:
        """Return the files of all passes over the samples of an expert."""
        return [self.file(row, kind, number) for number in range(len(plan.passes(kind)))]

    def missing(self, plan: MeasuringPlan, row: int) -> list[tuple[Measure, int]]:
        """Return the passes of an expert whose files are not there yet."""
        return [
            (kind, number)
            for kind in self.config.measure
            for number, file in enumerate(self.files(plan, row, kind))
            if not file.exists()
        ]

    def load(self, row: int) -> PreTrainedModel:
        """Load an expert, on its device."""
        options = {} if self.config.device_map is None else {"device_map": self.config.device_map}
        folder = self.folders.experts[row]
        model = load_model(folder, self.folders.kind, self.config, whole=True, **options)
        prompts = self.config.models[row].data.prompts
        if prompts is not None:
            attach_zero_shot_head(model, self.folders.base, prompts)
        return model if options else model.to(self.run.accelerator.device)

    @cached_property
    def rows(self) -> list[Any]:
        """The data of all experts: mistakes in it show before the first model is loaded."""
        seed = self.config.training.seed
        return [read_rows(expert.data, seed) for expert in self.config.models]

    def samples(self, model: PreTrainedModel, row: int, most: int | None = None) -> list[Example]:
        """Return the samples of an expert, or the first few, with answers that it writes itself."""
        rows = self.rows[row]
        rows = rows if most is None else rows.select(range(min(most, len(rows))))
        given, kind = self.config.models[row].data, self.folders.kind
        data, processor = fit_to_model(given, model), self.folders.processor
        samples = encode_rows(rows, given.split, data, kind, processor)
        check_samples(samples, data, model)
        warn_of_cuts(samples, given, data, model)
        lacking = [sample for sample in samples if kind.needs_completion(sample)]
        complete = [sample for sample in samples if not kind.needs_completion(sample)]
        starts = range(0, len(lacking), _AT_ONCE)
        for start in tqdm(starts, "answers", unit="batch", disable=self.run.quiet or not lacking):
            with explained_failures(data, model):
                part = lacking[start : start + _AT_ONCE]
                complete += kind.complete(model, part, data, processor)
        return complete

    def logits(self, model: PreTrainedModel, row: int, sample: Example) -> Tensor:
        """Return the logits of one sample, (P, C).

        Raises:
            TrainingError: the model answers NaN or Inf, or cannot read the sample.
        """
        data, kind = self.config.models[row].data, self.folders.kind
        with explained_failures(data, model):
            logits = kind.logits(model, to_device(kind.collate([sample]), model.device))
        if not is_finite(logits.detach()):
            raise TrainingError(
                f"expert {self.config.models[row].model} answers NaN or Inf to a sample of data "
                f"{data.path}; its checkpoint is damaged, or overflows in its dtype: leave it out"
            )
        return logits

    def read(self, row: int, samples: Sequence[Example], what: str, model: PreTrainedModel) -> None:
        """Let a model read samples one by one."""
        for sample in tqdm(samples, what, unit="sample", disable=self.run.quiet):
            self.logits(model, row, sample)

    def plan(self) -> MeasuringPlan:
        """Return the plan, which the first expert's architecture tells; kept for later runs."""
        path = self.run.state / "plan.json"
        if path.exists():
            return MeasuringPlan.model_validate_json(path.read_bytes())
        base = load_skeleton(self.folders.base, self.folders.kind, self.config)
        names = merged_parameters(base, self.folders.kind, ())
        for expert, folder in zip(self.config.models, self.folders.experts, strict=True):
            skeleton = load_skeleton(folder, self.folders.kind, self.config)
            check_expert(skeleton, base, names, self.folders.kind, expert.model)
        model = self.load(0)
        plan = self._plan(model)
        write_text(path, plan.model_dump_json(indent=1))
        return plan

    @torch.no_grad()
    def _plan(self, model: PreTrainedModel) -> MeasuringPlan:
        every = [name for name, p in model.named_parameters() if p.is_floating_point()]
        names = merged_parameters(model, self.folders.kind, self.config.exclude)
        modules = MeasuredModules.of(model, names)
        sample = self.samples(model, 0, _AT_ONCE)[:1]
        shared = modules.shared_inputs(model, lambda model: self.read(0, sample, "layers", model))
        folder, parameters = self.folders.experts[0], dict(model.named_parameters())
        headers = [read_file_header(path) for path in weight_files(Path(folder))]
        shapes = {name: header.shape for part in headers for name, header in part.items()}
        tensors, tied = [], _tied_names(model)
        for name, stored in stored_names(model, every, folder).items():
            same = [shapes[s] == tuple(parameters[name].shape) for s in stored]
            tensors.append(
                MeasuredTensor(
                    name=name,
                    stored=tuple(dict.fromkeys((*stored, *tied[name]))),
                    inputs=shared.get(name),
                    counted=name in modules.tables,
                    fisher=name in names and all(same),
                )
            )
        tensors += [MeasuredTensor(name=name, stored=()) for name, _ in model.named_buffers()]
        room = max(LEAST_ROOM, sum(p.numel() * p.element_size() for p in parameters.values()))
        leaders = {name: modules.columns(name) for name in dict.fromkeys(shared.values())}
        entries = {t.name: parameters[t.name].numel() for t in tensors if t.fisher}
        return MeasuringPlan(
            tensors=tuple(tensors),
            covariances=in_passes(leaders, room, lambda columns: 4 * columns**2),
            tables={name: len(parameters[name]) for name in modules.tables},
            fisher=in_passes(entries, room, lambda count: 8 * count),
        )

    def announce(self, plan: MeasuringPlan) -> None:
        """Say what is going to be measured, and what it takes.

        Raises:
            TrainingError: the disk has too little room for it.
        """
        count = len(self.config.models)
        for kind in self.config.measure:
            passes = len(plan.passes(kind))
            if not passes:
                raise TrainingError(
                    f"{self.config.base_model} has nothing of which {kind} could be measured"
                )
            if self.run.quiet:
                continue
            click.echo(
                f"{kind} of {count} expert{'s' * (count > 1)}: {count * plan.size(kind) / 1e9:.3g} "
                f"GB on disk, in {passes} pass{'es' * (passes > 1)} over the samples of each"
            )
        needed = sum(
            plan.size(kind) / len(plan.passes(kind))
            for row in range(count)
            for kind, _ in self.missing(plan, row)
        )
        free = shutil.disk_usage(self.run.path).free
        if needed > free:
            raise TrainingError(
                f"{self.run.path} needs {needed / 1e9:.3g} GB, and its disk has {free / 1e9:.3g} "
                "GB left; choose another folder, or leave tensors out by `exclude`"
            )

    def measure(self, plan: MeasuringPlan, row: int) -> None:
        """Measure what is not measured yet of an expert."""
        missing = self.missing(plan, row)
        if not missing:
            return
        model, expert = self.load(row), self.config.models[row]
        samples = self.samples(model, row)
        facts = {
            "model": expert.model,
            "task": expert.task,
            "samples": len(samples),
            "tokens": sum(len(s.get(n, ())) for s in samples for n in ("input_ids", "target_ids")),
        }
        for kind, number in missing:
            names = list(plan.passes(kind)[number])
            what = f"{kind} of {expert.task}, {number + 1} of {len(plan.passes(kind))}"
            if kind == "covariances":
                tables = list(plan.tables) if number == 0 else []
                read = partial(self.read, row, samples, what)
                found, facts["rows"] = sum_inputs(model, names, tables, read)
            else:
                shown = tqdm(samples, what, unit="sample", disable=self.run.quiet)
                logits = partial(self.logits, model, row)
                found = sum_fisher(model, names, shown, logits, self.config.training.seed)
            for name, tensor in found.items():
                if not is_finite(tensor.float()):
                    raise TrainingError(
                        f"expert {expert.model}: {name} came out as NaN or Inf on data "
                        f"{expert.data.path}; its inputs or gradients overflow: save it in float32"
                    )
            metadata = {"measured": kind, "facts": json.dumps(facts)}
            self.run.experts.mkdir(exist_ok=True)
            save_tensors(self.file(row, kind, number), found, metadata)

    def index(self, plan: MeasuringPlan) -> StatisticsIndex:
        """Return the index of all that lies in the folder."""
        count = range(len(self.config.models))
        measured = {
            kind: [self.files(plan, row, kind) for row in count]
            for kind in ("covariances", "fisher")
        }
        whole = {
            kind: files
            for kind, files in measured.items()
            if all(own and all(file.exists() for file in own) for own in files)
        }
        experts = []
        for row, expert in enumerate(self.config.models):
            files = [file for own in whole.values() for file in own[row]]
            with open_tensors(files[0]) as opened:
                facts = json.loads(opened.metadata()["facts"])
            experts.append(
                MeasuredExpert(
                    task=expert.task,
                    model=expert.model,
                    samples=facts["samples"],
                    tokens=facts["tokens"],
                    files=tuple(file.relative_to(self.run.path).as_posix() for file in files),
                )
            )
        return StatisticsIndex(
            base_model=self.config.base_model,
            measured=tuple(whole),
            experts=tuple(experts),
            tensors=plan.tensors,
            config=self.config.model_dump(mode="json"),
            package=mergekit_ace.__version__,
        )


def _tied_names(model: PreTrainedModel) -> dict[str, list[str]]:
    """Return further names in memory of every parameter."""
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    tied: dict[str, list[str]] = {name: [] for name in names.values()}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if name not in tied:
            tied[names[id(parameter)]].append(name)
    return tied


def in_passes(
    sizes: Mapping[str, int], room: float, memory: Callable[[int], float]
) -> tuple[dict[str, int], ...]:
    """Return sizes in parts whose sums take no more memory than there is room; at least one each.

    Args:
        sizes: by name, in the order in which they are to stay.
        room: bytes.
        memory: bytes that the sum of something of a size takes.
    """
    parts: list[dict[str, int]] = []
    used = math.inf
    for name, size in sizes.items():
        if used + memory(size) > room:
            parts.append({})
            used = 0
        parts[-1][name] = size
        used += memory(size)
    return tuple(parts)


def measure_statistics(
    config: StatisticsConfig,
    out: str | os.PathLike,
    *,
    overwrite: bool = False,
    quiet: bool = False,
) -> Path:
    """Measure statistics, or go on with that; return the path of their index.

    Raises:
        TrainingError: something about the config, the models or the data is wrong.
    """
    run = TrainingRun(out, quiet=quiet)
    folders = ModelFolders.find(config, run)
    inputs = [folders.base, *folders.experts, *(expert.data.path for expert in config.models)]
    run.claim(config, inputs, overwrite=overwrite)
    measuring = Measuring(config, folders, run)
    plan = measuring.plan()
    measuring.announce(plan)
    for row in range(len(config.models)):
        measuring.measure(plan, row)
    save_index(run.path, measuring.index(plan))
    return run.path / INDEX_FILE
