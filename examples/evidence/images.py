# SPDX-License-Identifier: Apache-2.0
"""A family of small vision transformers on the images that scikit-learn brings along.

Four tasks as grey images of 8 × 8 pixels: handwritten digits, how a digit is turned, patches of two
photographs, and the measurements of a breast tumour. The base has learned to tell how an image is
turned or mirrored, and of which kind it is; each expert one task, with a head of its own.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset, DatasetDict
from family import DEVICE, Family, Losses, whole_folder
from sklearn.datasets import load_breast_cancer, load_digits, load_sample_images
from torch import Tensor, nn
from torch.nn.functional import avg_pool2d, cross_entropy, unfold
from transformers import AutoModel, ViTConfig, ViTForImageClassification, ViTModel

Task = tuple[Tensor, Tensor]  # images (n, 1, 8, 8) from 0 to 1, classes (n,)
SHARES = {"experts": 0.5, "train": 0.2, "validation": 0.1, "test": 0.2}
BASE_STEPS, EXPERT_STEPS, BATCH = 1500, 400, 64
BASE_RATE, EXPERT_RATE = 1e-3, 5e-4


def digits() -> Task:
    """Return digits; the class is which one."""
    data = load_digits()
    return torch.tensor(data.images, dtype=torch.float32)[:, None] / 16, torch.tensor(data.target)


def turns() -> Task:
    """Return turned digits; the class is by how many quarters."""
    images, _ = digits()
    quarters = torch.arange(len(images)) % 4
    turned = [torch.rot90(image, n % 4, (-2, -1)) for n, image in enumerate(images)]
    return torch.stack(turned), quarters


def photographs() -> Task:
    """Return patches of two photographs; the class is which one, and which half of it."""
    patches, classes = [], []
    for number, photograph in enumerate(load_sample_images().images):
        grey = torch.tensor(photograph).float().mean(-1) / 255
        tiles = unfold(avg_pool2d(grey[None, None], 2), 8, stride=8)[0].T.view(-1, 1, 8, 8)
        lower = torch.arange(len(tiles)) >= len(tiles) / 2
        patches.append(tiles)
        classes.append(2 * number + lower.long())
    return torch.cat(patches), torch.cat(classes)


def tumours() -> Task:
    """Return measurements as pixels, ranks from 0 to 1; the class is malignant or benign."""
    measurements, target = load_breast_cancer(return_X_y=True)
    ranks = torch.tensor(measurements).argsort(0).argsort(0) / len(measurements)
    images = torch.zeros(len(ranks), 64)
    images[:, : ranks.shape[1]] = ranks.float()
    return images.view(-1, 1, 8, 8), torch.tensor(target)


TASKS: dict[str, Callable[[], Task]] = {
    "digits": digits, "turns": turns, "photographs": photographs, "tumours": tumours
}  # fmt: skip


@cache
def splits(name: str) -> dict[str, Task]:
    """Return disjoint shares of a task's images, the same in every run."""
    images, classes = TASKS[name]()
    order = torch.randperm(len(images), generator=torch.Generator().manual_seed(7))
    parts, start = {}, 0
    for split, share in SHARES.items():
        end = len(order) if split == "test" else start + round(share * len(order))
        parts[split] = (images[order[start:end]], classes[order[start:end]])
        start = end
    return parts


def pretext() -> Task:
    """Return all images in eight turns and reflections; the class is which, and of which kind."""
    images, classes = [], []
    for kind, name in enumerate(("digits", "photographs", "tumours")):
        original, _ = splits(name)["experts"]
        for quarter in range(4):
            turned = torch.rot90(original, quarter, (-2, -1))
            for mirrored in range(2):
                images.append(turned.flip(-1) if mirrored else turned)
                label = (kind * 4 + quarter) * 2 + mirrored
                classes.append(torch.full((len(original),), label))
    return torch.cat(images), torch.cat(classes)


def new_classifier(labels: int) -> ViTForImageClassification:
    """Return a transformer of about 140,000 parameters."""
    config = ViTConfig(
        hidden_size=64, num_hidden_layers=4, num_attention_heads=4, intermediate_size=128,
        image_size=8, patch_size=2, num_channels=1, num_labels=labels,
    )  # fmt: skip
    return ViTForImageClassification(config)


def train_classifier(model: nn.Module, task: Task, steps: int, peak: float, seed: int) -> None:
    """Fine-tune in place by AdamW at a one-cycle rate."""
    images, classes = (part.to(DEVICE) for part in task)
    generator = torch.Generator().manual_seed(seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=peak)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, peak, total_steps=steps + 1)
    model.to(DEVICE).train()
    for _ in range(steps):
        chosen = torch.randint(len(images), (BATCH,), generator=generator)
        loss = cross_entropy(model(pixel_values=images[chosen]).logits, classes[chosen])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()


class Images(Family):
    """Experts of `TASKS`; `steps` limits each training, for a trial."""

    layers = 4

    def __init__(self, seed: int, cache: Path, steps: int | None = None):
        super().__init__("images", seed)
        self.folder, self.steps = cache / "models" / f"images-{seed}", steps
        self.base = self.folder / "base"
        self.experts = {task: self.folder / task for task in TASKS}
        self.heads: dict[str, nn.Module] = {}

    def prepare(self) -> None:
        most = self.steps or BASE_STEPS
        if not self.base.exists():
            torch.manual_seed(100 * self.seed)
            model = new_classifier(24)
            train_classifier(model, pretext(), min(BASE_STEPS, most), BASE_RATE, 100 * self.seed)
            with whole_folder(self.base) as folder:
                model.base_model.save_pretrained(folder)
        for number, (task, target) in enumerate(self.experts.items()):
            if not target.exists():
                images, classes = splits(task)["experts"]
                torch.manual_seed(100 * self.seed + number)
                model = new_classifier(int(classes.max()) + 1)
                base = AutoModel.from_pretrained(self.base)  # brings a pooler of its own
                model.base_model.load_state_dict(base.state_dict(), strict=False)
                steps, order = min(EXPERT_STEPS, most), 100 * self.seed + number + 1
                train_classifier(model, (images, classes), steps, EXPERT_RATE, order)
                with whole_folder(target) as folder:
                    model.save_pretrained(folder)

    def load(self, folder: Path) -> nn.Module:
        return ViTModel.from_pretrained(folder, add_pooling_layer=False).to(DEVICE).eval()

    @torch.no_grad()
    def examine(self, model: nn.Module) -> Losses:
        losses = {}
        for task, folder in self.experts.items():
            if task not in self.heads:
                expert = ViTForImageClassification.from_pretrained(folder)
                self.heads[task] = expert.classifier.to(DEVICE).eval()
            images, classes = splits(task)["test"]
            features = model(pixel_values=images.to(DEVICE)).last_hidden_state[:, 0]
            wrong = self.heads[task](features).argmax(-1).cpu() != classes
            losses[task] = [(float(one), 1) for one in wrong.tolist()]
        return losses

    def training_config(self, samples: int) -> dict[str, Any]:
        held_out, models = samples // 10, []
        for task, folder in self.experts.items():
            data = self.folder / "data" / task
            if not data.exists():
                parts = {
                    split: Dataset.from_dict({"pixels": images.tolist(), "class": classes.tolist()})
                    for split, (images, classes) in splits(task).items()
                    if split != "experts"
                }
                DatasetDict(parts).save_to_disk(data)
            source = {"path": str(data), "image": "pixels", "label": "class",
                      "validation_split": "validation", "test_split": "test",
                      "samples": samples - 2 * held_out, "held_out": held_out}  # fmt: skip
            models.append({"model": str(folder), "task": task, "data": source})
        return {"base_model": str(self.base), "models": models, "task": "image-classification"}
