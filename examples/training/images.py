# SPDX-License-Identifier: Apache-2.0
"""Families of small vision transformers and ResNets on the data that scikit-learn brings along.

Four tasks that look nothing like each other, as grey images of 8 × 8 pixels: handwritten digits,
how a digit is turned, patches of two photographs, and the thirty measurements of a breast tumour.
The base has learned to tell how any of these images is turned or mirrored, and what kind it is;
each expert has learned one task, with a head of its own. A fifth task, wines by thirteen
measurements, is known to a small convolutional network only.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import torch
from datasets import Dataset, DatasetDict
from sklearn.datasets import load_breast_cancer, load_digits, load_sample_images, load_wine
from torch import Tensor
from torch.nn.functional import cross_entropy
from tqdm import tqdm
from transformers import (
    AutoModel,
    ResNetConfig,
    ResNetForImageClassification,
    ViTConfig,
    ViTForImageClassification,
)

Task = tuple[Tensor, Tensor]  # images (n, 1, 8, 8) from 0 to 1, classes (n,)
SHARES = {"experts": 0.5, "train": 0.2, "validation": 0.1, "test": 0.2}
TASKS = ("digits", "turns", "photographs", "tumours")


def digits() -> Task:
    """Return digits; the class is which one."""
    data = load_digits()
    return torch.tensor(data.images, dtype=torch.float32)[:, None] / 16, torch.tensor(data.target)


def turns() -> Task:
    """Return turned digits; the class is by how many quarters."""
    images, _ = digits()
    quarters = torch.arange(len(images)) % 4
    turned = [
        torch.rot90(image, int(quarter), (-2, -1))
        for image, quarter in zip(images, quarters, strict=True)
    ]
    return torch.stack(turned), quarters


def photographs() -> Task:
    """Return patches of two photographs; the class is which one, and which half of it."""
    patches, classes = [], []
    for number, photograph in enumerate(load_sample_images().images):
        grey = torch.tensor(photograph).float().mean(-1) / 255
        small = torch.nn.functional.avg_pool2d(grey[None, None], 2)
        tiles = torch.nn.functional.unfold(small, 8, stride=8)[0].T.view(-1, 1, 8, 8)
        upper = torch.arange(len(tiles)) < len(tiles) / 2
        patches.append(tiles)
        classes.append(2 * number + (~upper).long())
    return torch.cat(patches), torch.cat(classes)


def _table(measurements, target) -> Task:
    """Return measurements as pixels: ranks from 0 to 1, row by row."""
    values = torch.tensor(measurements).argsort(0).argsort(0) / len(measurements)
    images = torch.zeros(len(values), 64)
    images[:, : values.shape[1]] = values.float()
    return images.view(-1, 1, 8, 8), torch.tensor(target)


def tumours() -> Task:
    """Return measurements of tumours; the class is malignant or benign."""
    return _table(*load_breast_cancer(return_X_y=True))


def wines() -> Task:
    """Return measurements of wines; the class is which of three growers."""
    return _table(*load_wine(return_X_y=True))


MAKERS: dict[str, Callable[[], Task]] = {
    "digits": digits,
    "turns": turns,
    "photographs": photographs,
    "tumours": tumours,
    "wines": wines,
}


def splits(name: str) -> dict[str, Task]:
    """Return disjoint shares of a task's images, the same in every run."""
    images, classes = MAKERS[name.removesuffix("-student")]()
    order = torch.randperm(len(images), generator=torch.Generator().manual_seed(7))
    parts, start = {}, 0
    for split, share in SHARES.items():
        end = start + round(share * len(order))
        chosen = order[start:end] if split != "test" else order[start:]
        parts[split] = (images[chosen], classes[chosen])
        start = end
    return parts


def write_data(folder: Path) -> None:
    """Write the merge's data as `datasets` saves it: pixels, and classes for evaluation."""
    for name in MAKERS:
        if (folder / name).exists():
            continue
        parts = {
            split: Dataset.from_dict({"pixels": images.tolist(), "class": classes.tolist()})
            for split, (images, classes) in splits(name).items()
            if split != "experts"
        }
        DatasetDict(parts).save_to_disk(folder / name)


def vit_config(**settings) -> ViTConfig:
    """Return the config of a transformer of about 140,000 parameters."""
    return ViTConfig(
        hidden_size=64,
        num_hidden_layers=4,
        num_attention_heads=4,
        intermediate_size=128,
        image_size=8,
        patch_size=2,
        num_channels=1,
        **settings,
    )


def resnet_config(**settings) -> ResNetConfig:
    """Return the config of a convolutional network of about 200,000 parameters, with BatchNorm."""
    return ResNetConfig(
        num_channels=1,
        embedding_size=32,
        hidden_sizes=[32, 64],
        depths=[2, 2],
        layer_type="basic",
        **settings,
    )


# Per architecture: its classifier, its config, the peak rates of the base's and experts' training.
ARCHITECTURES = {
    "vit": (ViTForImageClassification, vit_config, 1e-3, 5e-4),
    "resnet": (ResNetForImageClassification, resnet_config, 3e-3, 2e-3),
}


def pretext() -> Task:
    """Return all images in eight turns and reflections; the class is which, and what kind."""
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


def train(model, task: Task, steps: int, peak: float, seed: int, name: str, batch: int = 64):
    """Fine-tune in place."""
    images, classes = task
    generator = torch.Generator().manual_seed(seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=peak)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, peak, steps)
    model.train()
    for _ in tqdm(range(steps), desc=f"training {name}", unit="step"):
        chosen = torch.randint(len(images), (batch,), generator=generator)
        loss = cross_entropy(model(pixel_values=images[chosen]).logits, classes[chosen])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
    return model.eval()


def train_family(
    folder: Path,
    seed: int = 0,
    *,
    architecture: str = "vit",
    teacher: bool = True,
    steps: int | None = None,
) -> None:
    """Train what is not in `folder` yet; each model appears there only when it is complete.

    Args:
        folder: for data and models.
        seed: of initialisation and order; the data and its splits stay the same.
        architecture: one of `ARCHITECTURES`.
        teacher: whether the convolutional network is wanted.
        steps: at most so many per model, to see that everything runs.
    """

    def at_most(count: int) -> int:
        return count if steps is None else min(count, steps)

    seed *= 100
    classifier, make_config, base_rate, rate = ARCHITECTURES[architecture]
    write_data(folder / "data")
    if not (folder / "base").exists():
        torch.manual_seed(seed)
        model = classifier(make_config(num_labels=24))
        train(model, pretext(), at_most(1500), base_rate, seed, "base")
        _save(model.base_model, folder / "base")
    for number, name in enumerate(TASKS):
        if not (folder / name).exists():
            task = splits(name)["experts"]
            torch.manual_seed(seed + number)
            labels = int(task[1].max()) + 1
            model = classifier(make_config(num_labels=labels))
            base = AutoModel.from_pretrained(folder / "base")
            model.base_model.load_state_dict(base.state_dict(), strict=False)  # a ViT adds a pooler
            train(model, task, at_most(400), rate, seed + 1 + number, name)
            _save(model, folder / name)
    if teacher and not (folder / "wines-cnn").exists():
        torch.manual_seed(9)
        config = ResNetConfig(
            num_channels=1,
            embedding_size=16,
            hidden_sizes=[16, 32],
            depths=[1, 1],
            layer_type="basic",
            num_labels=3,
        )
        teacher = ResNetForImageClassification(config)
        train(teacher, splits("wines")["experts"], at_most(200), 3e-3, 9, "wines (CNN)")
        _save(teacher, folder / "wines-cnn")


def _save(model, target: Path) -> None:
    partial = target.with_name(target.name + ".partial")
    shutil.rmtree(partial, ignore_errors=True)
    model.save_pretrained(partial)
    os.replace(partial, target)


def expert_configs(folder: Path, names=TASKS) -> list[dict]:
    """Return the experts as a `train.yml` lists them."""
    return [
        {
            "model": str(folder / name),
            "task": name.removesuffix("-student"),
            "data": {
                "path": str(folder / "data" / name.removesuffix("-student")),
                "image": "pixels",
                "label": "class",
                "validation_split": "validation",
                "test_split": "test",
            },
        }
        for name in names
    ]
