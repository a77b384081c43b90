# SPDX-License-Identifier: Apache-2.0
"""The training loop."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy, kl_div
from tqdm import tqdm

from mergekit_ace.coefficients.file import expand
from mergekit_ace.coefficients.learner import Learner, LearnerConfig
from mergekit_ace.files import write_text
from mergekit_ace.training.config import Labels, TrainConfig, TrainingConfig
from mergekit_ace.training.data import Examples, step_indices
from mergekit_ace.training.merged import MergedModel
from mergekit_ace.training.models import Heads
from mergekit_ace.training.state import (
    Diverged,
    load_checkpoint,
    module_tensors,
    optimizer_tensors,
    own_batches,
    restore_optimizer,
    samples_per_step,
    save_checkpoint,
    sum_over_processes,
    with_prefix,
)
from mergekit_ace.training.tasks import Kind
from mergekit_ace.training.teachers import move

if TYPE_CHECKING:
    from accelerate import Accelerator


@dataclass
class TrainingProgress:
    """Where a training stands; saved with every checkpoint.

    Attributes:
        step: steps done.
        best_loss, best_step: of the evaluation that is kept.
        waited: evaluations since then.
        log: lines of `training.jsonl` so far.
        finished: whether training has ended.
    """

    step: int = 0
    best_loss: float = math.inf
    best_step: int = 0
    waited: int = 0
    finished: bool = False
    log: list[dict[str, Any]] = field(default_factory=list)


@dataclass(frozen=True)
class TrainedLearner:
    """A finished training: the kept network, its coefficients per group (K, G), its log."""

    learner: Learner
    coefficients: Tensor
    progress: TrainingProgress


def train(
    session: Objective,
    config: LearnerConfig,
    statistics: Tensor,
    depths: Tensor,
    checkpoint: Path,
    *,
    quiet: bool = False,
) -> TrainedLearner:
    """Train a learner, or go on with one, and return it as it was at its best evaluation.

    Args:
        session: model, data and gradient.
        config: which learner.
        statistics: (K, G, F), float64.
        depths: (G,).
        checkpoint: file that the state is kept in.
        quiet: no progress bar.

    Raises:
        Diverged: the loss became NaN or Inf; the checkpoint holds the best network so far.
    """
    training = session.config.training
    torch.manual_seed(training.seed)
    learner = Learner(config, *statistics.shape[:2])
    learner.standardizer.fit(statistics)
    state = TrainingState(learner, training.learning_rate, checkpoint)
    progress = state.progress
    total = min(training.epochs * session.steps_per_epoch, training.max_steps or sys.maxsize)
    every = training.evaluate_every or session.steps_per_epoch
    saves = session.accelerator.is_main_process
    bar = tqdm(total=total, initial=progress.step, desc="training", unit="step", disable=quiet)
    if progress.step == 0:
        state.judge(session, statistics, depths)  # the start counts: training never ends below it
    while progress.step < total and not progress.finished:
        rate = _learning_rate(training, progress.step, session.steps_per_epoch, total)
        coefficients = learner(statistics, depths)
        try:
            gradient, loss = session.gradient(coefficients, progress.step)
        except Diverged as error:
            if saves:
                state.save()
            raise Diverged(
                f"{error}; the best network so far, of step {progress.best_step}, is kept in "
                f"{checkpoint}. Lower training.learning_rate, or look at that expert's data"
            ) from None
        away = coefficients.detach().double() - config.start(len(coefficients))
        gradient += 2 * session.config.penalty / away.numel() * away
        state.update(coefficients, gradient, rate)
        progress.step += 1
        progress.log.append({"step": progress.step, "loss": loss, "learning_rate": rate})
        bar.update()
        bar.set_postfix(loss=f"{loss:.4f}", best=f"{progress.best_loss:.4f}")
        if progress.step % every == 0 or progress.step == total:
            state.judge(session, statistics, depths)
            progress.finished = 0 < training.patience <= progress.waited
        if saves and progress.step % training.checkpoint_every == 0:
            state.save()
    bar.close()
    progress.finished = True
    if saves:
        state.save()
    learner.load_state_dict(state.best)
    learner.eval().requires_grad_(False)
    return TrainedLearner(learner, learner(statistics, depths), progress)


class TrainingState:
    """All that changes while a learner is trained; goes on from its checkpoint if there is one.

    Attributes:
        learner, optimizer: the network, and Adam.
        best: the network's state at its best evaluation.
        progress: see `TrainingProgress`.
    """

    def __init__(self, learner: Learner, learning_rate: float, checkpoint: Path):
        self.learner = learner
        self.optimizer = torch.optim.Adam(learner.parameters(), lr=learning_rate, foreach=False)
        self.checkpoint = checkpoint
        self.progress = TrainingProgress()
        self.best: dict[str, Tensor] = {}
        known = load_checkpoint(checkpoint)
        if known is None:
            self._keep()
            return
        tensors, facts = known
        learner.load_state_dict(with_prefix(tensors, "learner."))
        restore_optimizer(self.optimizer, tensors)
        self.best = with_prefix(tensors, "best.")
        torch.set_rng_state(tensors["random_state"])
        self.progress = TrainingProgress(**facts)

    def update(self, coefficients: Tensor, gradient: Tensor, rate: float) -> None:
        """One step of Adam along ∂L/∂λ, carried back through the network."""
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        self.optimizer.zero_grad()
        coefficients.backward(gradient.to(coefficients.dtype))
        self.optimizer.step()

    def judge(self, session: Objective, statistics: Tensor, depths: Tensor) -> None:
        """Evaluate on the held-out split, and keep the network if it was never better."""
        with torch.no_grad():
            session.write(self.learner(statistics, depths))
        score = session.evaluate("validation")
        progress = self.progress
        line = {
            "step": progress.step,
            "validation_loss": score.loss,
            "validation_accuracy": score.mean_accuracy,
        }
        if score.rehearsal is not None:
            line["validation_rehearsal"] = score.rehearsal
        progress.log.append(line)
        progress.waited += 1
        if score.loss < progress.best_loss:
            self._keep()
            progress.best_loss, progress.best_step = score.loss, progress.step
            progress.waited = 0

    def save(self) -> None:
        """Write the checkpoint."""
        tensors = {
            **module_tensors(self.learner, "learner."),
            **{f"best.{name}": tensor for name, tensor in self.best.items()},
            **optimizer_tensors(self.optimizer),
            "random_state": torch.get_rng_state(),
        }
        save_checkpoint(self.checkpoint, tensors, vars(self.progress))

    def _keep(self) -> None:
        self.best = {name: tensor.clone() for name, tensor in self.learner.state_dict().items()}


def _learning_rate(training: TrainingConfig, step: int, per_epoch: int, total: int) -> float:
    """Of one step, from 0: a function of its number alone, so nothing to save."""
    scheduler = training.scheduler
    if scheduler.kind == "linear":
        return training.learning_rate * (1 - step / total)
    return training.learning_rate * scheduler.gamma ** (step // per_epoch // scheduler.step)


def write_log(path: Path, progress: TrainingProgress) -> None:
    """`training.jsonl`: a line per step and per evaluation."""
    write_text(path, "".join(json.dumps(line) + "\n" for line in progress.log))


# Under float16 small gradients vanish; they are scaled by this and the products scaled back.
FLOAT16_SCALE = 1024.0


@dataclass(frozen=True)
class Score:
    """How the merge does on one split.

    Attributes:
        loss: mean over teachers of the mean loss per position, against the labels, weighted as in
            training; None where it was not measured. Teachers are the experts, and last the base
            where it rehearses.
        accuracy: share of right answers per expert, 0 to 1: against the truth where the data has
            it, else against the expert's own answers.
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
    """What training and evaluation work with.

    Attributes:
        config, kind, accelerator: of the run.
        merged: the model, its experts and the gradient of their coefficients.
        heads: of the experts, for classification.
        data: splits by teacher, each with inputs and labels.
        groups: (L,), which coefficient each tensor has.
    """

    config: TrainConfig
    kind: Kind
    accelerator: Accelerator
    merged: MergedModel
    heads: Heads
    data: Sequence[dict[str, Examples]]
    groups: Tensor

    @property
    def batch(self) -> int:
        """Samples of each expert in a step, all processes together."""
        training = self.config.training
        return samples_per_step(
            self.accelerator, training.batch_size, training.gradient_accumulation
        )

    @property
    def steps_per_epoch(self) -> int:
        """Steps after which the largest data set has been seen once."""
        return -(-max(len(splits["train"]) for splits in self.data) // self.batch)

    @property
    def weights(self) -> Tensor:
        """How much each teacher's mean loss counts, (teachers,), float64; they sum to 1."""
        weights = torch.ones(len(self.data), dtype=torch.float64)
        if self.config.rehearsal is not None:
            weights[-1] = self.config.training.rehearsal_weight * (len(weights) - 1)
        return weights / weights.sum()

    def write(self, coefficients: Tensor) -> None:
        """Put the merge for λ per group, (K, G), into the model."""
        self.merged.write(expand(coefficients.detach(), self.groups))

    def gradient(self, coefficients: Tensor, step: int) -> tuple[Tensor, float]:
        """∂L/∂λ, (K, G), and the loss: the weighted mean over teachers of that over positions.

        Raises:
            Diverged: the loss on the data of a teacher is not a number.
        """
        self.write(coefficients)
        self.merged.clear()
        losses = torch.zeros(len(self.data), dtype=torch.float64)
        half = self.config.mixed_precision == "fp16" or self.config.dtype == "float16"
        scale = FLOAT16_SCALE if half else 1.0
        weights = self.weights
        for task, splits in enumerate(self.data):
            examples = splits["train"]
            indices = step_indices(self.config.training.seed, task, step, self.batch, len(examples))
            positions = sum(examples.length("hard", index) for index in indices)
            for part in self._own(indices):
                loss = self._loss(task, examples, part) / positions
                (scale * float(weights[task]) * loss).backward()
                losses[task] += loss.detach().double().cpu()
            self.merged.collect()
        losses = sum_over_processes(self.accelerator, losses)
        gradient = sum_over_processes(self.accelerator, self.merged.products) / scale
        for task, loss in enumerate(losses.tolist()):
            if loss != loss or loss == float("inf"):
                name, _ = self.config.sources[task]
                raise Diverged(f"the loss on the data of {name} became {loss} in step {step}")
        if not gradient.isfinite().all():
            raise Diverged(f"the gradient became NaN or Inf in step {step}")
        grouped = torch.zeros(coefficients.shape, dtype=torch.float64)
        grouped.index_add_(1, self.groups, gradient)
        return grouped, float(losses @ weights)

    @torch.no_grad()
    def evaluate(self, split: str) -> Score:
        """The written merge on a split of every expert's data."""
        totals = torch.zeros(len(self.data), 3, dtype=torch.float64)  # loss, right, positions
        for task, splits in enumerate(self.data):
            examples = splits[split]
            for part in self._own(list(range(len(examples)))):
                totals[task] += self._totals(task, examples, part)
        loss, right, positions = sum_over_processes(self.accelerator, totals).unbind(1)
        mean = float((loss / positions) @ self.weights)
        shares = (right / positions).tolist()
        rehearsal = None if self.config.rehearsal is None else shares.pop()
        return Score(mean, tuple(shares), rehearsal)

    def _totals(self, task: int, examples: Examples, indices: list[int]) -> Tensor:
        logits, labels = self._answers(task, examples, indices)
        right = (logits.argmax(-1) == labels["target"]).sum()
        numbers = (float(summed_loss(logits, labels)), float(right), len(labels["target"]))
        return torch.tensor(numbers, dtype=torch.float64)

    def _loss(self, task: int, examples: Examples, indices: list[int]) -> Tensor:
        return summed_loss(*self._answers(task, examples, indices))

    def _answers(
        self, task: int, examples: Examples, indices: list[int]
    ) -> tuple[Tensor, dict[str, Tensor]]:
        module = self.merged.module
        if self.kind.has_heads:
            self.heads.put_on(module, task)
        batch = self.kind.collate([examples[index] for index in indices])
        with self.accelerator.autocast():
            logits = self.kind.logits(module, move(batch, self.accelerator.device))
        labels = collate_labels(examples, indices, self.config.labels)
        return logits, move(labels, logits.device)

    def _own(self, indices: list[int]) -> list[list[int]]:
        return own_batches(self.accelerator, indices, self.config.training.batch_size)


def collate_labels(examples: Examples, indices: list[int], labels: Labels) -> dict[str, Tensor]:
    """The labels of some samples end to end, over their P positions.

    ``hard`` and ``true`` give `classes`, (P,); ``soft`` gives `log_probabilities` and `classes`,
    (P, k). `target`, (P,), is what counts as right: the truth where the data has it.
    """

    def gather(name: str) -> Tensor:
        return torch.cat([examples.field(name, index) for index in indices])

    target = gather("true" if "true" in examples.fields else "hard")
    if labels == "soft":
        return {
            "log_probabilities": gather("soft_values"),
            "classes": gather("soft_indices"),
            "target": target,
        }
    return {"classes": gather(labels), "target": target}


def summed_loss(logits: Tensor, labels: dict[str, Tensor]) -> Tensor:
    """Cross-entropy to hard labels (Eq. 7), or KL from the teacher to the merge (Eq. 32), summed.

    Args:
        logits: (P, C).
        labels: see `collate_labels`. Where only the k likeliest classes of the teacher are known,
            the rest of both distributions counts as one class more.
    """
    logits = logits.float()
    if "log_probabilities" not in labels:
        return cross_entropy(logits, labels["classes"], reduction="sum")
    mine = logits.log_softmax(-1).gather(-1, labels["classes"])
    teacher = labels["log_probabilities"]
    loss = (teacher.exp() * (teacher - mine)).sum()
    if labels["classes"].shape[-1] < logits.shape[-1]:
        rest, my_rest = _rest(teacher), _rest(mine)
        loss = loss + (rest.exp() * (rest - my_rest)).sum()
    return loss


def distillation_loss(
    student: Tensor, teacher: Tensor | None, labels: Tensor, alpha: float, temperature: float
) -> Tensor:
    """Eq. 8, summed: α CE(student, labels) + (1 − α) T² KL(teacher at T ‖ student at T).

    Args:
        student, teacher: logits, (P, C); without a teacher's, its words are the only labels, and
            the loss is their cross-entropy.
        labels: (P,), the teacher's arg max, or its words.
        alpha: α, the share of the hard labels.
        temperature: T > 0.
    """
    hard = cross_entropy(student.float(), labels, reduction="sum")
    if teacher is None:
        return hard
    target = (teacher.float() / temperature).log_softmax(-1)
    guess = (student.float() / temperature).log_softmax(-1)
    soft = kl_div(guess, target, reduction="sum", log_target=True)
    return alpha * hard + (1 - alpha) * temperature**2 * soft


def _rest(log_probabilities: Tensor) -> Tensor:
    """Logarithm of the probability that the given classes leave, (P,)."""
    left = 1 - log_probabilities.exp().sum(-1)
    return left.clamp(min=torch.finfo(left.dtype).eps).log()
