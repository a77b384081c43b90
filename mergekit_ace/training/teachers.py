# SPDX-License-Identifier: Apache-2.0
"""Labels: every expert, and the base for the rehearsal, answers its own data once (Sec. 3.3)."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from tqdm import tqdm

from mergekit_ace.training.agreement import Agreement
from mergekit_ace.training.config import DataConfig, Labels, TrainConfig
from mergekit_ace.training.data import (
    Example,
    Examples,
    load_examples,
    load_rows,
    save_examples,
    to_device,
)
from mergekit_ace.training.limits import (
    check_samples,
    explained_failures,
    fit_to_model,
    warn_of_cuts,
)
from mergekit_ace.training.state import TrainingError, TrainingRun
from mergekit_ace.training.tasks import ModelKind

if TYPE_CHECKING:
    from datasets import Dataset
    from transformers import PreTrainedModel

LOG = logging.getLogger(__name__)
_NO_LIMIT = 2**31 - 1  # tokens


@dataclass(frozen=True)
class Teacher:
    """Labelled data of an expert or, last of all, of the base that rehearses.

    Attributes:
        name: of its data, for the user.
        splits: samples with inputs and labels, by split.
        accuracy: of the teacher itself on its test split, 0 to 1; of one that answers with a number
            its correlation, −1 to 1; None without true labels.
        head: modules of a classifier by name, which go on the merged backbone for this data.
    """

    name: str
    splits: dict[str, Examples]
    accuracy: float | None
    head: dict[str, nn.Module] = field(default_factory=dict)

    @classmethod
    def load(cls, name: str, path: Path, head: dict[str, nn.Module]) -> Teacher:
        """Open the labels at `path`, memory-mapped."""
        splits, metadata = load_examples(path)
        return cls(name, splits, json.loads(metadata["accuracy"]), head)


def labels_path(run: TrainingRun, row: int) -> Path:
    """Return where the samples and labels of a teacher are kept."""
    return run.state / f"labels-{row}.safetensors"


def read_unlabelled_rows(config: TrainConfig, run: TrainingRun) -> dict[int, dict[str, Dataset]]:
    """Read the data of the teachers that have not answered yet, before the first one does."""
    if not run.is_main:
        return {}
    return {
        row: load_rows(data, config.training.seed)
        for row, (_, data) in enumerate(config.sources)
        if not labels_path(run, row).exists()
    }


def write_labels(
    path: Path,
    teacher: PreTrainedModel,
    rows: Mapping[str, Dataset],
    kind: ModelKind,
    processor: Any,
    config: TrainConfig,
    row: int,
    *,
    quiet: bool,
) -> None:
    """Let a teacher answer its data, and write the samples with its labels.

    Args:
        path: where to.
        teacher: the model, on its device.
        rows: its data, by split.
        kind, processor: how rows become inputs.
        config: of the training.
        row: number of the teacher in `config.sources`.
        quiet: no progress bar.

    Raises:
        TrainingError: nothing usable is left of a split, an answer is NaN or Inf, or a true label
            is outside of the head or missing where it is wanted.
    """
    name, given = config.sources[row]
    data = fit_to_model(given, teacher)
    splits = {}
    for split, unlabelled in rows.items():
        samples = encode_rows(unlabelled, split, data, kind, processor)
        check_samples(samples, data, teacher)
        warn_of_cuts(samples, given, data, teacher)
        size = config.training.batch_size
        batches = [samples[start : start + size] for start in range(0, len(samples), size)]
        labelled: list[Example] = []
        for batch in tqdm(batches, f"labels of {name}, {split}", unit="batch", disable=quiet):
            lacking = [sample for sample in batch if kind.needs_completion(sample)]
            complete = [sample for sample in batch if not kind.needs_completion(sample)]
            with explained_failures(data, teacher):
                if lacking:
                    complete += kind.complete(teacher, lacking, data, processor)
                labelled += label_batch(teacher, complete, kind, data, config.labels, config.top_k)
        splits[split] = Examples.pack(labelled)
        if config.labels == "true" and "true" not in splits[split].fields:
            raise TrainingError(
                f"labels: true, but not all {split} samples of data {data.path} have the truth"
            )
    save_examples(splits, path, {"accuracy": json.dumps(_accuracy(splits["test"]))})


def encode_rows(
    rows: Dataset, split: str, data: DataConfig, kind: ModelKind, processor: Any
) -> list[Example]:
    """Return rows as samples, and warn where `max_length` cuts off what is to be predicted.

    Raises:
        TrainingError: nothing is left.
    """
    samples, cut = [], 0
    for row in rows:
        sample = kind.encode(row, data, processor)
        cut += _is_cut(sample, row, data, kind, processor)
        if sample is not None:
            samples.append(sample)
    if cut and samples:
        LOG.warning(
            "data %s: %d of %d %s samples are cut at max_length: %d, with some or all of what is "
            "to be predicted",
            data.path, cut, len(rows), split, data.max_length,
        )  # fmt: skip
    if not samples:
        raise TrainingError(
            f"data {data.path}: no {split} sample has anything to predict within max_length: "
            f"{data.max_length}"
        )
    return samples


def _is_cut(
    sample: Example | None, row: dict[str, Any], data: DataConfig, kind: ModelKind, processor: Any
) -> bool:
    """Return whether a sample has less to predict than it would have without `max_length`."""
    if kind.has_heads:
        return False
    lengths = [len(sample[name]) for name in ("input_ids", "target_ids") if name in (sample or {})]
    if lengths and max(lengths) < data.max_length:
        return False
    whole = kind.encode(row, data.model_copy(update={"max_length": _NO_LIMIT}), processor)
    if whole is None:
        return False
    return sample is None or count_positions(sample) < count_positions(whole)


@torch.no_grad()
def label_batch(
    teacher: PreTrainedModel,
    samples: Sequence[Example],
    kind: ModelKind,
    data: DataConfig,
    labels: Labels,
    top_k: int,
) -> list[Example]:
    """Add to samples what the teacher answers at their P supervised positions.

    Args:
        teacher: the model, on its device.
        samples: complete ones.
        kind: how samples become logits.
        data: theirs.
        labels: ``soft`` adds `soft_values` and `soft_indices`, (P, k), log-probabilities and their
            classes in descending order, to `hard`, (P,), the arg max. Of a teacher with a single
            output, `hard` is that number.
        top_k: k, unless there are fewer classes.
    """
    batch = to_device(kind.collate(samples), teacher.device)
    logits = kind.logits(teacher, batch).float()
    if not logits.isfinite().all():
        raise TrainingError(
            f"the expert of data {data.path} answers NaN or Inf; its checkpoint is damaged"
        )
    classes = logits.shape[-1]
    if classes == 1:
        return _label_with_numbers(samples, logits.squeeze(-1).cpu(), data)
    answers: dict[str, Tensor] = {"hard": logits.argmax(-1)}
    if labels == "soft":
        best = logits.log_softmax(-1).topk(min(top_k, classes), dim=-1)
        answers |= {"soft_values": best.values, "soft_indices": best.indices}
    counts = [count_positions(sample) for sample in samples]
    parts = {name: answer.cpu().split(counts) for name, answer in answers.items()}
    for sample in samples:
        true = sample.get("true")
        if true is not None and true.is_floating_point():
            raise TrainingError(
                f"data {data.path} has the label {float(true[0])}; the labels of its expert are "
                "the numbers of its classes: 0, 1, …"
            )
        if true is not None and not bool(((true >= 0) & (true < classes)).all()):
            raise TrainingError(
                f"data {data.path} has the label {int(true.max())}, but its expert knows only the "
                f"classes 0 to {classes - 1}"
            )
    return [
        sample | {name: part[n] for name, part in parts.items()} for n, sample in enumerate(samples)
    ]


def _label_with_numbers(
    samples: Sequence[Example], numbers: Tensor, data: DataConfig
) -> list[Example]:
    """Add to samples the number, (B,), that the teacher says of each; the truth is one, too."""
    labelled = []
    for sample, number in zip(samples, numbers, strict=True):
        true = {"true": sample["true"].float()} if "true" in sample else {}
        if true and not true["true"].isfinite().all():
            raise TrainingError(f"data {data.path} has a label that is NaN or Inf: leave it out")
        labelled.append(sample | {"hard": number[None]} | true)
    return labelled


def count_positions(sample: Example) -> int:
    """Return P, the number of supervised positions of a sample."""
    if "target_ids" in sample:
        return len(sample["target_ids"])
    if "supervised" in sample:
        return int(sample["supervised"].sum())
    return 1


def _accuracy(examples: Examples) -> float | None:
    """Return the share of right answers, or the correlation of numbers; None without the truth."""
    if "true" not in examples.fields:
        return None
    true, given = examples.fields["true"][0], examples.fields["hard"][0]
    if given.is_floating_point():
        return Agreement.of(given, true).correlation
    return float((true == given).float().mean())
