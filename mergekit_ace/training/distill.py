# SPDX-License-Identifier: Apache-2.0
"""Distillation of a teacher of any architecture into the base's (Sec. 3.3, Eq. 8)."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from tqdm import tqdm

from mergekit_ace.files import file_states, write_text
from mergekit_ace.training.config import DistillConfig
from mergekit_ace.training.data import (
    SPLITS,
    Example,
    Examples,
    Rows,
    load_examples,
    load_rows,
    save_examples,
    step_indices,
)
from mergekit_ace.training.loop import distillation_loss
from mergekit_ace.training.models import load_model, load_processor, local_folder
from mergekit_ace.training.state import (
    Diverged,
    RunFolder,
    TrainingError,
    load_checkpoint,
    module_tensors,
    new_accelerator,
    optimizer_tensors,
    own_batches,
    restore_optimizer,
    samples_per_step,
    save_checkpoint,
    sum_over_processes,
    with_prefix,
)
from mergekit_ace.training.tasks import CausalLanguageModel, Kind, kind_of
from mergekit_ace.training.teachers import move

if TYPE_CHECKING:
    from accelerate import Accelerator
    from transformers import PreTrainedModel


RECORD = "distillation.json"


def run_distillation(
    config: DistillConfig,
    out: str | os.PathLike,
    *,
    overwrite: bool = False,
    quiet: bool = False,
) -> Path:
    """Distil as `config` says, or go on with it; the student is saved in `out`.

    Raises:
        TrainingError: something about the config, the models or the data is wrong.
    """
    accelerator = new_accelerator(config.mixed_precision)
    quiet = quiet or not accelerator.is_main_process
    folder = RunFolder(out)
    kind = kind_of(config.task)
    with accelerator.main_process_first():
        places = [
            local_folder(reference, folder.path / "adapters", config.trust_remote_code)
            for reference in (config.teacher, config.student)
        ]
    if accelerator.is_main_process:
        identity = {
            "config": config.model_dump(mode="json"),
            "processes": accelerator.num_processes,
            "files": file_states([*places, config.data.path]),
        }
        folder.claim(identity, overwrite=overwrite)
    accelerator.wait_for_everyone()
    if (folder.path / RECORD).exists():  # this very run, complete
        return folder.path
    school = Distillation.open(config, kind, places, folder, accelerator, quiet=quiet)
    progress = _train(school, folder, quiet=quiet)
    accelerator.wait_for_everyone()
    best = load_checkpoint(folder.state / "best.safetensors")
    assert best is not None
    school.student.load_state_dict(with_prefix(best[0], "student."))
    loss, agreement = school.evaluate("test")
    if accelerator.is_main_process:
        scores = {"test_loss": loss, "test_agreement": agreement, "kept": best[1]}
        _write(school, {**scores, "log": progress.log}, folder)
    accelerator.wait_for_everyone()
    return folder.path


@dataclass
class DistillProgress:
    """Where a distillation stands; saved with every checkpoint."""

    step: int = 0
    best_loss: float = math.inf
    best_step: int = 0
    log: list[dict[str, float]] = field(default_factory=list)


def _train(school: Distillation, folder: RunFolder, *, quiet: bool) -> DistillProgress:
    """Train the student, or go on with it; the best one is in `state/best.safetensors`."""
    training = school.config.training
    optimizer = torch.optim.AdamW(
        school.student.parameters(), lr=training.learning_rate, weight_decay=training.weight_decay
    )
    count = len(school.mine["train"])
    per_epoch = -(-count // school.batch)
    total = min(training.epochs * per_epoch, training.max_steps or training.epochs * per_epoch)
    every = training.evaluate_every or per_epoch
    progress = _restore(school, optimizer, folder)
    main = school.accelerator.is_main_process
    bar = tqdm(total=total, initial=progress.step, desc="distilling", disable=quiet)
    while progress.step < total:
        rate = _learning_rate(school.config, progress.step, total)
        for group in optimizer.param_groups:
            group["lr"] = rate
        loss = _step(school, optimizer, progress.step, count)
        if not math.isfinite(loss):
            kept = (
                f"the best student so far, of step {progress.best_step}, is kept in {folder.state}"
                if math.isfinite(progress.best_loss)
                else "no student was evaluated before that"
            )
            raise Diverged(
                f"the loss became {loss} in step {progress.step}; {kept}. Lower "
                "training.learning_rate"
            )
        progress.step += 1
        progress.log.append({"step": progress.step, "loss": loss, "learning_rate": rate})
        bar.update()
        bar.set_postfix(loss=f"{loss:.4f}", best=f"{progress.best_loss:.4f}")
        if progress.step % every == 0 or progress.step == total:
            _judge(school, progress, folder)
        if main and (progress.step % training.checkpoint_every == 0 or progress.step == total):
            tensors = {
                **module_tensors(school.student, "student."),
                **optimizer_tensors(optimizer),
                "random_state": torch.get_rng_state(),
            }
            save_checkpoint(folder.state / "student.safetensors", tensors, vars(progress))
    bar.close()
    return progress


def _restore(
    school: Distillation, optimizer: torch.optim.Optimizer, folder: RunFolder
) -> DistillProgress:
    known = load_checkpoint(folder.state / "student.safetensors")
    if known is None:
        (folder.state / "best.safetensors").unlink(missing_ok=True)
        return DistillProgress()
    tensors, facts = known
    school.student.load_state_dict(with_prefix(tensors, "student."))
    restore_optimizer(optimizer, tensors)
    torch.set_rng_state(tensors["random_state"])
    return DistillProgress(**facts)


def _step(school: Distillation, optimizer: torch.optim.Optimizer, step: int, count: int) -> float:
    """One step over a batch; the mean loss per position."""
    indices = step_indices(school.config.training.seed, 0, step, school.batch, count)
    optimizer.zero_grad()
    totals = torch.zeros(2, dtype=torch.float64)
    for part in school.shares(indices):
        loss, _, positions = school.loss("train", part)
        loss.backward()
        totals += torch.tensor([float(loss.detach()), positions], dtype=torch.float64)
    total, positions = sum_over_processes(school.accelerator, totals).tolist()
    for parameter in school.student.parameters():
        if parameter.grad is None and school.accelerator.num_processes > 1:
            parameter.grad = torch.zeros_like(parameter)  # every process takes part in every sum
        if parameter.grad is not None:
            parameter.grad = sum_over_processes(school.accelerator, parameter.grad) / positions
    torch.nn.utils.clip_grad_norm_(school.student.parameters(), 1.0)
    optimizer.step()
    return total / positions


def _judge(school: Distillation, progress: DistillProgress, folder: RunFolder) -> None:
    """Evaluate, and keep the student if it was never better."""
    loss, agreement = school.evaluate("validation")
    line = {"step": progress.step, "validation_loss": loss, "agreement": agreement}
    progress.log.append(line)
    if loss < progress.best_loss:
        progress.best_loss, progress.best_step = loss, progress.step
        if school.accelerator.is_main_process:
            best = module_tensors(school.student, "student.")
            save_checkpoint(folder.state / "best.safetensors", best, line)


def _write(school: Distillation, record: dict[str, Any], folder: RunFolder) -> None:
    """The student as an ordinary checkpoint; last the record, which says it is complete."""
    school.student.save_pretrained(folder.path)
    if school.processor is not None:
        school.processor.save_pretrained(folder.path)
    write_text(folder.path / RECORD, json.dumps(record, indent=1))
    for path in folder.state.glob("*.safetensors"):
        path.unlink()


def _learning_rate(config: DistillConfig, step: int, total: int) -> float:
    """Linear warm-up, then a cosine to 0; a function of the step alone."""
    training = config.training
    warmup = max(round(training.warmup * total), 1)
    if step < warmup:
        return training.learning_rate * (step + 1) / warmup
    share = (step - warmup) / max(total - warmup, 1)
    return training.learning_rate * 0.5 * (1 + math.cos(math.pi * share))


@dataclass
class Distillation:
    """Teacher, student and what they read.

    Attributes:
        config, kind, accelerator: of the run.
        teacher: None where its words are known already.
        student: starts as the base.
        processor: the student's.
        mine, theirs: samples by split as the student and the teacher read them, position by
            position the same.
    """

    config: DistillConfig
    kind: Kind
    accelerator: Accelerator
    teacher: PreTrainedModel | None
    student: PreTrainedModel
    processor: Any
    mine: dict[str, Examples]
    theirs: dict[str, Examples]

    @classmethod
    def open(
        cls,
        config: DistillConfig,
        kind: Kind,
        places: Sequence[str],
        folder: RunFolder,
        accelerator: Accelerator,
        *,
        quiet: bool,
    ) -> Distillation:
        """Load both models and encode the data for each."""
        theirs_at, mine_at = places
        processors = [load_processor([place], kind, config) for place in places]
        teacher = load_model(theirs_at, kind, config).to(accelerator.device)
        written = isinstance(kind, CausalLanguageModel) and _by_text(config, *processors)
        path = folder.state / "data.safetensors"
        if accelerator.is_main_process and not path.exists():
            rows = load_rows(config.data, config.training.seed)
            sides = _encode(config, kind, teacher, rows, processors, written, quiet=quiet)
            save_examples(sides, path, {})
        accelerator.wait_for_everyone()
        splits, _ = load_examples(path)
        torch.manual_seed(config.training.seed)
        options = {}
        if kind.has_heads:
            options = {
                "num_labels": teacher.config.num_labels,
                "id2label": teacher.config.id2label,
                "label2id": teacher.config.label2id,
                "ignore_mismatched_sizes": True,
            }
        student = load_model(mine_at, kind, config, getattr(torch, config.dtype), **options)
        if not written and not kind.has_heads:
            _check_vocabulary(teacher, student)
        return cls(
            config,
            kind,
            accelerator,
            None if written else teacher,
            student.to(accelerator.device).requires_grad_(True).train(),
            processors[1],
            with_prefix(splits, "mine-"),
            with_prefix(splits, "theirs-"),
        )

    @property
    def batch(self) -> int:
        """Samples in a step, all processes together."""
        training = self.config.training
        return samples_per_step(
            self.accelerator, training.batch_size, training.gradient_accumulation
        )

    def shares(self, indices: list[int]) -> list[list[int]]:
        """This process's samples, in batches."""
        return own_batches(self.accelerator, indices, self.config.training.batch_size)

    def loss(self, split: str, indices: list[int]) -> tuple[Tensor, int, int]:
        """Summed loss, how often the student says what the teacher says, and positions."""
        samples = [self.mine[split][index] for index in indices]
        with self.accelerator.autocast():
            batch = move(self.kind.collate(samples), self.accelerator.device)
            answers = self.kind.logits(self.student, batch)
        if self.teacher is None:
            words = torch.cat([s["input_ids"][s["supervised"]] for s in samples])
            logits, labels = None, words.to(answers.device)
        else:
            logits = self._asked([self.theirs[split][index] for index in indices])
            labels = logits.argmax(-1)
        loss = distillation_loss(
            answers, logits, labels, self.config.alpha, self.config.temperature
        )
        return loss, int((answers.argmax(-1) == labels).sum()), len(labels)

    @torch.no_grad()
    def _asked(self, samples: list[Example]) -> Tensor:
        assert self.teacher is not None
        batch = move(self.kind.collate(samples), self.accelerator.device)
        return self.kind.logits(self.teacher, batch)

    @torch.no_grad()
    def evaluate(self, split: str) -> tuple[float, float]:
        """Mean loss per position, and the share of answers that are the teacher's."""
        self.student.eval()
        totals = torch.zeros(3, dtype=torch.float64)
        for part in self.shares(list(range(len(self.mine[split])))):
            loss, right, positions = self.loss(split, part)
            totals += torch.tensor([float(loss), right, positions], dtype=torch.float64)
        self.student.train()
        loss, right, positions = sum_over_processes(self.accelerator, totals).tolist()
        return loss / positions, right / positions


def _by_text(config: DistillConfig, theirs: Any, mine: Any) -> bool:
    """Whether the student learns the teacher's words instead of its logits."""
    same = theirs.get_vocab() == mine.get_vocab()
    if config.signal == "logits" and not same:
        raise TrainingError(
            "signal: logits needs one tokenizer, but teacher and student have different ones; use "
            "signal: text, with the `prompt` column"
        )
    written = config.signal == "text" or (config.signal == "auto" and not same)
    if written and config.data.prompt is None:
        raise TrainingError(
            "teacher and student have different tokenizers, so the teacher has to write text; give "
            "the `prompt` column that it answers"
        )
    return written


def _check_vocabulary(teacher: PreTrainedModel, student: PreTrainedModel) -> None:
    sizes = [model.get_output_embeddings().weight.shape[0] for model in (teacher, student)]
    if sizes[0] != sizes[1]:
        raise TrainingError(
            f"the teacher has {sizes[0]} logits and the student {sizes[1]}, though their "
            "tokenizers agree; resize the embeddings of one, or use signal: text"
        )


def _encode(
    config: DistillConfig,
    kind: Kind,
    teacher: PreTrainedModel,
    rows: Rows,
    processors: Sequence[Any],
    written: bool,
    *,
    quiet: bool,
) -> dict[str, Examples]:
    """`mine-train`, `theirs-train`, …: the rows as both models read them."""
    theirs, mine = processors
    sides = {}
    for split in SPLITS:
        pairs = []
        for row in tqdm(getattr(rows, split), desc=f"encoding {split}", disable=quiet):
            if written:
                row = _answered(row, config, kind, teacher, theirs)
            data = config.data
            if written:
                data = data.model_copy(update={"completion": "completion"})
            pair = (kind.encode(row, data, mine), kind.encode(row, data, theirs))
            if pair[0] is not None and pair[1] is not None:
                pairs.append(pair)
        if not pairs:
            raise TrainingError(f"data {config.data.path}: nothing to learn in the {split} split")
        pairs = [
            _completed(pair, config, kind, teacher, theirs) if kind.unanswered(pair[0]) else pair
            for pair in pairs
        ]
        sides[f"mine-{split}"] = Examples.pack([pair[0] for pair in pairs])
        sides[f"theirs-{split}"] = Examples.pack([pair[1] for pair in pairs])
    return sides


def _answered(
    row: dict[str, Any], config: DistillConfig, kind: Kind, teacher: PreTrainedModel, theirs: Any
) -> dict[str, Any]:
    """A row with what the teacher writes to its prompt, as text."""
    data = config.data.model_copy(update={"completion": None})
    prompt = kind.encode(row, data, theirs)
    if prompt is None:
        return {**row, "completion": ""}
    (completed,) = kind.complete(teacher, [prompt], data, theirs)
    words = completed["input_ids"][completed["supervised"]]
    return {**row, "completion": theirs.decode(words, skip_special_tokens=True)}


def _completed(
    pair: tuple[Example, Example],
    config: DistillConfig,
    kind: Kind,
    teacher: PreTrainedModel,
    theirs: Any,
) -> tuple[Example, Example]:
    """One tokenizer: what the teacher writes is the same tokens for both."""
    (completed,) = kind.complete(teacher, [pair[1]], config.data, theirs)
    return completed, completed
