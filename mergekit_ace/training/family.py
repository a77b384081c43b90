# SPDX-License-Identifier: Apache-2.0
"""The base model with its experts and their labelled data: everything known before training."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from mergekit.common import ModelReference
from torch import Tensor, nn
from tqdm import tqdm

from mergekit_ace.algebra.ace import split_tensor
from mergekit_ace.algebra.learner import LearnerInputs, combine, features, measure_moments
from mergekit_ace.algebra.task_vectors import IllConditionedError
from mergekit_ace.files.saving import save_tensors
from mergekit_ace.methods.architecture import stored_layout
from mergekit_ace.methods.base import is_finite
from mergekit_ace.naming import ConfigError, block_of, relative_depths, within_block
from mergekit_ace.training.data import (
    Examples,
    SampleReader,
    answer_data,
    load_rows,
    unpack_examples,
)
from mergekit_ace.training.merged import (
    Weights,
    map_folder,
    map_tensors,
    map_weights,
    stored_names,
)
from mergekit_ace.training.models import (
    Models,
    average_statistics,
    save_backbone,
)
from mergekit_ace.training.tasks import head_modules

if TYPE_CHECKING:
    from datasets import Dataset
    from transformers import PreTrainedModel


@dataclass(frozen=True)
class Teacher:
    """Labelled samples of a teacher, by split, and the head that goes on the merge for them."""

    name: str
    splits: dict[str, Examples]
    head: dict[str, nn.Module]

    @property
    def accuracy(self) -> float | None:
        """Share of right answers of the teacher on its test split; None without true labels."""
        test = self.splits["test"]
        if "true" not in test[0]:
            return None
        right = [sample["hard"] == sample["true"] for sample in test]
        return float(torch.cat(right).double().mean())


@dataclass
class Family:
    """The base model with its experts, mapped from disk, and their labelled data.

    Attributes:
        module: the model that the merge is written into; holds the base at first.
        on_disk: the base's tensors, by their names on disk.
        stored: names on disk of the L merged parameters, by their names in memory, input first.
        base, experts: weights.
        teachers: the experts, and last the base if there is a rehearsal, with their data.
    """

    models: Models
    module: PreTrainedModel
    on_disk: Weights
    stored: Mapping[str, tuple[str, ...]]
    base: Weights
    experts: list[Weights]
    teachers: list[Teacher]

    @property
    def backbones(self) -> list[Path]:
        """Folders for classifiers without heads, the base's first."""
        names = ["base", *(f"expert-{row}" for row in range(len(self.experts)))]
        return [self.models.run.path / "backbones" / name for name in names]

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
    def components(self) -> list[Weights] | None:
        """Components of the merge that training starts at, once per file; None for task vectors."""
        run, config = self.models.run, self.models.config
        if config.options is None:
            return None
        rows = len(self.experts) + (config.basis == "ace")
        target = run.state / "components"
        files = {name: target / f"{row:05d}.safetensors" for row, name in enumerate(self.base)}
        with run.accelerator.main_process_first():
            target.mkdir(parents=True, exist_ok=True)
            if not run.quiet:
                size = 4 * rows * sum(weight.numel() for weight in self.base.values())
                print(f"{rows} components of {len(files)} tensors: {size / 1e9:.2f} GB in {target}")
            for name, path in tqdm(files.items(), "components", unit="tensor", disable=run.quiet):
                if not path.exists():
                    parts = (part.to("cpu", torch.float32, copy=True) for part in self._split(name))
                    save_tensors(path, {str(n): part.contiguous() for n, part in enumerate(parts)})
        return [
            map_tensors({name: (str(path), str(row)) for name, path in files.items()})
            for row in range(rows)
        ]

    def _split(self, name: str) -> list[Tensor]:
        """Return the components of one parameter.

        mergekit merges what is packed from several tensors on disk as transformers packs it in
        memory; so that is how the layout is found.
        """
        config, device = self.models.config, self.models.run.accelerator.device
        base, *experts = (weights[name].to(device) for weights in (self.base, *self.experts))
        packed = any(self.on_disk[stored].shape != base.shape for stored in self.stored[name])
        model = ModelReference.model_validate(self.models.base)
        own, tables = name if packed else self.stored[name][0], config.basis == "ace_relative"
        layout = stored_layout("auto", model, own, base.ndim, tables=tables)
        try:
            return split_tensor(base, experts, config.options, layout)
        except (IllConditionedError, OverflowError) as error:
            raise ConfigError(
                f"{name} cannot be merged by {config.basis}: {error}. Raise its epsilon"
            ) from error

    def learner_inputs(self) -> LearnerInputs:
        """Measure statistics and depth of each group, or read what was measured before."""
        known = self.models.run.once("statistics", lambda: {"statistics": self._measure()})
        by_name = relative_depths(name for name, _ in self.module.named_parameters())
        depths = torch.tensor([by_name[name] for name in self.stored])
        counts = self.groups.bincount()
        grouped = torch.zeros(len(counts)).index_add_(0, self.groups, depths) / counts
        return LearnerInputs(known["statistics"], grouped)

    def _measure(self) -> Tensor:
        """Measure the statistics of every group, (K, G, F)."""
        learner, quiet = self.models.config.learner, self.models.run.quiet
        # Of weights or task vectors; a refinement has neither, but its component.
        described = self.components or self.experts
        if learner.statistics_of == "weights":
            described = self.experts + described[len(self.experts) :]
        minus_base = self.components is None and learner.statistics_of == "task_vector"
        rows = []
        for weights in tqdm(described, "statistics", unit="expert", disable=quiet):
            groups: list[list] = [[] for _ in range(int(self.groups.max()) + 1)]
            for group, name in zip(self.groups.tolist(), self.stored, strict=True):
                tensor = weights[name].float()
                tensor = tensor - self.base[name].float() if minus_base else tensor
                groups[group].append(measure_moments(tensor, learner.rank))
            moments = [combine(parts, learner.rank) for parts in groups]
            rows.append([features(one, learner.statistics, learner.rank) for one in moments])
        return torch.tensor(rows, dtype=torch.float64)


def load_family(models: Models) -> Family:
    """Load one model after the other, map its weights, and let it answer its data."""
    config, run, heads = models.config, models.run, models.kind.has_heads
    module = models.load(models.base)
    names = models.merged_names(module)
    on_disk = map_folder(models.base)
    stored = stored_names(module, names, on_disk)
    missing = [name for name, known in stored.items() if not known]
    if missing:
        raise ConfigError(
            f"the base model {models.base} has no {missing[0]} on disk; leave such tensors "
            "out by `exclude`, or use the base that the experts come from"
        )
    models.check_experts(module)
    # All of them now: mistakes in them show before the first answer.
    rows = {
        row: load_rows(data, config.training.seed)
        for row, (_, data) in enumerate(config.sources)
        if run.is_main and not run.file(f"labels-{row}").exists()
    }
    weights, teachers, buffers = [], [], []
    for row, folder in enumerate((models.base, *models.experts), start=-1):
        name, model = f"expert-{row}" if row >= 0 else "base", module
        if row >= 0:
            model = models.load(folder)
            buffers.append({n: b.cpu().clone() for n, b in model.named_buffers()})
        with run.accelerator.main_process_first():  # the first one may write a copy
            weights.append(map_weights(model, names, folder, run.file(name)))
        for key, tensor in weights[-1].items():
            if not is_finite(tensor):
                raise ConfigError(
                    f"tensor {key} of model {folder} contains NaN or Inf; the checkpoint "
                    "overflowed or is damaged: leave it out"
                )
        if heads:
            save_backbone(model, run.path / "backbones" / name, run)
        if row >= 0:
            teachers.append(_label(models, model, row, rows.get(row)))
        del model
    if config.rehearsal is not None:
        teachers.append(_label(models, module, len(teachers), rows.get(len(teachers))))
    dtype = getattr(torch, config.dtype)
    # Loaded anew where the dtype differs: `to` would round the buffers of rotary embeddings.
    if module.dtype != dtype:
        del module  # before its successor takes memory
        module = models.load(models.base, dtype)
    average_statistics(module, buffers)
    module.to(run.accelerator.device)
    return Family(models, module, on_disk, stored, weights[0], weights[1:], teachers)


def _label(
    models: Models, model: PreTrainedModel, row: int, rows: Mapping[str, Dataset] | None
) -> Teacher:
    """Let a teacher answer its data, unless it has; the base has the last number."""
    config, run = models.config, models.run
    name, data = config.sources[row]
    head = head_modules(model, models.kind, data, models.base)

    def answer() -> dict[str, Tensor]:
        teacher = model.to(run.accelerator.device)
        reader = SampleReader(teacher, models.kind, models.processor, data)
        answers = answer_data(reader, rows, name, config, quiet=run.quiet)
        model.cpu()
        return answers

    return Teacher(name, unpack_examples(run.once(f"labels-{row}", answer)), head)
