# SPDX-License-Identifier: Apache-2.0
"""Distillation of a teacher of any architecture into the base's (Sec. 3.3, Eq. 8)."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy, kl_div
from transformers import get_cosine_schedule_with_warmup

from mergekit_ace.files.saving import write_text
from mergekit_ace.naming import ConfigError
from mergekit_ace.training import models
from mergekit_ace.training.config import DistillConfig
from mergekit_ace.training.data import SampleReader, load_rows, step_indices
from mergekit_ace.training.state import TrainingProgress, TrainingRun, last_step, train_module
from mergekit_ace.training.tasks import MODEL_KINDS, Example, fit_to_model

RECORD = "distillation.json"
WARM_UP, WEIGHT_DECAY = 0.1, 0.01  # share of all steps; of AdamW


def run_distillation(
    config: DistillConfig, out: str | os.PathLike, *, overwrite: bool = False, quiet: bool = False
) -> Path:
    """Distil, or go on with it; the student is saved in `out`."""
    with TrainingRun.start(out, config.mixed_precision, quiet=quiet) as run:
        with run.accelerator.main_process_first():
            teacher, student = (
                models.local_folder(one, run.path / "adapters", config.trust_remote_code)
                for one in (config.teacher, config.student)
            )
        run.claim(config, [teacher, student, config.data.path], overwrite=overwrite)
        if (run.path / RECORD).exists():  # this very run, complete
            return run.path
        distillation = Distillation(config, teacher, student, run)
        progress = train_student(distillation)
        loss, scores = distillation.evaluate("test")
        if run.is_main:
            distillation.student.save_pretrained(run.path)
            if distillation.processor is not None:
                distillation.processor.save_pretrained(run.path)
            record = {"test_loss": loss, "test_agreement": scores["agreement"]}
            record |= {"kept_step": progress.best_step, "log": progress.log}
            # Last the record, which says that the student is complete.
            write_text(run.path / RECORD, json.dumps(record, indent=1))
            for path in run.state.glob("*.pt"):
                path.unlink()
        run.accelerator.wait_for_everyone()
        return run.path


# Not by `transformers.Trainer`: its checkpoints are not whole or absent, so that a kill while one
# is written stops the next start.
def train_student(distillation: Distillation) -> TrainingProgress:
    """Train the student, or go on with it."""
    settings, run, student = distillation.config.training, distillation.run, distillation.student
    peak, evaluate = settings.learning_rate, partial(distillation.evaluate, "validation")
    optimizer: Any = torch.optim.AdamW(student.parameters(), peak, weight_decay=WEIGHT_DECAY)
    count, batch = len(distillation.samples["train"]["student"]), run.samples_per_step(settings)
    per_epoch = -(-count // batch)
    total = last_step(settings, per_epoch)
    warm_up = max(round(WARM_UP * total), 1)
    (rate,) = get_cosine_schedule_with_warmup(optimizer, warm_up, total + 1).lr_lambdas

    def take_step(step: int) -> float:
        optimizer.param_groups[0]["lr"] = peak * rate(step + 1)
        optimizer.zero_grad()
        loss = distillation.backward(step_indices(settings.seed, 0, step, batch, count))
        torch.nn.utils.clip_grad_norm_(student.parameters(), 1.0)
        optimizer.step()
        return loss

    return train_module(
        run, "student", student, optimizer, settings, per_epoch, take_step, evaluate
    )


class Distillation:
    """Teacher and student, and the `samples` by split as each of them reads them.

    Both have the same supervised positions. `processor` is the student's.
    """

    student: Any

    def __init__(self, config: DistillConfig, teacher: str, student: str, run: TrainingRun):
        self.config, self.run, self._kind = config, run, MODEL_KINDS[config.task]
        model: Any = models.load_model(teacher, self._kind, config)
        skeleton = models.load_skeleton(student, self._kind, config)
        processor, self.processor = (
            models.load_processor([folder], self._kind, config) for folder in (teacher, student)
        )
        options = {}
        if self._kind.has_heads:  # the student gets a new head for the teacher's classes
            models.check_classes(model.config, f"the teacher {config.teacher}")
            labels = ("num_labels", "id2label", "label2id")
            options = {name: getattr(model.config, name) for name in labels}
        else:
            sizes = [m.config.get_text_config().vocab_size for m in (model, skeleton)]
            if processor.get_vocab() != self.processor.get_vocab() or sizes[0] != sizes[1]:
                said = "teacher and student have different tokenizers or numbers of logits"
                raise ConfigError(f"{said}; fine-tune the student on what the teacher writes")
        device, data = run.accelerator.device, fit_to_model(config.data, skeleton)
        self._teacher = SampleReader(model.to(device), self._kind, processor, data)
        self.samples = run.once("data", self._read_data)
        torch.manual_seed(config.training.seed)
        self.student = models.load_model(
            student, self._kind, config, getattr(torch, config.dtype),
            new_head=self._kind.has_heads, **options,
        )  # fmt: skip
        self.student.requires_grad_(True).train().to(device)

    def _read_data(self) -> dict[str, dict[str, list[Example]]]:
        teacher, kind, training = self._teacher, self._kind, self.config.training
        both = teacher.processor, self.processor  # of a text one may make no token
        splits = {}
        for split, rows in load_rows(self.config.data, training.seed).items():
            encoded = [[kind.encode(dict(row), teacher.data, one) for one in both] for row in rows]
            rows = rows.select([n for n, pair in enumerate(encoded) if None not in pair])
            read = teacher.read(rows, split, training.batch_size, quiet=self.run.quiet)
            own = [pair[1] for pair in encoded if None not in pair] if kind.has_heads else read
            splits[split] = {"student": own, "teacher": read}
        return splits

    def backward(self, indices: Sequence[int]) -> float:
        """Leave the gradient of some samples in the student; return the mean loss per position."""
        loss, _, positions = self._sum("train", indices)
        for parameter in self.student.parameters():
            if parameter.grad is None and self.run.accelerator.num_processes > 1:
                parameter.grad = torch.zeros_like(parameter)  # every process is in every sum
            if parameter.grad is not None:
                parameter.grad = self.run.sum(parameter.grad) / positions
        return loss / positions

    @torch.no_grad()
    def evaluate(self, split: str) -> tuple[float, dict[str, float]]:
        """Return the mean loss per position, and which share of answers is the teacher's."""
        self.student.eval()
        loss, right, positions = self._sum(split, range(len(self.samples[split]["student"])))
        self.student.train()
        return loss / positions, {"agreement": right / positions}

    def _sum(self, split: str, indices: Sequence[int]) -> list[float]:
        """Sum loss, answers that are the teacher's, and positions; leave gradients if they are on.

        The gradients are of this process alone.
        """
        config, samples = self.config, self.samples[split]
        totals = torch.zeros(3, dtype=torch.float64)
        for part in self.run.share(indices, config.training.batch_size):
            own, read = ([samples[who][index] for index in part] for who in ("student", "teacher"))
            with self.run.accelerator.autocast():
                answers = self._kind.answer(self.student, own)
            with torch.no_grad():
                wanted = self._teacher.logits(read)
            loss = distillation_loss(answers, wanted, config.alpha, config.temperature)
            if loss.requires_grad:
                loss.backward()
            right = int((answers.argmax(-1) == wanted.argmax(-1)).sum())
            totals += torch.tensor([float(loss.detach()), right, len(wanted)])
        return self.run.sum(totals).tolist()


def distillation_loss(student: Tensor, teacher: Tensor, alpha: float, temperature: float) -> Tensor:
    """Return Eq. 8, summed: α CE(student, best answer) + (1 − α) T² KL(teacher/T ‖ student/T).

    Student and teacher are logits, (P, C); α is the share of the teacher's best answers.
    """
    hard = cross_entropy(student.float(), teacher.argmax(-1), reduction="sum")
    target = (teacher.float() / temperature).log_softmax(-1)
    guess = (student.float() / temperature).log_softmax(-1)
    soft = kl_div(guess, target, reduction="sum", log_target=True)
    return alpha * hard + (1 - alpha) * temperature**2 * soft
