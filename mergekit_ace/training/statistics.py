# SPDX-License-Identifier: Apache-2.0
"""`mergekit-ace statistics`: what samples tell of every expert, one model in memory at a time.

Samples pass one by one: then there is no padding that would have to be left out, in whatever way an
architecture arranges its inputs.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Annotated, Any, ClassVar

import click
import torch
from pydantic import BaseModel, Field
from torch import Tensor, nn
from tqdm import tqdm
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

import mergekit_ace
from mergekit_ace.algebra.linalg import add_product_, full_precision
from mergekit_ace.algebra.measured import pack, packed_size
from mergekit_ace.files.saving import save_tensors, write_text
from mergekit_ace.files.statistics import (
    INDEX_FILE,
    Measure,
    MeasuredExpert,
    MeasuredTensor,
    StatisticsIndex,
    save_index,
)
from mergekit_ace.training.config import TrainConfig
from mergekit_ace.training.data import Example, read_rows
from mergekit_ace.training.mapped_weights import stored_headers, stored_names
from mergekit_ace.training.models import (
    ModelFolders,
    check_expert,
    load_model,
    load_skeleton,
    merged_parameters,
)
from mergekit_ace.training.own_texts import write_own_texts
from mergekit_ace.training.state import TrainingError, TrainingRun, open_tensors
from mergekit_ace.training.tasks import head_modules
from mergekit_ace.training.teachers import SampleReader

OWN_TEXTS = 16  # that an expert without data writes
_AT_ONCE = 8  # samples whose answers are written at once
_ROOM = 0.8  # share of a GPU's free memory that sums may take
LINEAR, TABLE = (nn.Linear, Conv1D), (nn.Embedding,)
Modules = dict[str, list[nn.Module]]  # of one kind, by the names of their weights in memory
Logits = Callable[[Any], Tensor]  # of a sample, (P, C) at its P supervised positions


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


class MeasuringPlan(BaseModel):
    """What is measured of every expert.

    Attributes:
        tensors: all that a merge may ask for.
        columns: of the linear layers whose inputs are summed up, by the names of their weights.
        tables: rows of the tables of embeddings, by name; counted with the covariances.
        entries: of the parameters with Fisher information, by name.
    """

    tensors: tuple[MeasuredTensor, ...]
    columns: dict[str, int]
    tables: dict[str, int]
    entries: dict[str, int]

    def sizes(self, kind: Measure) -> tuple[int, int]:
        """Return the bytes that one kind takes on disk, and in memory, per expert."""
        if kind == "fisher":
            return 4 * sum(self.entries.values()), 4 * sum(self.entries.values())
        counts, columns = 8 * sum(self.tables.values()), self.columns.values()
        return 4 * sum(map(packed_size, columns)) + counts, 4 * sum(c**2 for c in columns) + counts


@dataclass(frozen=True)
class Measuring:
    """A run of `mergekit-ace statistics`."""

    config: StatisticsConfig
    folders: ModelFolders
    run: TrainingRun

    @cached_property
    def plan(self) -> MeasuringPlan:
        """The plan, which the first expert's architecture tells; kept for later runs."""
        path = self.run.state / "measured.json"
        if path.exists():
            return MeasuringPlan.model_validate_json(path.read_bytes())
        kind = self.folders.kind
        base = load_skeleton(self.folders.base, kind, self.config)
        names = merged_parameters(base, kind, self.config.exclude)
        for expert, folder in zip(self.config.models, self.folders.experts, strict=True):
            skeleton = load_skeleton(folder, kind, self.config)
            check_expert(skeleton, base, names, kind, expert.model)
        plan = self._make_plan(self.load(0))
        write_text(path, plan.model_dump_json(indent=1))
        return plan

    @torch.no_grad()
    def _make_plan(self, reader: SampleReader) -> MeasuringPlan:
        model = reader.model
        names = merged_parameters(model, self.folders.kind, self.config.exclude)
        linear, tables = (modules_of(model, names, types) for types in (LINEAR, TABLE))
        sample = self.samples(reader, 0, _AT_ONCE)[:1]
        shared = shared_inputs(linear, partial(reader.logits, sample))
        tensors = describe_tensors(model, names, self.folders.experts[0], shared, tables)
        leaders = dict.fromkeys(shared.values())
        return MeasuringPlan(
            tensors=tensors,
            columns={name: input_size(linear[name][0]) for name in leaders},
            tables={name: len(model.get_parameter(name)) for name in tables},
            entries={t.name: model.get_parameter(t.name).numel() for t in tensors if t.fisher},
        )

    def file(self, row: int, kind: Measure) -> Path:
        """Return where what is measured of an expert goes."""
        return self.run.path / "experts" / f"{row}-{kind}.safetensors"

    def missing(self, row: int) -> list[Measure]:
        """Return what is not measured yet of an expert."""
        return [kind for kind in self.config.measure if not self.file(row, kind).exists()]

    def announce(self) -> None:
        """Say what is going to be measured, and what it takes.

        Raises:
            TrainingError: there is nothing to measure, or the disk has too little room for it.
        """
        count, needed = len(self.config.models), 0
        for kind in self.config.measure:
            size, memory = self.plan.sizes(kind)
            if not size:
                raise TrainingError(
                    f"{self.config.base_model} has nothing of which {kind} could be measured"
                )
            if not self.run.quiet:
                click.echo(
                    f"{kind} of {count} expert{'s' * (count > 1)}: {count * size / 1e9:.3g} GB on "
                    f"disk, and {memory / 1e9:.3g} GB of memory beside the model"
                )
            needed += size * sum(kind in self.missing(row) for row in range(count))
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

    def measure(self, row: int) -> None:
        """Measure what is not measured yet of an expert."""
        missing = self.missing(row)
        if not missing:
            return
        reader, expert = self.load(row), self.config.models[row]
        samples = self.samples(reader, row)
        tokens = sum(len(s.get(n, ())) for s in samples for n in ("input_ids", "target_ids"))
        facts = {"model": expert.model, "task": expert.task}
        facts |= {"samples": len(samples), "tokens": tokens}
        for kind in missing:
            what = f"{kind} of {expert.task}"
            shown = tqdm(samples, what, unit="sample", disable=self.run.quiet)
            found = self._sum(reader, shown, kind)
            for name, tensor in found.items():
                if not tensor.isfinite().all():
                    raise TrainingError(
                        f"expert {expert.model}: {name} came out as NaN or Inf on data "
                        f"{reader.data.path}; its inputs or gradients overflow: save it in float32"
                    )
            file = self.file(row, kind)
            file.parent.mkdir(exist_ok=True)
            save_tensors(file, found, {"measured": kind, "facts": json.dumps(facts)})

    def _sum(
        self, reader: SampleReader, samples: Iterable[Example], kind: Measure
    ) -> dict[str, Tensor]:
        """Sum up one kind of statistics; on the CPU where a GPU has too little room for that."""
        model, (_, needed) = reader.model, self.plan.sizes(kind)
        device = model.device
        if device.type == "cuda" and needed > _ROOM * torch.cuda.mem_get_info(device)[0]:
            device = torch.device("cpu")

        def logits(sample: Example) -> Tensor:
            return reader.logits([sample])

        if kind == "fisher":
            seed = self.config.training.seed
            return sum_fisher(model, list(self.plan.entries), samples, logits, seed, device)
        names = list(self.plan.columns), list(self.plan.tables)
        return sum_inputs(model, *names, samples, logits, device)

    def index(self) -> StatisticsIndex:
        """Return the index of all that lies in the folder."""
        rows = range(len(self.config.models))
        kinds: list[Measure] = ["covariances", "fisher"]
        kinds = [kind for kind in kinds if all(self.file(row, kind).exists() for row in rows)]
        experts = []
        for row in rows:
            files = [self.file(row, kind) for kind in kinds]
            with open_tensors(files[0]) as opened:
                facts = json.loads(opened.metadata()["facts"])
            names = tuple(file.relative_to(self.run.path).as_posix() for file in files)
            experts.append(MeasuredExpert(**facts, files=names))
        return StatisticsIndex(
            base_model=self.config.base_model,
            measured=tuple(kinds),
            experts=tuple(experts),
            tensors=self.plan.tensors,
            config=self.config.model_dump(mode="json"),
            package=mergekit_ace.__version__,
        )


def modules_of(model: nn.Module, names: Iterable[str], types: tuple[type, ...]) -> Modules:
    """Return the modules of some types whose weights are among the named parameters.

    A weight may have several of them, such as a tied head.
    """
    known = {id(model.get_parameter(name)): name for name in names}
    found: Modules = {}
    for module in model.modules():
        name = known.get(id(getattr(module, "weight", None)))
        if name is not None and isinstance(module, types):
            found.setdefault(name, []).append(module)
    return found


def input_size(linear: nn.Module) -> int:
    """Return i of a linear layer."""
    return linear.weight.shape[0 if isinstance(linear, Conv1D) else 1]


def describe_tensors(
    model: PreTrainedModel, merged: Sequence[str], folder: str, inputs: Mapping[str, str],
    tables: Modules,
) -> tuple[MeasuredTensor, ...]:  # fmt: skip
    """Return all tensors of a model, with the names that they have in memory and on disk.

    Args:
        merged: names in memory of those that are merged.
        folder: of the model.
        inputs: see `shared_inputs`.
        tables: of embeddings.
    """
    headers = stored_headers(folder)
    parameters = {n: p for n, p in model.named_parameters() if p.is_floating_point()}
    tied: dict[int, list[str]] = {id(parameter): [] for parameter in parameters.values()}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        tied.get(id(parameter), []).append(name)
    tensors = []
    for name, stored in stored_names(model, parameters, folder).items():
        shape = tuple(parameters[name].shape)
        same = all(headers[stored_name].shape == shape for stored_name in stored)
        others = [other for other in tied[id(parameters[name])] if other != name]
        tensors.append(
            MeasuredTensor(
                name=name,
                stored=tuple(dict.fromkeys((*stored, *others))),
                inputs=inputs.get(name),
                counted=name in tables,
                fisher=name in merged and same,
            )
        )
    buffers = (MeasuredTensor(name=name, stored=()) for name, _ in model.named_buffers())
    return (*tensors, *buffers)


@contextmanager
def watched(modules: Modules, hook: Callable[[str, Tensor], None]) -> Iterator[None]:
    """Call a hook with the name of a weight and every input of its modules."""

    def call(name: str, module: nn.Module, args: tuple, kwargs: dict) -> None:
        hook(name, args[0] if args else next(iter(kwargs.values())))

    with ExitStack() as stack:
        for name, members in modules.items():
            for module in members:
                handle = module.register_forward_pre_hook(partial(call, name), with_kwargs=True)
                stack.callback(handle.remove)
        yield


def shared_inputs(linear: Modules, read: Callable[[], object]) -> dict[str, str]:
    """Return the first of the linear layers with the same inputs, by the name of each.

    Layers share their inputs if in every call they are given the very tensor that the one before
    was given, as queries, keys and values are. Layers that nothing came to share none.

    Args:
        read: lets the model read something.
    """
    calls: dict[str, list[int]] = {name: [] for name in linear}
    given: list[Tensor] = []  # kept, so that no other one gets the place of one in memory

    def note(name: str, inputs: Tensor) -> None:
        if not given or inputs is not given[-1]:
            given.append(inputs)
        calls[name].append(len(given))

    with watched(linear, note):
        read()
    first: dict[tuple[int, ...], str] = {}
    return {n: first.setdefault(tuple(seen), n) if seen else n for n, seen in calls.items()}


@torch.no_grad()
@full_precision()
def sum_inputs(
    model: nn.Module, leaders: Sequence[str], tables: Sequence[str], samples: Iterable[Any],
    logits: Logits, device: torch.device,
) -> dict[str, Tensor]:  # fmt: skip
    """Return X_tᵀX_t/n_t of linear layers, packed, and counts of tables, over samples.

    Args:
        leaders, tables: names of the weights.
        device: of the sums.

    Returns:
        `covariance/NAME`, (i (i + 1)/2,) in float32, and `counts/NAME`, (n,) in int64, on the CPU.
        A layer that nothing came to has zeros.
    """
    linear, looked_up = modules_of(model, leaders, LINEAR), modules_of(model, tables, TABLE)
    rows = dict.fromkeys(leaders, 0)
    sums = {n: torch.zeros(2 * [input_size(m[0])], device=device) for n, m in linear.items()}
    counts = {
        name: torch.zeros(len(module.weight), dtype=torch.int64, device=device)
        for name, (module, *_) in looked_up.items()
    }

    def add(name: str, given: Tensor) -> None:
        inputs = given.reshape(-1, given.shape[-1]).to(device, torch.float32)
        add_product_(sums[name], inputs.mT, inputs)
        rows[name] += len(inputs)

    def count(name: str, given: Tensor) -> None:
        counts[name] += given.flatten().to(device).bincount(minlength=len(counts[name]))

    with watched(linear, add), watched(looked_up, count):
        for sample in samples:
            logits(sample)
    found = {f"counts/{name}": total.cpu() for name, total in counts.items()}
    for name in leaders:
        found[f"covariance/{name}"] = pack(sums.pop(name).div_(max(1, rows[name])).cpu())
    return found


def sum_fisher(
    model: nn.Module, names: Sequence[str], samples: Iterable[Any], logits: Logits, seed: int,
    device: torch.device,
) -> dict[str, Tensor]:  # fmt: skip
    """Return the diagonal of the Fisher information of some parameters, a mean over samples.

    That is the mean of (∂ log p(y | x)/∂θ)², with answers y drawn from the model's own distribution
    at every supervised position (departure: the paper takes the exact expectation where there are
    few classes). Answers at different positions are independent, so that their squares add up.

    Args:
        model: without gradients.
        seed: of the answers; with the same, they are the same.
        device: of the sums.

    Returns:
        `fisher/NAME`, shaped as the parameter, in float32 on the CPU.
    """
    parameters = {name: model.get_parameter(name).requires_grad_(True) for name in names}
    sums = {n: torch.zeros(p.shape, device=device) for n, p in parameters.items()}

    def add(name: str, parameter: Tensor) -> None:
        """Add a gradient as soon as it is complete: at no time are all of them in memory."""
        sums[name] += parameter.grad.to(device, torch.float32).square_()
        parameter.grad = None

    hooks = [
        parameter.register_post_accumulate_grad_hook(partial(add, name))
        for name, parameter in parameters.items()
    ]
    generator, count = torch.Generator("cpu").manual_seed(seed), 0
    try:
        for sample in samples:
            count += 1
            scores = logits(sample).float().log_softmax(-1)
            drawn = torch.multinomial(scores.detach().exp().cpu(), 1, generator=generator)
            scores.gather(-1, drawn.to(scores.device)).sum().backward()
    finally:
        model.requires_grad_(False)
        for hook in hooks:
            hook.remove()
    return {f"fisher/{name}": total.div_(count).cpu() for name, total in sums.items()}
