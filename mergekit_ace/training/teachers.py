# SPDX-License-Identifier: Apache-2.0
"""Every expert answers its own data, once: the labels of the distillation (Sec. 3.3)."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor

from mergekit_ace.training.config import DataConfig, Labels
from mergekit_ace.training.data import SPLITS, Example, Examples, Rows
from mergekit_ace.training.language import Batch
from mergekit_ace.training.state import TrainingError
from mergekit_ace.training.tasks import Kind

if TYPE_CHECKING:
    from transformers import PreTrainedModel

T = TypeVar("T")
Progress = Callable[[Sequence[T], str], Iterable[T]]


def label_rows(
    teacher: PreTrainedModel,
    rows: Rows,
    data: DataConfig,
    kind: Kind,
    processor: Any,
    *,
    labels: Labels,
    top_k: int,
    batch_size: int,
    progress: Progress,
) -> dict[str, Examples]:
    """Inputs and labels of all splits.

    Args:
        teacher: the expert.
        rows, data: its data.
        kind, processor: how rows become inputs.
        labels: ``soft`` adds `soft_values` and `soft_indices`, (P, k), log-probabilities and their
            classes in descending order, to `hard`, (P,), the arg max.
        top_k: k, unless there are fewer classes.
        batch_size: samples at once.
        progress: wraps the list of batches, with a description.

    Raises:
        TrainingError: nothing usable is left of a split, or a true label is outside of the head.
    """
    splits = {}
    for split in SPLITS:
        encoded = [kind.encode(row, data, processor) for row in getattr(rows, split)]
        samples = [sample for sample in encoded if sample is not None]
        if not samples:
            raise TrainingError(
                f"data {data.path}: no {split} sample has anything to predict within max_length: "
                f"{data.max_length}"
            )
        labelled: list[Example] = []
        for batch in progress(_batches(samples, batch_size), split):
            open_ones = [sample for sample in batch if kind.unanswered(sample)]
            answered = [sample for sample in batch if not kind.unanswered(sample)]
            if open_ones:
                answered += kind.complete(teacher, open_ones, data, processor)
            labelled += _label(teacher, answered, kind, data, labels, top_k)
        splits[split] = Examples.pack(labelled)
        if labels == "true" and "true" not in splits[split].fields:
            raise TrainingError(
                f"labels: true, but not all {split} samples of data {data.path} have the truth"
            )
    return splits


def move(batch: Batch, device: torch.device) -> Batch:
    """A batch on a device."""
    return {name: tensor.to(device) for name, tensor in batch.items()}


@torch.no_grad()
def _label(
    teacher: PreTrainedModel,
    samples: Sequence[Example],
    kind: Kind,
    data: DataConfig,
    labels: Labels,
    top_k: int,
) -> list[Example]:
    logits = kind.logits(teacher, move(kind.collate(samples), teacher.device)).float()
    if not logits.isfinite().all():
        raise TrainingError(
            f"the expert of data {data.path} answers NaN or Inf; its checkpoint is damaged"
        )
    answers: dict[str, Tensor] = {"hard": logits.argmax(-1)}
    if labels == "soft":
        best = logits.log_softmax(-1).topk(min(top_k, logits.shape[-1]), dim=-1)
        answers |= {"soft_values": best.values, "soft_indices": best.indices}
    counts = [positions(sample) for sample in samples]
    parts = {name: answer.cpu().split(counts) for name, answer in answers.items()}
    classes = logits.shape[-1]
    labelled = []
    for n, sample in enumerate(samples):
        true = sample.get("true")
        if true is not None and not bool(((true >= 0) & (true < classes)).all()):
            raise TrainingError(
                f"data {data.path} has the label {int(true.max())}, but its expert knows only the "
                f"classes 0 to {classes - 1}"
            )
        labelled.append(sample | {name: part[n] for name, part in parts.items()})
    return labelled


def positions(sample: Example) -> int:
    """P, how many supervised positions a sample has."""
    if "target_ids" in sample:
        return len(sample["target_ids"])
    if "supervised" in sample:
        return int(sample["supervised"].sum())
    return 1


def _batches(samples: Sequence[Example], size: int) -> list[Sequence[Example]]:
    return [samples[start : start + size] for start in range(0, len(samples), size)]


def silent(items: Sequence[T], description: str) -> Iterator[T]:
    """A `Progress` that shows nothing."""
    return iter(items)
