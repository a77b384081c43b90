# SPDX-License-Identifier: Apache-2.0
"""Output folder and processes of a run, its checkpoints, and its errors.

A run that was killed goes on where it was: what it has finished lies in its folder, each file whole
or not there at all.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

from accelerate import Accelerator
from accelerate.utils import InitProcessGroupKwargs
from pydantic import BaseModel
from safetensors import SafetensorError, safe_open
from torch import Tensor

from mergekit_ace.files.headers import json_or_empty
from mergekit_ace.files.saving import differences, file_states, locked, save_tensors, write_text
from mergekit_ace.training.config import LoopConfig

# Settings that do not change the result: a run may go on with others.
_FREE = frozenset(
    {("expert_storage",), ("training", "checkpoint_every"), ("device_map",), ("measure",)}
)
# What makes a folder look as if a run were complete; and the folders that a run makes in it.
_RESULTS = (
    "coefficients.safetensors", "distillation.json", "merge.yml", "inline.yml", "statistics.json",
)  # fmt: skip
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

    def backbone(self, expert: int | None) -> Path:
        """Return the folder for the backbone of a classifier; None stands for the base model."""
        return self.path / "backbones" / ("base" if expert is None else f"expert-{expert}")

    def claim(
        self,
        config: BaseModel,
        inputs: Iterable[str],
        *,
        overwrite: bool,
        results: Sequence[str] = _RESULTS,
    ) -> None:
        """Make the folder this run's, or find that it is already.

        Args:
            inputs: files and folders that it reads.
            overwrite: drop another run's state.
            results: names of files in the folder that are not replaced unless they are this run's.

        Raises:
            TrainingError: the folder holds something else, or lies in an input, or holds one that
                would be dropped.
        """
        if self.is_main:
            self._claim(config, list(inputs), overwrite, results)
        self.wait()

    def _claim(
        self, config: BaseModel, inputs: list[str], overwrite: bool, results: Sequence[str]
    ) -> None:
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
        found = [path for name in results if (path := self.path / name).is_file()]
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


def save_checkpoint(path: Path, tensors: Mapping[str, Tensor], facts: Mapping[str, Any]) -> None:
    """Write tensors and JSON-able facts into one safetensors file, whole or not at all."""
    owned = {name: tensor.detach().cpu().contiguous().clone() for name, tensor in tensors.items()}
    save_tensors(path, owned, {"facts": json.dumps(facts)})


def load_checkpoint(path: Path) -> tuple[dict[str, Tensor], dict[str, Any]] | None:
    """Map what `save_checkpoint` wrote; return None where there is nothing.

    Raises:
        TrainingError: the file is damaged.
    """
    if not path.exists():
        return None
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
