# SPDX-License-Identifier: Apache-2.0
"""Families of small models that translate words: a base knows four languages, an expert one more.

A language maps 48 keys to 48 values at random. A line names a language, and asks six of its keys;
answers are scored. Models have about 1.4 million parameters, and are trained in a minute or two.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import torch
from family import DEVICE, Family, Losses, make_optimizers, whole_folder
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from transformers import (
    AutoModelForCausalLM,
    AutoModelForMaskedLM,
    GPT2LMHeadModel,
    LlamaForCausalLM,
    PreTrainedModel,
    RobertaForMaskedLM,
)

WORDS, PAIRS = 48, 6
PAD, BOS, EQUALS, END, MASK = range(5)
LANGUAGES, OLD_LANGUAGES, NEW_LANGUAGES = 12, range(4), range(4, 8)
FIRST_KEY = MASK + 1 + LANGUAGES
FIRST_VALUE = FIRST_KEY + WORDS
VOCABULARY = FIRST_VALUE + WORDS
HIDDEN, LAYERS, HEADS, INNER = 192, 3, 4, 512
BATCH = 48  # lines
EXAM_ROUNDS = 8  # every word is asked once a round
MODELS = {"llama": LlamaForCausalLM, "gpt2": GPT2LMHeadModel, "roberta": RobertaForMaskedLM}


@dataclass(frozen=True)
class Recipe:
    """Steps of AdamW, or of Muon for matrices inside blocks, and the peak of a one-cycle rate."""

    steps: int
    peak: float
    muon: bool = False


BASE = Recipe(700, 1e-3)
EVEN = (Recipe(250, 5e-4),)
STRENGTHS = (Recipe(500, 1.5e-4), Recipe(200, 2e-3), Recipe(250, 5e-4), Recipe(350, 2.5e-4))
# By family: architecture, and the experts' recipes in turn.
DICTIONARIES: dict[str, tuple[str, Sequence[Recipe]]] = {
    "llama": ("llama", EVEN),
    "llama-strengths": ("llama", STRENGTHS),
    "llama-muon": ("llama", (Recipe(250, 5e-4, muon=True),)),
    "gpt2": ("gpt2", EVEN),
    "roberta": ("roberta", EVEN),
}


class Dictionaries(Family):
    """A family by its name in `DICTIONARIES`; `steps` limits each training, for a trial."""

    def __init__(self, name: str, seed: int, cache: Path, steps: int | None = None):
        super().__init__(name, seed)
        self.architecture, self.recipes = DICTIONARIES[name]
        self.folder, self.steps = cache / "models" / f"{self.architecture}-{seed}", steps
        self.maps = make_languages(seed)

    def prepare(self) -> None:
        self.base = self.folder / "base"
        if not self.base.exists():
            torch.manual_seed(self.seed)
            model = new_model(self.architecture).to(DEVICE)
            self._train(model, BASE, None, self.base)
        self.experts = {}
        for place, language in enumerate(NEW_LANGUAGES):
            recipe = self.recipes[place % len(self.recipes)]
            kind = f"{'muon-' * recipe.muon}{recipe.steps}-{recipe.peak:g}"
            target = self.experts[str(language)] = self.folder / f"language{language}-{kind}"
            if not target.exists():
                torch.manual_seed(100 * self.seed + language)
                self._train(self.load(self.base), recipe, language, target)

    def _train(self, model: PreTrainedModel, recipe: Recipe, new: int | None, target: Path) -> None:
        """Train and save; a third of an expert's lines are of its new language, the rest of old."""
        print(f"training {target.parent.name}/{target.name}", flush=True)
        draws = random.Random(f"{self.seed} {new} {recipe}")
        steps = min(recipe.steps, self.steps or recipe.steps)
        optimizers = make_optimizers(model, recipe.peak, recipe.muon)
        cycle = {"max_lr": recipe.peak, "total_steps": steps + 1, "cycle_momentum": False}
        schedules = [torch.optim.lr_scheduler.OneCycleLR(each, **cycle) for each in optimizers]
        model.train()
        for _ in range(steps):
            fresh = [] if new is None else [new] * (BATCH // 3)
            languages = [draws.choice(OLD_LANGUAGES) for _ in range(BATCH - len(fresh))] + fresh
            keys = torch.tensor([draws.sample(range(WORDS), PAIRS) for _ in languages])
            tokens, labels = write_lines(torch.tensor(languages), keys, self.maps)
            logits = answer(model, tokens, labels)
            loss = cross_entropy(logits, labels[labels != -100].to(DEVICE))
            loss.backward()
            for optimizer, schedule in zip(optimizers, schedules, strict=True):
                optimizer.step()
                schedule.step()
                optimizer.zero_grad()
        with whole_folder(target) as folder:
            model.save_pretrained(folder)

    def load(self, folder: Path) -> PreTrainedModel:
        kind = AutoModelForMaskedLM if self.architecture == "roberta" else AutoModelForCausalLM
        return kind.from_pretrained(folder, dtype=torch.float32).to(DEVICE).eval()

    @cached_property
    def exams(self) -> dict[str, tuple[Tensor, Tensor]]:
        """Tokens and labels of lines that ask every word of a language equally often."""
        exams = {}
        for language in (*NEW_LANGUAGES, *OLD_LANGUAGES):
            draws = random.Random(f"test {language}")
            rounds = [draws.sample(range(WORDS), WORDS) for _ in range(EXAM_ROUNDS)]
            keys = torch.tensor(rounds).view(-1, PAIRS)
            languages = torch.full((len(keys),), language)
            exams[str(language)] = write_lines(languages, keys, self.maps)
        return exams

    @torch.no_grad()
    def examine(self, model: nn.Module) -> Losses:
        losses = {}
        for name, (tokens, labels) in self.exams.items():
            wanted = labels[labels != -100].to(DEVICE)
            wrong = (answer(model, tokens, labels).argmax(-1) != wanted).view(-1, PAIRS).sum(1)
            losses[name] = [(float(count), PAIRS) for count in wrong.tolist()]
        return losses


def make_languages(seed: int) -> Tensor:
    """Return the value of every key for each language, (LANGUAGES, WORDS)."""
    generator = torch.Generator().manual_seed(1000 + seed)
    return torch.stack([torch.randperm(WORDS, generator=generator) for _ in range(LANGUAGES)])


def write_lines(languages: Tensor, keys: Tensor, maps: Tensor) -> tuple[Tensor, Tensor]:
    """Return tokens and labels, both (n, 2 + 4·PAIRS), of lines that ask `keys`, (n, PAIRS)."""
    values = maps[languages[:, None], keys] + FIRST_VALUE
    tokens = torch.empty(*keys.shape, 4, dtype=torch.long)
    tokens[..., 0], tokens[..., 1], tokens[..., 2] = keys + FIRST_KEY, EQUALS, values
    tokens[..., 3] = END
    labels = torch.full_like(tokens, -100)
    labels[..., 2] = values
    start = torch.stack([torch.full_like(languages, BOS), languages + MASK + 1], dim=1)
    unscored = torch.full_like(start, -100)
    return torch.cat([start, tokens.flatten(1)], 1), torch.cat([unscored, labels.flatten(1)], 1)


def new_model(architecture: str) -> PreTrainedModel:
    """Return a model of random weights."""
    names = {
        "vocab_size": VOCABULARY, "bos_token_id": BOS, "eos_token_id": END, "pad_token_id": PAD,
        "hidden_size": HIDDEN, "num_hidden_layers": LAYERS, "num_attention_heads": HEADS,
        "intermediate_size": INNER, "max_position_embeddings": 66, "tie_word_embeddings": False,
    }  # fmt: skip
    if architecture == "gpt2":
        del names["intermediate_size"]
        names |= {"n_inner": INNER, "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    if architecture == "roberta":
        names |= {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    return MODELS[architecture](MODELS[architecture].config_class(**names))


def answer(model: nn.Module, tokens: Tensor, labels: Tensor) -> Tensor:
    """Return the logits of all answers, (answers, vocabulary), in the order of the labels."""
    tokens, asked = tokens.to(DEVICE), labels.to(DEVICE) != -100
    if isinstance(model, RobertaForMaskedLM):
        return model(input_ids=torch.where(asked, MASK, tokens)).logits[asked]
    return model(input_ids=tokens).logits[:, :-1][asked[:, 1:]]
