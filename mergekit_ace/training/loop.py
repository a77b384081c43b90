# SPDX-License-Identifier: Apache-2.0
"""The loop of a training or distillation: steps, evaluations, and checkpoints to go on from."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from tqdm import tqdm

from mergekit_ace.files.saving import with_prefix
from mergekit_ace.training.config import LoopConfig
from mergekit_ace.training.state import (
    Diverged,
    TrainingRun,
    load_checkpoint,
    save_checkpoint,
)


@dataclass
class TrainingProgress:
    """Progress of a training; saved with every checkpoint.

    Attributes:
        best_loss, best_step: of the evaluation that is kept.
        waited: evaluations since then.
        finished: whether training has ended.
        log: a line per step and per evaluation.
    """

    step: int = 0
    best_loss: float = math.inf
    best_step: int = 0
    waited: int = 0
    finished: bool = False
    log: list[dict[str, Any]] = field(default_factory=list)


class ModuleTraining:
    """A module in training; it goes on from its checkpoint, if there is one.

    Args:
        name: of its files in the state of the run.
        evaluate: returns the validation loss of the module, and further scores for the log.

    Attributes:
        best: file with the state of the module at its best evaluation.
    """

    def __init__(
        self,
        name: str,
        run: TrainingRun,
        module: nn.Module,
        optimizer: torch.optim.Optimizer,
        evaluate: Callable[[], tuple[float, dict[str, float]]],
    ):
        self._name, self._run, self._module, self._optimizer = name, run, module, optimizer
        self._evaluate = evaluate
        self._checkpoint, self.best = run.file(name), run.file(f"{name}-best")
        self.progress = TrainingProgress()
        known = load_checkpoint(self._checkpoint)
        if known is None:
            self.best.unlink(missing_ok=True)  # whatever was kept before a kill
            return
        tensors, facts = known
        self.progress = TrainingProgress(**facts)
        module.load_state_dict(with_prefix(tensors, "module."))
        state: dict[int, dict[str, Any]] = {}
        for key, tensor in with_prefix(tensors, "optimizer.").items():
            parameter, entry = key.split(".")
            state.setdefault(int(parameter), {})[entry] = tensor.clone()
        optimizer.load_state_dict({**optimizer.state_dict(), "state": state})
        torch.set_rng_state(tensors["random_state"])

    def run_steps(
        self,
        settings: LoopConfig,
        per_epoch: int,
        rate: Callable[[int, int], float],
        step: Callable[[int], float],
        patience: int = 0,
    ) -> None:
        """Take all steps that are left, unless the loss no longer falls.

        Args:
            rate: learning rate of a step, counted from 0, of so many.
            step: changes the module by a step of the optimizer; returns the loss before it.
            patience: evaluations without improvement after which training ends; 0: never.

        Raises:
            Diverged: the loss became NaN or Inf; the best module so far is kept.
        """
        progress, epochs = self.progress, settings.epochs * per_epoch
        total = min(epochs, settings.max_steps or epochs)
        what, quiet = f"training {self._name}", self._run.quiet
        bar = tqdm(desc=what, unit="step", total=total, initial=progress.step, disable=quiet)
        while progress.step < total and not progress.finished:
            learning_rate = rate(progress.step, total)
            for group in self._optimizer.param_groups:
                group["lr"] = learning_rate
            try:
                loss = step(progress.step)
                if not math.isfinite(loss):
                    raise Diverged(f"the loss became {loss} in step {progress.step}")
            except Diverged as error:
                kept = f"the best so far, of step {progress.best_step}, is kept in {self.best}"
                if math.isinf(progress.best_loss):
                    kept = "nothing was evaluated before that"
                raise Diverged(
                    f"{error}; {kept}. Lower training.learning_rate, or look at the data"
                ) from None
            progress.step += 1
            progress.log.append(
                {"step": progress.step, "loss": loss, "learning_rate": learning_rate}
            )
            bar.update()
            bar.set_postfix(loss=f"{loss:.4f}", best=f"{progress.best_loss:.4f}")
            last = progress.step == total
            if progress.step % (settings.evaluate_every or per_epoch) == 0 or last:
                self.evaluate()
            progress.finished = last or 0 < patience <= progress.waited
            if progress.step % settings.checkpoint_every == 0 or progress.finished:
                self._save()
        bar.close()

    def evaluate(self) -> None:
        """Evaluate the module, log that, and keep it if it was never better."""
        loss, scores = self._evaluate()
        progress = self.progress
        progress.log.append({"step": progress.step, "validation_loss": loss, **scores})
        progress.waited += 1
        if loss < progress.best_loss:
            progress.best_loss, progress.best_step, progress.waited = loss, progress.step, 0
            if self._run.is_main:
                save_checkpoint(self.best, self._module.state_dict(), progress.log[-1])

    def load_best(self) -> dict[str, Any]:
        """Put back the module of the best evaluation; return the line of that in the log.

        Raises:
            Diverged: no evaluation came out as a number.
        """
        self._run.wait()
        best = load_checkpoint(self.best)
        if best is None:
            raise Diverged(
                "the loss was NaN or Inf in every evaluation; lower training.learning_rate, or "
                "look at the data"
            )
        self._module.load_state_dict(best[0])
        return best[1]

    def _save(self) -> None:
        if not self._run.is_main:
            return
        tensors = {f"module.{name}": t for name, t in self._module.state_dict().items()}
        for parameter, values in self._optimizer.state_dict()["state"].items():
            tensors |= {f"optimizer.{parameter}.{name}": value for name, value in values.items()}
        tensors["random_state"] = torch.get_rng_state()
        save_checkpoint(self._checkpoint, tensors, vars(self.progress))
