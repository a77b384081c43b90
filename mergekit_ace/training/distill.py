# SPDX-License-Identifier: Apache-2.0
"""A teacher of any architecture into the base's architecture (Sec. 3.3, Eq. 8)."""

from __future__ import annotations

import json
import math
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

from mergekit_ace.files import file_states, write_text
from mergekit_ace.training.distill_config import DistillConfig
from mergekit_ace.training.errors import Diverged
from mergekit_ace.training.models import local_folder
from mergekit_ace.training.order import step_indices
from mergekit_ace.training.processes import new_accelerator, sum_over_processes
from mergekit_ace.training.school import School
from mergekit_ace.training.state import (
    RunFolder,
    load_checkpoint,
    module_tensors,
    optimizer_tensors,
    restore_optimizer,
    save_checkpoint,
    with_prefix,
)
from mergekit_ace.training.tasks import kind_of

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
    school = School.open(config, kind, places, folder, accelerator, quiet=quiet)
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
class Progress:
    """Where a distillation stands; saved with every checkpoint."""

    step: int = 0
    best_loss: float = math.inf
    best_step: int = 0
    log: list[dict[str, float]] = field(default_factory=list)


def _train(school: School, folder: RunFolder, *, quiet: bool) -> Progress:
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


def _restore(school: School, optimizer: torch.optim.Optimizer, folder: RunFolder) -> Progress:
    known = load_checkpoint(folder.state / "student.safetensors")
    if known is None:
        (folder.state / "best.safetensors").unlink(missing_ok=True)
        return Progress()
    tensors, facts = known
    school.student.load_state_dict(with_prefix(tensors, "student."))
    restore_optimizer(optimizer, tensors)
    torch.set_rng_state(tensors["random_state"])
    return Progress(**facts)


def _step(school: School, optimizer: torch.optim.Optimizer, step: int, count: int) -> float:
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


def _judge(school: School, progress: Progress, folder: RunFolder) -> None:
    """Evaluate, and keep the student if it was never better."""
    loss, agreement = school.evaluate("validation")
    line = {"step": progress.step, "validation_loss": loss, "agreement": agreement}
    progress.log.append(line)
    if loss < progress.best_loss:
        progress.best_loss, progress.best_step = loss, progress.step
        if school.accelerator.is_main_process:
            best = module_tensors(school.student, "student.")
            save_checkpoint(folder.state / "best.safetensors", best, line)


def _write(school: School, record: dict[str, Any], folder: RunFolder) -> None:
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
