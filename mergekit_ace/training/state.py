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
from collections.abc import Callable, Iterable, Mapping
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

from mergekit_ace.files import differences, file_states, save_tensors, write_text
from mergekit_ace.training.config import DistillTraining, TrainingConfig

# Settings that do not change the result: a run may go on with others.
_FREE = frozenset(
    {("expert_storage",), ("training", "checkpoint_every"), ("device_map",), ("measure",)}
)
# What makes a folder look as if a run were complete.
_RESULTS = (
    "coefficients.safetensors", "distillation.json", "merge.yml", "inline.yml", "statistics.json",
)  # fmt: skip


class TrainingError(ValueError):
    """Mistake in the config, the models or the data; the message says what to do."""


class Diverged(TrainingError):
    """The loss is no longer a number; the best network so far is kept."""


class TrainingRun:
    """Output folder of a training or distillation, and this process among those that work on it.

    Attributes:
        path: the folder.
        state: its subfolder for what is only needed until the run is complete.
        accelerator: device, precision and the other processes.
        quiet: whether to show neither bars nor results; True outside of the main process.
    """

    def __init__(
        self, path: str | os.PathLike, mixed_precision: str = "no", *, quiet: bool = False
    ):
        # While one process lets the experts answer, the others wait: for hours, if need be.
        patience = InitProcessGroupKwargs(timeout=timedelta(days=7))
        try:
            self.accelerator = Accelerator(
                mixed_precision=mixed_precision, kwargs_handlers=[patience]
            )
        except ValueError as error:
            raise TrainingError(
                f"mixed_precision: {mixed_precision} cannot be used here ({error}); take bf16 or no"
            ) from error
        if mixed_precision == "fp16" and self.accelerator.device.type == "cpu":
            raise TrainingError(  # accelerate would train without it, and say nothing
                "mixed_precision: fp16 cannot be used on a CPU; take bf16 or no"
            )
        self.path = Path(path)
        self.state = self.path / "state"
        self.quiet = quiet or not self.is_main

    @property
    def is_main(self) -> bool:
        """Whether this process writes what all of them share."""
        return self.accelerator.is_main_process

    def wait(self) -> None:
        """Wait until all processes have come here."""
        self.accelerator.wait_for_everyone()

    def make_once(self, path: Path, make: Callable[[], None]) -> None:
        """Let the main process make a file that is missing; return when it is there for all."""
        if self.is_main and not path.exists():
            make()
        self.wait()

    def samples_per_step(self, settings: TrainingConfig | DistillTraining) -> int:
        """Return how many samples a step has, all processes and backward passes together."""
        count = settings.batch_size * settings.gradient_accumulation
        return count * self.accelerator.num_processes

    def share(self, indices: list[int], batch_size: int) -> list[list[int]]:
        """Return this process's share of some samples, in batches."""
        own = indices[self.accelerator.process_index :: self.accelerator.num_processes]
        return [own[start : start + batch_size] for start in range(0, len(own), batch_size)]

    def sum(self, numbers: Tensor) -> Tensor:
        """Sum a tensor over all processes; the result lies where `numbers` do."""
        if self.accelerator.num_processes == 1:
            return numbers
        total = self.accelerator.reduce(numbers.to(self.accelerator.device), reduction="sum")
        return total.to(numbers.device)

    @property
    def experts(self) -> Path:
        """The folder for what is measured of each expert."""
        return self.path / "experts"

    def backbone(self, expert: int | None) -> Path:
        """Return the folder for the backbone of a classifier; None stands for the base model."""
        return self.path / "backbones" / ("base" if expert is None else f"expert-{expert}")

    def claim(self, config: BaseModel, inputs: Iterable[str], *, overwrite: bool) -> None:
        """Make the folder this run's, or find that it is already.

        Args:
            config: of the run.
            inputs: files and folders that it reads.
            overwrite: drop another run's state.

        Raises:
            TrainingError: the folder holds another run's state, or that is where an input lies.
        """
        if self.is_main:
            inputs = list(inputs)
            identity = {
                "config": config.model_dump(mode="json"),
                "processes": self.accelerator.num_processes,
                "files": file_states(inputs),
            }
            if overwrite:
                self._check_needed(inputs)
            self._claim(identity, overwrite)
        self.wait()

    @property
    def _made_folders(self) -> tuple[Path, ...]:
        return self.state, self.path / "backbones", self.experts

    def _check_needed(self, inputs: Iterable[str]) -> None:
        """Refuse to drop what this run reads."""
        dropped = [folder.resolve() for folder in self._made_folders]
        for path in inputs:
            place = Path(path).expanduser().resolve()
            if any(folder in (place, *place.parents) for folder in dropped):
                raise TrainingError(
                    f"--overwrite would drop {path}, which this run needs; move it, or choose "
                    "another folder"
                )

    def _claim(self, identity: dict[str, Any], overwrite: bool) -> None:
        record = self.state / "run.json"
        known = _read_json(record)
        changed = differences(known, identity, _FREE) if known is not None else []
        if known is not None and not changed:
            return
        # A run that ended before it computed anything, over a mistake in its config or its data,
        # has nothing that would be lost.
        if overwrite or (changed and not self._has_results()):
            self._drop()
        elif changed:
            raise TrainingError(
                f"{self.path} holds the state of another run; changed since then: "
                f"{', '.join(changed)}. Choose another folder, or --overwrite to drop it"
            )
        elif self.state.exists() and any(self.state.iterdir()):
            raise TrainingError(
                f"{self.state} is not empty, but not the state of a run; choose another folder, or "
                "--overwrite to drop it"
            )
        self.state.mkdir(parents=True, exist_ok=True)
        write_text(record, json.dumps(identity, indent=1))

    def _has_results(self) -> bool:
        """Return whether a run has written more than what it is a run of."""
        made = [self.path / name for name in _RESULTS]
        made += [path for path in self.state.rglob("*") if path.name != "run.json"]
        return any(path.is_file() for path in made)

    def _drop(self) -> None:
        """Delete what another run left; first what would look as if this one were complete."""
        for name in _RESULTS:
            (self.path / name).unlink(missing_ok=True)
        for folder in self._made_folders:
            shutil.rmtree(folder, ignore_errors=True)


@dataclass
class TrainingProgress:
    """Progress of a training or distillation; saved with every checkpoint.

    Attributes:
        step: steps done.
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

    def add_step(self, loss: float, rate: float) -> None:
        """Count a step, and log its loss and learning rate."""
        self.step += 1
        self.log.append({"step": self.step, "loss": loss, "learning_rate": rate})

    def add_evaluation(self, loss: float, **scores: float) -> bool:
        """Log an evaluation; return whether its loss is the least so far."""
        self.log.append({"step": self.step, "validation_loss": loss, **scores})
        self.waited += 1
        if not loss < self.best_loss:
            return False
        self.best_loss, self.best_step, self.waited = loss, self.step, 0
        return True


def save_training(
    path: Path,
    module: nn.Module,
    optimizer: torch.optim.Optimizer,
    progress: TrainingProgress,
    best: Mapping[str, Tensor] | None = None,
) -> None:
    """Write all that changes while a module is trained.

    Args:
        path: of the checkpoint.
        module, optimizer, progress: as they are now, like torch's random state.
        best: state of the module at its best evaluation, unless that is kept elsewhere.
    """
    tensors = {f"module.{name}": tensor for name, tensor in module.state_dict().items()}
    tensors |= {f"best.{name}": tensor for name, tensor in (best or {}).items()}
    for parameter, values in optimizer.state_dict()["state"].items():
        tensors |= {f"optimizer.{parameter}.{name}": value for name, value in values.items()}
    tensors["random_state"] = torch.get_rng_state()
    save_checkpoint(path, tensors, vars(progress))


def restore_training(
    path: Path, module: nn.Module, optimizer: torch.optim.Optimizer
) -> tuple[TrainingProgress, dict[str, Tensor]] | None:
    """Put back what `save_training` wrote; return progress and best state, None without a file.

    Raises:
        TrainingError: the file is damaged.
    """
    known = load_checkpoint(path)
    if known is None:
        return None
    tensors, facts = known
    module.load_state_dict(with_prefix(tensors, "module."))
    state: dict[int, dict[str, Tensor]] = {}
    for key, tensor in with_prefix(tensors, "optimizer.").items():
        parameter, name = key.split(".")
        state.setdefault(int(parameter), {})[name] = tensor
    optimizer.load_state_dict({**optimizer.state_dict(), "state": state})
    torch.set_rng_state(tensors["random_state"])
    return TrainingProgress(**facts), with_prefix(tensors, "best.")


def save_checkpoint(path: Path, tensors: Mapping[str, Tensor], facts: Mapping[str, Any]) -> None:
    """Write tensors and JSON-able facts into one safetensors file, whole or not at all."""
    owned = {name: tensor.detach().cpu().contiguous().clone() for name, tensor in tensors.items()}
    save_tensors(path, owned, {"facts": json.dumps(facts)})


def load_checkpoint(path: Path) -> tuple[dict[str, Tensor], dict[str, Any]] | None:
    """Read what `save_checkpoint` wrote; return None where there is nothing.

    Raises:
        TrainingError: the file is damaged.
    """
    if not path.exists():
        return None
    with open_tensors(path) as file:
        try:
            tensors = {name: file.get_tensor(name).clone() for name in file.keys()}  # noqa: SIM118
            return tensors, json.loads(file.metadata()["facts"])
        except (KeyError, TypeError, json.JSONDecodeError) as error:
            raise _damaged(path, error) from error


def open_tensors(path: str | os.PathLike) -> safe_open:
    """Open a safetensors file that a run has written.

    Raises:
        TrainingError: the file is damaged.
    """
    try:
        return safe_open(path, framework="pt")
    except SafetensorError as error:
        raise _damaged(path, error) from error


def _damaged(path: str | os.PathLike, error: Exception) -> TrainingError:
    return TrainingError(f"{path} is damaged ({error}); delete it to repeat what it was made for")


def with_prefix(tensors: Mapping[str, Any], prefix: str) -> dict[str, Any]:
    """Return the entries whose names start with `prefix`, without it."""
    return {n.removeprefix(prefix): t for n, t in tensors.items() if n.startswith(prefix)}


def _read_json(path: Path) -> Any:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (FileNotFoundError, ValueError):
        return None
