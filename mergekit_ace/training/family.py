# SPDX-License-Identifier: Apache-2.0
"""The base model with its experts and their labelled data: everything known before training."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from tqdm import tqdm

from mergekit_ace.check.models import DEQUANTISE
from mergekit_ace.files.headers import read_json
from mergekit_ace.learner import (
    LearnerInputs,
    WeightMoments,
    combine,
    features,
    measure_moments,
)
from mergekit_ace.methods.base import is_finite
from mergekit_ace.naming import block_of, relative_depths, within_block
from mergekit_ace.training.config import TrainConfig
from mergekit_ace.training.data import load_rows, unpack_examples
from mergekit_ace.training.mapped_weights import (
    check_stored_dtypes,
    map_weights,
    stored_names,
    write_components,
)
from mergekit_ace.training.models import (
    average_statistics,
    check_classes,
    check_expert,
    load_model,
    load_processor,
    load_skeleton,
    local_folder,
    merged_parameters,
    running_statistics,
    save_backbone,
)
from mergekit_ace.training.state import TrainingError, TrainingRun
from mergekit_ace.training.tasks import ModelKind, head_modules, model_kind
from mergekit_ace.training.teachers import SampleReader, Teacher, answer_data

if TYPE_CHECKING:
    from datasets import Dataset
    from transformers import PreTrainedModel

Weights = Mapping[str, Tensor]  # mapped from disk, by names in memory
_SAME = (
    "%s and %s are the same model as far as it is merged; list the base and every expert once, "
    "with all of its data"
)


@dataclass(frozen=True)
class ModelFolders:
    """Folders of all models, and what the models have in common.

    Attributes:
        processor: tokenizer, or image processor (or None).
    """

    base: str
    experts: tuple[str, ...]
    processor: Any
    kind: ModelKind

    @classmethod
    def find(cls, config: TrainConfig, run: TrainingRun) -> ModelFolders:
        """Find all models before anything is computed.

        Raises:
            TrainingError: one cannot be found or is quantised, or they have different tokenizers.
        """
        kind = model_kind(config.task)
        references = (config.base_model, *(expert.model for expert in config.models))
        # The first process downloads, and merges adapters.
        with run.accelerator.main_process_first():
            folders = [
                local_folder(reference, run.path / "adapters", config.trust_remote_code)
                for reference in references
            ]
        places = [os.path.realpath(folder) for folder in folders]
        for number, (reference, place) in enumerate(zip(references, places, strict=True)):
            if read_json(Path(place) / "config.json").get("quantization_config"):
                raise TrainingError(
                    f"model {reference} is quantised, so it cannot be merged; {DEQUANTISE}"
                )
            if place in places[:number]:
                raise TrainingError(_SAME % (reference, references[places.index(place)]))
        processor = load_processor(folders, kind, config)
        return cls(folders[0], tuple(folders[1:]), processor, kind)


class Family:
    """The base model with its experts, mapped from disk, and their labelled data.

    One model is loaded after the other, and what is not labelled yet is.

    Attributes:
        module: the model that the merge is written into; holds the base at first.
        stored: names on disk of the L merged parameters, by their names in memory, input first.
        base, experts: weights.
        components: of the experts in a merge, and of its refinement, where the basis is that.
        teachers: the experts, and last the base if there is a rehearsal, with their data.

    Raises:
        TrainingError: models do not fit together, or data cannot be used.
    """

    def __init__(self, config: TrainConfig, folders: ModelFolders, run: TrainingRun):
        self.config, self.folders, self.run = config, folders, run
        self.experts: list[Weights] = []
        self.teachers: list[Teacher] = []
        base = load_model(folders.base, folders.kind, config)
        self.stored = self._find_parameters(base)
        # All of them now: mistakes in them show before the first answer.
        rows = {
            row: load_rows(data, config.training.seed)
            for row, (_, data) in enumerate(config.sources)
            if run.is_main and not run.file(f"labels-{row}").exists()
        }
        self.base = self._map_weights(base, None)
        statistics = []
        for row, path in enumerate(folders.experts):
            expert = load_model(path, folders.kind, config, whole=True)
            self.experts.append(self._map_weights(expert, row))
            self._check_difference()
            statistics.append(running_statistics(expert))
            self.teachers.append(self._label(expert, row, rows))
            del expert
        if config.rehearsal is not None:
            self.teachers.append(self._label(base, len(self.experts), rows))
        dtype = getattr(torch, config.dtype)
        # Loaded anew where the dtype differs: `to` would round the buffers of rotary embeddings.
        if config.device_map is not None or base.dtype != dtype:
            del base  # before its successor takes memory
            placed = {"device_map": config.device_map}
            base = load_model(folders.base, folders.kind, config, dtype, **placed)
        average_statistics(base, statistics)
        self.components = None
        if config.basis != "task_vector":
            with run.accelerator.main_process_first():
                self.components = write_components(self)
        if any(parameter.is_meta for parameter in base.parameters()):
            raise TrainingError(
                f"the base model {config.base_model} does not fit into the memory of all GPUs "
                "together; try dtype: bfloat16"
            )
        self.module = base.to(run.accelerator.device) if config.device_map is None else base

    def _find_parameters(self, base: PreTrainedModel) -> dict[str, tuple[str, ...]]:
        """Return the merged parameters with their names on disk, once all models have them."""
        config, folders, kind = self.config, self.folders, self.folders.kind
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

    def _map_weights(self, model: PreTrainedModel, row: int | None) -> Weights:
        """Map the weights of an expert, or the base (None); keep the backbone of a classifier."""
        folders, run = self.folders, self.run
        path = folders.base if row is None else folders.experts[row]
        copy = run.state / ("base.safetensors" if row is None else f"expert-{row}.safetensors")
        with run.accelerator.main_process_first():  # the first one writes a copy, if it is needed
            weights = map_weights(model, self.names, path, copy)
        for name, tensor in weights.items():
            if not is_finite(tensor):
                raise TrainingError(
                    f"tensor {name} of model {path} contains NaN or Inf; the checkpoint overflowed "
                    "or is damaged: leave it out"
                )
        if folders.kind.has_heads and run.is_main:
            save_backbone(model, run.backbone(row))
        return weights

    def _check_difference(self) -> None:
        """Raise unless the last expert differs from the base, and from all experts before it."""
        models = [self.config.base_model, *(expert.model for expert in self.config.models)]
        *others, last = self.base, *self.experts
        for other, known in zip(models, others, strict=False):
            if all(torch.equal(tensor, known[key]) for key, tensor in last.items()):
                raise TrainingError(_SAME % (models[len(others)], other))

    def _label(
        self, model: PreTrainedModel, row: int, rows: Mapping[int, Mapping[str, Dataset]]
    ) -> Teacher:
        """Let a teacher answer its data, unless it has; the base has the last number."""
        config, folders, run = self.config, self.folders, self.run
        name, data = config.sources[row]
        head = head_modules(model, folders.kind, data, folders.base)

        def answer() -> tuple[dict[str, Tensor], float | None]:
            if config.device_map is None:
                teacher = model.to(run.accelerator.device)
            else:
                folder = (*folders.experts, folders.base)[row]
                teacher = load_model(folder, folders.kind, config, device_map=config.device_map)
            reader = SampleReader(teacher, folders.kind, folders.processor, data)
            answers = answer_data(reader, rows[row], name, config, quiet=run.quiet)
            model.cpu()
            return answers

        samples, accuracy = run.once(f"labels-{row}", answer)
        return Teacher(name, unpack_examples(samples), accuracy, head)

    @property
    def names(self) -> list[str]:
        """Names in memory of the L merged parameters."""
        return list(self.stored)

    @cached_property
    def groups(self) -> Tensor:
        """Which coefficient each tensor has, (L,): 0 … G − 1, in order of appearance."""
        key = {"task": lambda _: "", "block": block_of, "kind": within_block, "tensor": str}[
            self.config.granularity
        ]
        keys = [key(name) for name in self.stored]
        numbers = {key: number for number, key in enumerate(dict.fromkeys(keys))}
        return torch.tensor([numbers[key] for key in keys])

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
        components = self.components or self.experts
        described = components
        if learner.statistics_of == "weights":
            described = self.experts + components[len(self.experts) :]
        minus_base = self.components is None and learner.statistics_of == "task_vector"
        total = len(described) * len(self.stored)
        bar = tqdm(total=total, desc="statistics", unit="tensor", disable=self.run.quiet)
        rows = []
        for weights in described:
            parts: list[list[WeightMoments]] = [[] for _ in range(int(self.groups.max()) + 1)]
            for group, name in zip(self.groups.tolist(), self.stored, strict=True):
                tensor = weights[name].float()
                tensor = tensor - self.base[name].float() if minus_base else tensor
                parts[group].append(measure_moments(tensor, learner.rank))
                bar.update()
            groups = [combine(part, learner.rank) if len(part) > 1 else part[0] for part in parts]
            rows.append([features(group, learner.statistics, learner.rank) for group in groups])
        bar.close()
        return torch.tensor(rows, dtype=torch.float64)
