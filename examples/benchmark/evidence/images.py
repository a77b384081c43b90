# SPDX-License-Identifier: Apache-2.0
"""The family of small vision transformers of `examples/training`, with several seeds.

Four tasks that look nothing like each other, on the real data that scikit-learn brings along; each
expert has a head of its own, and the backbones are merged.
"""

from __future__ import annotations

import sys
from functools import cache
from pathlib import Path
from typing import Any

import torch
from evidence.families import FOLDER, Family, Split
from torch import Tensor, nn
from transformers import ViTForImageClassification, ViTModel

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "training"))

import images

LAYERS = 4


class Images(Family):
    """Digits, how a digit is turned, patches of photographs, tumours."""

    layers = LAYERS

    def __init__(self, name: str, seed: int, count: int | None = None):
        """With `count`, of the first experts only."""
        self.name, self.seed = name, seed
        self.folder = FOLDER / f"images-{seed}"
        self.base = self.folder / "base"
        self._heads: dict[str, nn.Module] = {}
        self.experts = {task: self.folder / task for task in images.TASKS[:count]}

    def train(self) -> None:
        images.train_family(self.folder, self.seed, teacher=False)

    def load(self, folder: Path) -> nn.Module:
        return ViTModel.from_pretrained(folder, add_pooling_layer=False).eval()

    @torch.no_grad()
    def accuracy(self, model: nn.Module, task: str, split: Split) -> float:
        pixels, classes = _questions(task, split)
        head = self._head(task)
        features = model(pixel_values=pixels).last_hidden_state[:, 0]
        return float((head(features).argmax(-1) == classes).float().mean())

    def unlabelled(self, samples: int, rehearsed: int = 0) -> dict[str, Any]:
        experts = images.expert_configs(self.folder, self.tasks)
        held_out = max(samples // 10, 1)  # for validation and for test, as where no split is named
        for expert in experts:
            expert["data"] |= {"samples": samples - 2 * held_out, "held_out": held_out}
        return {"base_model": str(self.base), "models": experts, "task": "image-classification"}

    def _head(self, task: str) -> nn.Module:
        if task not in self._heads:
            expert = ViTForImageClassification.from_pretrained(self.experts[task])
            self._heads[task] = expert.classifier.eval()
        return self._heads[task]


@cache
def _questions(task: str, split: Split) -> tuple[Tensor, Tensor]:
    """Images and classes; what the experts did not see, the trainer's share included."""
    parts = images.splits(task)
    if split == "test":
        return parts["test"]
    both = [parts["train"], parts["validation"]]
    return torch.cat([p[0] for p in both]), torch.cat([p[1] for p in both])
