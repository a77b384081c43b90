# SPDX-License-Identifier: Apache-2.0
"""`mergekit-ace train`: from statistics to coefficients λ to a merge to its loss, and back.

In each step of `train_learner` the learner predicts λ, `Objective` writes the merge for it and
returns ∂L/∂λ, and Adam carries that back through the learner.
"""

from __future__ import annotations

import os
from functools import partial

import torch
from accelerate.utils import gather_object, send_to_device
from torch import Tensor

from mergekit_ace.algebra.learner import Learner, LearnerInputs
from mergekit_ace.methods.coefficients import CoefficientFile
from mergekit_ace.training.config import TrainConfig, TrainingConfig
from mergekit_ace.training.data import Example, step_indices
from mergekit_ace.training.family import Family, load_family
from mergekit_ace.training.merged import MergedModel
from mergekit_ace.training.models import ModelFolders
from mergekit_ace.training.results import Score, TrainedLearner, coefficient_file, write_results
from mergekit_ace.training.state import ModuleTraining, TrainingError, TrainingRun
from mergekit_ace.training.tasks import attach_head
from mergekit_ace.training.teachers import (
    Teacher,
    agreement,
    collate_labels,
    summed_entropy,
    summed_loss,
)

# Under float16 small gradients vanish; they are scaled by this and the products scaled back.
FLOAT16_SCALE = 1024.0


def run_training(
    config: TrainConfig, out: str | os.PathLike, *, overwrite: bool = False, quiet: bool = False
) -> CoefficientFile:
    """Learn coefficients, or go on with that; the files go to `out`.

    Raises:
        TrainingError: something about the config, the models or the data is wrong.
    """
    with TrainingRun.start(out, config.mixed_precision, quiet=quiet) as run:
        if config.dtype == "float16" and run.accelerator.device.type == "cpu":
            raise TrainingError("dtype: float16 is too narrow and slow on a CPU; take bfloat16")
        folders = ModelFolders.find(config, run)
        inputs = [folders.base, *folders.experts, *(data.path for _, data in config.sources)]
        run.claim(config, inputs, overwrite=overwrite)
        family = load_family(config, folders, run)
        objective = Objective(family)
        trained = train_learner(objective, family.learner_inputs())
        scores = score_merges(objective, trained.coefficients)
        file = coefficient_file(family, trained, scores)
        if run.is_main:
            write_results(file, family, trained.log, scores)
        run.wait()
        return file


def train_learner(objective: Objective, inputs: LearnerInputs) -> TrainedLearner:
    """Train a learner, or go on with one, and return it as it was at its best evaluation.

    Args:
        inputs: of the learner, for G groups of tensors.

    Raises:
        Diverged: the loss became NaN or Inf; the best network so far is kept.
    """
    config, settings = objective.config, objective.config.training
    experts = len(inputs.statistics)
    torch.manual_seed(settings.seed)
    learner = Learner(config.learner, *inputs.statistics.shape[:2])
    learner.standardizer.fit(inputs.statistics)
    optimizer = torch.optim.Adam(learner.parameters(), lr=settings.learning_rate, foreach=False)
    per_epoch = objective.steps_per_epoch
    training = ModuleTraining("learner", objective.run, learner, optimizer, settings, per_epoch)

    def evaluate() -> None:
        with torch.no_grad():
            score = objective.score(learner(*inputs), "validation")
        scores = {"validation_accuracy": score.mean_accuracy}
        if score.rehearsal is not None:
            scores["validation_rehearsal"] = score.rehearsal
        training.keep_best(score.loss, scores)

    if training.progress.step == 0:
        evaluate()  # the start counts: training never ends below it
    rate = partial(learning_rate, settings, per_epoch)
    for step in training.steps(rate, settings.patience):
        coefficients = learner(*inputs)  # (K, G)
        gradient, losses = objective.gradient(coefficients, step)
        for teacher, loss in zip(objective.teachers, losses.tolist(), strict=True):
            training.check_finite(f"the loss on the data of {teacher.name}", loss)
        training.check_finite("the gradient", float(gradient.abs().sum()))
        away = coefficients.detach().double() - config.learner.start(experts)
        gradient += 2 * config.penalty / away.numel() * away  # of penalty times the mean square
        optimizer.zero_grad()
        coefficients.backward(gradient.to(coefficients.dtype))
        optimizer.step()
        if training.end_step(float(losses @ objective.weights)):
            evaluate()
    training.load_best()
    learner.eval().requires_grad_(False)
    return TrainedLearner(learner, inputs, learner(*inputs), training.progress.log)


def learning_rate(settings: TrainingConfig, per_epoch: int, step: int, total: int) -> float:
    """Return the learning rate of one step, counted from 0; it depends on nothing else."""
    scheduler = settings.scheduler
    if scheduler.kind == "linear":
        return settings.learning_rate * (1 - step / total)
    return settings.learning_rate * scheduler.gamma ** (step // per_epoch // scheduler.step)


def score_merges(objective: Objective, coefficients: Tensor) -> dict[str, Score]:
    """Score the learned coefficients beside merges that need no training, on the test split.

    Returns:
        Scores by name, in the order of the final table.
    """
    config, shape = objective.config, coefficients.shape

    def equal(value: float) -> Score:
        return objective.score(torch.full(shape, value), "test")

    scores = {}
    accuracies = [t.accuracy for t in objective.teachers if t.accuracy is not None]
    if len(accuracies) == len(objective.teachers):  # all true labels are known
        rehearsal = None if config.rehearsal is None else accuracies.pop()
        scores["each expert on its own"] = Score(None, tuple(accuracies), rehearsal)
    scores["base model"] = equal(0.0)
    if config.options is None:
        scores["uniform (mean of the experts)"] = equal(1 / shape[0])
        learned = "AdaMerging" if config.loss == "entropy" else "StatsMerging"
    else:
        scores[f"{config.basis}, without data"] = equal(1.0)
        learned = f"{config.basis}, coefficients"
    return {**scores, learned: objective.score(coefficients, "test")}


class Objective:
    """Loss of a merge on the teachers' data, as a function of its coefficients.

    Attributes:
        teachers: T of them with their labelled data.
        weights: of each teacher's mean loss, (T,); their sum is 1.
    """

    def __init__(self, family: Family):
        self.config, self.run, self.teachers = family.config, family.run, family.teachers
        self._groups, self._kind = family.groups, family.folders.kind
        self._merged = MergedModel(
            family.module,
            family.base,
            family.components or family.experts,
            list(family.stored),
            components=family.components is not None,
        )
        self._batch = self.run.samples_per_step(self.config.training)
        weights = torch.ones(len(self.teachers), dtype=torch.float64)
        if self.config.rehearsal is not None:
            weights[-1] = self.config.training.rehearsal_weight * (len(weights) - 1)
        self.weights = weights / weights.sum()

    @property
    def steps_per_epoch(self) -> int:
        """Steps after which the largest data set has been seen once."""
        return -(-max(len(teacher.splits["train"]) for teacher in self.teachers) // self._batch)

    def gradient(self, coefficients: Tensor, step: int) -> tuple[Tensor, Tensor]:
        """Return ∂L/∂λ, (K, G), and the teachers' losses, (T,), of one step.

        A teacher's loss is the mean over supervised positions; L is their weighted mean.
        """
        self._merged.write(coefficients[:, self._groups])
        self._merged.clear()
        half = self.config.mixed_precision == "fp16" or self.config.dtype == "float16"
        scale, settings = FLOAT16_SCALE if half else 1.0, self.config.training
        losses = torch.zeros(len(self.teachers), dtype=torch.float64)
        for row, (weight, teacher) in enumerate(zip(self.weights, self.teachers, strict=True)):
            examples = teacher.splits["train"]
            indices = step_indices(settings.seed, row, step, self._batch, len(examples))
            positions = sum(len(examples[index]["hard"]) for index in indices)
            for part in self.run.share(indices, settings.batch_size):
                samples = [examples[index] for index in part]
                loss = self._loss(*self._answers(teacher, samples)) / positions
                (scale * float(weight) * loss).backward()
                losses[row] += loss.detach().double().cpu()
            self._merged.collect()
        gradient = torch.zeros(coefficients.shape, dtype=torch.float64)
        gradient.index_add_(1, self._groups, self.run.sum(self._merged.products) / scale)
        return gradient, self.run.sum(losses)

    @torch.no_grad()
    def score(self, coefficients: Tensor, split: str) -> Score:
        """Return the score of the merge for λ per group, (K, G), on a split of all data."""
        self._merged.write(coefficients[:, self._groups])
        losses, shares = torch.zeros(len(self.teachers), dtype=torch.float64), []
        for row, teacher in enumerate(self.teachers):
            examples, answers = teacher.splits[split], []
            for part in self.run.share(range(len(examples)), self.config.training.batch_size):
                logits, labels = self._answers(teacher, [examples[index] for index in part])
                losses[row] += float(self._loss(logits, labels))
                given = logits.float().squeeze(-1) if "numbers" in labels else logits.argmax(-1)
                answers.append(torch.stack((given, labels["target"])).cpu())  # numbers, or classes
                del logits  # large: gone before the next ones are computed
            given, wanted = torch.cat(gather_object(answers), dim=1)
            losses[row] /= len(given)
            shares.append(agreement(given, wanted))
        mean = float(self.run.sum(losses) @ self.weights)
        rehearsal = None if self.config.rehearsal is None else shares.pop()
        return Score(mean, tuple(shares), rehearsal)

    def _loss(self, logits: Tensor, labels: dict[str, Tensor]) -> Tensor:
        """Return the loss of logits (P, C), summed over positions."""
        if self.config.loss == "entropy":
            return summed_entropy(logits)
        return summed_loss(logits, labels)

    def _answers(self, teacher: Teacher, samples: list[Example]) -> tuple[Tensor, dict]:
        """Return logits (P, C) of the merge on some samples, and their labels."""
        module, device = self._merged.module, self.run.accelerator.device
        attach_head(module, teacher.head)
        with self.run.accelerator.autocast():
            logits = self._kind.logits(module, send_to_device(self._kind.collate(samples), device))
        kind = self.config.labels_of(dict(self.config.sources)[teacher.name])
        return logits, send_to_device(collate_labels(samples, kind), logits.device)
