# SPDX-License-Identifier: Apache-2.0
"""Output folder and processes of a run, its checkpoints, and its errors.

A run that was killed goes on where it was: each file is whole or not there at all.
"""

from __future__ import annotations

import json
import math
import os
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import InitProcessGroupKwargs
from pydantic import BaseModel
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn
from tqdm import tqdm

from mergekit_ace.files.checkpoints import json_or_empty
from mergekit_ace.files.saving import differences, file_states, locked, save_tensors, write_text
from mergekit_ace.naming import ConfigError
from mergekit_ace.training.config import LoopConfig

# A setting that does not change the result: a run may go on with another.
_FREE = frozenset({("training", "checkpoint_every")})
# What makes a folder look as if a run were complete; and the folders that a run makes in it.
_RESULTS = ("coefficients.safetensors", "distillation.json", "merge.yml", "statistics.json")
_FOLDERS = ("state", "backbones", "texts", "experts")


class TrainingRun:
    """Output folder of a command that runs models, and this process among those that work on it.

    `state` is its subfolder for what is only needed until the run is complete. The main process
    writes what all of them share; the others are `quiet`.
    """

    def __init__(
        self, path: str | os.PathLike, mixed_precision: str = "no", *, quiet: bool = False
    ):
        # While one process lets the experts answer, the others wait: for hours, if need be.
        patience = InitProcessGroupKwargs(timeout=timedelta(days=7))
        self.accelerator = Accelerator(mixed_precision=mixed_precision, kwargs_handlers=[patience])
        self.is_main = self.accelerator.is_main_process
        self.path = Path(path)
        self.state = self.path / "state"
        self.quiet = quiet or not self.is_main

    @classmethod
    @contextmanager
    def start(cls, *args: Any, **options: Any) -> Iterator[TrainingRun]:
        """Keep other runs out of the folder while this one lasts; arguments are the class's."""
        run = cls(*args, **options)
        if not run.is_main:
            yield run
            return
        busy = f"another run is writing to {run.path}; wait for it, or choose another folder"
        with locked(run.path, ".training.lock", ConfigError(busy)):
            yield run

    def file(self, name: str) -> Path:
        """Return where tensors of the state lie."""
        return self.state / f"{name}.safetensors"

    def once(self, name: str, make: Callable[[], Mapping[str, Tensor]]) -> dict[str, Tensor]:
        """Return tensors, memory-mapped, that the main process makes once."""
        path = self.file(name)
        if self.is_main and not path.exists():
            save_tensors(path, make())
        self.accelerator.wait_for_everyone()
        with open_tensors(path) as file:
            return {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118

    def samples_per_step(self, settings: LoopConfig) -> int:
        """Return how many samples a step has, all processes and backward passes together."""
        count = settings.batch_size * settings.gradient_accumulation
        return count * self.accelerator.num_processes

    def share(self, indices: Sequence[int], batch_size: int) -> list[Sequence[int]]:
        """Return this process's share of some samples, in batches."""
        own = indices[self.accelerator.process_index :: self.accelerator.num_processes]
        return [own[start : start + batch_size] for start in range(0, len(own), batch_size)]

    def sum(self, numbers: Tensor) -> Tensor:
        """Sum a tensor over all processes; the result lies where `numbers` do."""
        if self.accelerator.num_processes == 1:
            return numbers
        total = self.accelerator.reduce(numbers.to(self.accelerator.device), reduction="sum")
        return total.to(numbers.device)

    def claim(self, config: BaseModel, inputs: Sequence[str], *, overwrite: bool) -> None:
        """Make the folder this run's, or find that it is already, by all that the run reads.

        A `ConfigError` says that the folder holds something else, lies in an input, or holds one
        that would be dropped.
        """
        if self.is_main:
            self._check_inputs(inputs, overwrite)
            self._claim(config, inputs, overwrite)
        self.accelerator.wait_for_everyone()

    def _check_inputs(self, inputs: Sequence[str], overwrite: bool) -> None:
        made = [self.path / name for name in _FOLDERS]
        for path in inputs:
            place = Path(path).expanduser().resolve()
            what = ""
            if place.exists() and self.path.resolve().is_relative_to(place):
                what = f"{self.path.resolve()} is {path} or lies in it, which this run reads"
            elif overwrite and any(place.is_relative_to(folder.resolve()) for folder in made):
                what = f"--overwrite would drop {path}, which this run needs"
            if what:
                raise ConfigError(f"{what}; choose another folder")

    def _claim(self, config: BaseModel, inputs: Sequence[str], overwrite: bool) -> None:
        made = [self.path / name for name in _FOLDERS]
        identity = {
            "config": config.model_dump(mode="json"),
            "processes": self.accelerator.num_processes,
            "files": file_states(inputs),
        }
        record = self.state / "run.json"
        known = json_or_empty(record)
        changed = differences(known, identity, _FREE)
        if not changed:
            return
        # A run that ended over a mistake before it computed anything has nothing to lose. A folder
        # whose record is gone may have anything in it.
        found = [self.path / name for name in ("config.json", *_RESULTS)]
        for folder in [self.state] if known else made:
            found += [path for path in folder.rglob("*") if path != record]
        found = [path for path in found if path.is_file()]
        if found and not overwrite:
            what = f"{found[0].relative_to(self.path)}, which is not of this run"
            if known:
                what = f"the state of another run; changed since then: {', '.join(changed)}"
            raise ConfigError(
                f"{self.path} holds {what}. Choose another folder, or --overwrite to drop it"
            )
        if known or overwrite:  # first what would look as if this run were complete
            for name in _RESULTS:
                (self.path / name).unlink(missing_ok=True)
            for folder in made:
                shutil.rmtree(folder, ignore_errors=True)
        self.state.mkdir(parents=True, exist_ok=True)
        write_text(record, json.dumps(identity, indent=1))


@dataclass
class TrainingProgress:
    """Progress of a training; `waited` counts evaluations since the best, which is kept."""

    step: int = 0
    best_loss: float = math.inf
    best_step: int = 0
    waited: int = 0
    finished: bool = False
    log: list[dict[str, Any]] = field(default_factory=list)


class ModuleTraining:
    """A module in training, which goes on from its checkpoint if there is one.

    A loop over `steps` calls, in each step, `check_finite`, the optimizer, `end_step` and, where
    that returns True, `keep_best`. `total` is the number of steps.
    """

    def __init__(
        self, name: str, run: TrainingRun, module: nn.Module, optimizer: torch.optim.Optimizer,
        settings: LoopConfig, per_epoch: int,
    ):  # fmt: skip
        self._name, self._run, self._module, self._optimizer = name, run, module, optimizer
        self._checkpoint, self._best = run.state / f"{name}.pt", run.state / f"{name}-best.pt"
        self._settings = settings
        self._evaluate_every = settings.evaluate_every or per_epoch
        self.total = min(settings.epochs * per_epoch, settings.max_steps or math.inf)
        self.progress = TrainingProgress()
        if self._checkpoint.exists():
            state = torch.load(self._checkpoint, map_location="cpu", weights_only=True)
            self._module.load_state_dict(state["module"])
            self._optimizer.load_state_dict(state["optimizer"])
            torch.set_rng_state(state["random"])
            self.progress = TrainingProgress(**state["progress"])

    def steps(self, rate: Callable[[int], float], patience: int = 0) -> Iterator[int]:
        """Yield the numbers of the steps that are left, and save checkpoints.

        After so many evaluations (`patience`; 0: never) without improvement, training ends.
        """
        progress = self.progress
        bar = tqdm(None, f"training {self._name}", self.total, unit="step", initial=progress.step,
                   disable=self._run.quiet)  # fmt: skip
        while not progress.finished:
            for group in self._optimizer.param_groups:
                group["lr"] = rate(progress.step)
            yield progress.step
            bar.update()
            bar.set_postfix(best=f"{progress.best_loss:.4f}")
            progress.finished = progress.step == self.total or 0 < patience <= progress.waited
            if progress.step % self._settings.checkpoint_every == 0 or progress.finished:
                self._save(self._checkpoint, {
                    "module": self._module.state_dict(),
                    "optimizer": self._optimizer.state_dict(),
                    "random": torch.get_rng_state(),
                    "progress": vars(progress),
                })  # fmt: skip
        bar.close()

    def check_finite(self, what: str, value: float) -> None:
        """Raise a `ConfigError` where a value of this step, such as its loss, is NaN or Inf."""
        if not math.isfinite(value):
            best = f"the best so far, of step {self.progress.best_step}, is kept in {self._best}"
            kept = "nothing was evaluated before that" if not self._best.exists() else best
            raise ConfigError(
                f"{what} became {value} in step {self.progress.step}; {kept}. Lower "
                "training.learning_rate, or look at the data"
            )

    def end_step(self, loss: float) -> bool:
        """Log a step; return whether an evaluation is due."""
        progress, rate = self.progress, self._optimizer.param_groups[0]["lr"]
        progress.step += 1
        progress.log.append({"step": progress.step, "loss": loss, "learning_rate": rate})
        return progress.step % self._evaluate_every == 0 or progress.step == self.total

    def keep_best(self, loss: float, scores: Mapping[str, float]) -> None:
        """Log an evaluation, and keep the module if it was never better."""
        progress = self.progress
        progress.log.append({"step": progress.step, "validation_loss": loss, **scores})
        progress.waited += 1
        if loss < progress.best_loss:
            progress.best_loss, progress.best_step, progress.waited = loss, progress.step, 0
            self._save(self._best, self._module.state_dict())

    def load_best(self) -> None:
        """Put back the module of the best evaluation."""
        self._run.accelerator.wait_for_everyone()
        if math.isinf(self.progress.best_loss):
            raise ConfigError(
                "the loss was NaN or Inf in every evaluation; lower training.learning_rate, or "
                "look at the data"
            )
        best = torch.load(self._best, map_location="cpu", weights_only=True)
        self._module.load_state_dict(best)

    def _save(self, path: Path, state: Mapping[str, Any]) -> None:
        if self._run.is_main:
            partial = path.with_name(path.name + ".partial")
            torch.save(state, partial)
            os.replace(partial, path)


def open_tensors(path: str | os.PathLike) -> safe_open:
    """Open a safetensors file that a run has written."""
    try:
        return safe_open(path, framework="pt")
    except SafetensorError as error:
        raise ConfigError(
            f"{path} is damaged ({error}); delete it to repeat what it was made for"
        ) from error
