# SPDX-License-Identifier: Apache-2.0
"""Output folder and processes of a run, and its checkpoints: each file is whole or not there."""

from __future__ import annotations

import json
import math
import os
import pickle
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import InitProcessGroupKwargs
from pydantic import BaseModel
from torch import Tensor, nn
from tqdm import tqdm

from mergekit_ace.files.checkpoints import json_or_empty
from mergekit_ace.files.saving import differences, file_states, locked, write_text
from mergekit_ace.naming import ConfigError
from mergekit_ace.training.config import LoopConfig

# A setting that does not change the result: a run may go on with another.
_FREE = frozenset({("training", "checkpoint_every")})
# What makes a folder look as if a run were complete; and the folders that a run makes in it.
_RESULTS = ("coefficients.safetensors", "distillation.json", "merge.yml", "statistics.json")
_FOLDERS = ("state", "backbones", "texts", "experts")


class TrainingRun:
    """Output folder of a command that runs models, and this process among those that work on it.

    `state` is its subfolder for what is only needed until the run is complete.
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
        busy = f"another run is writing to {run.path}; wait for it, or choose another folder"
        lock = locked(run.path, ".training.lock", ConfigError(busy))
        with lock if run.is_main else nullcontext():
            yield run

    def once(self, name: str, make: Callable[[], Any]) -> Any:
        """Return tensors of the state, memory-mapped, that the main process makes once."""
        path = self.state / f"{name}.pt"
        if self.is_main and not path.exists():
            _save(path, make())
        self.accelerator.wait_for_everyone()
        try:
            return torch.load(path, map_location="cpu", weights_only=True, mmap=True)
        except (RuntimeError, EOFError, OSError, pickle.UnpicklingError) as error:
            said = f"{path} is damaged ({error}); delete it to repeat what it was made for"
            raise ConfigError(said) from error

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
        total: Any = self.accelerator.reduce(numbers.to(self.accelerator.device), reduction="sum")
        return total.to(numbers.device)

    def claim(self, config: BaseModel, inputs: Sequence[str], *, overwrite: bool) -> None:
        """Make the folder this run's, or find that it is already, by all that the run reads.

        A `ConfigError` says that the folder holds something else, or that an input would be
        written over.
        """
        if self.is_main:
            out = self.path.resolve()
            for path in inputs:
                place = Path(path).expanduser().resolve()
                made = any(place.is_relative_to(out / name) for name in _FOLDERS)
                if place.exists() and (made or out.is_relative_to(place)):
                    raise ConfigError(
                        f"{path}, which this run reads, holds {self.path}, or lies where it "
                        "writes; choose another folder"
                    )
            identity = {
                "config": config.model_dump(mode="json"),
                "processes": self.accelerator.num_processes,
                "files": file_states(inputs),
            }
            self._claim(identity, overwrite)
        self.accelerator.wait_for_everyone()

    def _claim(self, identity: dict[str, Any], overwrite: bool) -> None:
        record = self.state / "run.json"
        known = json_or_empty(record)
        changed = differences(known, identity, _FREE)
        if not changed:
            return
        # A run that ended over a mistake before it computed anything has nothing to lose.
        found = [self.path / name for name in ("config.json", *_RESULTS)]
        for name in _FOLDERS:
            found += [path for path in (self.path / name).rglob("*") if path != record]
        found = [path for path in found if path.is_file()]
        if found and not overwrite:
            what = f"{found[0].relative_to(self.path)}, which is not of this run"
            if known:
                what = f"the state of another run; changed since then: {', '.join(changed)}"
            raise ConfigError(
                f"{self.path} holds {what}. Choose another folder, or --overwrite to drop it"
            )
        for name in _RESULTS:  # first what would look as if this run were complete
            (self.path / name).unlink(missing_ok=True)
        for name in _FOLDERS:
            shutil.rmtree(self.path / name, ignore_errors=True)
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
        self._run, self._module, self._optimizer = run, module, optimizer
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
        progress, initial = self.progress, self.progress.step
        quiet = self._run.quiet
        with tqdm(desc="steps", total=self.total, initial=initial, disable=quiet) as bar:
            while not progress.finished:
                for group in self._optimizer.param_groups:
                    group["lr"] = rate(progress.step)
                yield progress.step
                bar.update()
                bar.set_postfix(best=f"{progress.best_loss:.4f}")
                progress.finished = progress.step == self.total or 0 < patience <= progress.waited
                due = progress.step % self._settings.checkpoint_every == 0 or progress.finished
                if due and self._run.is_main:
                    _save(self._checkpoint, {
                        "module": self._module.state_dict(),
                        "optimizer": self._optimizer.state_dict(),
                        "random": torch.get_rng_state(),
                        "progress": vars(progress),
                    })  # fmt: skip

    def check_finite(self, what: str, value: float) -> None:
        """Raise a `ConfigError` where a value of this step, such as its loss, is NaN or Inf."""
        if not math.isfinite(value):
            raise ConfigError(
                f"{what} became {value} in step {self.progress.step}; lower "
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
        self.check_finite("the loss on the validation split", loss)
        progress.log.append({"step": progress.step, "validation_loss": loss, **scores})
        progress.waited += 1
        if loss < progress.best_loss:
            progress.best_loss, progress.best_step, progress.waited = loss, progress.step, 0
            if self._run.is_main:
                _save(self._best, self._module.state_dict())

    def load_best(self) -> None:
        """Put back the module of the best evaluation."""
        self._run.accelerator.wait_for_everyone()
        best = torch.load(self._best, map_location="cpu", weights_only=True)
        self._module.load_state_dict(best)


def _save(path: Path, content: Any) -> None:
    partial = path.with_name(path.name + ".partial")
    torch.save(content, partial)
    os.replace(partial, path)
