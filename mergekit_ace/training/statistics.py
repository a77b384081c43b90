# SPDX-License-Identifier: Apache-2.0
"""`mergekit-ace statistics`: what samples tell of every expert, one model in memory at a time."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Annotated, Any, ClassVar

import click
import torch
from pydantic import Field
from torch import Tensor, nn
from tqdm import tqdm
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

import mergekit_ace
from mergekit_ace.algebra.linalg import add_product_, full_precision
from mergekit_ace.algebra.ridge import pack, packed_size
from mergekit_ace.files.saving import save_tensors
from mergekit_ace.files.statistics import (
    INDEX_FILE,
    Measure,
    MeasuredExpert,
    MeasuredTensor,
    StatisticsIndex,
    save_index,
)
from mergekit_ace.naming import ConfigError
from mergekit_ace.training.config import TrainConfig
from mergekit_ace.training.data import SampleReader, read_rows
from mergekit_ace.training.models import (
    Models,
    claim_models,
    load_skeleton,
    map_folder,
    open_tensors,
    stored_names,
)
from mergekit_ace.training.state import TrainingRun
from mergekit_ace.training.tasks import Example, head_modules, write_own_texts

OWN_TEXTS = 16  # that an expert without data writes
_AT_ONCE = 8  # samples whose answers are written at once
LINEAR, TABLE = (nn.Linear, Conv1D), (nn.Embedding,)
Modules = dict[str, list[nn.Module]]  # of one kind, by the names of their weights in memory
Logits = Callable[[Any], Tensor]  # of a sample, (P, C) at its P supervised positions


class StatisticsConfig(TrainConfig):
    """Settings of a `statistics.yml`: those of a `train.yml`, of which models and data are used."""

    needs_data: ClassVar[bool] = False

    measure: Annotated[tuple[Measure, ...], Field(min_length=1)] = ("covariances",)


def measure_statistics(
    config: StatisticsConfig, out: str | os.PathLike, *, overwrite: bool = False,
    quiet: bool = False,
) -> Path:  # fmt: skip
    """Measure statistics, or go on with that; return the path of their index."""
    with TrainingRun.start(out, quiet=quiet) as run:
        models = claim_models(config, run, overwrite=overwrite)
        index = run.path / INDEX_FILE
        files = [
            {kind: run.path / "experts" / f"{row}-{kind}.safetensors" for kind in config.measure}
            for row in range(len(config.models))
        ]
        if index.exists() and all(file.exists() for own in files for file in own.values()):
            return index  # this very run, complete
        base = load_skeleton(models.base, models.kind, config)
        models.merged_names(base)  # says what is wrong with `exclude`
        models.check_experts(base)
        for _, data in config.sources:  # mistakes in it show before the first model reads
            read_rows(data, config.training.seed)
        tensors = plan_measurements(models, config.measure)
        (run.path / "experts").mkdir(exist_ok=True)
        experts = [measure_expert(models, tensors, row, own) for row, own in enumerate(files)]
        save_index(run.path, StatisticsIndex(
            base_model=config.base_model,
            measured=config.measure,
            experts=tuple(experts),
            tensors=tensors,
            config=config.model_dump(mode="json"),
            package=mergekit_ace.__version__,
        ))  # fmt: skip
        return index


@torch.no_grad()
def plan_measurements(models: Models, measures: Sequence[Measure]) -> tuple[MeasuredTensor, ...]:
    """Return what is known of all tensors by the first expert; say what measuring them takes."""
    config, reader = models.config, load_reader(models, 0)
    model = reader.model
    names = models.merged_names(model)
    linear, tables = (modules_of(model, names, types) for types in (LINEAR, TABLE))
    rows = read_rows(reader.data, config.training.seed)
    samples = reader.read(rows.select(range(min(_AT_ONCE, len(rows)))), "first", 1, quiet=True)
    shared = shared_inputs(linear, partial(reader.logits, samples[:1]))
    tensors = describe_tensors(model, names, models.experts[0], shared, tables)
    columns = [_input_size(linear, name) for name in set(shared.values())]
    covariances = 4 * sum(map(packed_size, columns))
    covariances += 8 * sum(len(model.get_parameter(name)) for name in tables)
    fisher = 4 * sum(model.get_parameter(one.name).numel() for one in tensors if one.fisher)
    # Whole matrices are summed up in memory, and half of each is written.
    for kind, disk, memory in (("covariances", covariances, 2), ("fisher", fisher, 1)):
        if kind in measures and not disk:
            said = f"{config.base_model} has nothing of which {kind} could be measured"
            raise ConfigError(said)
        if kind in measures and not models.run.quiet:
            click.echo(
                f"{kind} of {len(config.models)} experts: {len(config.models) * disk / 1e9:.3g} GB "
                f"on disk, and {memory * disk / 1e9:.3g} GB of memory beside the model"
            )
    return tensors


def load_reader(models: Models, row: int) -> SampleReader:
    """Load an expert, on its device, with its data."""
    config, run, kind = models.config, models.run, models.kind
    model: Any = models.load(models.experts[row])
    model, data = model.to(run.accelerator.device), config.models[row].data
    if data is not None:
        head_modules(model, kind, data, models.base)
    else:
        path = run.path / "texts" / f"{row}.jsonl"
        data = write_own_texts(model, models.processor, OWN_TEXTS, path, quiet=run.quiet)
    return SampleReader(model, kind, models.processor, data)


def measure_expert(
    models: Models, tensors: Sequence[MeasuredTensor], row: int, files: Mapping[str, Path]
) -> MeasuredExpert:
    """Measure what is not measured yet of an expert; return its entry of the index."""
    config, run, expert = models.config, models.run, models.config.models[row]
    missing = [kind for kind, file in files.items() if not file.exists()]
    if missing:
        reader = load_reader(models, row)
        rows = read_rows(reader.data, config.training.seed)
        samples = reader.read(rows, reader.data.split, _AT_ONCE, quiet=run.quiet)
        tokens = sum(len(s.get(n, ())) for s in samples for n in ("input_ids", "target_ids"))
        facts = {"model": expert.model, "task": expert.task}
        facts |= {"samples": len(samples), "tokens": tokens}
        for kind in missing:
            found = _sum(reader, samples, tensors, kind, models)
            for name, tensor in found.items():
                if not tensor.isfinite().all():
                    raise ConfigError(
                        f"expert {expert.model}: {name} came out as NaN or Inf on data "
                        f"{reader.data.path}; its inputs or gradients overflow: save it in float32"
                    )
            save_tensors(files[kind], found, {"measured": kind, "facts": json.dumps(facts)})
    with open_tensors(next(iter(files.values()))) as opened:
        facts = json.loads(opened.metadata()["facts"])
    names = tuple(file.relative_to(run.path).as_posix() for file in files.values())
    return MeasuredExpert(**facts, files=names)


def _sum(
    reader: SampleReader, samples: Sequence[Example], tensors: Sequence[MeasuredTensor],
    kind: str, models: Models,
) -> dict[str, Tensor]:  # fmt: skip
    """Sum up one kind of statistics, on the CPU where a GPU is full."""
    model, inputs = reader.model, dict.fromkeys(one.inputs for one in tensors if one.inputs)
    for device in dict.fromkeys((model.device, torch.device("cpu"))):
        bar = tqdm(samples, kind, unit="sample", disable=models.run.quiet)
        # One by one: there is no padding to leave out.
        given = model, ([sample] for sample in bar), reader.logits, device
        with suppress(*[torch.OutOfMemoryError] * (device.type != "cpu")):
            if kind == "covariances":
                return sum_inputs([*inputs], [one.name for one in tensors if one.counted], *given)
            names = [tensor.name for tensor in tensors if tensor.fisher]
            return sum_fisher(names, *given, models.config.training.seed)
    raise AssertionError


def modules_of(model: nn.Module, names: Iterable[str], types: tuple[type, ...]) -> Modules:
    """Return the modules of some types whose weights are named: of a tied one several."""
    known = {id(model.get_parameter(name)): name for name in names}
    found: Modules = {}
    for module in model.modules():
        name = known.get(id(getattr(module, "weight", None)))
        if name is not None and isinstance(module, types):
            found.setdefault(name, []).append(module)
    return found


def _input_size(linear: Modules, name: str) -> int:
    layer: Any = linear[name][0]
    return layer.weight.shape[0 if isinstance(layer, Conv1D) else 1]


def describe_tensors(
    model: PreTrainedModel, merged: Sequence[str], folder: str, inputs: Mapping[str, str],
    tables: Modules,
) -> tuple[MeasuredTensor, ...]:  # fmt: skip
    """Return all tensors of a model, with the names that they have in memory and on disk."""
    on_disk = map_folder(folder)
    parameters = {n: p for n, p in model.named_parameters() if p.is_floating_point()}
    names: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    tensors = []
    for name, stored in stored_names(model, parameters, on_disk).items():
        same = all(on_disk[one].shape == parameters[name].shape for one in stored)
        tied = [other for other in names[id(parameters[name])] if other != name]
        tensors.append(MeasuredTensor(
            name=name,
            stored=tuple(dict.fromkeys((*stored, *tied))),
            inputs=inputs.get(name),
            counted=name in tables,
            fisher=name in merged and same,
        ))  # fmt: skip
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
    leaders: Sequence[str], tables: Sequence[str], model: nn.Module, samples: Iterable[Any],
    logits: Logits, device: torch.device,
) -> dict[str, Tensor]:  # fmt: skip
    """Return X_tᵀX_t/n_t of linear layers, packed, and counts of tables, over samples.

    `covariance/NAME` is (i (i + 1)/2,) in float32, and `counts/NAME` (n,) in int64, on the CPU. A
    layer that nothing came to has zeros.
    """
    linear, looked_up = modules_of(model, leaders, LINEAR), modules_of(model, tables, TABLE)
    rows = dict.fromkeys(leaders, 0)
    sums = {name: torch.zeros(2 * [_input_size(linear, name)], device=device) for name in linear}
    counts = {
        name: torch.zeros(len(model.get_parameter(name)), dtype=torch.int64, device=device)
        for name in looked_up
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
    names: Sequence[str], model: nn.Module, samples: Iterable[Any], logits: Logits,
    device: torch.device, seed: int,
) -> dict[str, Tensor]:  # fmt: skip
    """Return the diagonal of the Fisher information of some parameters, a mean over samples.

    That is the mean of (∂ log p(y | x)/∂θ)², with answers y drawn from the model's own distribution
    at every supervised position (departure: the paper takes the exact expectation where there are
    few classes). Answers at different positions are independent, so that their squares add up.
    """
    parameters = {name: model.get_parameter(name).requires_grad_(True) for name in names}
    sums = {n: torch.zeros(p.shape, device=device) for n, p in parameters.items()}

    def add(name: str, parameter: Tensor) -> None:
        """Add a gradient as soon as it is complete: at no time are all of them in memory."""
        assert parameter.grad is not None
        sums[name] += parameter.grad.to(device, torch.float32).square_()
        parameter.grad = None

    generator, count = torch.Generator("cpu").manual_seed(seed), 0
    with ExitStack() as stack:
        stack.callback(model.requires_grad_, False)
        stack.callback(model.zero_grad)
        for name, parameter in parameters.items():
            hook = parameter.register_post_accumulate_grad_hook(partial(add, name))
            stack.callback(hook.remove)
        for sample in samples:
            count += 1
            scores = logits(sample).float().log_softmax(-1)
            drawn = torch.multinomial(scores.detach().exp().cpu(), 1, generator=generator)
            scores.gather(-1, drawn.to(scores.device)).sum().backward()
    return {f"fisher/{name}": total.div_(count).cpu() for name, total in sums.items()}
