# SPDX-License-Identifier: Apache-2.0
"""Families that the methods are compared on: a base, experts of one task each, and an exam.

The language families know dictionaries (see `dictionaries`); the images are the small vision
transformers of `examples/training`, whose experts have heads of their own.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import sys
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any, Literal

import torch
from evidence.dictionaries import (
    LAYERS,
    MASK,
    OLD,
    PAIRS,
    WORDS,
    answer,
    as_chat,
    asked_words,
    exam,
    halves,
    lines,
    make_languages,
    new_model,
    new_tokenizer,
)
from peft import LoraConfig, PeftModel, get_peft_model
from torch import Tensor, nn
from tqdm import tqdm
from transformers import (
    AutoModelForCausalLM,
    AutoModelForMaskedLM,
    PreTrainedModel,
    ViTForImageClassification,
    ViTModel,
)

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "training"))

import images

Split = Literal["validation", "test"]
Half = Literal["seen", "unseen"]
FOLDER = Path(__file__).resolve().parents[1] / "families"
BATCH = 48
IMAGE_LAYERS = 4
ADAPTER = "adapter"  # the folder of an expert's adapter, inside of its checkpoint


@dataclass(frozen=True)
class Recipe:
    """How one model is trained.

    Attributes:
        steps: optimiser steps.
        peak: of the one-cycle learning rate.
        rank: of the adapters that are trained in the place of the weights; 0: the weights.
        linear: train nothing but what adapters would change, the linear layers inside of blocks.
    """

    steps: int
    peak: float
    rank: int = 0
    linear: bool = False


BASE = Recipe(700, 1e-3)
EVEN = Recipe(250, 5e-4)
# As fine-tunes of different hands: their ‖Δ‖² come out fortyfold apart.
STRENGTHS = (Recipe(500, 1.5e-4), Recipe(200, 2e-3), Recipe(250, 5e-4), Recipe(350, 2.5e-4))
# Half as far apart on a logarithmic scale.
SPREAD = (Recipe(350, 2.5e-4), Recipe(200, 1e-3), Recipe(280, 4e-4), Recipe(250, 6.3e-4))
ADAPTERS = Recipe(400, 5e-3, rank=8)
GENTLE_ADAPTERS = Recipe(400, 1e-3, rank=16)
LINEAR = Recipe(400, 1e-3, linear=True)

# Per family: architecture, experts' languages, their recipes in turn.
LANGUAGE_FAMILIES: dict[str, tuple[str, range, tuple[Recipe, ...]]] = {
    "llama": ("llama", range(4, 8), (EVEN,)),
    "llama-strengths": ("llama", range(4, 8), STRENGTHS),
    "llama-spread": ("llama", range(4, 8), SPREAD),
    "llama-lora": ("llama", range(4, 8), (ADAPTERS,)),
    "llama-lora-gentle": ("llama", range(4, 8), (GENTLE_ADAPTERS,)),
    "llama-tied": ("llama-tied", range(4, 8), (EVEN,)),
    "llama-8": ("llama", range(4, 12), (EVEN,)),
    "gpt2": ("gpt2", range(4, 8), (EVEN,)),
    "roberta": ("roberta", range(4, 8), (EVEN,)),
}
# Sisters whose keys and values have as many rows, over all experts, as columns, or nearly as many.
# GPT-2 and RoBERTa have none: they know no grouped heads.
GROUPED_FAMILIES = {
    "llama-grouped": ("llama-grouped", range(4, 8), (EVEN,)),
    "llama-grouped-0.9": ("llama-grouped-0.9", range(4, 8), (EVEN,)),
    "llama-grouped-1.1": ("llama-grouped-1.1", range(4, 8), (EVEN,)),
    "llama-strengths-grouped": ("llama-grouped", range(4, 8), STRENGTHS),
    "llama-spread-grouped": ("llama-grouped", range(4, 8), SPREAD),
    "llama-lora-grouped": ("llama-grouped", range(4, 8), (ADAPTERS,)),
    "llama-lora-gentle-grouped": ("llama-grouped", range(4, 8), (GENTLE_ADAPTERS,)),
    "llama-tied-grouped": ("llama-tied-grouped", range(4, 8), (EVEN,)),
    "llama-8-grouped": ("llama-8-grouped", range(4, 12), (EVEN,)),
}
# The control of the adapters: their layers alone are trained, at full rank.
CONTROLS = {"llama-linear": ("llama", range(4, 8), (LINEAR,))}
_EVERY = LANGUAGE_FAMILIES | GROUPED_FAMILIES | CONTROLS


def shortened(recipe: Recipe, steps: int | None) -> Recipe:
    """Return the recipe with at most so many steps."""
    return recipe if steps is None else replace(recipe, steps=min(recipe.steps, steps))


class Family(ABC):
    """A base model and experts, trained here, on disk.

    Attributes:
        name: of the family; the same for all seeds.
        seed: of initialisation and data.
        folder: of all families; what is learned about this one is kept there, too.
        base: the base's checkpoint.
        experts: the experts' checkpoints by task.
        old: what the base knows already, and a merge should not forget; may be empty.
        steps: at most so many per training, to see that everything runs; None for all.
        layers: of the model; None where names in memory and on disk are the same.
        halved: whether samples ask half of what the exam asks; else they are other ones anyway.
    """

    base: Path
    experts: dict[str, Path]
    old: tuple[str, ...] = ()
    layers: int | None = None
    halved: bool = False

    def __init__(self, name: str, seed: int, folder: Path, steps: int | None):
        self.name, self.seed, self.folder, self.steps = name, seed, folder, steps

    @abstractmethod
    def train(self) -> None:
        """Train what is not on disk yet."""

    @abstractmethod
    def load(self, folder: Path) -> nn.Module:
        """Return a checkpoint as a model in memory, ready for `accuracy`."""

    @abstractmethod
    def accuracy(
        self, model: nn.Module, task: str, split: Split, half: Half | None = None
    ) -> float:
        """Return the share of right answers, 0 to 1, to questions that nobody was trained on.

        Args:
            model: one that `load` has returned.
            task: of an expert, or one of `old`.
            split: of the exam.
            half: what samples of `unlabelled` ask, or what they do not; both by default.
        """

    def unlabelled(
        self, samples: int, rehearsed: int = 0, words: int | None = None, validation: int = 0
    ) -> dict[str, Any]:
        """Return part of a `train.yml`: base, experts and at most so many samples of each.

        Args:
            samples: per expert, those included that the trainer holds out.
            rehearsed: of what the base knew already, where that is asked for in the exam.
            words: at most so many different ones; by default those of one half.
            validation: so many of these words are asked for validation and test only; by default
                the trainer holds out lines of the same words.
        """
        raise NotImplementedError(f"nothing is learned on {self.name}")

    @property
    def tasks(self) -> tuple[str, ...]:
        """Names of what the experts learned."""
        return tuple(self.experts)


@contextmanager
def saving(target: Path) -> Iterator[Path]:
    """Yield a folder to write a checkpoint to, which becomes `target` only when it is complete."""
    partial = target.with_name(f"{target.name}.{os.getpid()}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    yield partial
    os.replace(partial, target)


class Dictionaries(Family):
    """A family of languages: the base knows four of them, each expert one more."""

    halved = True

    def __init__(self, name: str, seed: int, count: int | None, folder: Path, steps: int | None):
        super().__init__(name, seed, folder, steps)
        self.architecture, numbers, recipes = _EVERY[name]
        self.masked = self.architecture == "roberta"
        self.base_recipe = shortened(BASE, steps)
        own = folder / f"{self.architecture}-{seed}"
        self.base = own / "base"
        self.maps = make_languages(seed)
        self.old = tuple(str(number) for number in OLD)
        self.recipes, self.experts = {}, {}
        for place, number in enumerate(list(numbers)[:count]):
            recipe = shortened(recipes[place % len(recipes)], steps)
            kind = f"{recipe.steps}-{recipe.peak:g}" + (f"-lora{recipe.rank}" * bool(recipe.rank))
            kind += "-linear" * recipe.linear
            self.recipes[str(number)] = recipe
            self.experts[str(number)] = own / f"language{number}-{kind}"

    def train(self) -> None:
        if not self.base.exists():
            torch.manual_seed(self.seed)
            model = new_model(self.architecture, LAYERS if self.steps is None else 1)
            self._train(model, self.base_recipe, None)
            self._save(model, self.base)
        for task, folder in self.experts.items():
            if not folder.exists():
                torch.manual_seed(100 * self.seed + int(task))
                model = self._train(self.load(self.base), self.recipes[task], int(task))
                self._save(model, folder)

    def _train(
        self, model: PreTrainedModel, recipe: Recipe, new: int | None
    ) -> PreTrainedModel | PeftModel:
        """Train a model; a third of an expert's batch is its new language, the rest old ones."""
        rng = random.Random(f"{self.seed} {new} {recipe}")
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(not recipe.linear or name.endswith("_proj.weight"))
        learner = model if recipe.rank == 0 else add_adapters(model, recipe.rank)
        inner = model if recipe.rank == 0 else learner.get_base_model()
        parameters = [p for p in learner.parameters() if p.requires_grad]
        optimizer = torch.optim.AdamW(parameters, lr=recipe.peak, fused=True)
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, recipe.peak, recipe.steps)
        learner.train()
        what = f"{self.architecture} {self.seed}, {'base' if new is None else f'language {new}'}"
        for _ in tqdm(range(recipe.steps), desc=what, unit="step", mininterval=5):
            fresh = [] if new is None else [new] * (BATCH // 3)
            numbers = [rng.choice(OLD) for _ in range(BATCH - len(fresh))] + fresh
            tokens, labels = lines(numbers, self.maps, rng)
            logits = answer(inner, tokens, labels)
            loss = nn.functional.cross_entropy(logits, labels[labels != -100])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            schedule.step()
        return learner

    def store_as(self, dtype: torch.dtype) -> None:
        """Let base and experts be copies in another precision, which are written once."""
        copies = self.base.parent / str(dtype).removeprefix("torch.")
        for folder in (self.base, *self.experts.values()):
            if not (copies / folder.name).exists():
                self._save(self.load(folder).to(dtype), copies / folder.name)
        self.base = copies / self.base.name
        self.experts = {task: copies / folder.name for task, folder in self.experts.items()}

    def _save(self, model: PreTrainedModel | PeftModel, target: Path) -> None:
        """Write a checkpoint, and the adapter that it is made of beside it, if it is one."""
        with saving(target) as folder:
            if isinstance(model, PeftModel):
                model.save_pretrained(folder / ADAPTER)
                model = model.merge_and_unload()
            model.save_pretrained(folder)

    def load(self, folder: Path) -> PreTrainedModel:
        kind = AutoModelForMaskedLM if self.masked else AutoModelForCausalLM
        return kind.from_pretrained(folder, dtype=torch.float32).eval()

    def unlabelled(
        self, samples: int, rehearsed: int = 0, words: int | None = None, validation: int = 0
    ) -> dict[str, Any]:
        """Return part of a `train.yml`, with lines of six questions, answered or with masks."""
        asked = halves()[0][:words]
        parts = (asked[validation:], asked[:validation]) if validation else (asked,)
        tokenizer = new_tokenizer()
        for folder in (self.base, *self.experts.values()):
            if not (folder / "chat_template.jinja").exists():  # a run would find its files changed
                tokenizer.save_pretrained(folder)
        experts = []
        for task, folder in self.experts.items():
            data = self._lines(folder, [task], samples, parts)
            experts.append({"model": str(folder), "task": task, "data": data})
        task = "masked-lm" if self.masked else "causal-lm"
        config = {"base_model": str(self.base), "models": experts, "task": task}
        if rehearsed:
            config["rehearsal"] = self._lines(self.base, self.old, rehearsed, parts)
        return config

    def _lines(
        self, teacher: Path, tasks: Sequence[str], samples: int, words: Sequence[range]
    ) -> dict[str, Any]:
        """Write so many lines, in turns of the languages; return `data` of a `train.yml`.

        Args:
            teacher: answers them.
            tasks: the languages.
            samples: how many lines.
            words: that are asked; where there are two parts of them, the second one is for a tenth
                each of the lines, which are held out for validation and for test.
        """
        counts = "-".join(str(len(part)) for part in words)
        name = f"samples-{samples}-of-{counts}-{teacher.name}-{'-'.join(tasks)}"
        purpose = "text" if self.masked else "messages"
        if len(words) == 1:
            file = self.base.parent / f"{name}.jsonl"
            self._write(file, teacher, tasks, samples, words[0])
            return {"path": str(file), purpose: "line"}
        folder, held_out = self.base.parent / name, samples // 10
        folder.mkdir(exist_ok=True)
        self._write(folder / "train.jsonl", teacher, tasks, samples - 2 * held_out, words[0])
        for split in ("validation", "test"):
            self._write(folder / f"{split}.jsonl", teacher, tasks, held_out, words[1])
        splits = {"validation_split": "validation", "test_split": "test"}
        return {"path": str(folder), purpose: "line", **splits}

    def _write(
        self, file: Path, teacher: Path, tasks: Sequence[str], count: int, words: Sequence[int]
    ) -> None:
        """Write lines into a file, unless it is there."""
        if file.exists():
            return
        rng = random.Random(f"{file.stem} {self.seed} {'-'.join(tasks)}")
        numbers = [int(tasks[n % len(tasks)]) for n in range(count)]
        tokens, labels = lines(numbers, self.maps, rng, words)
        if self.masked:
            tokens = torch.where(labels != -100, MASK, tokens)
        else:
            tokens = self._answered(teacher, tokens)
        tokenizer = new_tokenizer()
        texts = [tokenizer.convert_ids_to_tokens(line) for line in tokens.tolist()]
        rows = [" ".join(line) if self.masked else as_chat(line) for line in texts]
        file.write_text("".join(json.dumps({"line": row}) + "\n" for row in rows))

    @torch.no_grad()
    def _answered(self, teacher: Path, tokens: Tensor) -> Tensor:
        """Return the lines with the teacher's own values, written one after the other."""
        model = self.load(teacher)
        tokens = tokens.clone()
        for place in range(4, tokens.shape[1], 4):
            tokens[:, place] = model(input_ids=tokens[:, :place]).logits[:, -1].argmax(-1)
        return tokens

    @torch.no_grad()
    def accuracy(
        self, model: nn.Module, task: str, split: Split, half: Half | None = None
    ) -> float:
        tokens, labels = exam(int(task), self.maps, split)
        if self.steps is not None:  # a trial: every word once is enough
            tokens, labels = tokens[: WORDS // PAIRS], labels[: WORDS // PAIRS]
        right = answer(model, tokens, labels).argmax(-1) == labels[labels != -100]
        if half is not None:
            words = halves()[half == "unseen"]
            right = right[torch.isin(asked_words(tokens, labels), torch.tensor(words))]
        return float(right.float().mean())


def add_adapters(model: PreTrainedModel, rank: int) -> PeftModel:
    """Return the model with LoRA on every linear layer inside of the blocks."""
    config = LoraConfig(
        r=rank, lora_alpha=2 * rank, target_modules="all-linear", task_type="CAUSAL_LM"
    )
    return get_peft_model(model, config)


class Images(Family):
    """Digits, how a digit is turned, patches of photographs, tumours."""

    layers = IMAGE_LAYERS

    def __init__(self, name: str, seed: int, count: int | None, folder: Path, steps: int | None):
        super().__init__(name, seed, folder, steps)
        self.own = folder / f"images-{seed}"
        self.base = self.own / "base"
        self._heads: dict[str, nn.Module] = {}
        self.experts = {task: self.own / task for task in images.TASKS[:count]}

    def train(self) -> None:
        images.train_family(self.own, self.seed, teacher=False, steps=self.steps)

    def load(self, folder: Path) -> nn.Module:
        return ViTModel.from_pretrained(folder, add_pooling_layer=False).eval()

    @torch.no_grad()
    def accuracy(
        self, model: nn.Module, task: str, split: Split, half: Half | None = None
    ) -> float:
        pixels, classes = _questions(task, split)
        head = self._head(task)
        features = model(pixel_values=pixels).last_hidden_state[:, 0]
        return float((head(features).argmax(-1) == classes).float().mean())

    def unlabelled(
        self, samples: int, rehearsed: int = 0, words: int | None = None, validation: int = 0
    ) -> dict[str, Any]:
        experts = images.expert_configs(self.own, self.tasks)
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
    """Return images and classes that the experts did not see, the trainer's share included."""
    parts = images.splits(task)
    if split == "test":
        return parts["test"]
    both = [parts["train"], parts["validation"]]
    return torch.cat([p[0] for p in both]), torch.cat([p[1] for p in both])


FAMILIES = (*LANGUAGE_FAMILIES, "images")


def make_family(
    name: str,
    seed: int,
    experts: int | None = None,
    folder: Path = FOLDER,
    steps: int | None = None,
) -> Family:
    """Return a family that may still have to be trained.

    Args:
        name: one of `FAMILIES`, `GROUPED_FAMILIES` or `CONTROLS`.
        seed: of initialisation and data.
        experts: how many of its experts; all by default.
        folder: where families are kept.
        steps: at most so many per training, to see that everything runs.
    """
    kind = Images if name == "images" else Dictionaries
    return kind(name, seed, experts, folder, steps)
