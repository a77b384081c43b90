# SPDX-License-Identifier: Apache-2.0
"""The training loop: statistics to coefficients to a merge to a loss, and back.

A step in `train_learner`: the learner predicts λ, `Objective` writes the merge for it and returns
∂L/∂λ, Adam carries that back through the learner.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy
from tqdm import tqdm

from mergekit_ace.coefficients.learner import Learner, LearnerConfig, LearnerInputs
from mergekit_ace.files import write_text
from mergekit_ace.training.agreement import Agreement
from mergekit_ace.training.config import Labels, TrainConfig, TrainingConfig
from mergekit_ace.training.data import Examples, step_indices, to_device
from mergekit_ace.training.merged import MergedModel
from mergekit_ace.training.state import (
    Diverged,
    TrainingProgress,
    TrainingRun,
    restore_training,
    save_training,
)
from mergekit_ace.training.tasks import ModelKind, attach_head
from mergekit_ace.training.teachers import Teacher

# Under float16 small gradients vanish; they are scaled by this and the products scaled back.
FLOAT16_SCALE = 1024.0


@dataclass(frozen=True)
class TrainedLearner:
    """Result of a training: the kept network, its coefficients per group (K, G), its log."""

    learner: Learner
    coefficients: Tensor
    progress: TrainingProgress


def train_learner(
    objective: Objective, config: LearnerConfig, inputs: LearnerInputs, checkpoint: Path
) -> TrainedLearner:
    """Train a learner, or go on with one, and return it as it was at its best evaluation.

    Args:
        objective: the loss, its gradient and its evaluation.
        config: which learner.
        inputs: of the learner, for G groups of tensors.
        checkpoint: file that the state is kept in.

    Raises:
        Diverged: the loss became NaN or Inf; the checkpoint holds the best network so far.
    """
    settings, penalty = objective.config.training, objective.config.penalty
    torch.manual_seed(settings.seed)
    learner = Learner(config, *inputs.statistics.shape[:2])
    learner.standardizer.fit(inputs.statistics)
    start = config.start(len(inputs.statistics))
    state = LearnerState(learner, inputs, objective, checkpoint)
    progress = state.progress
    per_epoch = objective.steps_per_epoch
    total = min(settings.epochs * per_epoch, settings.max_steps or sys.maxsize)
    quiet = objective.run.quiet
    bar = tqdm(total=total, initial=progress.step, desc="training", unit="step", disable=quiet)
    if progress.step == 0:
        state.evaluate()  # the start counts: training never ends below it
    while progress.step < total and not progress.finished:
        rate = learning_rate(settings, progress.step, per_epoch, total)
        coefficients = learner(*inputs)  # (K, G)
        try:
            gradient, loss = objective.gradient(coefficients, progress.step)
        except Diverged as error:
            state.save()
            raise Diverged(
                f"{error}; the best network so far, of step {progress.best_step}, is kept in "
                f"{checkpoint}. Lower training.learning_rate, or look at that expert's data"
            ) from None
        away = coefficients.detach().double() - start
        gradient += 2 * penalty / away.numel() * away  # of penalty times the mean square
        state.update(coefficients, gradient, rate)
        progress.add_step(loss, rate)
        bar.update()
        bar.set_postfix(loss=f"{loss:.4f}", best=f"{progress.best_loss:.4f}")
        if progress.step % (settings.evaluate_every or per_epoch) == 0 or progress.step == total:
            state.evaluate()
            progress.finished = 0 < settings.patience <= progress.waited
        if progress.step % settings.checkpoint_every == 0:
            state.save()
    bar.close()
    progress.finished = True
    state.save()
    learner.load_state_dict(state.best)
    learner.eval().requires_grad_(False)
    return TrainedLearner(learner, learner(*inputs), progress)


class LearnerState:
    """All that changes while a learner is trained; goes on from its checkpoint if there is one.

    Attributes:
        learner, optimizer: the network, and Adam.
        best: state of the network at its best evaluation.
        progress: steps and evaluations so far.
    """

    def __init__(
        self, learner: Learner, inputs: LearnerInputs, objective: Objective, checkpoint: Path
    ):
        self.learner = learner
        rate = objective.config.training.learning_rate
        self.optimizer = torch.optim.Adam(learner.parameters(), lr=rate, foreach=False)
        self._inputs, self._objective, self._checkpoint = inputs, objective, checkpoint
        known = restore_training(checkpoint, learner, self.optimizer)
        self.progress, self.best = known or (TrainingProgress(), self._copy())

    def update(self, coefficients: Tensor, gradient: Tensor, rate: float) -> None:
        """Take one step of Adam along ∂L/∂λ, carried back through the network."""
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        self.optimizer.zero_grad()
        coefficients.backward(gradient.to(coefficients.dtype))
        self.optimizer.step()

    def evaluate(self) -> None:
        """Evaluate on the held-out split, and keep the network if it was never better."""
        with torch.no_grad():
            self._objective.write(self.learner(*self._inputs))
        score = self._objective.evaluate("validation")
        scores = {"validation_accuracy": score.mean_accuracy}
        if score.rehearsal is not None:
            scores["validation_rehearsal"] = score.rehearsal
        assert score.loss is not None
        if self.progress.add_evaluation(score.loss, **scores):
            self.best = self._copy()

    def save(self) -> None:
        """Write the checkpoint; the main process does."""
        if self._objective.run.is_main:
            save_training(self._checkpoint, self.learner, self.optimizer, self.progress, self.best)

    def _copy(self) -> dict[str, Tensor]:
        return {name: tensor.clone() for name, tensor in self.learner.state_dict().items()}


def learning_rate(settings: TrainingConfig, step: int, per_epoch: int, total: int) -> float:
    """Return the learning rate of one step, counted from 0; it depends on nothing else."""
    scheduler = settings.scheduler
    if scheduler.kind == "linear":
        return settings.learning_rate * (1 - step / total)
    return settings.learning_rate * scheduler.gamma ** (step // per_epoch // scheduler.step)


def write_log(path: Path, progress: TrainingProgress) -> None:
    """Write `training.jsonl`: a line per step and per evaluation."""
    write_text(path, "".join(json.dumps(line) + "\n" for line in progress.log))


@dataclass(frozen=True)
class Score:
    """Loss and accuracy of a merge on one split.

    Attributes:
        loss: mean over teachers of the mean loss per position, weighted as in training; None where
            it was not measured. Teachers are the experts, and last the base
            where it rehearses.
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


@dataclass
class Objective:
    """Loss of a merge on the teachers' data, as a function of its coefficients.

    Attributes:
        config, kind, run: of the training.
        merged: the model, its experts and the gradient of their coefficients.
        teachers: labelled data of every teacher.
        groups: (L,), which coefficient each tensor has.
    """

    config: TrainConfig
    kind: ModelKind
    run: TrainingRun
    merged: MergedModel
    teachers: Sequence[Teacher]
    groups: Tensor

    def __post_init__(self) -> None:
        settings = self.config.training
        self._batch = self.run.samples_per_step(settings)
        weights = torch.ones(len(self.teachers), dtype=torch.float64)
        if self.config.rehearsal is not None:
            weights[-1] = settings.rehearsal_weight * (len(weights) - 1)
        self._weights = weights / weights.sum()  # of each teacher's mean loss

    @property
    def steps_per_epoch(self) -> int:
        """Steps after which the largest data set has been seen once."""
        return -(-max(len(teacher.splits["train"]) for teacher in self.teachers) // self._batch)

    def write(self, coefficients: Tensor) -> None:
        """Put the merge for λ per group, (K, G), into the model."""
        self.merged.write(coefficients.detach()[:, self.groups])

    def gradient(self, coefficients: Tensor, step: int) -> tuple[Tensor, float]:
        """Return ∂L/∂λ, (K, G), and the loss of one step.

        The loss is the weighted mean over teachers of the mean over supervised positions.

        Raises:
            Diverged: the loss on the data of a teacher, or the gradient, is not a number.
        """
        self.write(coefficients)
        self.merged.clear()
        half = self.config.mixed_precision == "fp16" or self.config.dtype == "float16"
        scale = FLOAT16_SCALE if half else 1.0
        losses = torch.zeros(len(self.teachers), dtype=torch.float64)
        for row, (weight, teacher) in enumerate(zip(self._weights, self.teachers, strict=True)):
            examples, seed = teacher.splits["train"], self.config.training.seed
            indices = step_indices(seed, row, step, self._batch, len(examples))
            positions = sum(examples.length("hard", index) for index in indices)
            for part in self._share(indices):
                loss = self._loss(*self._answers(teacher, examples, part)) / positions
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

    @torch.no_grad()
    def evaluate(self, split: str) -> Score:
        """Return the score of the written merge on a split of every teacher's data."""
        totals = torch.zeros(len(self.teachers), 8, dtype=torch.float64)  # loss, and an agreement
        for row, teacher in enumerate(self.teachers):
            examples = teacher.splits[split]
            for part in self._share(list(range(len(examples)))):
                logits, labels = self._answers(teacher, examples, part)
                given = logits.squeeze(-1) if "numbers" in labels else logits.argmax(-1)
                totals[row, 0] += float(self._loss(logits, labels))
                totals[row, 1:] += Agreement.of(given, labels["target"]).sums
                del logits  # large: gone before the next ones are computed
        totals = self.run.sum(totals)
        mean = float((totals[:, 0] / totals[:, 1]) @ self._weights)
        shares = []
        for teacher, sums in zip(self.teachers, totals[:, 1:], strict=True):
            numbers = teacher.splits[split].fields["hard"][0].is_floating_point()
            agreement = Agreement(sums)
            shares.append(agreement.correlation if numbers else agreement.accuracy)
        rehearsal = None if self.config.rehearsal is None else shares.pop()
        return Score(mean, tuple(shares), rehearsal)

    def _loss(self, logits: Tensor, labels: dict[str, Tensor]) -> Tensor:
        """Return the loss of logits (P, C), summed over positions."""
        if self.config.loss == "entropy":
            return summed_entropy(logits)
        return summed_loss(logits, labels)

    def _share(self, indices: list[int]) -> list[list[int]]:
        return self.run.share(indices, self.config.training.batch_size)

    def _answers(
        self, teacher: Teacher, examples: Examples, indices: list[int]
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Return logits (P, C) of the merge on some samples, and their labels."""
        module = self.merged.module
        if teacher.head:
            attach_head(module, teacher.head)
        batch = self.kind.collate([examples[index] for index in indices])
        with self.run.accelerator.autocast():
            logits = self.kind.logits(module, to_device(batch, self.run.accelerator.device))
        labels = collate_labels(examples, indices, self.config.labels)
        return logits, to_device(labels, logits.device)


def collate_labels(examples: Examples, indices: list[int], labels: Labels) -> dict[str, Tensor]:
    """Lay the labels of some samples end to end, over their P positions.

    Returns:
        For ``hard`` and ``true`` labels `classes`, (P,); for ``soft`` ones `log_probabilities` and
        `classes`, (P, k). Of experts that answer with numbers: `numbers`, (P,). In `target`, (P,),
        what counts as right: the truth where it is known.
    """

    def gather(name: str) -> Tensor:
        return torch.cat([examples.field(name, index) for index in indices])

    target = gather("true" if "true" in examples.fields else "hard")
    if examples.fields["hard"][0].is_floating_point():
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
