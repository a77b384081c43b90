# SPDX-License-Identifier: Apache-2.0
"""Output folder and processes of a run, its checkpoints, and its errors.

A run that was killed goes on where it was: what it has finished lies in its folder, each file whole
or not there at all.
"""

from __future__ import annotations

import json
import math
import os
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
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

from mergekit_ace.files.headers import json_or_empty
from mergekit_ace.files.saving import (
    differences,
    file_states,
    locked,
    save_tensors,
    with_prefix,
    write_text,
)
from mergekit_ace.training.config import LoopConfig

# Settings that do not change the result: a run may go on with others.
_FREE = frozenset({("training", "checkpoint_every"), ("device_map",), ("measure",)})
# What makes a folder look as if a run were complete; and the folders that a run makes in it.
_RESULTS = ("coefficients.safetensors", "distillation.json", "merge.yml", "statistics.json")
_FOLDERS = ("state", "backbones", "texts", "experts")
_LOCK_FILE = ".training.lock"


class TrainingError(ValueError):
    """Mistake in the config, the models or the data; the message says what to do."""


class Diverged(TrainingError):
    """The loss is no longer a number; the best network so far is kept."""


class TrainingRun:
    """Output folder of a training or distillation, and this process among those that work on it.

    Attributes:
        state: its subfolder for what is only needed until the run is complete.
        accelerator: device, precision and the other processes.
        quiet: whether to show neither bars nor results; True outside of the main process.
    """

    def __init__(
        self, path: str | os.PathLike, mixed_precision: str = "no", *, quiet: bool = False
    ):
        # While one process lets the experts answer, the others wait: for hours, if need be.
        patience = InitProcessGroupKwargs(timeout=timedelta(days=7))
        self.accelerator = Accelerator(mixed_precision=mixed_precision, kwargs_handlers=[patience])
        if mixed_precision == "fp16" and self.accelerator.device.type == "cpu":
            raise TrainingError(  # accelerate would train without it, and say nothing
                "mixed_precision: fp16 cannot be used on a CPU; take bf16 or no"
            )
        self.path = Path(path)
        self.state = self.path / "state"
        self.quiet = quiet or not self.is_main

    @classmethod
    @contextmanager
    def start(cls, *args: Any, **options: Any) -> Iterator[TrainingRun]:
        """Keep other runs out of the folder while this one lasts; arguments are the class's.

        Raises:
            TrainingError: another run is at work there.
        """
        run = cls(*args, **options)
        if not run.is_main:
            yield run
            return
        busy = f"another run is writing to {run.path}; wait for it, or choose another folder"
        with locked(run.path, _LOCK_FILE, TrainingError(busy)):
            yield run

    @property
    def is_main(self) -> bool:
        """Whether this process writes what all of them share."""
        return self.accelerator.is_main_process

    def wait(self) -> None:
        """Wait until all processes have come here."""
        self.accelerator.wait_for_everyone()

    def file(self, name: str) -> Path:
        """Return where tensors of the state lie."""
        return self.state / f"{name}.safetensors"

    def once(
        self, name: str, make: Callable[[], tuple[Mapping[str, Tensor], Any]]
    ) -> tuple[dict[str, Tensor], Any]:
        """Return tensors, memory-mapped, and facts that the main process makes once.

        Args:
            make: returns contiguous tensors that share no memory, and facts for JSON.
        """
        path = self.file(name)
        if self.is_main and not path.exists():
            tensors, facts = make()
            save_tensors(path, tensors, {"facts": json.dumps(facts)})
        self.wait()
        return load_checkpoint(path)

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
        """Make the folder this run's, or find that it is already.

        Args:
            inputs: files and folders that it reads.
            overwrite: drop another run's state.

        Raises:
            TrainingError: the folder holds a model or something else, or lies in an input, or holds
                one that would be dropped.
        """
        if self.is_main:
            self._claim(config, inputs, overwrite)
        self.wait()

    def _claim(self, config: BaseModel, inputs: Sequence[str], overwrite: bool) -> None:
        identity = {
            "config": config.model_dump(mode="json"),
            "processes": self.accelerator.num_processes,
            "files": file_states(inputs),
        }
        made = [self.path / name for name in _FOLDERS]
        _check_inputs(inputs, self.path, made if overwrite else ())
        record = self.state / "run.json"
        known = json_or_empty(record)
        changed = differences(known, identity, _FREE)
        if not changed:
            return
        # A run that ended before it computed anything, over a mistake in its config or its data,
        # has nothing that would be lost. A folder whose record is gone may have anything in it.
        names = ("config.json", *_RESULTS)  # of a model, or of any run
        found = [path for name in names if (path := self.path / name).is_file()]
        for folder in [self.state] if known else made:
            found += [path for path in folder.rglob("*") if path != record and path.is_file()]
        if found and not overwrite:
            what = f"{found[0].relative_to(self.path)}, which is not of this run"
            if known:
                what = f"the state of another run; changed since then: {', '.join(changed)}"
            raise TrainingError(
                f"{self.path} holds {what}. Choose another folder, or --overwrite to drop it"
            )
        if known or overwrite:  # first what would look as if this run were complete
            for name in _RESULTS:
                (self.path / name).unlink(missing_ok=True)
            for folder in made:
                shutil.rmtree(folder, ignore_errors=True)
        self.state.mkdir(parents=True, exist_ok=True)
        write_text(record, json.dumps(identity, indent=1))


def _check_inputs(inputs: Iterable[str], out: Path, dropped: Iterable[Path]) -> None:
    """Raise if a run would write into one of its inputs, or drop one with some of its folders."""
    out, *folders = (folder.resolve() for folder in (out, *dropped))
    for path in inputs:
        place = Path(path).expanduser().resolve()
        if place.exists() and out.is_relative_to(place):
            raise TrainingError(
                f"{out} is {path} or lies in it, which this run reads; choose another folder"
            )
        if any(place.is_relative_to(folder) for folder in folders):
            raise TrainingError(
                f"--overwrite would drop {path}, which this run needs; move it, or choose another "
                "folder"
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
    """A module in training, which goes on from its checkpoint if there is one.

    A loop over `steps` calls, in each step, `check_finite`, the optimizer, `end_step` and, where
    that returns True, `keep_best`.

    Args:
        name: of its files in the state of the run.
        per_epoch: steps of an epoch.

    Attributes:
        total: steps of the training.
    """

    def __init__(
        self,
        name: str,
        run: TrainingRun,
        module: nn.Module,
        optimizer: torch.optim.Optimizer,
        settings: LoopConfig,
        per_epoch: int,
    ):
        self._name, self._run, self._module, self._optimizer = name, run, module, optimizer
        self._checkpoint, self._best = run.file(name), run.file(f"{name}-best")
        self._settings = settings
        self._evaluate_every = settings.evaluate_every or per_epoch
        self.total = min(settings.epochs * per_epoch, settings.max_steps or math.inf)
        self.progress = TrainingProgress()
        if self._checkpoint.exists():
            self._restore()
        else:
            self._best.unlink(missing_ok=True)  # whatever was kept before a kill

    def steps(self, rate: Callable[[int, int], float], patience: int = 0) -> Iterator[int]:
        """Yield the numbers of the steps that are left, from 0, and save checkpoints.

        Args:
            rate: learning rate of a step, from 0, of so many.
            patience: evaluations without improvement after which training ends; 0: never.
        """
        progress, what = self.progress, f"training {self._name}"
        bar = tqdm(None, what, self.total, unit="step", initial=progress.step,
                   disable=self._run.quiet)  # fmt: skip
        while progress.step < self.total and not progress.finished:
            for group in self._optimizer.param_groups:
                group["lr"] = rate(progress.step, self.total)
            yield progress.step
            bar.update()
            bar.set_postfix(best=f"{progress.best_loss:.4f}")
            progress.finished = progress.step == self.total or 0 < patience <= progress.waited
            if progress.step % self._settings.checkpoint_every == 0 or progress.finished:
                self._save()
        bar.close()

    def check_finite(self, what: str, value: float) -> None:
        """Raise `Diverged` where a value of this step, such as its loss, is NaN or Inf."""
        if math.isfinite(value):
            return
        kept = f"the best so far, of step {self.progress.best_step}, is kept in {self._best}"
        if math.isinf(self.progress.best_loss):
            kept = "nothing was evaluated before that"
        raise Diverged(
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
            if self._run.is_main:
                save_checkpoint(self._best, self._module.state_dict(), progress.log[-1])

    def load_best(self) -> dict[str, Any]:
        """Put back the module of the best evaluation; return the line of that in the log.

        Raises:
            Diverged: no evaluation came out as a number.
        """
        self._run.wait()
        if not self._best.exists():
            raise Diverged(
                "the loss was NaN or Inf in every evaluation; lower training.learning_rate, or "
                "look at the data"
            )
        state, evaluation = load_checkpoint(self._best)
        self._module.load_state_dict(state)
        return evaluation

    def _restore(self) -> None:
        tensors, facts = load_checkpoint(self._checkpoint)
        self.progress = TrainingProgress(**facts)
        self._module.load_state_dict(with_prefix(tensors, "module."))
        state: dict[int, dict[str, Any]] = {}
        for key, tensor in with_prefix(tensors, "optimizer.").items():
            parameter, entry = key.split(".")
            state.setdefault(int(parameter), {})[entry] = tensor.clone()
        self._optimizer.load_state_dict({**self._optimizer.state_dict(), "state": state})
        torch.set_rng_state(tensors["random_state"])

    def _save(self) -> None:
        if not self._run.is_main:
            return
        tensors = {f"module.{name}": t for name, t in self._module.state_dict().items()}
        for parameter, values in self._optimizer.state_dict()["state"].items():
            tensors |= {f"optimizer.{parameter}.{name}": value for name, value in values.items()}
        tensors["random_state"] = torch.get_rng_state()
        save_checkpoint(self._checkpoint, tensors, vars(self.progress))


def save_checkpoint(path: Path, tensors: Mapping[str, Tensor], facts: Mapping[str, Any]) -> None:
    """Write tensors and JSON-able facts into one safetensors file, whole or not at all."""
    owned = {name: tensor.detach().cpu().contiguous().clone() for name, tensor in tensors.items()}
    save_tensors(path, owned, {"facts": json.dumps(facts)})


def load_checkpoint(path: Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Map what `save_checkpoint` wrote.

    Raises:
        TrainingError: the file is damaged.
    """
    with open_tensors(path) as file:
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        return tensors, json.loads(file.metadata()["facts"])


def open_tensors(path: str | os.PathLike) -> safe_open:
    """Open a safetensors file that a run has written.

    Raises:
        TrainingError: the file is damaged.
    """
    try:
        return safe_open(path, framework="pt")
    except SafetensorError as error:
        raise TrainingError(
            f"{path} is damaged ({error}); delete it to repeat what it was made for"
        ) from error
