# SPDX-License-Identifier: Apache-2.0
"""`mergekit-ace statistics`: what samples tell of every expert, one model in memory at a time."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Annotated, Any, ClassVar

import torch
from pydantic import Field
from safetensors import safe_open
from torch import Tensor, nn
from tqdm import tqdm
from transformers.pytorch_utils import Conv1D

import mergekit_ace
from mergekit_ace.algebra.linalg import add_product_, full_precision
from mergekit_ace.algebra.ridge import pack
from mergekit_ace.files import statistics as files
from mergekit_ace.files.saving import save_tensors
from mergekit_ace.files.statistics import Measure, MeasuredExpert, MeasuredTensor
from mergekit_ace.methods.base import first_that_fits
from mergekit_ace.naming import ConfigError
from mergekit_ace.training.config import TrainConfig
from mergekit_ace.training.data import SampleReader, read_rows
from mergekit_ace.training.models import Models, claim_models, map_folder, stored_names
from mergekit_ace.training.state import TrainingRun, explained_damage
from mergekit_ace.training.tasks import Example, head_modules, write_own_texts

OWN_TEXTS = 16  # that an expert without data writes
_AT_ONCE = 8  # samples whose answers are written at once
Modules = dict[str, list[nn.Module]]  # linear layers by the names of their weights in memory


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
        index = run.path / files.INDEX_FILE
        measured = [
            {kind: run.path / "experts" / f"{row}-{kind}.safetensors" for kind in config.measure}
            for row in range(len(config.models))
        ]
        if index.exists() and all(file.exists() for own in measured for file in own.values()):
            return index  # this very run, complete
        models.check_experts()
        for _, data in config.sources:  # mistakes in it show before the first model reads
            read_rows(data, config.training.seed)
        tensors = describe_tensors(models, load_reader(models, 0))
        known = {"covariances": [one.inputs is not None for one in tensors]}
        known["fisher"] = [one.fisher for one in tensors]
        for kind in (kind for kind in config.measure if not any(known[kind])):
            said = f"{config.base_model} has nothing of which {kind} could be measured"
            raise ConfigError(said)
        (run.path / "experts").mkdir(exist_ok=True)
        experts = [measure_expert(models, tensors, row, own) for row, own in enumerate(measured)]
        files.StatisticsIndex(
            base_model=config.base_model,
            measured=config.measure,
            experts=tuple(experts),
            tensors=tensors,
            config=config.model_dump(mode="json"),
            package=mergekit_ace.__version__,
        ).save(run.path)
        return index


def load_reader(models: Models, row: int) -> SampleReader:
    """Load an expert, on its device, with its data."""
    run, kind, data = models.run, models.kind, models.config.models[row].data
    model: Any = models.load(models.experts[row])
    model = model.to(run.accelerator.device)
    if data is not None:
        head_modules(model, kind, data, models.base)
    else:
        path = run.path / "texts" / f"{row}.jsonl"
        data = write_own_texts(model, models.processor, OWN_TEXTS, path, quiet=run.quiet)
    return SampleReader(model, kind, models.processor, data)


def describe_tensors(models: Models, reader: SampleReader) -> tuple[MeasuredTensor, ...]:
    """Return all tensors of the first expert, with the names they have in memory and on disk."""
    model, on_disk = reader.model, map_folder(models.experts[0])
    merged = models.merged_names(model)
    rows = read_rows(reader.data, models.config.training.seed)
    encoded = (reader.kind.encode(dict(row), reader.data, reader.processor) for row in rows)
    first = next((place for place, one in enumerate(encoded) if one is not None), 0)
    sample = reader.read(rows.select([first]), "first", 1, quiet=True)[0]
    inputs = shared_inputs(reader, sample, linear_layers(model, merged))
    parameters = {n: p for n, p in model.named_parameters() if p.is_floating_point()}
    every = dict(model.named_parameters(remove_duplicate=False))
    tensors = []
    for name, stored in stored_names(model, parameters, on_disk).items():
        parameter = parameters[name]
        same = all(on_disk[one].shape == parameter.shape for one in stored)
        tied = [other for other in every if every[other] is parameter and other != name]
        tensors.append(MeasuredTensor(
            name=name,
            stored=tuple(dict.fromkeys((*stored, *tied))),
            inputs=inputs.get(name),
            fisher=name in merged and same,
        ))  # fmt: skip
    buffers = (MeasuredTensor(name=name, stored=()) for name, _ in model.named_buffers())
    return (*tensors, *buffers)


@torch.no_grad()
def shared_inputs(reader: SampleReader, sample: Example, linear: Modules) -> dict[str, str]:
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
        reader.logits([sample])
    first: dict[tuple[int, ...], str] = {}
    return {n: first.setdefault(tuple(seen), n) if seen else n for n, seen in calls.items()}


def measure_expert(
    models: Models, tensors: Sequence[MeasuredTensor], row: int, paths: Mapping[str, Path]
) -> MeasuredExpert:
    """Measure what is not measured yet of an expert; return its entry of the index."""
    config, run, expert = models.config, models.run, models.config.models[row]
    missing = [kind for kind, file in paths.items() if not file.exists()]
    if missing:
        reader = load_reader(models, row)
        rows = read_rows(reader.data, config.training.seed)
        samples = reader.read(rows, reader.data.split, _AT_ONCE, quiet=run.quiet)
        facts = MeasuredExpert(
            model=expert.model,
            task=expert.task,
            samples=len(samples),
            tokens=sum(len(sample.get("input_ids", ())) for sample in samples),
            files=tuple(file.relative_to(run.path).as_posix() for file in paths.values()),
        )
        for kind in missing:
            bar = tqdm(samples, kind, unit="sample", disable=run.quiet)
            total: Any = partial(sum_fisher, seed=config.training.seed)
            total = partial(sum_inputs if kind == "covariances" else total, reader, bar, tensors)
            found = first_that_fits(reader.model.device, total, "statistics", kind)
            for name, tensor in found.items():
                if not tensor.isfinite().all():
                    said = f"{expert.model}: {name} is NaN or Inf on data {reader.data.path}"
                    raise ConfigError(f"{said}, as numbers overflow; save it in float32")
            save_tensors(paths[kind], found, {"expert": facts.model_dump_json()})
    file = next(iter(paths.values()))
    with explained_damage(file), safe_open(file, "pt") as opened:
        return MeasuredExpert.model_validate_json(opened.metadata()["expert"])


def linear_layers(model: nn.Module, names: Iterable[str]) -> Modules:
    """Return the linear layers whose weights are named: of a tied one several."""
    known = {id(model.get_parameter(name)): name for name in names}
    found: Modules = {}
    for module in model.modules():
        name = known.get(id(getattr(module, "weight", None)))
        if name is not None and isinstance(module, nn.Linear | Conv1D):
            found.setdefault(name, []).append(module)
    return found


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


@torch.no_grad()
@full_precision()
def sum_inputs(
    reader: SampleReader, samples: Iterable[Example], tensors: Sequence[MeasuredTensor],
    device: torch.device,
) -> dict[str, Tensor]:  # fmt: skip
    """Return X_tᵀX_t/n_t of linear layers, packed, over samples.

    `covariance/NAME` is (i (i + 1)/2,) in float32, on the CPU. A layer that nothing came to has
    zeros.
    """
    model, leaders = reader.model, dict.fromkeys(one.inputs for one in tensors if one.inputs)
    linear = linear_layers(model, leaders)
    rows = dict.fromkeys(leaders, 0)
    sums = {}
    for name, (layer, *_) in linear.items():
        size: Any = model.get_parameter(name).shape[0 if isinstance(layer, Conv1D) else 1]
        sums[name] = torch.zeros(size, size, device=device)

    def add(name: str, given: Tensor) -> None:
        inputs = given.reshape(-1, given.shape[-1]).to(device, torch.float32)
        add_product_(sums[name], inputs.mT, inputs)
        rows[name] += len(inputs)

    with watched(linear, add):
        for sample in samples:  # one by one: there is no padding to leave out
            reader.logits([sample])
    means = ((name, sums.pop(name).div_(max(1, rows[name]))) for name in leaders)
    return {f"covariance/{name}": pack(mean.cpu()) for name, mean in means}


def sum_fisher(
    reader: SampleReader, samples: Iterable[Example], tensors: Sequence[MeasuredTensor],
    device: torch.device, seed: int,
) -> dict[str, Tensor]:  # fmt: skip
    """Return the diagonal of the Fisher information of some parameters, a mean over samples.

    That is the mean of (∂ log p(y | x)/∂θ)², with answers y drawn from the model's own distribution
    at every supervised position (departure: the paper takes the exact expectation where there are
    few classes). Answers at different positions are independent, so that their squares add up.
    """
    model: Any = reader.model
    parameters = {one.name: model.get_parameter(one.name) for one in tensors if one.fisher}
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
            parameter.requires_grad_(True)
            hook = parameter.register_post_accumulate_grad_hook(partial(add, name))
            stack.callback(hook.remove)
        for sample in samples:
            count += 1
            scores = reader.logits([sample]).float().log_softmax(-1)
            drawn = torch.multinomial(scores.detach().exp().cpu(), 1, generator=generator)
            scores.gather(-1, drawn.to(scores.device)).sum().backward()
    return {f"fisher/{name}": total.div_(count).cpu() for name, total in sums.items()}
