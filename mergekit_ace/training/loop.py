# SPDX-License-Identifier: Apache-2.0
"""The training loop: statistics to coefficients to a merge to a loss, and back."""

from __future__ import annotations

import json
import math
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from tqdm import tqdm

from mergekit_ace.coefficients.learner import Learner, LearnerConfig
from mergekit_ace.files import write_text
from mergekit_ace.training.config import TrainingConfig
from mergekit_ace.training.errors import Diverged
from mergekit_ace.training.session import Session
from mergekit_ace.training.state import (
    load_checkpoint,
    module_tensors,
    optimizer_tensors,
    restore_optimizer,
    save_checkpoint,
    with_prefix,
)


@dataclass
class Progress:
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
class Trained:
    """A finished training: the kept network, its coefficients per group (K, G), its log."""

    learner: Learner
    coefficients: Tensor
    progress: Progress


def train(
    session: Session,
    config: LearnerConfig,
    statistics: Tensor,
    depths: Tensor,
    checkpoint: Path,
    *,
    quiet: bool = False,
) -> Trained:
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
    state = State(learner, training.learning_rate, checkpoint)
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
    return Trained(learner, learner(statistics, depths), progress)


class State:
    """All that changes while a learner is trained; goes on from its checkpoint if there is one.

    Attributes:
        learner, optimizer: the network, and Adam.
        best: the network's state at its best evaluation.
        progress: see `Progress`.
    """

    def __init__(self, learner: Learner, learning_rate: float, checkpoint: Path):
        self.learner = learner
        self.optimizer = torch.optim.Adam(learner.parameters(), lr=learning_rate, foreach=False)
        self.checkpoint = checkpoint
        self.progress = Progress()
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
        self.progress = Progress(**facts)

    def update(self, coefficients: Tensor, gradient: Tensor, rate: float) -> None:
        """One step of Adam along ∂L/∂λ, carried back through the network."""
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        self.optimizer.zero_grad()
        coefficients.backward(gradient.to(coefficients.dtype))
        self.optimizer.step()

    def judge(self, session: Session, statistics: Tensor, depths: Tensor) -> None:
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


def write_log(path: Path, progress: Progress) -> None:
    """`training.jsonl`: a line per step and per evaluation."""
    write_text(path, "".join(json.dumps(line) + "\n" for line in progress.log))
