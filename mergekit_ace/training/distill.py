# SPDX-License-Identifier: Apache-2.0
"""Distillation of a teacher of any architecture into the base's (Sec. 3.3, Eq. 8).

The result is an expert that merges with others of the base's architecture.
"""

from __future__ import annotations

import json
import math
import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy, kl_div
from tqdm import tqdm

from mergekit_ace.files import write_text
from mergekit_ace.training.config import DistillConfig
from mergekit_ace.training.data import (
    Example,
    Examples,
    load_examples,
    load_rows,
    save_examples,
    step_indices,
    to_device,
)
from mergekit_ace.training.limits import check_classes, fit_to_model
from mergekit_ace.training.models import load_model, load_processor, load_skeleton, local_folder
from mergekit_ace.training.state import (
    Diverged,
    TrainingError,
    TrainingProgress,
    TrainingRun,
    load_checkpoint,
    restore_training,
    save_checkpoint,
    save_training,
    with_prefix,
)
from mergekit_ace.training.tasks import CausalLanguageModel, ModelKind, model_kind

if TYPE_CHECKING:
    from transformers import PreTrainedModel

RECORD = "distillation.json"


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
    run = TrainingRun(out, config.mixed_precision, quiet=quiet)
    with run.accelerator.main_process_first():
        teacher, student = (
            local_folder(reference, run.path / "adapters", config.trust_remote_code)
            for reference in (config.teacher, config.student)
        )
    run.claim(config, [teacher, student, config.data.path], overwrite=overwrite)
    if (run.path / RECORD).exists():  # this very run, complete
        return run.path
    distillation = Distillation.prepare(config, teacher, student, run)
    progress = train_student(distillation)
    run.wait()
    best = load_checkpoint(run.state / "best.safetensors")
    assert best is not None
    distillation.student.load_state_dict(best[0])
    loss, agreement = distillation.evaluate("test")
    if run.is_main:
        scores = {"test_loss": loss, "test_agreement": agreement, "kept": best[1]}
        _write_student(distillation, {**scores, "log": progress.log})
    run.wait()
    return run.path


@dataclass
class Distillation:
    """Teacher, student, and the data as each of them reads it.

    Attributes:
        config, kind, run: of the distillation.
        teacher: None where the student learns its words, which are in the data.
        student: starts as the base.
        processor: the student's.
        student_data, teacher_data: samples by split, with the same supervised positions.
    """

    config: DistillConfig
    kind: ModelKind
    run: TrainingRun
    teacher: PreTrainedModel | None
    student: PreTrainedModel
    processor: Any
    student_data: dict[str, Examples]
    teacher_data: dict[str, Examples]

    @classmethod
    def prepare(
        cls, config: DistillConfig, teacher_folder: str, student_folder: str, run: TrainingRun
    ) -> Distillation:
        """Load both models and encode the data for each.

        Raises:
            TrainingError: teacher and student do not fit together, or data cannot be used.
        """
        if os.path.realpath(teacher_folder) == os.path.realpath(student_folder):
            raise TrainingError(
                f"the teacher {config.teacher} is the student, who would learn nothing from it; "
                "take the model that knows more as the teacher"
            )
        kind = model_kind(config.task)
        teacher = load_model(teacher_folder, kind, config, whole=True)
        if kind.has_heads:
            check_classes(teacher.config, f"the teacher {config.teacher}")
        skeleton = load_skeleton(student_folder, kind, config)
        data = fit_to_model(fit_to_model(config.data, teacher), skeleton)
        config = config.model_copy(update={"data": data})
        encoder = PairEncoder(
            config,
            kind,
            teacher.to(run.accelerator.device),
            load_processor([teacher_folder], kind, config),
            load_processor([student_folder], kind, config),
        )
        path = run.state / "data.safetensors"
        run.make_once(path, lambda: encoder.write(path, quiet=run.quiet))
        splits, _ = load_examples(path)
        torch.manual_seed(config.training.seed)
        student = _load_student(config, kind, student_folder, encoder.teacher)
        if not kind.has_heads and not encoder.by_text:
            _check_vocabulary(encoder.teacher, student)
        return cls(
            config=config,
            kind=kind,
            run=run,
            teacher=None if encoder.by_text else encoder.teacher,
            student=student.to(run.accelerator.device),
            processor=encoder.student_processor,
            student_data=with_prefix(splits, "student-"),
            teacher_data=with_prefix(splits, "teacher-"),
        )

    def share(self, indices: list[int]) -> list[list[int]]:
        """Return this process's samples, in batches."""
        return self.run.share(indices, self.config.training.batch_size)

    def loss(self, split: str, indices: list[int]) -> tuple[Tensor, int, int]:
        """Return the summed loss, how many answers are the teacher's, and how many there are."""
        samples = [self.student_data[split][index] for index in indices]
        with self.run.accelerator.autocast():
            answers = self._logits(self.student, samples)
        if self.teacher is None:
            words = torch.cat([sample["input_ids"][sample["supervised"]] for sample in samples])
            teacher_logits, labels = None, words.to(answers.device)
        else:
            with torch.no_grad():
                read = [self.teacher_data[split][index] for index in indices]
                teacher_logits = self._logits(self.teacher, read)
            labels = teacher_logits.argmax(-1)
        alpha, temperature = self.config.alpha, self.config.temperature
        loss = distillation_loss(answers, teacher_logits, labels, alpha, temperature)
        return loss, int((answers.argmax(-1) == labels).sum()), len(labels)

    def _logits(self, model: PreTrainedModel, samples: list[Example]) -> Tensor:
        batch = to_device(self.kind.collate(samples), self.run.accelerator.device)
        return self.kind.logits(model, batch)

    @torch.no_grad()
    def evaluate(self, split: str) -> tuple[float, float]:
        """Return the mean loss per position, and the share of answers that are the teacher's."""
        self.student.eval()
        totals = torch.zeros(3, dtype=torch.float64)
        for part in self.share(list(range(len(self.student_data[split])))):
            loss, right, positions = self.loss(split, part)
            totals += torch.tensor([float(loss), right, positions], dtype=torch.float64)
        self.student.train()
        loss, right, positions = self.run.sum(totals).tolist()
        return loss / positions, right / positions


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


# Not by `transformers.Trainer`, which was tried (5.23, a subclass with Eq. 8 as its loss). It takes
# about as many lines once divergence and the best student are cared for, and it does not resume as
# this does: its checkpoints are not whole or absent, so that a kill while one is written stops the
# next start, and a model whose names on disk differ from those in memory (ViT) loses its progress.
def train_student(distillation: Distillation) -> TrainingProgress:
    """Train the student, or go on with it; the best one is kept in `state/best.safetensors`.

    Raises:
        Diverged: the loss became NaN or Inf.
    """
    run, settings, student = distillation.run, distillation.config.training, distillation.student
    optimizer = torch.optim.AdamW(
        student.parameters(), lr=settings.learning_rate, weight_decay=settings.weight_decay
    )
    checkpoint = run.state / "student.safetensors"
    known = restore_training(checkpoint, student, optimizer)
    progress = known[0] if known else TrainingProgress()
    if not known:  # whatever was kept before a kill
        (run.state / "best.safetensors").unlink(missing_ok=True)
    per_epoch = -(-len(distillation.student_data["train"]) // run.samples_per_step(settings))
    total = min(settings.epochs * per_epoch, settings.max_steps or settings.epochs * per_epoch)
    bar = tqdm(total=total, initial=progress.step, desc="distilling", disable=run.quiet)
    while progress.step < total:
        rate = warm_cosine_rate(distillation.config, progress.step, total)
        loss = step_student(distillation, optimizer, progress.step, rate)
        if not math.isfinite(loss):
            raise _diverged(loss, progress, run)
        progress.add_step(loss, rate)
        bar.update()
        bar.set_postfix(loss=f"{loss:.4f}", best=f"{progress.best_loss:.4f}")
        last = progress.step == total
        if progress.step % (settings.evaluate_every or per_epoch) == 0 or last:
            _evaluate_student(distillation, progress)
        if run.is_main and (progress.step % settings.checkpoint_every == 0 or last):
            save_training(checkpoint, student, optimizer, progress)
    bar.close()
    return progress


def step_student(
    distillation: Distillation, optimizer: torch.optim.Optimizer, step: int, rate: float
) -> float:
    """Take one step of the optimizer; return the mean loss per position before it."""
    run, student, settings = distillation.run, distillation.student, distillation.config.training
    count, size = len(distillation.student_data["train"]), run.samples_per_step(settings)
    optimizer.zero_grad()
    totals = torch.zeros(2, dtype=torch.float64)
    for part in distillation.share(step_indices(settings.seed, 0, step, size, count)):
        loss, _, positions = distillation.loss("train", part)
        loss.backward()
        totals += torch.tensor([float(loss.detach()), positions], dtype=torch.float64)
    total, positions = run.sum(totals).tolist()
    for parameter in student.parameters():
        if parameter.grad is None and run.accelerator.num_processes > 1:
            parameter.grad = torch.zeros_like(parameter)  # every process takes part in every sum
        if parameter.grad is not None:
            parameter.grad = run.sum(parameter.grad) / positions
    torch.nn.utils.clip_grad_norm_(student.parameters(), 1.0)
    for group in optimizer.param_groups:
        group["lr"] = rate
    optimizer.step()
    return total / positions


def warm_cosine_rate(config: DistillConfig, step: int, total: int) -> float:
    """Return the learning rate of one step, from 0: linear warm-up, then a cosine to 0."""
    training = config.training
    warmup = max(round(training.warmup * total), 1)
    if step < warmup:
        return training.learning_rate * (step + 1) / warmup
    share = (step - warmup) / max(total - warmup, 1)
    return training.learning_rate * 0.5 * (1 + math.cos(math.pi * share))


def _evaluate_student(distillation: Distillation, progress: TrainingProgress) -> None:
    """Evaluate, and keep the student if it was never better."""
    run = distillation.run
    loss, agreement = distillation.evaluate("validation")
    if progress.add_evaluation(loss, agreement=agreement) and run.is_main:
        state = distillation.student.state_dict()
        save_checkpoint(run.state / "best.safetensors", state, progress.log[-1])


def _diverged(loss: float, progress: TrainingProgress, run: TrainingRun) -> Diverged:
    kept = "no student was evaluated before that"
    if math.isfinite(progress.best_loss):
        kept = f"the best student so far, of step {progress.best_step}, is kept in {run.state}"
    return Diverged(
        f"the loss became {loss} in step {progress.step}; {kept}. Lower training.learning_rate"
    )


def _write_student(distillation: Distillation, record: dict[str, Any]) -> None:
    """Save the student as a checkpoint; last the record, which says it is complete."""
    run = distillation.run
    distillation.student.save_pretrained(run.path)
    if distillation.processor is not None:
        distillation.processor.save_pretrained(run.path)
    write_text(run.path / RECORD, json.dumps(record, indent=1))
    for path in run.state.glob("*.safetensors"):
        path.unlink()


def _load_student(
    config: DistillConfig, kind: ModelKind, folder: str, teacher: PreTrainedModel
) -> PreTrainedModel:
    """Load the student for training; a classifier gets a new head for the teacher's classes."""
    head = {}
    if kind.has_heads:
        head = {
            "num_labels": teacher.config.num_labels,
            "id2label": teacher.config.id2label,
            "label2id": teacher.config.label2id,
            "ignore_mismatched_sizes": True,
        }
    student = load_model(folder, kind, config, getattr(torch, config.dtype), **head)
    return student.requires_grad_(True).train()


def _check_vocabulary(teacher: PreTrainedModel, student: PreTrainedModel) -> None:
    sizes = [model.get_output_embeddings().weight.shape[0] for model in (teacher, student)]
    if sizes[0] != sizes[1]:
        raise TrainingError(
            f"the teacher has {sizes[0]} logits and the student {sizes[1]}, though their "
            "tokenizers agree; resize the embeddings of one, or use signal: text"
        )


@dataclass
class PairEncoder:
    """Encoding of rows for student and teacher at once.

    Attributes:
        config, kind: of the distillation.
        teacher: writes what rows lack.
        teacher_processor, student_processor: of each.
    """

    config: DistillConfig
    kind: ModelKind
    teacher: PreTrainedModel
    teacher_processor: Any
    student_processor: Any

    def __post_init__(self) -> None:
        self.by_text = isinstance(self.kind, CausalLanguageModel) and self._needs_text()

    def _needs_text(self) -> bool:
        """Return whether the student learns the teacher's words instead of its logits."""
        config = self.config
        same = self.teacher_processor.get_vocab() == self.student_processor.get_vocab()
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

    def write(self, path: Path, *, quiet: bool) -> None:
        """Write `student-train`, `teacher-train`, …: the rows as both models read them."""
        data = self.config.data
        splits = {}
        for split, rows in load_rows(data, self.config.training.seed).items():
            bar = tqdm(rows, desc=f"encoding {split}", disable=quiet)
            pairs = [pair for row in bar if (pair := self._encode(row)) is not None]
            if not pairs:
                raise TrainingError(f"data {data.path}: nothing to learn in the {split} split")
            student, teacher = zip(*pairs, strict=True)
            splits[f"student-{split}"] = Examples.pack(student)
            splits[f"teacher-{split}"] = Examples.pack(teacher)
        save_examples(splits, path, {})

    def _encode(self, row: dict[str, Any]) -> tuple[Example, Example] | None:
        """Return a row as the student and as the teacher read it; None if nothing is to learn."""
        data = self.config.data
        if self.by_text:
            row = {**row, "completion": self._written_answer(row)}
            data = data.model_copy(update={"completion": "completion"})
        student = self.kind.encode(row, data, self.student_processor)
        teacher = self.kind.encode(row, data, self.teacher_processor)
        if student is None or teacher is None:
            return None
        if self.kind.needs_completion(student):  # one tokenizer: the same tokens for both
            (student,) = (teacher,) = self._complete(teacher)
        return student, teacher

    def _written_answer(self, row: dict[str, Any]) -> str:
        """Let the teacher write to a prompt; return that as text."""
        data = self.config.data.model_copy(update={"completion": None})
        prompt = self.kind.encode(row, data, self.teacher_processor)
        if prompt is None:
            return ""
        (sample,) = self._complete(prompt)
        words = sample["input_ids"][sample["supervised"]]
        return self.teacher_processor.decode(words, skip_special_tokens=True)

    def _complete(self, sample: Example) -> list[Example]:
        """Let the teacher write the completion of a sample."""
        data, processor = self.config.data, self.teacher_processor
        return self.kind.complete(self.teacher, [sample], data, processor)
