# SPDX-License-Identifier: Apache-2.0
"""The quickstart family: a small Llama that speaks four languages, and four experts."""

from __future__ import annotations

import os
import random
import shutil
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from dictionaries import (
    KEYS,
    NEW_LANGUAGES,
    OLD_LANGUAGES,
    encode,
    exam,
    make_dictionaries,
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
    PreTrainedTokenizerFast,
)


@dataclass(frozen=True)
class Recipe:
    """How one model is trained."""

    languages: tuple[str, ...]  # of a batch; an expert rehearses the old languages too
    new: str | None  # the language that an expert learns; None for the base
    steps: int
    peak: float  # of the one-cycle learning rate
    seed: int  # of initialisation and data
    batch: int = 48  # lines per step
    new_share: float = 1 / 3  # of an expert's batch that is the new language


BASE = Recipe(OLD_LANGUAGES, None, steps=500, peak=1e-3, seed=0)
EXPERTS = {
    language: Recipe(OLD_LANGUAGES, language, steps=200, peak=5e-4, seed=1 + n)
    for n, language in enumerate(NEW_LANGUAGES)
}


def new_model(tokenizer: PreTrainedTokenizerFast) -> LlamaForCausalLM:
    """Return a Llama of about 1.4 million parameters."""
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


def train(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast, recipe: Recipe, name: str
) -> None:
    """Train in place, with a progress bar."""
    rng = random.Random(recipe.seed)
    dictionaries = make_dictionaries()
    old = [dictionaries[language] for language in recipe.languages]
    new_lines = round(recipe.batch * recipe.new_share) if recipe.new else 0
    optimizer = torch.optim.AdamW(model.parameters(), lr=recipe.peak, fused=True)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, recipe.peak, recipe.steps)
    model.train()
    bar = tqdm(range(recipe.steps), desc=f"training {name:>6}", unit="step")
    for _ in bar:
        lines = random_lines(old, recipe.batch - new_lines, rng)
        if recipe.new:
            lines += random_lines([dictionaries[recipe.new]], new_lines, rng)
        ids, labels = encode(lines, tokenizer)
        loss = model(input_ids=ids, labels=labels).loss
        loss.backward()
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        bar.set_postfix(loss=f"{loss.item():.3f}")
    model.eval()


def train_family(folder: Path, steps: int | None = None) -> None:
    """Train what is not in `folder` yet, by at most so many steps a model."""
    tokenizer = make_tokenizer()
    train_base(folder, steps)
    for language, recipe in EXPERTS.items():
        if (folder / language).exists():
            continue
        torch.manual_seed(recipe.seed)
        model = AutoModelForCausalLM.from_pretrained(folder / "base", attn_implementation="eager")
        train(model, tokenizer, shortened(recipe, steps), language)
        save_model(model, tokenizer, folder / language)


def train_base(folder: Path, steps: int | None = None) -> None:
    """Train the base, unless it is in the folder already."""
    if (folder / "base").exists():
        return
    tokenizer = make_tokenizer()
    torch.manual_seed(BASE.seed)
    model = new_model(tokenizer)
    train(model, tokenizer, shortened(BASE, steps), "base")
    save_model(model, tokenizer, folder / "base")


def shortened(recipe: Recipe, steps: int | None) -> Recipe:
    """Return the recipe with at most so many steps."""
    return recipe if steps is None else replace(recipe, steps=min(recipe.steps, steps))


def save_model(model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast, target: Path) -> None:
    """Write the checkpoint whole or not at all."""
    partial = target.with_name(target.name + ".partial")
    shutil.rmtree(partial, ignore_errors=True)
    model.save_pretrained(partial)
    tokenizer.save_pretrained(partial)
    os.replace(partial, target)


def accuracies(folder: Path, keys: Sequence[str] = KEYS) -> dict[str, float]:
    """Return the share of right answers, 0 to 1, per language, of those to some of the words."""
    dictionaries = make_dictionaries()
    shares = {}
    for language, (given, right) in answers(folder).items():
        asked = [key for line in exam(dictionaries[language]) for key in line.split()[1::4]]
        counted = torch.tensor([key in keys for key in asked])
        shares[language] = (given == right)[counted].float().mean().item()
    return shares


@torch.no_grad()
def answers(folder: Path) -> dict[str, tuple[Tensor, Tensor]]:
    """Return what a model answers, and the right answers, per language.

    Loads a checkpoint, or an adapter, as any user would; the model sees the right answers before
    each question.
    """
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    result = {}
    for language, dictionary in make_dictionaries().items():
        ids, labels = encode(exam(dictionary), tokenizer)
        guesses = model(input_ids=ids).logits[:, :-1].argmax(-1)
        asked = labels[:, 1:] != -100
        result[language] = guesses[asked], labels[:, 1:][asked]
    return result
