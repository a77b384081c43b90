# SPDX-License-Identifier: Apache-2.0
"""The quickstart family: a small Llama that speaks four languages, and four experts."""

from __future__ import annotations

import os
import random
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from dictionaries import (
    DICTIONARIES,
    KEYS,
    NEW_LANGUAGES,
    OLD_LANGUAGES,
    encode,
    exam,
    make_tokenizer,
    random_lines,
)
from torch import Tensor
from tqdm import tqdm
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
)

BATCH = 48  # lines per step; a third of an expert's are in its new language, the rest in old ones


@dataclass(frozen=True)
class Recipe:
    """How one model is trained."""

    new: str | None  # the language that an expert learns; None for the base
    steps: int
    peak: float  # of the one-cycle learning rate
    seed: int  # of initialisation and data


BASE = Recipe(None, steps=500, peak=1e-3, seed=0)
EXPERTS = {
    language: Recipe(language, steps=200, peak=5e-4, seed=1 + n)
    for n, language in enumerate(NEW_LANGUAGES)
}


def start_model(base: Path, recipe: Recipe) -> PreTrainedModel:
    """Return the base before its training, a Llama of 1.4 million parameters, or an expert."""
    if recipe.new:
        return AutoModelForCausalLM.from_pretrained(base, attn_implementation="eager")
    tokenizer = make_tokenizer()
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=192,
        intermediate_size=512,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=4,
        max_position_embeddings=64,
        tie_word_embeddings=False,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        attn_implementation="eager",
    )
    return LlamaForCausalLM(config)


def train_family(
    folder: Path,
    experts: Mapping[str, Recipe] = EXPERTS,
    start: Callable[[Path, Recipe], PreTrainedModel] = start_model,
    base: Recipe = BASE,
    steps: int | None = None,
) -> None:
    """Train what is not in `folder` yet, by at most so many steps a model."""
    for name, recipe in {"base": base, **experts}.items():
        if (folder / name).exists():
            continue
        torch.manual_seed(recipe.seed)
        model = start(folder / "base", recipe)
        train(model, recipe, min(recipe.steps, steps or recipe.steps), name)
        save_model(model, folder / name)


def train(model: PreTrainedModel, recipe: Recipe, steps: int, name: str) -> None:
    """Train in place, with a progress bar."""
    rng, tokenizer = random.Random(recipe.seed), make_tokenizer()
    new_lines = BATCH // 3 if recipe.new else 0
    optimizer = torch.optim.AdamW(model.parameters(), lr=recipe.peak, fused=True)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, recipe.peak, steps)
    model.train()
    bar = tqdm(range(steps), desc=f"training {name:>6}", unit="step")
    for _ in bar:
        lines = random_lines(OLD_LANGUAGES, BATCH - new_lines, rng)
        if recipe.new:
            lines += random_lines([recipe.new], new_lines, rng)
        ids, labels = encode(lines, tokenizer)
        loss = model(input_ids=ids, labels=labels).loss
        loss.backward()
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        bar.set_postfix(loss=f"{loss.item():.3f}")
    model.eval()


def save_model(model: PreTrainedModel, target: Path) -> None:
    """Write the checkpoint and its tokenizer whole or not at all."""
    partial = target.with_name(target.name + ".partial")
    shutil.rmtree(partial, ignore_errors=True)
    model.save_pretrained(partial)
    make_tokenizer().save_pretrained(partial)
    os.replace(partial, target)


@torch.no_grad()
def answers(folder: Path) -> dict[str, tuple[Tensor, Tensor]]:
    """Return what a model answers, and the right answers, per language.

    Loads a checkpoint, or an adapter, as any user would; the model sees the right answers before
    each question.
    """
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    result = {}
    for language in DICTIONARIES:
        ids, labels = encode(exam(language), tokenizer)
        guesses = model(input_ids=ids).logits[:, :-1].argmax(-1)
        asked = labels[:, 1:] != -100
        result[language] = guesses[asked], labels[:, 1:][asked]
    return result


def accuracies(folder: Path, keys: Sequence[str] = KEYS) -> dict[str, float]:
    """Return the share of right answers, 0 to 1, per language, of those to some of the words."""
    shares = {}
    for language, (given, right) in answers(folder).items():
        asked = [key for line in exam(language) for key in line.split()[1::4]]
        counted = torch.tensor([key in keys for key in asked])
        shares[language] = (given == right)[counted].float().mean().item()
    return shares
