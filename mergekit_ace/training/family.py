# SPDX-License-Identifier: Apache-2.0
"""The base model with its experts and their data: everything that is known before training."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from tqdm import tqdm

from mergekit_ace.coefficients.statistics import WeightMoments, combine, features, measure_moments
from mergekit_ace.naming import block_of, relative_depths
from mergekit_ace.training.basis import write_components
from mergekit_ace.training.config import TrainConfig
from mergekit_ace.training.data import Rows, load_examples, load_rows, save_examples
from mergekit_ace.training.loop import Objective
from mergekit_ace.training.mapped_weights import MappedWeights, map_weights, stored_names
from mergekit_ace.training.merged import MergedModel
from mergekit_ace.training.models import (
    Heads,
    check_expert,
    load_model,
    load_processor,
    load_skeleton,
    local_folder,
    merged_parameters,
    save_backbone,
)
from mergekit_ace.training.state import RunFolder, TrainingError, load_checkpoint, save_checkpoint
from mergekit_ace.training.tasks import Kind, kind_of
from mergekit_ace.training.teachers import label_rows

if TYPE_CHECKING:
    from accelerate import Accelerator
    from transformers import PreTrainedModel


@dataclass(frozen=True)
class Models:
    """Where the models lie, and what they have in common.

    Attributes:
        base, experts: folders.
        processor: tokenizer, or image processor (or None).
        kind: what they do.
    """

    base: str
    experts: tuple[str, ...]
    processor: Any
    kind: Kind

    @classmethod
    def find(cls, config: TrainConfig, folder: RunFolder, accelerator: Accelerator) -> Models:
        """Find all models before anything is computed."""
        kind = kind_of(config.task)
        adapters = folder.path / "adapters"
        with accelerator.main_process_first():  # the first one downloads, and merges adapters
            base, *experts = (
                local_folder(reference, adapters, config.trust_remote_code)
                for reference in (config.base_model, *(expert.model for expert in config.models))
            )
        return cls(base, tuple(experts), load_processor([base, *experts], kind, config), kind)


@dataclass
class Family:
    """The base model with its experts, mapped from disk, and their labelled data.

    Attributes:
        config, models: what it was made of.
        module: the model that is written; holds the base at first.
        names: of the L merged parameters, input first.
        stored: under which names the base has them on disk.
        base, experts: their weights.
        parts: what the coefficients multiply, per row: the experts, or their components and that of
            a refinement.
        heads: of the experts.
        data: splits by expert, and last those of the rehearsal, if there is one.
        teachers: accuracy of each teacher on its own test split, None without true labels.
        groups: (L,), which coefficient each tensor has; 0 … G − 1.
    """

    config: TrainConfig
    models: Models
    module: PreTrainedModel
    names: list[str]
    stored: dict[str, tuple[str, ...]]
    base: MappedWeights
    experts: list[MappedWeights]
    parts: list[MappedWeights]
    heads: Heads
    data: list[dict]
    teachers: list[float | None]
    groups: Tensor

    @classmethod
    def prepare(
        cls,
        config: TrainConfig,
        models: Models,
        folder: RunFolder,
        accelerator: Accelerator,
        *,
        quiet: bool,
    ) -> Family:
        """Load one model after the other; label what is not labelled yet."""
        kind = models.kind
        base = load_model(models.base, kind, config)
        names = merged_parameters(base, kind, config.exclude)
        stored = stored_names(base, names, models.base)
        _check_base(stored, models.base)
        for expert, path in zip(config.models, models.experts, strict=True):
            check_expert(load_skeleton(path, kind, config), base, names, expert.model)
        rows = _unlabelled_rows(config, folder) if accelerator.is_main_process else {}
        with accelerator.main_process_first():  # the first one writes a copy, if one is needed
            weights = map_weights(base, names, models.base, folder.state / "base.safetensors")
        if kind.has_heads and accelerator.is_main_process:
            save_backbone(base, folder.backbone(None))
        experts, data, teachers, heads = [], [], [], Heads()

        def teach(row: int, path: str, model: PreTrainedModel) -> None:
            if row in rows:
                _label(config, models, path, model, row, rows, folder, accelerator, quiet=quiet)
            accelerator.wait_for_everyone()
            splits, metadata = load_examples(_labels(folder, row))
            data.append(splits)
            teachers.append(json.loads(metadata["accuracy"]))

        for row, path in enumerate(models.experts):
            model = load_model(path, kind, config)
            copy = folder.state / f"expert-{row}.safetensors"
            with accelerator.main_process_first():
                experts.append(map_weights(model, names, path, copy))
            if kind.has_heads and accelerator.is_main_process:
                save_backbone(model, folder.backbone(row))
            teach(row, path, model)
            heads.add(model, kind)
            del model
        if config.rehearsal is not None:
            teach(len(experts), models.base, base)
        dtype = getattr(torch, config.dtype)
        # Loaded anew where the dtype differs: `to` would round the buffers of rotary embeddings.
        if config.device_map is not None or base.dtype != dtype:
            del base
            base = load_model(models.base, kind, config, dtype, **_placement(config))
        if config.device_map is None:
            base = base.to(accelerator.device)
        elif any(parameter.is_meta for parameter in base.parameters()):
            raise TrainingError(
                f"the base model {config.base_model} does not fit into the memory of all GPUs "
                "together; try dtype: bfloat16"
            )
        parts = experts
        if config.basis != "task_vector":
            with accelerator.main_process_first():
                parts = write_components(
                    config,
                    models.base,
                    stored,
                    weights,
                    experts,
                    folder.state,
                    device=accelerator.device,
                    quiet=quiet,
                )
        groups = _groups(names, config)
        return cls(
            config,
            models,
            base,
            names,
            stored,
            weights,
            experts,
            parts,
            heads,
            data,
            teachers,
            groups,
        )

    @property
    def components(self) -> bool:
        """Whether `parts` are components, not experts."""
        return self.config.basis != "task_vector"

    def session(self, accelerator: Accelerator) -> Objective:
        """What training and evaluation work with."""
        config, storage = self.config, self.config.expert_storage
        merged = MergedModel(
            self.module, self.base, self.parts, self.names, storage, components=self.components
        )
        kind = self.models.kind
        return Objective(config, kind, accelerator, merged, self.heads, self.data, self.groups)

    def statistics(
        self, folder: RunFolder, accelerator: Accelerator, *, quiet: bool
    ) -> tuple[Tensor, Tensor]:
        """(K, G, F) in float64, and the relative depth of each group, (G,)."""
        path = folder.state / "statistics.safetensors"
        if accelerator.is_main_process and not path.exists():
            save_checkpoint(path, {"statistics": self._measure(quiet=quiet)}, {})
        accelerator.wait_for_everyone()
        known = load_checkpoint(path)
        assert known is not None
        by_name = relative_depths(name for name, _ in self.module.named_parameters())
        depths = torch.tensor([by_name[name] for name in self.names])
        counts = self.groups.bincount()
        grouped = torch.zeros(len(counts)).index_add_(0, self.groups, depths) / counts
        return known[0]["statistics"], grouped

    def _measure(self, *, quiet: bool) -> Tensor:
        learner = self.config.learner
        rank = learner.rank
        bar = tqdm(
            total=len(self.parts) * len(self.names),
            desc="statistics",
            unit="tensor",
            disable=quiet,
        )
        rows = []
        for weights in self._described():
            parts: list[list[WeightMoments]] = [[] for _ in range(int(self.groups.max()) + 1)]
            for group, name in zip(self.groups.tolist(), self.names, strict=True):
                tensor = weights[name].float()
                if learner.statistics_of == "task_vector" and not self.components:
                    tensor = tensor - self.base[name].float()
                parts[group].append(measure_moments(tensor, rank))
                bar.update()
            groups = [combine(part, rank) if len(part) > 1 else part[0] for part in parts]
            rows.append([features(group, learner.statistics, rank) for group in groups])
        bar.close()
        return torch.tensor(rows, dtype=torch.float64)

    def _described(self) -> list[MappedWeights]:
        """What statistics are taken of, per row; a refinement has no weights but its component."""
        if self.config.learner.statistics_of == "task_vector":
            return self.parts
        return self.experts + self.parts[len(self.experts) :]


def _unlabelled_rows(config: TrainConfig, folder: RunFolder) -> dict[int, Rows]:
    """The data of the teachers that have not answered yet, read before the first one does."""
    return {
        row: load_rows(data, config.training.seed)
        for row, (_, data) in enumerate(config.sources)
        if not _labels(folder, row).exists()
    }


def _labels(folder: RunFolder, row: int) -> Path:
    """Where the samples and labels of a teacher are kept."""
    return folder.state / f"labels-{row}.safetensors"


def _check_base(stored: dict[str, tuple[str, ...]], folder: str) -> None:
    missing = [name for name, known in stored.items() if not known]
    if missing:
        raise TrainingError(
            f"the base model {folder} has no {missing[0]} on disk"
            + (f" (nor {len(missing) - 1} others)" if len(missing) > 1 else "")
            + "; leave such tensors out by `exclude`, or use the base that the experts come from"
        )


def _label(
    config: TrainConfig,
    models: Models,
    path: str,
    model: PreTrainedModel,
    row: int,
    rows: dict[int, Rows],
    folder: RunFolder,
    accelerator: Accelerator,
    *,
    quiet: bool,
) -> None:
    name, data = config.sources[row]
    if config.device_map is None:
        model.to(accelerator.device)
    else:
        model = load_model(path, models.kind, config, **_placement(config))
    splits = label_rows(
        model,
        rows[row],
        data,
        models.kind,
        models.processor,
        labels=config.labels,
        top_k=config.top_k,
        batch_size=config.training.batch_size,
        progress=lambda batches, split: tqdm(
            batches, desc=f"labels of {name}, {split}", unit="batch", disable=quiet
        ),
    )
    if config.device_map is None:
        model.cpu()
    test = splits["test"]
    accuracy = None
    if "true" in test.fields:
        accuracy = float((test.fields["true"][0] == test.fields["hard"][0]).float().mean())
    save_examples(splits, _labels(folder, row), {"accuracy": json.dumps(accuracy)})


def _placement(config: TrainConfig) -> dict[str, Any]:
    """How transformers shall place a model."""
    return {} if config.device_map is None else {"device_map": config.device_map}


def _groups(names: Sequence[str], config: TrainConfig) -> Tensor:
    """Which coefficient each tensor has, numbered in order of appearance."""
    if config.granularity == "task":
        keys = [""] * len(names)
    elif config.granularity == "block":
        keys = [block_of(name) for name in names]
    else:
        keys = list(names)
    numbers = {key: number for number, key in enumerate(dict.fromkeys(keys))}
    return torch.tensor([numbers[key] for key in keys])
