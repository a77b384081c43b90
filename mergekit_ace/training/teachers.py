# SPDX-License-Identifier: Apache-2.0
"""Teachers answer their data once (Sec. 3.3), and how far a merge is from their answers.

Teachers are the experts and, for the rehearsal, the base model.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch
from accelerate.utils import send_to_device
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from tqdm import tqdm

from mergekit_ace.methods.base import is_finite
from mergekit_ace.training.config import DataConfig, Labels, TrainConfig
from mergekit_ace.training.data import Example, Examples, pack_examples
from mergekit_ace.training.state import TrainingError
from mergekit_ace.training.tasks import ModelKind, fit_to_model

if TYPE_CHECKING:
    from datasets import Dataset
    from transformers import PreTrainedModel

LOG = logging.getLogger(__name__)


@dataclass(frozen=True)
class Teacher:
    """Labelled data of an expert or, last of all, of the base that rehearses.

    Attributes:
        splits: samples with inputs and labels, by split.
        accuracy: of the teacher itself on its test split, 0 to 1; of one that answers with a number
            its correlation, −1 to 1; None without true labels.
        head: modules of a classifier by name, which go on the merged backbone for this data.
    """

    name: str
    splits: dict[str, Examples]
    accuracy: float | None
    head: dict[str, nn.Module]


@contextmanager
def explained_failures(model: PreTrainedModel, data: DataConfig) -> Iterator[None]:
    """Raise what a model says to its inputs as a `TrainingError` that names the data."""
    try:
        yield
    except (torch.OutOfMemoryError, TrainingError):
        raise
    except (ValueError, RuntimeError, IndexError, NotImplementedError) as error:
        raise TrainingError(
            f"data {data.path}: {model.name_or_path} cannot read its samples: {error}"
        ) from error


@dataclass(frozen=True)
class SampleReader:
    """A model with the data that it reads and answers.

    Attributes:
        model: on its device.
        kind, processor: how rows become its inputs, and these logits.
        given: the data as the config has it.
    """

    model: PreTrainedModel
    kind: ModelKind
    processor: Any
    given: DataConfig

    @cached_property
    def data(self) -> DataConfig:
        """The data, cut to the positions of the model."""
        return fit_to_model(self.given, self.model)

    def read(self, rows: Dataset, split: str, size: int, *, quiet: bool) -> list[Example]:
        """Return rows as complete samples; warn of what is cut off.

        Args:
            size: how many answers are written at once, where rows have none. Their samples come
                last.

        Raises:
            TrainingError: nothing is left, tokens have no embedding, or images differ in size.
        """
        data, kind = self.data, self.kind
        encoded = (kind.encode(row, data, self.processor) for row in rows)
        samples = [sample for sample in encoded if sample is not None]
        if not samples:
            raise TrainingError(
                f"data {data.path}: no {split} sample has anything to predict within max_length: "
                f"{data.max_length}"
            )
        lengths = [max(len(s.get(n, ())) for n in ("input_ids", "target_ids")) for s in samples]
        full, lost = sum(n >= data.max_length for n in lengths), len(rows) - len(samples)
        if full or lost:
            limit = f"max_length: {data.max_length}"
            if data.max_length < self.given.max_length:
                limit = f"the {data.max_length} positions of {self.model.name_or_path}"
            LOG.warning(
                "data %s: %d of %d %s samples fill %s, where longer texts are cut; %d have nothing "
                "to predict within it",
                data.path, full, len(rows), split, limit, lost,
            )  # fmt: skip
        self._check(samples)
        lacking = [sample for sample in samples if kind.writes and "true" not in sample]
        if not lacking:
            return samples
        complete = [sample for sample in samples if "true" in sample]
        for start in tqdm(range(0, len(lacking), size), "answers", unit="batch", disable=quiet):
            with explained_failures(self.model, data):
                part = lacking[start : start + size]
                complete += kind.complete(self.model, part, data, self.processor)
        return complete

    def logits(self, samples: Sequence[Example]) -> Tensor:
        """Return the logits of complete samples, (P, C).

        Raises:
            TrainingError: the model answers NaN or Inf, or cannot read the samples.
        """
        with explained_failures(self.model, self.data):
            batch = send_to_device(self.kind.collate(samples), self.model.device)
            logits = self.kind.logits(self.model, batch)
        if not is_finite(logits.detach()):
            raise TrainingError(
                f"expert {self.model.name_or_path} answers NaN or Inf to a sample of data "
                f"{self.data.path}; its checkpoint is damaged, or overflows in its dtype: leave it "
                "out"
            )
        return logits

    def _check(self, samples: Sequence[Example]) -> None:
        """Raise for tokens that the model has no embedding of, and for images of two sizes."""
        sizes = {tuple(s["pixel_values"].shape) for s in samples if "pixel_values" in s}
        if len(sizes) > 1:
            one, other = sorted(sizes)[:2]
            raise TrainingError(
                f"data {self.data.path}: column {self.data.image} holds images of different sizes, "
                f"{one[1:]} and {other[1:]}; bring all to the size that the model reads"
            )
        if any("input_ids" in sample for sample in samples):
            known = len(self.model.get_input_embeddings().weight)
            check_tokens(samples, self.data, self.model.name_or_path, known)


def check_tokens(samples: Sequence[Example], data: DataConfig, model: str, known: int) -> None:
    """Raise a `TrainingError` for tokens beyond the `known` embeddings of a model."""
    texts = [s[name] for name in ("input_ids", "target_ids") for s in samples if name in s]
    largest = max((int(ids.max()) for ids in texts if len(ids)), default=-1)
    if largest >= known:
        raise TrainingError(
            f"data {data.path}: the tokenizer has the token number {largest}, but {model} has only "
            f"{known} embeddings; use the tokenizer that belongs to the model"
        )


def answer_data(
    teacher: SampleReader,
    rows: Mapping[str, Dataset],
    name: str,
    config: TrainConfig,
    *,
    quiet: bool,
) -> tuple[dict[str, Tensor], float | None]:
    """Let a teacher answer its data; return the samples with its labels, packed.

    With them goes the accuracy of the teacher itself, see `Teacher`.

    Raises:
        TrainingError: nothing usable is left of a split, an answer is NaN or Inf, or a true label
            is outside of the head or missing where it is wanted.
    """
    size, splits = config.training.batch_size, {}
    for split, unlabelled in rows.items():
        samples = teacher.read(unlabelled, split, size, quiet=quiet)
        starts = range(0, len(samples), size)
        labelled: list[Example] = []
        for start in tqdm(starts, f"labels of {name}, {split}", unit="batch", disable=quiet):
            labelled += label_batch(teacher, samples[start : start + size], config)
        if config.labels == "true" and not all("true" in sample for sample in labelled):
            raise TrainingError(
                f"labels: true, but not all {split} samples of data {teacher.given.path} have the "
                "truth"
            )
        splits[split] = labelled
    accuracy, test = None, splits["test"]
    if all("true" in sample for sample in test):
        given, true = (torch.cat([sample[name] for sample in test]) for name in ("hard", "true"))
        accuracy = agreement(given, true)
    return pack_examples(splits), accuracy


@torch.no_grad()
def label_batch(
    teacher: SampleReader, samples: Sequence[Example], config: TrainConfig
) -> list[Example]:
    """Add to complete samples what the teacher answers at their P supervised positions.

    That is `hard`, (P,), the arg max or, of a teacher with a single output, that number. With soft
    labels it is `soft_values` and `soft_indices`, (P, k), too: the `top_k` highest
    log-probabilities and their classes, in descending order.
    """
    logits = teacher.logits(samples).float()
    classes = logits.shape[-1]
    answers = {"hard": logits.argmax(-1) if classes > 1 else logits.squeeze(-1)}
    if config.labels_of(teacher.given) == "soft" and classes > 1:
        best = logits.log_softmax(-1).topk(min(config.top_k, classes), dim=-1)
        answers |= {"soft_values": best.values, "soft_indices": best.indices}
    counts = [int(one["supervised"].sum()) if "supervised" in one else 1 for one in samples]  # P
    parts = {name: answer.cpu().split(counts) for name, answer in answers.items()}
    return [
        sample
        | _checked_truth(sample, classes, teacher.given)
        | {name: part[n] for name, part in parts.items()}
        for n, sample in enumerate(samples)
    ]


def _checked_truth(sample: Example, classes: int, data: DataConfig) -> Example:
    """Return `true` as the teacher's answers are: classes, or a number if it has one output.

    Raises:
        TrainingError: it is none of the teacher's classes, or no finite number.
    """
    true = sample.get("true")
    if true is None:
        return {}
    if classes == 1 and true.isfinite().all():
        return {"true": true.float()}
    if classes == 1:
        raise TrainingError(f"data {data.path} has a label that is NaN or Inf: leave it out")
    if true.is_floating_point():
        raise TrainingError(
            f"data {data.path} has the label {float(true[0])}; the labels of its expert are the "
            "numbers of its classes: 0, 1, …"
        )
    if int(true.min()) < 0 or int(true.max()) >= classes:
        raise TrainingError(
            f"data {data.path} has the label {int(true.max())}, but its expert knows only the "
            f"classes 0 to {classes - 1}"
        )
    return {"true": true}


def agreement(given: Tensor, wanted: Tensor) -> float:
    """Return how far answers agree with what was wanted.

    Args:
        given, wanted: (P,): classes, or numbers in floating point.

    Returns:
        The share of right answers, 0 to 1; of numbers, Pearson's correlation, −1 to 1, and 0 where
        one side is constant.
    """
    if not wanted.is_floating_point():
        return float((given == wanted).double().mean())
    if min(len(given.unique()), len(wanted.unique())) < 2:
        return 0.0
    return float(torch.corrcoef(torch.stack((given, wanted)).double())[0, 1])


def collate_labels(samples: Sequence[Example], labels: Labels) -> dict[str, Tensor]:
    """Lay the labels of some samples end to end, over their P positions.

    Returns:
        For ``hard`` and ``true`` labels `classes`, (P,); for ``soft`` ones `log_probabilities` and
        `classes`, (P, k). Of experts that answer with numbers: `numbers`, (P,). In `target`, (P,),
        what counts as right: the truth where it is known.
    """

    def gather(name: str) -> Tensor:
        return torch.cat([sample[name] for sample in samples])

    target = gather("true" if "true" in samples[0] else "hard")
    if target.is_floating_point():
        return {"numbers": gather("true" if labels == "true" else "hard"), "target": target}
    if labels != "soft":
        return {"classes": gather(labels), "target": target}
    log_probabilities, classes = gather("soft_values"), gather("soft_indices")
    return {"log_probabilities": log_probabilities, "classes": classes, "target": target}


def summed_loss(logits: Tensor, labels: dict[str, Tensor]) -> Tensor:
    """Return cross-entropy to hard labels (Eq. 7), or KL from teacher to merge (Eq. 32), summed.

    To numbers it is the square of the distance, which the paper does not treat.

    Args:
        logits: (P, C).
        labels: see `collate_labels`. Where only the k likeliest classes of the teacher are known,
            the rest of both distributions counts as one class more.
    """
    logits = logits.float()
    if "numbers" in labels:
        return (logits.squeeze(-1) - labels["numbers"]).square().sum()
    if "log_probabilities" not in labels:
        return cross_entropy(logits, labels["classes"], reduction="sum")
    merge = logits.log_softmax(-1).gather(-1, labels["classes"])
    teacher = labels["log_probabilities"]
    loss = (teacher.exp() * (teacher - merge)).sum()
    if labels["classes"].shape[-1] < logits.shape[-1]:
        teacher_rest, merge_rest = _log_rest(teacher), _log_rest(merge)
        loss = loss + (teacher_rest.exp() * (teacher_rest - merge_rest)).sum()
    return loss


def summed_entropy(logits: Tensor) -> Tensor:
    """Return the entropy of the distributions that logits (P, C) stand for, summed, in nats."""
    logarithms = logits.float().log_softmax(-1)
    return -(logarithms.exp() * logarithms).sum()


def _log_rest(log_probabilities: Tensor) -> Tensor:
    """Return the logarithm of the probability that the given classes leave, (P,)."""
    rest = 1 - log_probabilities.exp().sum(-1)
    return rest.clamp(min=torch.finfo(rest.dtype).eps).log()
