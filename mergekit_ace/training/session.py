# SPDX-License-Identifier: Apache-2.0
"""One forward and backward pass over a step's samples, and evaluation; shared by all learners."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from mergekit_ace.coefficients.file import expand
from mergekit_ace.training.config import TrainConfig
from mergekit_ace.training.errors import Diverged
from mergekit_ace.training.examples import Examples
from mergekit_ace.training.losses import collate_labels, summed_loss
from mergekit_ace.training.merged import MergedModel
from mergekit_ace.training.models import Heads
from mergekit_ace.training.order import step_indices
from mergekit_ace.training.processes import own_batches, samples_per_step, sum_over_processes
from mergekit_ace.training.tasks import Kind
from mergekit_ace.training.teachers import move

if TYPE_CHECKING:
    from accelerate import Accelerator

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
class Session:
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
