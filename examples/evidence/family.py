# SPDX-License-Identifier: Apache-2.0
"""What every family has: a base model, experts of it, and an exam."""

from __future__ import annotations

import shutil
from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
if DEVICE.type == "cuda":
    torch.set_float32_matmul_precision("high")  # TF32 trains as well, five times as fast
# By text: for each sequence its summed loss (or number of wrong answers), and what was counted.
Losses = dict[str, list[tuple[float, int]]]


class Family(ABC):
    """A base model, its experts by the name of what they learned, and an exam.

    Attributes:
        name: of the family.
        seed: of training.
        variant: what else tells its experts from others of the family.
        base: folder of the base model's checkpoint, after `prepare`.
        experts: folders of the experts' checkpoints by text, after `prepare`.
        layers: of a model whose config mergekit cannot ask for their number; else None.
        adapters: whether the experts were trained as LoRA adapters.
        exam: what else tells its exam from others of the same models.
        facts: what results.json says of how the models were made.
    """

    base: Path
    experts: dict[str, Path]
    adapters = False
    layers: int | None = None
    exam = ""

    def __init__(self, name: str, seed: int, variant: str = ""):
        self.name, self.seed, self.variant = name, seed, variant
        self.facts: dict[str, Any] = {}

    @property
    def key(self) -> str:
        """What identifies the family's models."""
        return " ".join(filter(None, (self.name, self.variant, f"seed {self.seed}")))

    @abstractmethod
    def prepare(self) -> None:
        """Train what is not in the cache yet."""

    @abstractmethod
    def load(self, folder: Path) -> nn.Module:
        """Return a checkpoint in float32, in memory on DEVICE, ready for `examine`."""

    @abstractmethod
    def examine(self, model: nn.Module) -> Losses:
        """Return what a model gets wrong, on every expert's text and on untrained ones."""

    def training_config(self, samples: int) -> dict[str, Any] | None:
        """Return models and data of a `train.yml`; None where nothing is learned."""
        return None


@contextmanager
def whole_folder(target: Path) -> Iterator[Path]:
    """Give a folder to fill, which gets the name `target` only when it is complete."""
    partial = target.with_name(f"{target.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    yield partial
    partial.rename(target)


def make_optimizers(model: nn.Module, rate: float, muon: bool) -> list[torch.optim.Optimizer]:
    """Return AdamW, and Muon before it for the matrices inside blocks if it is wanted."""
    weights = {name: weight for name, weight in model.named_parameters() if weight.requires_grad}
    inside = [n for n, weight in weights.items() if muon and weight.ndim == 2 and "layers." in n]
    matrices = [weights.pop(name) for name in inside]
    optimizers: list[torch.optim.Optimizer] = []
    if matrices:
        matched = {"adjust_lr_fn": "match_rms_adamw", "weight_decay": 0.0}
        optimizers.append(torch.optim.Muon(matrices, lr=rate, **matched))
    return [*optimizers, torch.optim.AdamW(weights.values(), lr=rate, weight_decay=0.0)]
