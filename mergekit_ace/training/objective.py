# SPDX-License-Identifier: Apache-2.0
"""The training of coefficients: from statistics to λ to a merge to its loss, and back.

A step in `train_learner`: the learner predicts λ, `Objective` writes the merge for it and returns
∂L/∂λ, Adam carries that back through the learner.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import torch
from accelerate.utils import gather_object, send_to_device
from torch import Tensor
from torch.nn.functional import cross_entropy

from mergekit_ace.learner import Learner, LearnerConfig, LearnerInputs
from mergekit_ace.training.config import Labels, TrainingConfig
from mergekit_ace.training.data import Example, step_indices
from mergekit_ace.training.loop import ModuleTraining, TrainingProgress
from mergekit_ace.training.merged import MergedModel
from mergekit_ace.training.state import Diverged
from mergekit_ace.training.tasks import attach_head
from mergekit_ace.training.teachers import Teacher, agreement

if TYPE_CHECKING:
    from mergekit_ace.training.family import Family

# Under float16 small gradients vanish; they are scaled by this and the products scaled back.
FLOAT16_SCALE = 1024.0


@dataclass(frozen=True)
class TrainedLearner:
    """Result of a training: the kept network, what it reads, its λ per group (K, G), the log."""

    learner: Learner
    inputs: LearnerInputs
    coefficients: Tensor
    progress: TrainingProgress


def train_learner(
    objective: Objective, config: LearnerConfig, inputs: LearnerInputs, name: str
) -> TrainedLearner:
    """Train a learner, or go on with one, and return it as it was at its best evaluation.

    Args:
        inputs: of the learner, for G groups of tensors.
        name: of its files in the state of the run.

    Raises:
        Diverged: the loss became NaN or Inf; the best network so far is kept.
    """
    settings, penalty = objective.config.training, objective.config.penalty
    per_epoch = objective.steps_per_epoch
    torch.manual_seed(settings.seed)
    learner = Learner(config, *inputs.statistics.shape[:2])
    learner.standardizer.fit(inputs.statistics)
    optimizer = torch.optim.Adam(learner.parameters(), lr=settings.learning_rate, foreach=False)
    start = config.start(len(inputs.statistics))

    def evaluate() -> tuple[float, dict[str, float]]:
        with torch.no_grad():
            score = objective.score(learner(*inputs), "validation")
        scores = {"validation_accuracy": score.mean_accuracy}
        if score.rehearsal is not None:
            scores["validation_rehearsal"] = score.rehearsal
        return score.loss, scores

    def step(number: int) -> float:
        coefficients = learner(*inputs)  # (K, G)
        gradient, loss = objective.gradient(coefficients, number)
        away = coefficients.detach().double() - start
        gradient += 2 * penalty / away.numel() * away  # of penalty times the mean square
        optimizer.zero_grad()
        coefficients.backward(gradient.to(coefficients.dtype))
        optimizer.step()
        return loss

    training = ModuleTraining(name, objective.run, learner, optimizer, evaluate)
    if training.progress.step == 0:
        training.evaluate()  # the start counts: training never ends below it
    rate = partial(learning_rate, settings, per_epoch)
    training.run_steps(settings, per_epoch, rate, step, settings.patience)
    training.load_best()
    learner.eval().requires_grad_(False)
    return TrainedLearner(learner, inputs, learner(*inputs), training.progress)


def learning_rate(settings: TrainingConfig, per_epoch: int, step: int, total: int) -> float:
    """Return the learning rate of one step, counted from 0; it depends on nothing else."""
    scheduler = settings.scheduler
    if scheduler.kind == "linear":
        return settings.learning_rate * (1 - step / total)
    return settings.learning_rate * scheduler.gamma ** (step // per_epoch // scheduler.step)


@dataclass(frozen=True)
class Score:
    """Loss and accuracy of a merge on one split.

    Attributes:
        loss: mean over teachers (the experts, and the base where it rehearses) of the mean loss per
            position, weighted as in training; None where it was not measured.
        accuracy: share of right answers per expert, 0 to 1: against the truth where the data has
            it, else against the expert's own answers. Of numbers it is the correlation.
        rehearsal: likewise for the base's; None without rehearsal.
    """

    loss: float | None
    accuracy: tuple[float, ...]
    rehearsal: float | None = None

    @property
    def mean_accuracy(self) -> float:
        """Mean over experts."""
        return sum(self.accuracy) / len(self.accuracy)


class Objective:
    """Loss of a merge on the teachers' data, as a function of its coefficients.

    Attributes:
        merged: the model, its experts and the gradient of their coefficients.
        teachers: labelled data of every teacher.
        groups: (L,), which coefficient each tensor has.
    """

    def __init__(self, family: Family):
        self.config, self.run, self._kind = family.config, family.run, family.folders.kind
        self.teachers, self.groups = family.teachers, family.groups
        self.merged = MergedModel(
            family.module,
            family.base,
            family.components or family.experts,
            family.names,
            self.config.expert_storage,
            components=family.components is not None,
        )
        self._batch = self.run.samples_per_step(self.config.training)
        weights = torch.ones(len(self.teachers), dtype=torch.float64)
        if self.config.rehearsal is not None:
            weights[-1] = self.config.training.rehearsal_weight * (len(weights) - 1)
        self._weights = weights / weights.sum()  # of each teacher's mean loss

    @property
    def steps_per_epoch(self) -> int:
        """Steps after which the largest data set has been seen once."""
        return -(-max(len(teacher.splits["train"]) for teacher in self.teachers) // self._batch)

    def gradient(self, coefficients: Tensor, step: int) -> tuple[Tensor, float]:
        """Return ∂L/∂λ, (K, G), and the loss of one step.

        The loss is the weighted mean over teachers of the mean over supervised positions.

        Raises:
            Diverged: the loss on the data of a teacher, or the gradient, is not a number.
        """
        self.merged.write(coefficients[:, self.groups])
        self.merged.clear()
        half = self.config.mixed_precision == "fp16" or self.config.dtype == "float16"
        scale, settings = FLOAT16_SCALE if half else 1.0, self.config.training
        losses = torch.zeros(len(self.teachers), dtype=torch.float64)
        for row, (weight, teacher) in enumerate(zip(self._weights, self.teachers, strict=True)):
            examples = teacher.splits["train"]
            indices = step_indices(settings.seed, row, step, self._batch, len(examples))
            positions = sum(len(examples[index]["hard"]) for index in indices)
            for part in self.run.share(indices, settings.batch_size):
                samples = [examples[index] for index in part]
                loss = self._loss(*self._answers(teacher, samples)) / positions
                (scale * float(weight) * loss).backward()
                losses[row] += loss.detach().double().cpu()
            self.merged.collect()
        losses = self.run.sum(losses)
        gradient = self.run.sum(self.merged.products) / scale
        for teacher, loss in zip(self.teachers, losses.tolist(), strict=True):
            if not math.isfinite(loss):
                name = teacher.name
                raise Diverged(f"the loss on the data of {name} became {loss} in step {step}")
        if not gradient.isfinite().all():
            raise Diverged(f"the gradient became NaN or Inf in step {step}")
        grouped = torch.zeros(coefficients.shape, dtype=torch.float64)
        grouped.index_add_(1, self.groups, gradient)
        return grouped, float(losses @ self._weights)

    def score(self, coefficients: Tensor, split: str) -> Score:
        """Return the score of the merge for λ per group, (K, G), on a split."""
        self.merged.write(coefficients[:, self.groups])
        return self.evaluate(split)

    @torch.no_grad()
    def evaluate(self, split: str) -> Score:
        """Return the score of the written merge on a split of every teacher's data."""
        losses, shares = torch.zeros(len(self.teachers), dtype=torch.float64), []
        for row, teacher in enumerate(self.teachers):
            examples, answers = teacher.splits[split], []
            indices = list(range(len(examples)))
            for part in self.run.share(indices, self.config.training.batch_size):
                logits, labels = self._answers(teacher, [examples[index] for index in part])
                losses[row] += float(self._loss(logits, labels))
                given = logits.float().squeeze(-1) if "numbers" in labels else logits.argmax(-1)
                answers.append(torch.stack((given, labels["target"])).cpu())  # numbers, or classes
                del logits  # large: gone before the next ones are computed
            given, wanted = torch.cat(gather_object(answers), dim=1)
            losses[row] /= len(given)
            shares.append(agreement(given, wanted))
        mean = float(self.run.sum(losses) @ self._weights)
        rehearsal = None if self.config.rehearsal is None else shares.pop()
        return Score(mean, tuple(shares), rehearsal)

    def _loss(self, logits: Tensor, labels: dict[str, Tensor]) -> Tensor:
        """Return the loss of logits (P, C), summed over positions."""
        if self.config.loss == "entropy":
            return summed_entropy(logits)
        return summed_loss(logits, labels)

    def _answers(
        self, teacher: Teacher, samples: Sequence[Example]
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Return logits (P, C) of the merge on some samples, and their labels."""
        module = self.merged.module
        if teacher.head:
            attach_head(module, teacher.head)
        batch = self._kind.collate(samples)
        with self.run.accelerator.autocast():
            logits = self._kind.logits(module, send_to_device(batch, self.run.accelerator.device))
        kind = self.config.labels_of(dict(self.config.sources)[teacher.name])
        labels = collate_labels(samples, kind)
        return logits, send_to_device(labels, logits.device)


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
    return {
        "log_probabilities": gather("soft_values"),
        "classes": gather("soft_indices"),
        "target": target,
    }


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
