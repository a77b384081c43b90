# SPDX-License-Identifier: Apache-2.0
"""Output folder and processes of a run, and its training loop: each file is whole or not there."""

from __future__ import annotations

import json
import math
import os
import pickle
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import InitProcessGroupKwargs
from pydantic import BaseModel
from safetensors import SafetensorError
from torch import Tensor, nn
from tqdm import tqdm

from mergekit_ace.files import saving
from mergekit_ace.files.checkpoints import json_or_empty
from mergekit_ace.naming import ConfigError
from mergekit_ace.training.config import LoopConfig

# A setting that does not change the result: a run may go on with another.
_FREE = frozenset({("training", "checkpoint_every")})
_RECORD = "run.json"  # in the state: what the run reads
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
        with saving.locked(run.path) if run.is_main else nullcontext():
            yield run

    def claim(self, config: BaseModel, inputs: Sequence[str], *, overwrite: bool) -> None:
        """Make the folder this run's, or find that it is already, by all that the run reads.

        A `ConfigError` says that the folder holds something else, or that an input would be
        written over.
        """
        if self.is_main:
            identity = {
                "config": config.model_dump(mode="json"),
                "processes": self.accelerator.num_processes,
                "files": saving.file_states(inputs),
            }
            known = json_or_empty(self.state / _RECORD)
            changed = saving.differences(known, identity, _FREE)
            if changed:
                self._clear(inputs, changed if known else [], overwrite)
                self.state.mkdir(parents=True, exist_ok=True)
                saving.write_text(self.state / _RECORD, json.dumps(identity, indent=1))
        self.accelerator.wait_for_everyone()

    def _clear(self, inputs: Sequence[str], changed: Sequence[str], overwrite: bool) -> None:
        """Drop what another run has left, where `overwrite` allows it, and nothing else."""
        results, folders = ([self.path / name for name in names] for names in (_RESULTS, _FOLDERS))
        saving.check_apart(inputs, folders)
        left = [self.path / "config.json", *results]
        left += [path for folder in folders for path in folder.rglob("*") if path.name != _RECORD]
        left = [path for path in left if path.is_file()]
        # A run that ended over a mistake before it computed anything has nothing to lose.
        if left and not overwrite:
            foreign = f"{left[0].relative_to(self.path)}, which is not of this run"
            raise saving.occupied(
                self.path, "the state of another run" if changed else foreign, changed
            )
        for path in results:  # first what would look as if this run were complete
            path.unlink(missing_ok=True)
        for folder in folders:
            shutil.rmtree(folder, ignore_errors=True)

    def once(self, name: str, make: Callable[[], Any]) -> Any:
        """Return tensors of the state, memory-mapped, that the main process makes once."""
        path = self.state / f"{name}.pt"
        if self.is_main and not path.exists():
            _save(path, make())
        self.accelerator.wait_for_everyone()
        with explained_damage(path):
            return torch.load(path, map_location="cpu", weights_only=True, mmap=True)

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


@dataclass
class TrainingProgress:
    """Progress of a training; `waited` counts evaluations since the best, which is kept."""

    step: int = 0
    best_loss: float = math.inf
    best_step: int = 0
    waited: int = 0
    finished: bool = False
    log: list[dict[str, Any]] = field(default_factory=list)


def last_step(settings: LoopConfig, steps_per_epoch: int) -> int:
    """Return the number of steps of a training that no lack of improvement ends."""
    steps = settings.epochs * steps_per_epoch
    return min(steps, settings.max_steps or steps)


def train_module(
    run: TrainingRun, name: str, module: nn.Module, optimizer: torch.optim.Optimizer,
    settings: LoopConfig, steps_per_epoch: int, take_step: Callable[[int], float],
    evaluate: Callable[[], tuple[float, dict[str, float]]],
) -> TrainingProgress:  # fmt: skip
    """Train a module, or go on from its checkpoint; leave it as it was at its best evaluation.

    `take_step` optimises by the samples of a step, and returns their loss. `evaluate` returns the
    loss on the validation split, and other scores for the log. The start counts, too.
    """
    checkpoint, best = (run.state / f"{name}{end}.pt" for end in ("", "-best"))
    total, progress = last_step(settings, steps_per_epoch), TrainingProgress()

    def keep_best() -> None:
        loss, scores = evaluate()
        check_number("the loss on the validation split", loss, progress.step)
        progress.log.append({"step": progress.step, "validation_loss": loss, **scores})
        progress.waited += 1
        if loss < progress.best_loss:
            progress.best_loss, progress.best_step, progress.waited = loss, progress.step, 0
            if run.is_main:
                _save(best, module.state_dict())

    if checkpoint.exists():
        state = torch.load(checkpoint, map_location="cpu", weights_only=True)
        module.load_state_dict(state["module"])
        optimizer.load_state_dict(state["optimizer"])
        torch.set_rng_state(state["random"])
        progress = TrainingProgress(**state["progress"])
    else:
        keep_best()
    with tqdm(desc="steps", total=total, initial=progress.step, disable=run.quiet) as bar:
        while not progress.finished:
            loss = take_step(progress.step)
            check_number("the loss", loss, progress.step)
            progress.step += 1
            rate = optimizer.param_groups[0]["lr"]
            progress.log.append({"step": progress.step, "loss": loss, "learning_rate": rate})
            last = progress.step == total
            if last or progress.step % (settings.evaluate_every or steps_per_epoch) == 0:
                keep_best()
            bar.update()
            bar.set_postfix(best=f"{progress.best_loss:.4f}")
            progress.finished = last or 0 < settings.patience <= progress.waited
            due = progress.finished or progress.step % settings.checkpoint_every == 0
            if due and run.is_main:
                _save(checkpoint, {
                    "module": module.state_dict(),
                    "optimizer": optimizer.state_dict(),
                    "random": torch.get_rng_state(),
                    "progress": vars(progress),
                })  # fmt: skip
    run.accelerator.wait_for_everyone()
    module.load_state_dict(torch.load(best, map_location="cpu", weights_only=True))
    return progress


def check_number(what: str, value: float, step: int) -> None:
    """Raise a `ConfigError` where a value of a step, such as its loss, is NaN or Inf."""
    if not math.isfinite(value):
        raise ConfigError(f"{what} became {value} in step {step}; lower training.learning_rate")


@contextmanager
def explained_damage(path: str | os.PathLike) -> Iterator[None]:
    """Raise a `ConfigError` with a remedy where a file that can be made again is damaged."""
    try:
        yield
    except (SafetensorError, RuntimeError, EOFError, OSError, pickle.UnpicklingError) as error:
        said = f"{path} is damaged ({error}); delete it to repeat what it was made for"
        raise ConfigError(said) from error


def _save(path: Path, content: Any) -> None:
    with saving.replacing(path) as partial:
        torch.save(content, partial)
