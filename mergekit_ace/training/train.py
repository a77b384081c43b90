# SPDX-License-Identifier: Apache-2.0
"""`mergekit-ace train`: from statistics to coefficients λ to a merge to its loss, and back.

In each step of `train_learner` the learner predicts λ, `Objective` writes the merge for it and
returns ∂L/∂λ, and Adam carries that back through the learner.
"""

from __future__ import annotations

import os
from statistics import fmean

import torch
from accelerate.utils import send_to_device
from torch import Tensor
from torch.nn.functional import cross_entropy

from mergekit_ace.algebra.learner import Learner, LearnerInputs
from mergekit_ace.methods.coefficients import CoefficientFile
from mergekit_ace.training.config import Labels, TrainConfig
from mergekit_ace.training.data import Example, step_indices
from mergekit_ace.training.family import Family, Teacher, load_family
from mergekit_ace.training.merged import MergedModel
from mergekit_ace.training.models import claim_models
from mergekit_ace.training.results import Log, Score, coefficient_file, write_results
from mergekit_ace.training.state import ModuleTraining, TrainingRun
from mergekit_ace.training.tasks import attach_head


def run_training(
    config: TrainConfig, out: str | os.PathLike, *, overwrite: bool = False, quiet: bool = False
) -> CoefficientFile:
    """Learn coefficients, or go on with that; the files go to `out`."""
    with TrainingRun.start(out, config.mixed_precision, quiet=quiet) as run:
        family = load_family(claim_models(config, run, overwrite=overwrite))
        objective = Objective(family)
        inputs = family.learner_inputs()
        learner, log = train_learner(objective, inputs)
        scores = score_merges(objective, learner(*inputs))
        file = coefficient_file(family, learner, inputs, scores)
        if run.is_main:
            write_results(file, family, log, scores)
        run.accelerator.wait_for_everyone()
        return file


def train_learner(objective: Objective, inputs: LearnerInputs) -> tuple[Learner, Log]:
    """Train a learner, or go on with one, and return it as it was at its best evaluation."""
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
        scores = {"validation_accuracy": fmean(score.accuracy)}
        if score.rehearsal is not None:
            scores["validation_rehearsal"] = score.rehearsal
        training.keep_best(score.loss, scores)

    if training.progress.step == 0:
        evaluate()  # the start counts: training never ends below it

    def rate(step: int) -> float:
        schedule = settings.scheduler
        return settings.learning_rate * schedule.gamma ** (step // per_epoch // schedule.step)

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
    return learner.eval().requires_grad_(False), training.progress.log


def score_merges(objective: Objective, coefficients: Tensor) -> dict[str, Score]:
    """Score the learned coefficients beside merges that need no training, on the test split."""
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
    """Loss of a merge on the data of T teachers, as a function of its coefficients.

    `weights`, (T,), are those of the teachers' mean losses; their sum is 1.
    """

    def __init__(self, family: Family):
        models, self.teachers = family.models, family.teachers
        self.config, self.run = models.config, models.run
        self._groups, self._kind = family.groups, models.kind
        versions, components = family.components or family.experts, bool(family.components)
        names = list(family.stored)
        self._merged = MergedModel(
            family.module, family.base, versions, names, components=components
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
        settings = self.config.training
        losses = torch.zeros(len(self.teachers), dtype=torch.float64)
        for row, (weight, teacher) in enumerate(zip(self.weights, self.teachers, strict=True)):
            examples = teacher.splits["train"]
            indices = step_indices(settings.seed, row, step, self._batch, len(examples))
            positions = sum(len(examples[index]["hard"]) for index in indices)
            for part in self.run.share(indices, settings.batch_size):
                loss, _ = self._loss(teacher, [examples[index] for index in part])
                loss = loss / positions
                (float(weight) * loss).backward()
                losses[row] += loss.detach().double().cpu()
            self._merged.collect()
        gradient = torch.zeros(coefficients.shape, dtype=torch.float64)
        gradient.index_add_(1, self._groups, self.run.sum(self._merged.products))
        return gradient, self.run.sum(losses)

    @torch.no_grad()
    def score(self, coefficients: Tensor, split: str) -> Score:
        """Return the score of the merge for λ per group, (K, G), on a split of all data."""
        self._merged.write(coefficients[:, self._groups])
        sums = torch.zeros(len(self.teachers), 3, dtype=torch.float64)  # loss, right, positions
        for row, teacher in enumerate(self.teachers):
            examples = teacher.splits[split]
            for part in self.run.share(range(len(examples)), self.config.training.batch_size):
                samples = [examples[index] for index in part]
                loss, answers = self._loss(teacher, samples)
                wanted = _gather(samples, "true" if "true" in samples[0] else "hard")
                right = int((answers.cpu() == wanted).sum())
                sums[row] += torch.tensor([float(loss), right, len(wanted)])
        losses, right, positions = self.run.sum(sums).unbind(1)
        shares = (right / positions).tolist()
        rehearsal = None if self.config.rehearsal is None else shares.pop()
        return Score(float(losses / positions @ self.weights), tuple(shares), rehearsal)

    def _loss(self, teacher: Teacher, samples: list[Example]) -> tuple[Tensor, Tensor]:
        """Return the summed loss of the merge on some samples, and its answers, (P,)."""
        module, device = self._merged.module, self.run.accelerator.device
        attach_head(module, teacher.head)
        with self.run.accelerator.autocast():
            logits = self._kind.logits(module, send_to_device(self._kind.collate(samples), device))
        if self.config.loss == "entropy":
            loss = summed_entropy(logits)
        else:
            kind = self.config.labels_of(dict(self.config.sources)[teacher.name])
            loss = summed_loss(logits, samples, kind)
        return loss, logits.argmax(-1)


def _gather(samples: list[Example], name: str) -> Tensor:
    """Lay the labels of some samples end to end, over their P positions."""
    return torch.cat([sample[name] for sample in samples])


def summed_loss(logits: Tensor, samples: list[Example], labels: Labels) -> Tensor:
    """Return cross-entropy to hard labels (Eq. 7), or KL from teacher to merge (Eq. 32), summed.

    Where only the k likeliest classes of the teacher are known, the rest of both distributions
    counts as one class more. Logits are (P, C), and samples as `answer_data` makes them.
    """
    logits = logits.float()
    if labels != "soft":
        return cross_entropy(logits, _gather(samples, labels).to(logits.device), reduction="sum")
    teacher, classes = (
        _gather(samples, name).to(logits.device) for name in ("soft_values", "soft_indices")
    )
    merge = logits.log_softmax(-1).gather(-1, classes)
    loss = (teacher.exp() * (teacher - merge)).sum()
    if classes.shape[-1] < logits.shape[-1]:
        teacher_rest, merge_rest = _log_rest(teacher), _log_rest(merge)
        loss = loss + (teacher_rest.exp() * (teacher_rest - merge_rest)).sum()
    return loss


def _log_rest(log_probabilities: Tensor) -> Tensor:
    """Return the logarithm of the probability that the given classes leave, (P,)."""
    rest = 1 - log_probabilities.exp().sum(-1)
    return rest.clamp(min=torch.finfo(rest.dtype).eps).log()


def summed_entropy(logits: Tensor) -> Tensor:
    """Return the entropy of the distributions that logits (P, C) stand for, summed, in nats."""
    logarithms = logits.float().log_softmax(-1)
    return -(logarithms.exp() * logarithms).sum()
