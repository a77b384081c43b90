# SPDX-License-Identifier: Apache-2.0
"""What a family is: a base, experts that learned one task each, and an exam for all tasks."""

from __future__ import annotations

import os
import shutil
from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

from torch import nn

Split = Literal["validation", "test"]
FOLDER = Path(__file__).resolve().parents[1] / "families"


class Family(ABC):
    """A base model and experts, trained here, on disk.

    Attributes:
        name: of the family; the same for all seeds.
        seed: of initialisation and data.
        base: the base's checkpoint.
        experts: the experts' checkpoints by task.
        old: what the base knows already, and a merge should not forget; may be empty.
        layers: of the model; None where names in memory and on disk are the same.
    """

    name: str
    seed: int
    base: Path
    experts: dict[str, Path]
    old: tuple[str, ...] = ()
    layers: int | None = None

    @abstractmethod
    def train(self) -> None:
        """Train what is not on disk yet."""

    @abstractmethod
    def load(self, folder: Path) -> nn.Module:
        """A checkpoint as a model in memory, ready for `accuracy`."""

    @abstractmethod
    def accuracy(self, model: nn.Module, task: str, split: Split) -> float:
        """Share of right answers, 0 to 1, to questions that nobody was trained on."""

    def unlabelled(self, samples: int, rehearsed: int = 0) -> dict[str, Any]:
        """Base, experts and at most so many samples of each: part of a `train.yml`.

        Args:
            samples: per expert, those included that the trainer holds out.
            rehearsed: of what the base knew already, where that is asked for in the exam.
        """
        raise NotImplementedError(f"nothing is learned on {self.name}")

    @property
    def tasks(self) -> tuple[str, ...]:
        """What the experts learned."""
        return tuple(self.experts)


@contextmanager
def saving(target: Path) -> Iterator[Path]:
    """A folder to write a checkpoint to, which becomes `target` only when it is complete."""
    partial = target.with_name(f"{target.name}.{os.getpid()}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    yield partial
    os.replace(partial, target)
