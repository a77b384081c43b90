# SPDX-License-Identifier: Apache-2.0
"""Output folder and processes of a run, its checkpoints, its errors."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import InitProcessGroupKwargs
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from mergekit_ace.files import differences, save_tensors, write_text


class TrainingError(ValueError):
    """Something in the config, the models or the data is wrong; the message says what to do."""


class Diverged(TrainingError):
    """The loss is no longer a number; the last good checkpoint is kept."""


# Settings that do not change the result: a run may go on with others.
_FREE = frozenset({("expert_storage",), ("training", "checkpoint_every"), ("device_map",)})


class RunFolder:
    """The output folder of one run; what it needs to go on is under `state/`.

    Attributes:
        path: the folder.
        state: its subfolder for what is only needed until the run is complete.
    """

    def __init__(self, path: str | os.PathLike):
        self.path = Path(path)
        self.state = self.path / "state"

    def backbone(self, expert: int | None) -> Path:
        """Where the backbone of a classifier is kept; None for that of the base model."""
        return self.path / "backbones" / ("base" if expert is None else f"expert-{expert}")

    def _drop(self) -> None:
        """Everything of the run that was here; what is complete looks so no longer."""
        for name in ("coefficients.safetensors", "distillation.json", "merge.yml", "inline.yml"):
            (self.path / name).unlink(missing_ok=True)
        for folder in (self.state, self.path / "backbones"):
            shutil.rmtree(folder, ignore_errors=True)

    def claim(self, identity: dict[str, Any], *, overwrite: bool) -> None:
        """Make the folder this run's, or find that it is already.

        Args:
            identity: config and inputs, as JSON has them.
            overwrite: drop another run's state.

        Raises:
            TrainingError: the folder holds another run's state.
        """
        record = self.state / "run.json"
        known = _read_json(record)
        changed = differences(known, identity, _FREE) if known is not None else []
        if known is not None and not changed:
            return
        if overwrite:
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


def save_checkpoint(path: Path, tensors: Mapping[str, Tensor], facts: Mapping[str, Any]) -> None:
    """Tensors and JSON-able facts in one safetensors file, whole or not at all."""
    owned = {name: tensor.detach().cpu().contiguous().clone() for name, tensor in tensors.items()}
    save_tensors(path, owned, {"facts": json.dumps(facts)})


def load_checkpoint(path: Path) -> tuple[dict[str, Tensor], dict[str, Any]] | None:
    """What `save_checkpoint` wrote; None where there is nothing.

    Raises:
        TrainingError: the file is damaged.
    """
    if not path.exists():
        return None
    try:
        with safe_open(path, framework="pt") as file:
            tensors = {name: file.get_tensor(name).clone() for name in file.keys()}  # noqa: SIM118
            return tensors, json.loads(file.metadata()["facts"])
    except (SafetensorError, KeyError, TypeError, json.JSONDecodeError) as error:
        raise TrainingError(
            f"{path} is damaged ({error}); delete it to repeat what it was made for"
        ) from error


def module_tensors(module: nn.Module, prefix: str) -> dict[str, Tensor]:
    """The state of a module under prefixed names."""
    return {prefix + name: tensor for name, tensor in module.state_dict().items()}


def optimizer_tensors(optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """The state of an optimiser as tensors: `optimizer.0.exp_avg`, …"""
    state = optimizer.state_dict()["state"]
    return {
        f"optimizer.{parameter}.{name}": value
        for parameter, values in state.items()
        for name, value in values.items()
    }


def restore_optimizer(optimizer: torch.optim.Optimizer, tensors: Mapping[str, Tensor]) -> None:
    """The inverse of `optimizer_tensors`."""
    state: dict[int, dict[str, Tensor]] = {}
    for key, tensor in tensors.items():
        if key.startswith("optimizer."):
            _, parameter, name = key.split(".")
            state.setdefault(int(parameter), {})[name] = tensor
    optimizer.load_state_dict({**optimizer.state_dict(), "state": state})


def with_prefix(tensors: Mapping[str, Tensor], prefix: str) -> dict[str, Tensor]:
    """The tensors whose names start with `prefix`, without it."""
    return {n.removeprefix(prefix): t for n, t in tensors.items() if n.startswith(prefix)}


def _read_json(path: Path) -> Any:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (FileNotFoundError, json.JSONDecodeError):
        return None


def new_accelerator(mixed_precision: str) -> Accelerator:
    """An accelerator, alone or one of several processes.

    While one process lets the experts answer, the others wait: for hours, if need be.
    """
    patience = InitProcessGroupKwargs(timeout=timedelta(days=7))
    return Accelerator(mixed_precision=mixed_precision, kwargs_handlers=[patience])


def samples_per_step(accelerator: Accelerator, batch_size: int, accumulation: int) -> int:
    """Samples in a step, all processes and backward passes together."""
    return batch_size * accumulation * accelerator.num_processes


def own_batches(accelerator: Accelerator, indices: list[int], batch_size: int) -> list[list[int]]:
    """This process's share of some samples, in batches."""
    own = indices[accelerator.process_index :: accelerator.num_processes]
    return [own[start : start + batch_size] for start in range(0, len(own), batch_size)]


def sum_over_processes(accelerator: Accelerator, numbers: Tensor) -> Tensor:
    """The sum of what all processes have, where `numbers` lie."""
    if accelerator.num_processes == 1:
        return numbers
    total = accelerator.reduce(numbers.to(accelerator.device), reduction="sum")
    return total.to(numbers.device)
