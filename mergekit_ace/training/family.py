# SPDX-License-Identifier: Apache-2.0
"""The base model with its experts and their labelled data: everything known before training."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from mergekit.common import ModelReference
from torch import Tensor
from tqdm import tqdm

from mergekit_ace.algebra.components import split_tensor
from mergekit_ace.algebra.learner import (
    LearnerInputs,
    WeightMoments,
    combine,
    features,
    measure_moments,
)
from mergekit_ace.algebra.task_vectors import IllConditionedError
from mergekit_ace.files.headers import TensorHeader
from mergekit_ace.files.saving import save_tensors
from mergekit_ace.methods.architecture import stored_layout
from mergekit_ace.methods.base import is_finite
from mergekit_ace.naming import block_of, relative_depths, within_block
from mergekit_ace.training.config import TrainConfig
from mergekit_ace.training.data import load_rows, unpack_examples
from mergekit_ace.training.mapped_weights import (
    check_stored_dtypes,
    map_tensors,
    map_weights,
    stored_headers,
    stored_names,
)
from mergekit_ace.training.models import (
    SAME_MODEL,
    ModelFolders,
    average_statistics,
    check_classes,
    check_expert,
    load_model,
    load_skeleton,
    merged_parameters,
    save_backbone,
)
from mergekit_ace.training.state import TrainingError, TrainingRun
from mergekit_ace.training.tasks import head_modules
from mergekit_ace.training.teachers import SampleReader, Teacher, answer_data

if TYPE_CHECKING:
    from datasets import Dataset
    from transformers import PreTrainedModel

Weights = Mapping[str, Tensor]  # mapped from disk, by names in memory


@dataclass
class Family:
    """The base model with its experts, mapped from disk, and their labelled data.

    Attributes:
        module: the model that the merge is written into; holds the base at first.
        stored: names on disk of the L merged parameters, by their names in memory, input first.
        base, experts: weights.
        teachers: the experts, and last the base if there is a rehearsal, with their data.
    """

    config: TrainConfig
    folders: ModelFolders
    run: TrainingRun
    module: PreTrainedModel
    stored: Mapping[str, tuple[str, ...]]
    base: Weights
    experts: list[Weights]
    teachers: list[Teacher]

    @property
    def backbones(self) -> list[Path]:
        """Folders for classifiers without heads, the base's first."""
        names = ["base", *(f"expert-{row}" for row in range(len(self.config.models)))]
        return [self.run.path / "backbones" / name for name in names]

    @cached_property
    def groups(self) -> Tensor:
        """Which coefficient each tensor has, (L,): 0 … G − 1, in order of appearance."""
        key = {"task": lambda _: "", "block": block_of, "kind": within_block, "tensor": str}[
            self.config.granularity
        ]
        keys = [key(name) for name in self.stored]
        numbers = {key: number for number, key in enumerate(dict.fromkeys(keys))}
        return torch.tensor([numbers[key] for key in keys])

    @cached_property
    def components(self) -> list[Weights] | None:
        """Components of the experts in the merge that training starts at, and of its refinement.

        None for task vectors. What is on disk already is not computed again.

        Raises:
            TrainingError: a matrix is too ill-conditioned.
        """
        if self.config.options is None:
            return None
        with self.run.accelerator.main_process_first():
            files = self._write_components()
        return [
            map_tensors({name: (str(path), str(row)) for name, path in files.items()})
            for row in range(self._rows)
        ]

    @property
    def _rows(self) -> int:
        """Rows of coefficients."""
        return len(self.experts) + (self.config.basis == "ace")

    def _write_components(self) -> dict[str, Path]:
        """Write a file per tensor with its components, and return it by the tensor's name."""
        target = self.run.state / "components"
        target.mkdir(parents=True, exist_ok=True)
        dtype = getattr(torch, self.config.component_dtype)
        if not self.run.quiet:
            count = sum(weight.numel() for weight in self.base.values()) * self._rows
            print(
                f"components of {len(self.base)} tensors, {self._rows} each, in "
                f"{self.config.component_dtype}: {count * dtype.itemsize / 1e9:.2f} GB in {target}"
            )
        headers = stored_headers(self.folders.base)
        files = {name: target / f"{row:05d}.safetensors" for row, name in enumerate(self.base)}
        bar = tqdm(files.items(), "components", unit="tensor", disable=self.run.quiet)
        for name, path in bar:
            if not path.exists():
                parts = [part.to("cpu", dtype, copy=True) for part in self._split(name, headers)]
                save_tensors(path, {str(row): part.contiguous() for row, part in enumerate(parts)})
        return files

    def _split(self, name: str, headers: Mapping[str, TensorHeader]) -> list[Tensor]:
        """Return the components of one parameter.

        mergekit merges what is packed from several tensors on disk as transformers packs it in
        memory; so that is how the layout is found.
        """
        device, basis = self.run.accelerator.device, self.config.basis
        base, *experts = (weights[name].to(device) for weights in (self.base, *self.experts))
        shape, stored = tuple(base.shape), self.stored[name]
        own = name if any(headers[n].shape != shape for n in stored) else stored[0]
        model, tables = ModelReference.model_validate(self.folders.base), basis == "ace_relative"
        layout = stored_layout("auto", model, own, len(shape), tables=tables)
        try:
            return split_tensor(base, experts, self.config.options, layout)
        except (IllConditionedError, OverflowError) as error:
            raise TrainingError(
                f"{name} cannot be merged by {basis}: {error}. Raise its epsilon"
            ) from error

    def learner_inputs(self) -> LearnerInputs:
        """Measure statistics and depth of each group, or read what was measured before."""
        known, _ = self.run.once("statistics", lambda: ({"statistics": self._measure()}, {}))
        by_name = relative_depths(name for name, _ in self.module.named_parameters())
        depths = torch.tensor([by_name[name] for name in self.stored])
        counts = self.groups.bincount()
        grouped = torch.zeros(len(counts)).index_add_(0, self.groups, depths) / counts
        return LearnerInputs(known["statistics"], grouped)

    def _measure(self) -> Tensor:
        """Measure the statistics of every group, (K, G, F)."""
        learner = self.config.learner
        # Of weights or task vectors; a refinement has neither, but its component.
        described = self.components or self.experts
        if learner.statistics_of == "weights":
            described = self.experts + described[len(self.experts) :]
        minus_base = self.components is None and learner.statistics_of == "task_vector"
        total = len(described) * len(self.stored)
        bar = tqdm(total=total, desc="statistics", unit="tensor", disable=self.run.quiet)
        rows = []
        for weights in described:
            groups: list[list[WeightMoments]] = [[] for _ in range(int(self.groups.max()) + 1)]
            for group, name in zip(self.groups.tolist(), self.stored, strict=True):
                tensor = weights[name].float()
                tensor = tensor - self.base[name].float() if minus_base else tensor
                groups[group].append(measure_moments(tensor, learner.rank))
                bar.update()
            moments = [combine(g, learner.rank) if len(g) > 1 else g[0] for g in groups]
            rows.append([features(one, learner.statistics, learner.rank) for one in moments])
        bar.close()
        return torch.tensor(rows, dtype=torch.float64)


def load_family(config: TrainConfig, folders: ModelFolders, run: TrainingRun) -> Family:
    """Load one model after the other, map its weights, and let it answer its data.

    Raises:
        TrainingError: models do not fit together, or data cannot be used.
    """
    module = load_model(folders.base, folders.kind, config)
    stored = _check_models(config, folders, module)
    # All of them now: mistakes in them show before the first answer.
    rows = {
        row: load_rows(data, config.training.seed)
        for row, (_, data) in enumerate(config.sources)
        if run.is_main and not run.file(f"labels-{row}").exists()
    }
    base = _map(run, module, stored, folders.base, "base")
    experts: list[Weights] = []
    teachers, buffers = [], []
    for row, folder in enumerate(folders.experts):
        expert = load_model(folder, folders.kind, config, whole=True)
        experts.append(_map(run, expert, stored, folder, f"expert-{row}"))
        _check_difference(config, [base, *experts])
        if folders.kind.has_heads:
            save_backbone(expert, run.path / "backbones" / f"expert-{row}", run)
        buffers.append({n: b.cpu().clone() for n, b in expert.named_buffers()})
        teachers.append(_label(config, folders, run, expert, row, rows.get(row)))
        del expert
    if folders.kind.has_heads:
        save_backbone(module, run.path / "backbones" / "base", run)
    if config.rehearsal is not None:
        row = len(experts)
        teachers.append(_label(config, folders, run, module, row, rows.get(row)))
    # Loaded anew where the dtype differs: `to` would round the buffers of rotary embeddings.
    if config.device_map is not None or module.dtype != getattr(torch, config.dtype):
        del module  # before its successor takes memory
        module = _load_again(config, folders)
    average_statistics(module, buffers)
    if config.device_map is None:
        module.to(run.accelerator.device)
    return Family(config, folders, run, module, stored, base, experts, teachers)


def _check_models(
    config: TrainConfig, folders: ModelFolders, base: PreTrainedModel
) -> dict[str, tuple[str, ...]]:
    """Return the merged parameters with their names on disk, once all models have them."""
    kind = folders.kind
    names = merged_parameters(base, kind, config.exclude)
    stored = stored_names(base, names, folders.base)
    missing = [name for name, known in stored.items() if not known]
    if missing:
        raise TrainingError(
            f"the base model {folders.base} has no {missing[0]} on disk; leave such tensors "
            "out by `exclude`, or use the base that the experts come from"
        )
    on_disk = {name for names in stored.values() for name in names}
    check_stored_dtypes(config.base_model, folders.base, on_disk)
    for expert, path in zip(config.models, folders.experts, strict=True):
        check_stored_dtypes(expert.model, path, on_disk)
        skeleton = load_skeleton(path, kind, config)
        check_expert(skeleton, base, names, kind, expert.model)
        if kind.has_heads:
            answers = config.loss == "answers"  # the entropy of a number is 0
            check_classes(skeleton.config, f"expert {expert.model}", regression=answers)
    return stored


def _map(
    run: TrainingRun, model: PreTrainedModel, names: Iterable[str], folder: str, copy: str
) -> Weights:
    """Map the weights of a model; `copy` names the file of a copy, if one is needed."""
    with run.accelerator.main_process_first():  # the first one writes the copy
        weights = map_weights(model, names, folder, run.file(copy))
    for name, tensor in weights.items():
        if not is_finite(tensor):
            raise TrainingError(
                f"tensor {name} of model {folder} contains NaN or Inf; the checkpoint overflowed "
                "or is damaged: leave it out"
            )
    return weights


def _check_difference(config: TrainConfig, weights: Sequence[Weights]) -> None:
    """Raise unless the last model differs from those before it, the base and experts."""
    references = [config.base_model, *(expert.model for expert in config.models)]
    *others, last = weights
    for other, reference in zip(others, references, strict=False):
        if all(torch.equal(tensor, other[name]) for name, tensor in last.items()):
            raise TrainingError(SAME_MODEL % (references[len(others)], reference))


def _label(
    config: TrainConfig, folders: ModelFolders, run: TrainingRun, model: PreTrainedModel, row: int,
    rows: Mapping[str, Dataset] | None,
) -> Teacher:  # fmt: skip
    """Let a teacher answer its data, unless it has; the base has the last number."""
    name, data = config.sources[row]
    head = head_modules(model, folders.kind, data, folders.base)

    def answer() -> tuple[dict[str, Tensor], float | None]:
        if config.device_map is None:
            teacher = model.to(run.accelerator.device)
        else:
            folder = (*folders.experts, folders.base)[row]
            teacher = load_model(folder, folders.kind, config, device_map=config.device_map)
        reader = SampleReader(teacher, folders.kind, folders.processor, data)
        answers = answer_data(reader, rows, name, config, quiet=run.quiet)
        model.cpu()
        return answers

    samples, accuracy = run.once(f"labels-{row}", answer)
    return Teacher(name, unpack_examples(samples), accuracy, head)


def _load_again(config: TrainConfig, folders: ModelFolders) -> PreTrainedModel:
    """Load the base in the dtype of the training, and on its devices."""
    dtype, device_map = getattr(torch, config.dtype), config.device_map
    module = load_model(folders.base, folders.kind, config, dtype, device_map=device_map)
    if any(parameter.is_meta for parameter in module.parameters()):
        raise TrainingError(
            f"the base model {config.base_model} does not fit into the memory of all GPUs "
            "together; try dtype: bfloat16"
        )
    return module
