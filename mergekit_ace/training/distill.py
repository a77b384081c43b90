# SPDX-License-Identifier: Apache-2.0
"""Distillation of a teacher of any architecture into the base's (Sec. 3.3, Eq. 8).

The result is an expert that merges with others of the base's architecture.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from accelerate.utils import send_to_device
from torch import Tensor
from torch.nn.functional import cross_entropy, kl_div

from mergekit_ace.files.saving import with_prefix, write_text
from mergekit_ace.training.config import DistillConfig, DistillTraining
from mergekit_ace.training.data import (
    Example,
    load_rows,
    pack_examples,
    step_indices,
    unpack_examples,
)
from mergekit_ace.training.models import (
    check_classes,
    load_model,
    load_processor,
    load_skeleton,
    local_folder,
)
from mergekit_ace.training.state import ModuleTraining, TrainingError, TrainingRun
from mergekit_ace.training.tasks import CausalLanguageModel, fit_to_model, model_kind
from mergekit_ace.training.teachers import SampleReader, explained_failures

if TYPE_CHECKING:
    from transformers import PreTrainedModel

RECORD = "distillation.json"
WARM_UP, WEIGHT_DECAY = 0.1, 0.01  # share of all steps; of AdamW


def run_distillation(
    config: DistillConfig,
    out: str | os.PathLike,
    *,
    overwrite: bool = False,
    quiet: bool = False,
) -> Path:
    """Distil, or go on with it; the student is saved in `out`.

    Raises:
        TrainingError: something about the config, the models or the data is wrong.
    """
    with TrainingRun.start(out, config.mixed_precision, quiet=quiet) as run:
        with run.accelerator.main_process_first():
            teacher, student = (
                local_folder(reference, run.path / "adapters", config.trust_remote_code)
                for reference in (config.teacher, config.student)
            )
        inputs = [teacher, student, config.data.path]
        run.claim(config, inputs, overwrite=overwrite)
        if (run.path / RECORD).exists():  # this very run, complete
            return run.path
        distillation = Distillation(config, teacher, student, run)
        training = train_student(distillation)
        kept = training.load_best()
        loss, agreement = distillation.evaluate("test")
        if run.is_main:
            distillation.student.save_pretrained(run.path)
            if distillation.student_processor is not None:
                distillation.student_processor.save_pretrained(run.path)
            # Last the record, which says that the student is complete.
            record = {"test_loss": loss, "test_agreement": agreement, "kept": kept}
            record["log"] = training.progress.log
            write_text(run.path / RECORD, json.dumps(record, indent=1))
            for path in run.state.glob("*.safetensors"):
                path.unlink()
        run.wait()
        return run.path


# Not by `transformers.Trainer`, which was tried (5.23). It takes as many lines once divergence and
# the best student are cared for, its checkpoints are not whole or absent, so that a kill while one
# is written stops the next start, and a ViT loses its progress.
def train_student(distillation: Distillation) -> ModuleTraining:
    """Train the student, or go on with it.

    Raises:
        Diverged: the loss became NaN or Inf.
    """
    settings, run, student = distillation.settings, distillation.run, distillation.student
    optimizer = torch.optim.AdamW(
        student.parameters(), lr=settings.learning_rate, weight_decay=WEIGHT_DECAY
    )
    count, batch = len(distillation.student_data["train"]), run.samples_per_step(settings)
    training = ModuleTraining("student", run, student, optimizer, settings, -(-count // batch))
    for step in training.steps(partial(warm_cosine_rate, settings)):
        optimizer.zero_grad()
        loss = distillation.backward(step_indices(settings.seed, 0, step, batch, count))
        training.check_finite("the loss", loss)
        torch.nn.utils.clip_grad_norm_(student.parameters(), 1.0)
        optimizer.step()
        if training.end_step(loss):
            validation_loss, agreement = distillation.evaluate("validation")
            training.keep_best(validation_loss, {"agreement": agreement})
    return training


def warm_cosine_rate(training: DistillTraining, step: int, total: int) -> float:
    """Return the learning rate of one step, from 0: linear warm-up, then a cosine to 0."""
    warmup = max(round(WARM_UP * total), 1)
    if step < warmup:
        return training.learning_rate * (step + 1) / warmup
    share = (step - warmup) / max(total - warmup, 1)
    return training.learning_rate * 0.5 * (1 + math.cos(math.pi * share))


class Distillation:
    """Teacher, student, and the data as each of them reads it.

    Attributes:
        settings: of the loop.
        student: starts as the base.
        student_processor: its tokenizer or image processor.
        student_data: samples by split.

    Raises:
        TrainingError: teacher and student do not fit together, or data cannot be used.
    """

    def __init__(
        self, config: DistillConfig, teacher_folder: str, student_folder: str, run: TrainingRun
    ):
        if os.path.realpath(teacher_folder) == os.path.realpath(student_folder):
            raise TrainingError(
                f"the teacher {config.teacher} is the student, who would learn nothing from it; "
                "take the model that knows more as the teacher"
            )
        self.run, self.settings, self._kind = run, config.training, model_kind(config.task)
        teacher = load_model(teacher_folder, self._kind, config, whole=True)
        if self._kind.has_heads:
            check_classes(teacher.config, f"the teacher {config.teacher}")
        skeleton = load_skeleton(student_folder, self._kind, config)
        data = fit_to_model(fit_to_model(config.data, teacher), skeleton)
        self._config = config.model_copy(update={"data": data})
        self._teacher_processor, self.student_processor = (
            load_processor([folder], self._kind, config)
            for folder in (teacher_folder, student_folder)
        )
        # Whether the student learns the teacher's words, which are in the data, not its logits.
        self._by_text = isinstance(self._kind, CausalLanguageModel) and self._needs_text()
        self._teacher = teacher.to(run.accelerator.device)
        del teacher
        splits = unpack_examples(run.once("data", lambda: (self._read_data(), {}))[0])
        self.student_data = with_prefix(splits, "student-")
        self._teacher_data = with_prefix(splits, "teacher-")  # the same supervised positions
        if self._by_text:
            del self._teacher  # before the student takes memory
        self.student = self._load_student(student_folder)

    def _needs_text(self) -> bool:
        config = self._config
        same = self._teacher_processor.get_vocab() == self.student_processor.get_vocab()
        if config.signal == "logits" and not same:
            raise TrainingError(
                "signal: logits needs one tokenizer, but teacher and student have different ones; "
                "use signal: text, with the `prompt` column"
            )
        by_text = config.signal == "text" or (config.signal == "auto" and not same)
        if by_text and config.data.prompt is None:
            raise TrainingError(
                "teacher and student have different tokenizers, so the teacher has to write text; "
                "give the `prompt` column that it answers"
            )
        return by_text

    def _read_data(self) -> dict[str, Tensor]:
        """Return `student-train`, `teacher-train`, …: the rows as both models read them, packed."""
        data, kind, settings = self._config.data, self._kind, self.settings
        if self._by_text:
            data = data.model_copy(update={"completion": None})
        both = self._teacher_processor, self.student_processor  # of a text one may make no token
        reader = SampleReader(self._teacher, kind, self._teacher_processor, data)
        splits = {}
        for split, rows in load_rows(data, settings.seed).items():
            rows = [row for row in rows if all(kind.encode(row, data, one) for one in both)]
            teacher = student = reader.read(rows, split, settings.batch_size, quiet=self.run.quiet)
            if self._by_text:
                student = [*filter(None, map(self._encode_answer, rows, teacher))]
            elif kind.has_heads:
                student = [kind.encode(row, data, self.student_processor) for row in rows]
            if not student:
                raise TrainingError(f"data {data.path}: nothing to learn in the {split} split")
            splits |= {f"student-{split}": student, f"teacher-{split}": teacher}
        return pack_examples(splits)

    def _encode_answer(self, row: dict[str, Any], sample: Example) -> Example | None:
        """Return a prompt with what the teacher has written to it, as the student reads it."""
        words = sample["input_ids"][sample["supervised"]]
        text = self._teacher_processor.decode(words, skip_special_tokens=True)
        data = self._config.data.model_copy(update={"completion": "completion"})
        return self._kind.encode({**row, "completion": text}, data, self.student_processor)

    def _load_student(self, folder: str) -> PreTrainedModel:
        """Load the student for training; a classifier gets a new head for the teacher's classes."""
        config, new = self._config, self._kind.has_heads
        labels = ("num_labels", "id2label", "label2id") if new else ()
        options = {name: getattr(self._teacher.config, name) for name in labels}
        dtype = getattr(torch, config.dtype)
        torch.manual_seed(config.training.seed)
        student = load_model(folder, self._kind, config, dtype, whole=True, new_head=new, **options)
        if not self._kind.has_heads and not self._by_text:
            sizes = [len(m.get_output_embeddings().weight) for m in (self._teacher, student)]
            if sizes[0] != sizes[1]:
                raise TrainingError(
                    f"the teacher has {sizes[0]} logits and the student {sizes[1]}, though their "
                    "tokenizers agree; resize the embeddings of one, or use signal: text"
                )
        return student.requires_grad_(True).train().to(self.run.accelerator.device)

    def backward(self, indices: Sequence[int]) -> float:
        """Leave the gradient of some samples in the student; return the mean loss per position."""
        run = self.run
        totals = torch.zeros(2, dtype=torch.float64)
        for part in run.share(indices, self.settings.batch_size):
            loss, _, positions = self._loss("train", part)
            loss.backward()
            totals += torch.tensor([float(loss.detach()), positions], dtype=torch.float64)
        total, positions = run.sum(totals).tolist()
        for parameter in self.student.parameters():
            if parameter.grad is None and run.accelerator.num_processes > 1:
                parameter.grad = torch.zeros_like(parameter)  # every process is in every sum
            if parameter.grad is not None:
                parameter.grad = run.sum(parameter.grad) / positions
        return total / positions

    @torch.no_grad()
    def evaluate(self, split: str) -> tuple[float, float]:
        """Return the mean loss per position, and the share of answers that are the teacher's."""
        self.student.eval()
        totals = torch.zeros(3, dtype=torch.float64)
        indices = range(len(self.student_data[split]))
        for part in self.run.share(indices, self.settings.batch_size):
            loss, right, positions = self._loss(split, part)
            totals += torch.tensor([float(loss), right, positions], dtype=torch.float64)
        self.student.train()
        loss, right, positions = self.run.sum(totals).tolist()
        return loss / positions, right / positions

    def _loss(self, split: str, indices: Sequence[int]) -> tuple[Tensor, int, int]:
        """Return the summed loss, how many answers are the teacher's, and how many there are."""
        samples = [self.student_data[split][index] for index in indices]
        with self.run.accelerator.autocast(), explained_failures(self.student, self._config.data):
            batch = send_to_device(self._kind.collate(samples), self.run.accelerator.device)
            answers = self._kind.logits(self.student, batch)
        if self._by_text:
            words = torch.cat([sample["input_ids"][sample["supervised"]] for sample in samples])
            teacher_logits, labels = None, words.to(answers.device)
        else:
            with torch.no_grad():
                read = [self._teacher_data[split][index] for index in indices]
                reader = SampleReader(self._teacher, self._kind, None, self._config.data)
                teacher_logits = reader.logits(read)
            labels = teacher_logits.argmax(-1)
        alpha, temperature = self._config.alpha, self._config.temperature
        loss = distillation_loss(answers, teacher_logits, labels, alpha, temperature)
        return loss, int((answers.argmax(-1) == labels).sum()), len(labels)


def distillation_loss(
    student: Tensor, teacher: Tensor | None, labels: Tensor, alpha: float, temperature: float
) -> Tensor:
    """Return Eq. 8, summed: α CE(student, labels) + (1 − α) T² KL(teacher at T ‖ student at T).

    Args:
        student, teacher: logits, (P, C); without a teacher's, its words are the only labels, and
            the loss is their cross-entropy.
        labels: (P,), the teacher's arg max, or its words.
        alpha: α, the share of the hard labels, 0 to 1.
        temperature: T > 0.
    """
    hard = cross_entropy(student.float(), labels, reduction="sum")
    if teacher is None:
        return hard
    target = (teacher.float() / temperature).log_softmax(-1)
    guess = (student.float() / temperature).log_softmax(-1)
    soft = kl_div(guess, target, reduction="sum", log_target=True)
    return alpha * hard + (1 - alpha) * temperature**2 * soft
