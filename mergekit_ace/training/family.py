# SPDX-License-Identifier: Apache-2.0
"""The base model with its experts and their labelled data, and the model that is their merge."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import TYPE_CHECKING

import torch
from mergekit.common import ModelReference
from torch import Tensor, nn
from tqdm import tqdm

from mergekit_ace.algebra.ace import split_tensor
from mergekit_ace.algebra.learner import combine, features, measure_moments
from mergekit_ace.algebra.linalg import blocks
from mergekit_ace.algebra.task_vectors import IllConditionedError, select_active
from mergekit_ace.files.saving import save_tensors
from mergekit_ace.methods.storage import stored_layout
from mergekit_ace.naming import ConfigError, block_of, relative_depths, within_block
from mergekit_ace.training.config import Labels
from mergekit_ace.training.data import SampleReader, answer_data, load_rows
from mergekit_ace.training.models import (
    Models,
    Weights,
    average_statistics,
    map_file,
    map_folder,
    map_weights,
    save_backbone,
    stored_names,
)
from mergekit_ace.training.tasks import Example, head_modules

if TYPE_CHECKING:
    from transformers import PreTrainedModel


@dataclass(frozen=True)
class Teacher:
    """Labelled samples of a teacher, by split, and the head that goes on the merge for them."""

    name: str
    labels: Labels
    splits: dict[str, list[Example]]
    head: dict[str, nn.Module]


@dataclass
class Family:
    """The base model with its experts, mapped from disk, and their labelled data."""

    models: Models
    module: PreTrainedModel  # that the merge is written into; holds the base at first
    on_disk: Weights  # of the base, by their names on disk
    stored: Mapping[str, tuple[str, ...]]  # names on disk of the L merged parameters, input first
    base: Weights
    experts: list[Weights]
    teachers: list[Teacher]  # the experts, and last the base if there is a rehearsal

    @cached_property
    def groups(self) -> Tensor:
        """Which coefficient each tensor has, (L,): 0 … G − 1, in order of appearance."""
        key = {"task": lambda _: "", "block": block_of, "kind": within_block, "tensor": str}[
            self.models.config.granularity
        ]
        keys = [key(name) for name in self.stored]
        numbers = {key: number for number, key in enumerate(dict.fromkeys(keys))}
        return torch.tensor([numbers[key] for key in keys])

    @cached_property
    def components(self) -> list[Weights]:
        """Components of the merge that training starts at, in files; none for task vectors."""
        run, config = self.models.run, self.models.config
        if config.options is None:
            return []
        rows = len(self.experts) + (config.basis == "ace")
        target = run.state / "components"
        files = {name: target / f"{row:05d}.safetensors" for row, name in enumerate(self.stored)}
        with run.accelerator.main_process_first():
            target.mkdir(parents=True, exist_ok=True)
            for name, path in tqdm(files.items(), "components", unit="tensor", disable=run.quiet):
                if not path.exists():
                    split = (part.to("cpu", torch.float32, copy=True) for part in self._split(name))
                    save_tensors(path, {str(n): part.contiguous() for n, part in enumerate(split)})
        parts = {name: map_file(path) for name, path in files.items()}
        return [{name: part[str(row)] for name, part in parts.items()} for row in range(rows)]

    def _split(self, name: str) -> list[Tensor]:
        """Return the components of one parameter, in the layout that mergekit will merge it in."""
        config, device = self.models.config, self.models.run.accelerator.device
        assert config.options is not None
        base, *experts = (weights[name].to(device) for weights in (self.base, *self.experts))
        packed = any(self.on_disk[stored].shape != base.shape for stored in self.stored[name])
        model = ModelReference.model_validate(self.models.base)
        own, tables = name if packed else self.stored[name][0], config.basis != "ace"
        layout = stored_layout("auto", model, own, base.ndim, tables=tables)
        try:
            return split_tensor(base, experts, config.options, layout)
        except (IllConditionedError, OverflowError) as error:
            said = f"{name} cannot be merged by {config.basis}: {error}. Raise its epsilon"
            raise ConfigError(said) from error

    @cached_property
    def depths(self) -> Tensor:
        """Mean relative depths of the groups of tensors, (G,)."""
        by_name = relative_depths(name for name, _ in self.module.named_parameters())
        depths = torch.tensor([by_name[name] for name in self.stored])
        counts = self.groups.bincount()
        return torch.zeros(len(counts)).index_add_(0, self.groups, depths) / counts

    @cached_property
    def statistics(self) -> Tensor:
        """What the learner is told of the groups of tensors, (K, G, F)."""
        return self.models.run.once("statistics", self._measure)

    def _measure(self) -> Tensor:
        """Measure weights, task vectors or components; of a refinement always its component."""
        learner, quiet = self.models.config.learner, self.models.run.quiet
        of_weights = learner.statistics_of == "weights"
        minus_base = not (of_weights or self.components)
        described = self.components or self.experts
        if of_weights:
            described = self.experts + self.components[len(self.experts) :]
        rows = []
        for weights in tqdm(described, "statistics", unit="expert", disable=quiet):
            groups: list[list] = [[] for _ in self.depths]
            for group, name in zip(self.groups.tolist(), self.stored, strict=True):
                tensor = weights[name].float()
                tensor = tensor - self.base[name].float() if minus_base else tensor
                groups[group].append(measure_moments(tensor, learner.rank))
            moments = [combine(parts, learner.rank) for parts in groups]
            rows.append([features(one, learner.statistics, learner.rank) for one in moments])
        return torch.tensor(rows, dtype=torch.float64)


def load_family(models: Models) -> Family:
    """Load one model after the other, map its weights, and let it answer its data."""
    config, run, kind = models.config, models.run, models.kind
    models.check_experts()
    module = models.load(models.base)
    names, on_disk = models.merged_names(module), map_folder(models.base)
    stored = stored_names(module, names, on_disk)
    for name in (name for name, known in stored.items() if not known):
        raise ConfigError(f"{models.base} has no {name} on disk; leave it out by `exclude`")
    # All of them now: mistakes in them show before the first answer.
    rows = {
        row: load_rows(data, config.training.seed)
        for row, (_, data) in enumerate(config.sources)
        if run.is_main and not (run.state / f"labels-{row}.pt").exists()
    }

    def teach(model: PreTrainedModel, row: int) -> Teacher:
        """Let a model answer its data, unless it has."""
        name, data = config.sources[row]
        head = head_modules(model, kind, data, models.base)

        def answer() -> dict[str, list[Example]]:
            teacher: nn.Module = model
            reader = SampleReader(teacher.to(run.accelerator.device), kind, models.processor, data)
            answers = answer_data(reader, rows[row], name, config, quiet=run.quiet)
            teacher.cpu()
            return answers

        splits = run.once(f"labels-{row}", answer)
        return Teacher(name, config.labels_of(data), splits, head)

    weights, teachers, buffers = [], [], []
    folders = (models.base, *models.experts)
    for row, (folder, backbone) in enumerate(zip(folders, models.backbones, strict=True)):
        model = models.load(folder) if row else module
        with run.accelerator.main_process_first():  # the first one may write a copy
            weights.append(map_weights(model, names, folder, run.state / f"{row}.safetensors"))
        if kind.has_heads and run.is_main:
            save_backbone(model, backbone)
        if row:
            buffers.append({n: b.cpu().clone() for n, b in model.named_buffers()})
            teachers.append(teach(model, row - 1))
        del model
    if config.rehearsal is not None:
        teachers.append(teach(module, len(teachers)))
    dtype = getattr(torch, config.dtype)
    # Loaded anew where the dtype differs: `to` would round the buffers of rotary embeddings.
    if module.dtype != dtype:
        del module  # before its successor takes memory
        module = models.load(models.base, dtype)
    average_statistics(module, buffers)
    nn.Module.to(module, run.accelerator.device)
    return Family(models, module, on_disk, stored, weights[0], weights[1:], teachers)


class MergedModel:
    """Model that is written anew for given coefficients, and collects their gradient.

    The merge θ_0 + Σ_k λ_k s_k Δ_k is linear in the coefficients, so for any loss
    ∂L/∂λ_k^l = s_k^l ⟨∂L/∂θ^l, Δ_k^l⟩. s_k is 0 where an expert is the base, maybe in another
    precision, else 1. As soon as a parameter's gradient is ready, its inner products with all Δ_k,
    formed in blocks from the mapped weights, are added to `products`, (K, L), and it is freed:
    beyond the model and its activations there is one gradient in memory.
    """

    def __init__(
        self, module: nn.Module, base: Weights, experts: Sequence[Weights], names: Sequence[str],
        *, components: bool = False,
    ):  # fmt: skip
        """Take weights by name; as `components`, those of `experts` are the Δ_k themselves."""
        self.module = module
        self.products = torch.zeros(len(experts), len(names), dtype=torch.float64)
        self._base, self._experts, self._names = base, experts, tuple(names)
        self._components = components
        self._parameters = [module.get_parameter(name) for name in names]
        self._changed = torch.ones(len(experts), len(names))  # s_k, as `statsmerging` has them
        module.requires_grad_(False)
        for column, (name, parameter) in enumerate(zip(names, self._parameters, strict=True)):
            parameter.requires_grad_(True)
            parameter.register_post_accumulate_grad_hook(partial(self._reduce, column))
            if not components:
                versions = [expert[name] for expert in experts]
                active = select_active(base[name], versions, [1.0] * len(versions), torch.float32)
                self._changed[:, column] = torch.tensor(active.changed)

    @torch.no_grad()
    def write(self, coefficients: Tensor) -> None:
        """Set every merged parameter to θ_0 + Σ_k λ_k s_k Δ_k for λ, (K, L)."""
        used = (coefficients.detach().float().cpu() * self._changed).T.contiguous()
        for column, parameter in enumerate(self._parameters):
            flat, row = parameter.data.view(-1), used[column].to(parameter.device)
            for part, base, deltas in self._blocks(column, parameter.device):
                flat[part].copy_(base + row @ deltas)

    @torch.no_grad()
    def _reduce(self, column: int, parameter: nn.Parameter) -> None:
        """Take the inner products of a gradient with all Δ_k, and free it."""
        assert parameter.grad is not None
        gradient = parameter.grad.reshape(-1)
        for part, _, deltas in self._blocks(column, parameter.device):
            products = (deltas @ gradient[part].float()).cpu().double()
            self.products[:, column] += products * self._changed[:, column]
        parameter.grad = None

    def _blocks(self, column: int, device: torch.device) -> Iterator[tuple[slice, Tensor, Tensor]]:
        """Yield blocks of a parameter in float32: where, θ_0 there, (n,), and all Δ_k, (K, n)."""
        name = self._names[column]
        base, *experts = (w[name].reshape(-1) for w in (self._base, *self._experts))
        for part in blocks(len(base), len(experts), device):
            origin = base[part].to(device, torch.float32)
            deltas = torch.stack([expert[part].to(device, torch.float32) for expert in experts])
            yield part, origin, deltas if self._components else deltas.sub_(origin)
