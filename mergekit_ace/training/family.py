# SPDX-License-Identifier: Apache-2.0
"""The base model with its experts and their labelled data: everything known before training."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from tqdm import tqdm

from mergekit_ace.coefficients.learner import LearnerInputs
from mergekit_ace.coefficients.statistics import WeightMoments, combine, features, measure_moments
from mergekit_ace.headers import read_json
from mergekit_ace.methods.inputs import is_finite
from mergekit_ace.naming import block_of, relative_depths, within_block
from mergekit_ace.preflight.dtype_rules import DEQUANTISE
from mergekit_ace.training.basis import write_components
from mergekit_ace.training.config import TrainConfig
from mergekit_ace.training.limits import check_classes
from mergekit_ace.training.loop import Objective
from mergekit_ace.training.mapped_weights import check_stored_dtypes, map_weights, stored_names
from mergekit_ace.training.merged import MergedModel
from mergekit_ace.training.models import (
    check_expert,
    load_model,
    load_processor,
    load_skeleton,
    local_folder,
    merged_parameters,
    save_backbone,
)
from mergekit_ace.training.normalisation import average_statistics, running_statistics
from mergekit_ace.training.state import TrainingError, TrainingRun, load_checkpoint, save_checkpoint
from mergekit_ace.training.tasks import ModelKind, head_modules, model_kind
from mergekit_ace.training.teachers import (
    Teacher,
    labels_path,
    read_unlabelled_rows,
    write_labels,
)
from mergekit_ace.training.zero_shot import attach_zero_shot_head

if TYPE_CHECKING:
    from datasets import Dataset
    from transformers import PreTrainedModel

Weights = Mapping[str, Tensor]  # mapped from disk, by names in memory


@dataclass(frozen=True)
class ModelFolders:
    """Folders of all models, and what the models have in common.

    Attributes:
        base, experts: folders.
        processor: tokenizer, or image processor (or None).
        kind: how they are used.
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
            base, *experts = (
                local_folder(reference, run.path / "adapters", config.trust_remote_code)
                for reference in references
            )
        for reference, folder in zip(references, (base, *experts), strict=True):
            if read_json(Path(folder) / "config.json").get("quantization_config"):
                raise TrainingError(
                    f"model {reference} is quantised, so it cannot be merged; {DEQUANTISE}"
                )
        places = [os.path.realpath(folder) for folder in (base, *experts)]
        for place, expert in zip(places[1:], config.models, strict=True):
            if place == places[0]:
                raise TrainingError(
                    f"expert {expert.model} is the base model; list what was fine-tuned from it"
                )
            if places.count(place) > 1:
                raise TrainingError(
                    f"expert {expert.model} is listed twice; list it once, with all of its data"
                )
        return cls(base, tuple(experts), load_processor([base, *experts], kind, config), kind)


@dataclass
class Family:
    """The base model with its experts, mapped from disk, and their labelled data.

    Attributes:
        config, folders: what it was made of.
        module: the model that the merge is written into; holds the base at first.
        stored: names on disk of the L merged parameters, by their names in memory, input first.
        base, experts: weights.
        components: of the experts in a merge, and of its refinement, where the basis is that.
        teachers: the experts, and last the base if there is a rehearsal, with their data.
    """

    config: TrainConfig
    folders: ModelFolders
    module: PreTrainedModel
    stored: dict[str, tuple[str, ...]]
    base: Weights
    experts: list[Weights]
    components: list[Weights] | None
    teachers: list[Teacher]

    @classmethod
    def prepare(cls, config: TrainConfig, folders: ModelFolders, run: TrainingRun) -> Family:
        """Load one model after the other, and label what is not labelled yet.

        Raises:
            TrainingError: models do not fit together, or data cannot be used.
        """
        base = load_model(folders.base, folders.kind, config)
        stored = _find_parameters(config, folders, base)
        rows = read_unlabelled_rows(config, run)  # mistakes in them show before the first answer
        base_weights = _map_model(base, stored, folders, run, None)
        experts, statistics, teachers = [], [], []
        for row, path in enumerate(folders.experts):
            expert = load_model(path, folders.kind, config, whole=True)
            experts.append(_map_model(expert, stored, folders, run, row))
            _check_difference(config, base_weights, experts)
            statistics.append(running_statistics(expert))
            teachers.append(_label(expert, config, folders, run, row, rows))
            del expert
        if config.rehearsal is not None:
            teachers.append(_label(base, config, folders, run, len(experts), rows))
        dtype = getattr(torch, config.dtype)
        # Loaded anew where the dtype differs: `to` would round the buffers of rotary embeddings.
        if config.device_map is not None or base.dtype != dtype:
            del base  # before its successor takes memory
            base = load_model(
                folders.base, folders.kind, config, dtype, device_map=config.device_map
            )
        average_statistics(base, statistics)
        components = None
        if config.basis != "task_vector":
            with run.accelerator.main_process_first():
                components = write_components(
                    config, folders.base, stored, base_weights, experts, run
                )
        return cls(
            config=config,
            folders=folders,
            module=_on_device(base, config, run),
            stored=stored,
            base=base_weights,
            experts=experts,
            components=components,
            teachers=teachers,
        )

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

    def objective(self, run: TrainingRun) -> Objective:
        """Return the loss of the merge on the teachers' data."""
        merged = MergedModel(
            self.module,
            self.base,
            self.components or self.experts,
            self.names,
            self.config.expert_storage,
            components=self.components is not None,
        )
        return Objective(self.config, self.folders.kind, run, merged, self.teachers, self.groups)

    def learner_inputs(self, run: TrainingRun) -> LearnerInputs:
        """Measure statistics and depth of each group, or read what was measured before."""
        path = run.state / "statistics.safetensors"
        run.make_once(path, lambda: save_checkpoint(path, {"statistics": self._measure(run)}, {}))
        known = load_checkpoint(path)
        assert known is not None
        by_name = relative_depths(name for name, _ in self.module.named_parameters())
        depths = torch.tensor([by_name[name] for name in self.stored])
        counts = self.groups.bincount()
        grouped = torch.zeros(len(counts)).index_add_(0, self.groups, depths) / counts
        return LearnerInputs(known[0]["statistics"], grouped)

    def _measure(self, run: TrainingRun) -> Tensor:
        """Measure the statistics of every group, (K, G, F)."""
        learner = self.config.learner
        described = list(self._described())
        total = len(described) * len(self.stored)
        bar = tqdm(total=total, desc="statistics", unit="tensor", disable=run.quiet)
        rows = []
        for weights in described:
            parts: list[list[WeightMoments]] = [[] for _ in range(int(self.groups.max()) + 1)]
            for group, name in zip(self.groups.tolist(), self.stored, strict=True):
                tensor = weights[name].float()
                if self.components is None and learner.statistics_of == "task_vector":
                    tensor = tensor - self.base[name].float()
                parts[group].append(measure_moments(tensor, learner.rank))
                bar.update()
            groups = [combine(part, learner.rank) if len(part) > 1 else part[0] for part in parts]
            rows.append([features(group, learner.statistics, learner.rank) for group in groups])
        bar.close()
        return torch.tensor(rows, dtype=torch.float64)

    def _described(self) -> list[Weights]:
        """Return what statistics are of, per row: a refinement has no weights but its component."""
        components = self.components or []
        if self.config.learner.statistics_of == "weights":
            return self.experts + components[len(self.experts) :]
        return components or self.experts


def _find_parameters(
    config: TrainConfig, folders: ModelFolders, base: PreTrainedModel
) -> dict[str, tuple[str, ...]]:
    """Return the merged parameters with their names on disk, once all models have them.

    Raises:
        TrainingError: the base lacks one on disk, or an expert has another one.
    """
    names = merged_parameters(base, folders.kind, config.exclude)
    stored = stored_names(base, names, folders.base)
    missing = [name for name, known in stored.items() if not known]
    if missing:
        raise TrainingError(
            f"the base model {folders.base} has no {missing[0]} on disk"
            + (f" (nor {len(missing) - 1} others)" if len(missing) > 1 else "")
            + "; leave such tensors out by `exclude`, or use the base that the experts come from"
        )
    check_stored_dtypes(config.base_model, folders.base, stored)
    for expert, path in zip(config.models, folders.experts, strict=True):
        check_stored_dtypes(expert.model, path, stored)
        skeleton = load_skeleton(path, folders.kind, config)
        check_expert(skeleton, base, names, folders.kind, expert.model)
        if folders.kind.has_heads:
            answers = config.loss == "answers"  # the entropy of a number is 0
            check_classes(skeleton.config, f"expert {expert.model}", regression=answers)
    return stored


def _check_difference(config: TrainConfig, base: Weights, experts: Sequence[Weights]) -> None:
    """Raise unless the last expert differs from the base, and from all experts before it."""
    *others, last = experts
    name = config.models[len(others)].model
    if _is_same(last, base):
        raise TrainingError(
            f"expert {name} does not differ from the base model in anything that is merged; leave "
            "it out, or get the fine-tuned model"
        )
    for other, expert in zip(others, config.models, strict=False):
        if _is_same(last, other):
            raise TrainingError(
                f"the experts {expert.model} and {name} are the same model; list it once, with all "
                "of its data"
            )


def _is_same(one: Weights, other: Weights) -> bool:
    return all(torch.equal(tensor, other[name]) for name, tensor in one.items())


def _map_model(
    model: PreTrainedModel,
    names: Iterable[str],
    folders: ModelFolders,
    run: TrainingRun,
    expert: int | None,
) -> Weights:
    """Map the weights of an expert, or of the base (None); keep the backbone of a classifier."""
    path = folders.base if expert is None else folders.experts[expert]
    copy = run.state / ("base.safetensors" if expert is None else f"expert-{expert}.safetensors")
    with run.accelerator.main_process_first():  # the first one writes a copy, if one is needed
        weights = map_weights(model, names, path, copy)
    for name, tensor in weights.items():
        if not is_finite(tensor):
            raise TrainingError(
                f"tensor {name} of model {path} contains NaN or Inf; the checkpoint overflowed or "
                "is damaged: leave it out"
            )
    if folders.kind.has_heads and run.is_main:
        save_backbone(model, run.backbone(expert))
    return weights


def _label(
    model: PreTrainedModel,
    config: TrainConfig,
    folders: ModelFolders,
    run: TrainingRun,
    row: int,
    rows: Mapping[int, Mapping[str, Dataset]],
) -> Teacher:
    """Let a teacher answer its data, unless it has; `row` is its number, that of the base last."""
    path = labels_path(run, row)
    name, data = config.sources[row]
    if data.prompts is None:
        head = head_modules(model, folders.kind)
    else:
        head = attach_zero_shot_head(model, folders.base, data.prompts)

    def write() -> None:
        if config.device_map is None:
            teacher = model.to(run.accelerator.device)
        else:
            folder = (*folders.experts, folders.base)[row]
            teacher = load_model(folder, folders.kind, config, device_map=config.device_map)
        kind, processor = folders.kind, folders.processor
        write_labels(path, teacher, rows[row], kind, processor, config, row, quiet=run.quiet)
        model.cpu()

    run.make_once(path, write)
    return Teacher.load(name, path, head)


def _on_device(base: PreTrainedModel, config: TrainConfig, run: TrainingRun) -> PreTrainedModel:
    """Return the base on its device; under a device map it is there already.

    Raises:
        TrainingError: all GPUs together have too little memory.
    """
    if config.device_map is None:
        return base.to(run.accelerator.device)
    if any(parameter.is_meta for parameter in base.parameters()):
        raise TrainingError(
            f"the base model {config.base_model} does not fit into the memory of all GPUs "
            "together; try dtype: bfloat16"
        )
    return base
