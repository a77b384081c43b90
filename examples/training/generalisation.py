# SPDX-License-Identifier: Apache-2.0
"""What merges of image classifiers are worth on images and tasks that nobody trained them on.

    python examples/training/generalisation.py vit
    python examples/training/generalisation.py resnet    # and by whose statistics of BatchNorm
    python examples/training/generalisation.py vit --teachers resnet     # and the other way round

Families of `images.py`. A merge is scored with the experts' heads on their test images:
clean ones, with noise, blurred, and with little contrast. Then a task is left out of the merge in
turn, and its images are told by the class means of the merge's features; and coefficients are
learned from answers of which a part is wrong. With `--teachers`, the digits' expert is distilled
from that of the other family, and coefficients are carried over from there by depth. Figures are
the mean over `--seeds`, ± half the range. Models lie in `generalisation/`.
"""

from __future__ import annotations

import argparse
import shutil
from collections import defaultdict
from collections.abc import Callable, Iterator
from copy import deepcopy
from functools import cache, cached_property
from pathlib import Path
from typing import Any

import torch
import yaml
from click.testing import CliRunner
from datasets import DatasetDict, disable_progress_bars, load_from_disk
from images import ARCHITECTURES, TASKS, expert_configs, splits, train_family
from torch import Tensor, nn
from torch.nn.functional import conv2d, pad
from transformers import AutoModel, AutoModelForImageClassification, PreTrainedModel

from mergekit_ace.cli import main as mergekit_ace
from mergekit_ace.naming import is_running_statistic
from mergekit_ace.training.config import DistillConfig, TrainConfig
from mergekit_ace.training.distill import run_distillation
from mergekit_ace.training.run import run_training

SAMPLES = 64  # of each expert's unlabelled images, for statistics
WEIGHTS = (0.2, 0.25, 0.3, 0.4, 0.5, 0.7)
Scores = tuple[str, list[float]]  # of a row, by column
LEARNED = {
    "learned coefficients of task vectors": {"training": {"learning_rate": 1e-2}},
    "learned coefficients of `ace`": {"basis": "ace", "training": {"learning_rate": 1e-2}},
}


def noisy(images: Tensor) -> Tensor:
    """Return images, (n, 1, 8, 8) from 0 to 1, with Gaussian noise of standard deviation 0.2."""
    return images + 0.2 * torch.randn(images.shape, generator=torch.Generator().manual_seed(5))


def blurred(images: Tensor) -> Tensor:
    """Return images blurred by a Gaussian of three pixels, standard deviation 1."""
    line = torch.tensor([-1.0, 0.0, 1.0]).square().div(-2).exp()
    kernel = torch.outer(line, line) / line.sum().square()
    return conv2d(pad(images, (1, 1, 1, 1), mode="replicate"), kernel[None, None])


def faint(images: Tensor) -> Tensor:
    """Return images whose distance from their mean is a third."""
    mean = images.mean((1, 2, 3), keepdim=True)
    return mean + (images - mean) / 3


CORRUPTIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "clean": lambda images: images,
    "noise": noisy,
    "blur": blurred,
    "contrast": faint,
}


class Images:
    """A family with its backbones, and merges of some of its experts.

    Args:
        architecture: of `images.ARCHITECTURES`.
        folder: for everything.
        steps: at most so many per training, to see that it runs.
        seed: of the family's initialisation and order, and of what is learned.
    """

    def __init__(self, architecture: str, folder: Path, steps: int | None = None, seed: int = 0):
        self.own = folder / f"{architecture}-{seed}"
        self.kind, self.steps, self.seed = architecture, steps, seed
        train_family(self.own, seed, architecture=architecture, teacher=False, steps=steps)
        self.experts: dict[str, PreTrainedModel] = {}
        for task in TASKS:
            self.set_expert(task, self.own / task)
        base = AutoModelForImageClassification.from_pretrained(self.own / "base")
        self.keep_backbone("base", base)

    def keep_backbone(self, name: str, model: PreTrainedModel) -> None:
        """Save a model without its head."""
        model.base_model.save_pretrained(self.backbone(name), save_original_format=False)

    def backbone(self, name: str) -> Path:
        """Return the folder of a model without its head."""
        return self.own / "backbones" / name

    def merge(self, method: str, tasks: tuple[str, ...], **parameters: Any) -> nn.Module:
        """Return the backbone that `mergekit-ace merge` makes of some experts."""
        config = {
            "merge_method": method,
            "base_model": str(self.backbone("base")),
            "models": [{"model": str(self.backbone(task))} for task in tasks],
            "parameters": parameters,
            "dtype": "float32",
        }
        return self._merged(config)

    def learned(self, tasks: tuple[str, ...], change: dict, wrong: float = 0.0) -> nn.Module:
        """Return the merge with coefficients from unlabelled images, or from noisy classes."""
        experts = expert_configs(self.own, tasks)
        for expert in experts if wrong else ():
            expert["data"]["path"] = str(self._mislabelled(expert["task"], wrong))
        config = {
            "base_model": str(self.own / "base"),
            "models": experts,
            "task": "image-classification",
            "learner": {"input": "direct"},
            "labels": "true" if wrong else "hard",
            "compare": {"direct": False, "task_arithmetic": []},
            **change,
        }
        config["training"] = {
            "epochs": 10,
            "batch_size": 16,
            "seed": self.seed,
            **change["training"],
        }
        if self.steps is not None:
            config["training"]["max_steps"] = self.steps
        out = self.own / "learned"
        shutil.rmtree(out, ignore_errors=True)
        run_training(TrainConfig.model_validate(config), out, quiet=True)
        return self._merged(yaml.safe_load((out / "merge.yml").read_text()))

    def distilled(self, teacher: Path, task: str) -> Path:
        """Teach the base what an expert of another architecture knows; return the student."""
        (expert,) = expert_configs(self.own, (task,))
        training = {"epochs": 60, "batch_size": 16, "learning_rate": ARCHITECTURES[self.kind][3]}
        if self.steps is not None:
            training["max_steps"] = self.steps
        config = {
            "teacher": str(teacher),
            "student": str(self.own / "base"),
            "task": "image-classification",
            "data": {name: text for name, text in expert["data"].items() if name != "label"},
            "training": training,
        }
        out = self.own / f"{task}-student"
        run_distillation(DistillConfig.model_validate(config), out, quiet=True)
        return out

    def set_expert(self, task: str, model: Path) -> None:
        """Make a model, with its own head, the expert of a task."""
        self.experts[task] = AutoModelForImageClassification.from_pretrained(model).eval()
        self.keep_backbone(task, self.experts[task])

    def carried_over(self, coefficients: Path) -> nn.Module:
        """Return the merge of all experts with coefficients of another architecture, by depth."""
        config = {
            "merge_method": "statsmerging",
            "base_model": str(self.backbone("base")),
            "models": [
                {"model": str(self.backbone(task)), "parameters": {"task": task}} for task in TASKS
            ],
            "parameters": {"coefficients": str(coefficients), "match": "depth"},
            "dtype": "float32",
        }
        return self._merged(config)

    def _merged(self, config: dict) -> nn.Module:
        path, out = self.own / "merge.yml", self.own / "merged"
        path.write_text(yaml.safe_dump(config))
        arguments = ["merge", str(path), str(out), "--overwrite", "--quiet"]
        CliRunner().invoke(mergekit_ace, arguments, catch_exceptions=False, standalone_mode=False)
        return AutoModel.from_pretrained(out).eval()

    def _mislabelled(self, task: str, wrong: float) -> Path:
        """Write the data of a task with a share of wrong classes, but for the test split."""
        out = self.own / "mislabelled" / task
        if out.exists():
            shutil.rmtree(out)
        data = load_from_disk(self.own / "data" / task)
        classes = self.experts[task].config.num_labels
        generator = torch.Generator().manual_seed(6)

        def mistake(row: dict) -> dict:
            if torch.rand((), generator=generator) >= wrong:
                return row
            other = torch.randint(1, classes, (), generator=generator)
            return {**row, "class": (row["class"] + int(other)) % classes}

        parts = {s: rows if s == "test" else rows.map(mistake) for s, rows in data.items()}
        DatasetDict(parts).save_to_disk(out)
        return out

    @torch.no_grad()
    def accuracy(
        self, backbone: nn.Module, task: str, corrupt: Callable, split: str = "test"
    ) -> float:
        """Return the share of right answers of a backbone with an expert's head."""
        expert = self.experts[task]
        own = expert.base_model
        pixels, classes = splits(task)[split]
        setattr(expert, expert.base_model_prefix, backbone)
        answers = expert(pixel_values=corrupt(pixels)).logits.argmax(-1)
        setattr(expert, expert.base_model_prefix, own)
        return float((answers == classes).float().mean())

    def mean_accuracy(
        self, backbone: nn.Module, corrupt: Callable = CORRUPTIONS["clean"], split: str = "test"
    ) -> float:
        """Return the mean over all tasks."""
        return mean([self.accuracy(backbone, task, corrupt, split) for task in TASKS])

    @torch.no_grad()
    def told_by_means(self, backbone: nn.Module, task: str) -> float:
        """Return how many test images are nearest to the mean features of their own class."""
        parts = splits(task)
        (known, of), (asked, right) = parts["train"], parts["test"]
        features = _features(backbone, known)
        means = torch.stack([features[of == c].mean(0) for c in range(int(of.max()) + 1)])
        nearest = torch.cdist(_features(backbone, asked), means).argmin(-1)
        return float((nearest == right).float().mean())

    @torch.no_grad()
    def measured(self, backbone: nn.Module, tasks: tuple[str, ...]) -> nn.Module:
        """Return a backbone with statistics of BatchNorm from a few images of all tasks."""
        pixels = torch.cat([splits(task)["train"][0][:SAMPLES] for task in tasks])
        backbone = deepcopy(backbone)
        for layer in backbone.modules():
            if isinstance(layer, nn.BatchNorm2d):
                layer.reset_running_stats()
                layer.momentum = None  # the mean over all batches, of which there is one
                layer.train()
        backbone(pixel_values=pixels)
        return backbone.eval()

    def of_base(self, backbone: nn.Module) -> nn.Module:
        """Return a backbone with the base's statistics of BatchNorm."""
        base = AutoModel.from_pretrained(self.backbone("base")).state_dict()
        own = {name: tensor for name, tensor in base.items() if is_running_statistic(name)}
        backbone = deepcopy(backbone)
        backbone.load_state_dict(own, strict=False)
        return backbone

    @cached_property
    def weight(self) -> float:
        """The weight of task arithmetic that is best on the images that a trainer would see."""

        def score(weight: float) -> float:
            merged = self.merge("statsmerging", TASKS, weight=weight)
            return self.mean_accuracy(merged, split="train")

        return max(WEIGHTS, key=score)


def _features(backbone: nn.Module, pixels: Tensor) -> Tensor:
    """Return what the heads of a backbone see, (n, features)."""
    states = backbone(pixel_values=pixels).last_hidden_state
    return states[:, 0] if states.ndim == 3 else states.mean((2, 3))


def mean(values: list[float]) -> float:
    return sum(values) / len(values)


def makers(family: Images) -> dict[str, Callable[[tuple[str, ...]], nn.Module]]:
    """Return what makes each merge of some tasks, by the name of its row."""
    merges = {
        "task arithmetic, best weight": lambda tasks: family.merge(
            "statsmerging", tasks, weight=family.weight
        ),
        "`ace`": lambda tasks: family.merge("ace", tasks),
    }
    for name, change in LEARNED.items():
        merges[name] = lambda tasks, change=change: family.learned(tasks, change)
    rows = {"base": lambda tasks: AutoModel.from_pretrained(family.backbone("base")).eval()}
    rows |= {name: cache(make) for name, make in merges.items()}
    if family.kind == "resnet":
        for name in merges:
            make = rows[name]
            rows[f"{name}, the base's statistics"] = lambda t, make=make: family.of_base(make(t))
            rows[f"{name}, measured ones"] = lambda t, make=make: family.measured(make(t), t)
        averaged = [{"filter": "convolution", "value": "mean"}, {"value": "auto"}]
        rows["`ace`, kernels averaged"] = lambda tasks: family.merge("ace", tasks, layout=averaged)
        rows["mergekit's task arithmetic, weight 0.4"] = lambda tasks: family.merge(
            "task_arithmetic", tasks, weight=0.4
        )
    return rows


def shifts(family: Images) -> Iterator[Scores]:
    """Yield a merge per row, on clean and on corrupted images, and on a task left out of it."""
    own = {task: expert.base_model for task, expert in family.experts.items()}
    scores = [
        mean([family.accuracy(own[task], task, corrupt) for task in TASKS])
        for corrupt in CORRUPTIONS.values()
    ]
    scores.append(mean([family.told_by_means(own[task], task) for task in TASKS]))
    yield "each expert on its own task", scores
    for name, make in makers(family).items():
        merged = make(TASKS)
        scores = [family.mean_accuracy(merged, corrupt) for corrupt in CORRUPTIONS.values()]
        others = {task: tuple(other for other in TASKS if other != task) for task in TASKS}
        scores.append(mean([family.told_by_means(make(o), t) for t, o in others.items()]))
        yield name, scores


def mistakes(family: Images) -> Iterator[Scores]:
    """Yield the accuracy of coefficients learned from answers of which a share is wrong."""
    for name, change in LEARNED.items():
        for wrong in (0.2, 0.4, 0.6):
            score = family.mean_accuracy(family.learned(TASKS, change, wrong))
            yield f"{name}, {wrong:.0%}", [score]


def teachers(family: Images, other: Images, task: str = "digits") -> Iterator[Scores]:
    """Yield what a student of another architecture knows of a task, and merges of all tasks."""
    clean = CORRUPTIONS["clean"]
    for name, one in {"own expert": family, "teacher": other}.items():
        yield f"{task}: {name}", [one.accuracy(one.experts[task].base_model, task, clean)]
    other.learned(TASKS, LEARNED["learned coefficients of task vectors"])
    best = family.merge("statsmerging", TASKS, weight=family.weight)
    yield "all tasks: task arithmetic, best weight", [family.mean_accuracy(best)]
    carried = family.carried_over(other.own / "learned" / "coefficients.safetensors")
    yield (
        "all tasks: coefficients of the other architecture, by depth",
        [family.mean_accuracy(carried)],
    )
    family.set_expert(task, family.distilled(other.own / task, task))
    student = family.experts[task].base_model
    yield f"{task}: student", [family.accuracy(student, task, clean)]
    merged = family.merge("ace", TASKS)
    yield "all tasks: `ace` with the student", [family.mean_accuracy(merged)]


def print_table(columns: list[str], seeds: list[Iterator[Scores]]) -> None:
    """Print the mean of every score over seeds, ± half the range; and each as soon as it is known.

    Args:
        columns: titles of the scores.
        seeds: rows of every seed, the same in each.
    """
    known: defaultdict[str, list[list[float]]] = defaultdict(list)
    for number, rows in enumerate(seeds):
        for name, scores in rows:
            print(f"family {number}, {name}: {' '.join(f'{s:.3f}' for s in scores)}", flush=True)
            known[name].append(scores)
    print(f"\n|  | {' | '.join(columns)} |\n{'|---' * (len(columns) + 1)}|")
    for name, scores in known.items():
        cells = [
            f"{mean(column):.3f}" + f" ± {(max(column) - min(column)) / 2:.3f}" * (len(column) > 1)
            for column in map(list, zip(*scores, strict=True))
        ]
        print(f"| {name} | {' | '.join(cells)} |", flush=True)
    print()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("architecture", choices=tuple(ARCHITECTURES))
    parser.add_argument("--teachers", choices=tuple(ARCHITECTURES), help="only: distil from these")
    parser.add_argument("--seeds", nargs="+", type=int, default=[0], help="of the families")
    parser.add_argument("--folder", type=Path, default=Path(__file__).parent / "generalisation")
    parser.add_argument("--steps", type=int, help="at most so many per training, to see it run")
    arguments = parser.parse_args()
    disable_progress_bars()
    folder, steps = arguments.folder.resolve(), arguments.steps
    families = [Images(arguments.architecture, folder, steps, n) for n in arguments.seeds]
    if arguments.teachers:
        others = [Images(arguments.teachers, folder, steps, n) for n in arguments.seeds]
        pairs = zip(families, others, strict=True)
        print_table(["accuracy"], [teachers(own, other) for own, other in pairs])
        return
    print_table([*CORRUPTIONS, "a task left out"], [shifts(family) for family in families])
    print_table(["clean, a share of wrong answers"], [mistakes(family) for family in families])


if __name__ == "__main__":
    main()
