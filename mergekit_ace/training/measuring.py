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
from typing import Annotated, Any, ClassVar

import click
import torch
from pydantic import BaseModel, Field
from tqdm import tqdm

import mergekit_ace
from mergekit_ace.algebra.measured import packed_size
from mergekit_ace.files.saving import save_tensors, write_text
from mergekit_ace.files.statistics import (
    INDEX_FILE,
    Measure,
    MeasuredExpert,
    MeasuredTensor,
    StatisticsIndex,
    save_index,
)
from mergekit_ace.methods.base import is_finite
from mergekit_ace.training.config import TrainConfig
from mergekit_ace.training.data import Example, read_rows
from mergekit_ace.training.family import ModelFolders
from mergekit_ace.training.input_sums import (
    LINEAR,
    TABLE,
    input_size,
    modules_of,
    shared_inputs,
    sum_fisher,
    sum_inputs,
)
from mergekit_ace.training.mapped_weights import stored_headers, stored_names
from mergekit_ace.training.models import check_expert, load_model, load_skeleton, merged_parameters
from mergekit_ace.training.own_texts import write_own_texts
from mergekit_ace.training.state import TrainingError, TrainingRun, open_tensors
from mergekit_ace.training.tasks import head_modules
from mergekit_ace.training.teachers import SampleReader

# Sums of so many bytes are held at once beside a model, or as many as the model itself takes.
LEAST_ROOM = 2**30
OWN_TEXTS = 16  # that an expert without data writes
_AT_ONCE = 8  # samples whose answers are written at once


class StatisticsConfig(TrainConfig):
    """Settings of a `stats.yml`: those of a `train.yml`, of which models and data are used.

    Language models without data write texts of their own.

    Attributes:
        measure: ``covariances`` of the inputs of linear layers, with counts of looked-up rows, for
            `regmean`, `ace` and `ace_relative`; ``fisher``, the diagonal of the Fisher information,
            for `fisher`. What was measured before in the same folder stays.
    """

    needs_data: ClassVar[bool] = False

    measure: Annotated[tuple[Measure, ...], Field(min_length=1)] = ("covariances",)


class MeasuringPlan(BaseModel):
    """What is measured of every expert, and in which pass over its samples.

    Attributes:
        tensors: all that a merge may ask for.
        passes: per kind of statistics and pass, the linear layers whose inputs are summed up, with
            their columns; or the parameters, with their numbers of entries.
        tables: rows of the tables of embeddings, by name; counted with the first covariances.
    """

    tensors: tuple[MeasuredTensor, ...]
    passes: dict[Measure, tuple[dict[str, int], ...]]
    tables: dict[str, int]

    def size(self, kind: Measure) -> int:
        """Return the bytes that one kind takes on disk, per expert."""
        sizes = [number for part in self.passes[kind] for number in part.values()]
        if kind == "fisher":
            return 4 * sum(sizes)
        return 4 * sum(map(packed_size, sizes)) + 8 * sum(self.tables.values())


@dataclass(frozen=True)
class Measuring:
    """A run of `mergekit-ace statistics`."""

    config: StatisticsConfig
    folders: ModelFolders
    run: TrainingRun

    @cached_property
    def plan(self) -> MeasuringPlan:
        """The plan, which the first expert's architecture tells; kept for later runs."""
        path = self.run.state / "plan.json"
        if path.exists():
            return MeasuringPlan.model_validate_json(path.read_bytes())
        base = load_skeleton(self.folders.base, self.folders.kind, self.config)
        names = merged_parameters(base, self.folders.kind, self.config.exclude)
        for expert, folder in zip(self.config.models, self.folders.experts, strict=True):
            skeleton = load_skeleton(folder, self.folders.kind, self.config)
            check_expert(skeleton, base, names, self.folders.kind, expert.model)
        plan = self._make_plan(self.load(0))
        write_text(path, plan.model_dump_json(indent=1))
        return plan

    @torch.no_grad()
    def _make_plan(self, reader: SampleReader) -> MeasuringPlan:
        model = reader.model
        parameters = dict(model.named_parameters())
        every = [name for name, p in parameters.items() if p.is_floating_point()]
        names = merged_parameters(model, self.folders.kind, self.config.exclude)
        linear, tables = (modules_of(model, names, types) for types in (LINEAR, TABLE))
        sample = self.samples(reader, 0, _AT_ONCE)[:1]
        shared = shared_inputs(linear, lambda: self.read(reader, sample, "layers"))
        folder = self.folders.experts[0]
        headers = stored_headers(folder)
        numbers = {id(parameter): name for name, parameter in parameters.items()}
        tied: dict[str, list[str]] = {name: [] for name in every}  # names in memory
        for name, parameter in model.named_parameters(remove_duplicate=False):
            tied.get(numbers[id(parameter)], []).append(name)
        tensors = []
        for name, stored in stored_names(model, every, folder).items():
            same = all(headers[n].shape == tuple(parameters[name].shape) for n in stored)
            others = [other for other in tied[name] if other != name]
            tensors.append(
                MeasuredTensor(
                    name=name,
                    stored=tuple(dict.fromkeys((*stored, *others))),
                    inputs=shared.get(name),
                    counted=name in tables,
                    fisher=name in names and same,
                )
            )
        tensors += [MeasuredTensor(name=name, stored=()) for name, _ in model.named_buffers()]
        room = max(LEAST_ROOM, sum(p.numel() * p.element_size() for p in parameters.values()))
        leaders = {name: input_size(linear[name][0]) for name in dict.fromkeys(shared.values())}
        entries = {t.name: parameters[t.name].numel() for t in tensors if t.fisher}
        return MeasuringPlan(
            tensors=tuple(tensors),
            passes={
                "covariances": in_passes(leaders, room, lambda columns: 4 * columns**2),
                "fisher": in_passes(entries, room, lambda count: 8 * count),
            },
            tables={name: len(parameters[name]) for name in tables},
        )

    def files(self, row: int, kind: Measure) -> list[Path]:
        """Return where what each pass over the samples of an expert measures goes."""
        folder, numbers = self.run.path / "experts", range(len(self.plan.passes[kind]))
        return [folder / f"{row}-{kind}-{number}.safetensors" for number in numbers]

    def missing(self, row: int) -> list[tuple[Measure, int, Path]]:
        """Return the passes of an expert whose files are not there yet."""
        return [
            (kind, number, file)
            for kind in self.config.measure
            for number, file in enumerate(self.files(row, kind))
            if not file.exists()
        ]

    def announce(self) -> None:
        """Say what is going to be measured, and what it takes.

        Raises:
            TrainingError: there is nothing to measure, or the disk has too little room for it.
        """
        plan, count = self.plan, len(self.config.models)
        for kind in self.config.measure:
            passes = len(plan.passes[kind])
            if not passes:
                raise TrainingError(
                    f"{self.config.base_model} has nothing of which {kind} could be measured"
                )
            if not self.run.quiet:
                click.echo(
                    f"{kind} of {count} expert{'s' * (count > 1)}: "
                    f"{count * plan.size(kind) / 1e9:.3g} GB on disk, in {passes} "
                    f"pass{'es' * (passes > 1)} over the samples of each"
                )
        missing = [kind for row in range(count) for kind, _, _ in self.missing(row)]
        needed = sum(plan.size(kind) / len(plan.passes[kind]) for kind in missing)
        free = shutil.disk_usage(self.run.path).free
        if needed > free:
            raise TrainingError(
                f"{self.run.path} needs {needed / 1e9:.3g} GB, and its disk has {free / 1e9:.3g} "
                "GB left; choose another folder, or leave tensors out by `exclude`"
            )

    def load(self, row: int) -> SampleReader:
        """Load an expert, on its device, with its data."""
        folders, data = self.folders, self.config.models[row].data
        device_map = self.config.device_map or self.run.accelerator.device
        model = load_model(
            folders.experts[row], folders.kind, self.config, whole=True, device_map=device_map
        )
        if data is not None:
            head_modules(model, folders.kind, data, folders.base)
        else:
            path = self.run.path / "texts" / f"{row}.jsonl"
            data = write_own_texts(model, folders.processor, OWN_TEXTS, path, quiet=self.run.quiet)
        return SampleReader(model, folders.kind, folders.processor, data)

    @cached_property
    def rows(self) -> list[Any]:
        """The data of all experts: mistakes in it show before the first model reads."""
        seed = self.config.training.seed
        return [one.data and read_rows(one.data, seed) for one in self.config.models]

    def samples(self, reader: SampleReader, row: int, most: int | None = None) -> list[Example]:
        """Return the samples of an expert, or the first few, with answers that it writes itself."""
        rows = self.rows[row] or read_rows(reader.given, self.config.training.seed)
        rows = rows if most is None else rows.select(range(min(most, len(rows))))
        return reader.read(rows, reader.given.split, _AT_ONCE, quiet=self.run.quiet)

    def read(self, reader: SampleReader, samples: Sequence[Example], what: str) -> None:
        """Let a model read samples one by one."""
        for sample in tqdm(samples, what, unit="sample", disable=self.run.quiet):
            reader.logits([sample])

    def measure(self, row: int) -> None:
        """Measure what is not measured yet of an expert."""
        missing = self.missing(row)
        if not missing:
            return
        missing[0][-1].parent.mkdir(exist_ok=True)
        reader, expert = self.load(row), self.config.models[row]
        samples = self.samples(reader, row)
        facts: dict[str, Any] = {
            "model": expert.model,
            "task": expert.task,
            "samples": len(samples),
            "tokens": sum(len(s.get(n, ())) for s in samples for n in ("input_ids", "target_ids")),
        }
        seed = self.config.training.seed
        for kind, number, file in missing:
            names = list(self.plan.passes[kind][number])
            what = f"{kind} of {expert.task}, {number + 1} of {len(self.plan.passes[kind])}"
            if kind == "covariances":
                tables = list(self.plan.tables) if number == 0 else []
                read = partial(self.read, reader, samples, what)
                found = sum_inputs(reader.model, names, tables, read)
            else:
                shown = tqdm(samples, what, unit="sample", disable=self.run.quiet)
                found = sum_fisher(reader.model, names, shown, lambda s: reader.logits([s]), seed)
            for name, tensor in found.items():
                if not is_finite(tensor.float()):
                    raise TrainingError(
                        f"expert {expert.model}: {name} came out as NaN or Inf on data "
                        f"{reader.data.path}; its inputs or gradients overflow: save it in float32"
                    )
            save_tensors(file, found, {"measured": kind, "facts": json.dumps(facts)})

    def index(self) -> StatisticsIndex:
        """Return the index of all that lies in the folder."""
        rows = range(len(self.config.models))
        kinds: list[Measure] = ["covariances", "fisher"]
        whole = [
            kind
            for kind in kinds
            if self.plan.passes[kind]
            and all(file.exists() for row in rows for file in self.files(row, kind))
        ]
        experts = []
        for row in rows:
            files = [file for kind in whole for file in self.files(row, kind)]
            with open_tensors(files[0]) as opened:
                facts = json.loads(opened.metadata()["facts"])
            experts.append(
                MeasuredExpert(
                    **{name: facts[name] for name in ("task", "model", "samples", "tokens")},
                    files=tuple(file.relative_to(self.run.path).as_posix() for file in files),
                )
            )
        return StatisticsIndex(
            base_model=self.config.base_model,
            measured=tuple(whole),
            experts=tuple(experts),
            tensors=self.plan.tensors,
            config=self.config.model_dump(mode="json"),
            package=mergekit_ace.__version__,
        )


def in_passes(
    sizes: Mapping[str, int], room: float, memory: Callable[[int], float]
) -> tuple[dict[str, int], ...]:
    """Return sizes in parts whose sums take no more memory than there is room; at least one each.

    Args:
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
    with TrainingRun.start(out, quiet=quiet) as run:
        folders = ModelFolders.find(config, run)
        inputs = [folders.base, *folders.experts, *(data.path for _, data in config.sources)]
        run.claim(config, inputs, overwrite=overwrite)
        measuring = Measuring(config, folders, run)
        measuring.announce()
        for row in range(len(config.models)):
            measuring.measure(row)
        save_index(run.path, measuring.index())
        return run.path / INDEX_FILE
