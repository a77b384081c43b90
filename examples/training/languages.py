# SPDX-License-Identifier: Apache-2.0
"""The quickstart's Llama family as one for StatsMerging: its questions, without the answers."""

from __future__ import annotations

import json
import random
import sys
from pathlib import Path

QUICKSTART = Path(__file__).resolve().parents[1] / "quickstart"
FAMILY = QUICKSTART / "family"
sys.path.insert(0, str(QUICKSTART))

from dictionaries import (  # noqa: E402
    ASKED,
    NEW_LANGUAGES,
    PAIRS,
    UNASKED,
    make_dictionaries,
    make_tokenizer,
    random_lines,
)
from family import Recipe, save_model, train, train_family  # noqa: E402

LINES = {"train": 256, "validation": 128, "test": 384}
# What each split asks: the words of one say nothing about those of another.
WORDS = {"train": ASKED[:-PAIRS], "validation": ASKED[-PAIRS:], "test": UNASKED}
FEW_LINES = dict.fromkeys(LINES, 8)  # enough to see that everything runs
DISTILLED_LINES = 512


def write_data(folder: Path, counts: dict[str, int]) -> None:
    """Write lines that end in a question, and their answers for evaluation, per new language.

    Args:
        folder: for the files.
        counts: how many lines, by split.
    """
    folder.mkdir(parents=True, exist_ok=True)
    for number, language in enumerate(NEW_LANGUAGES):
        rng = random.Random(100 + number)
        dictionary = make_dictionaries()[language]
        for split, count in counts.items():
            with open(folder / f"{language}-{split}.jsonl", "w", encoding="utf-8") as file:
                for _ in range(count):
                    line = dictionary.line(rng.sample(WORDS[split], rng.randint(1, PAIRS)))
                    question, _, answer = line.rpartition(" ")
                    file.write(json.dumps({"question": question, "answer": answer}) + "\n")


def expert_configs(folder: Path, family: Path = FAMILY) -> list[dict]:
    """Return the experts as a `train.yml` lists them; each writes its own one-word answers.

    Args:
        folder: of the data.
        family: of the models.
    """
    return [
        {
            "model": str(family / language),
            "task": language,
            "data": {
                "path": str(folder / language),
                "prompt": "question",
                "max_new_tokens": 1,
                "validation_split": "validation",
                "test_split": "test",
            },
        }
        for language in NEW_LANGUAGES
    ]


def save_splits(folder: Path) -> None:
    """Save the lines as `datasets` keeps splits together."""
    from datasets import DatasetDict, load_dataset

    for language in NEW_LANGUAGES:
        if not (folder / language).exists():
            files = {split: str(folder / f"{language}-{split}.jsonl") for split in LINES}
            data = load_dataset("json", data_files=files)
            assert isinstance(data, DatasetDict)
            partial = folder / f"{language}.partial"
            data.save_to_disk(partial)
            partial.rename(folder / language)


def prepare(folder: Path, family: Path = FAMILY, steps: int | None = None) -> str:
    """Train the family, if the quickstart has not, and write the data; return the base's folder.

    Args:
        folder: for the data.
        family: for the models.
        steps: at most so many per model, to see that everything runs.
    """
    train_family(family, steps)
    write_data(folder, LINES if steps is None else FEW_LINES)
    save_splits(folder)
    return str(family / "base")


def train_gpt2(folder: Path, steps: int | None = None) -> str:
    """Train a GPT-2 that knows the first new language and no other; return its folder."""
    import torch
    from transformers import GPT2Config, GPT2LMHeadModel

    target = folder / "gpt2"
    if not target.exists():
        tokenizer = make_tokenizer()
        torch.manual_seed(9)
        config = GPT2Config(
            vocab_size=len(tokenizer),
            n_positions=64,
            n_embd=128,
            n_layer=2,
            n_head=4,
            bos_token_id=tokenizer.bos_token_id,
            eos_token_id=tokenizer.eos_token_id,
            pad_token_id=tokenizer.pad_token_id,
        )
        model = GPT2LMHeadModel(config)
        recipe = Recipe(
            NEW_LANGUAGES[:1], None, steps=400 if steps is None else steps, peak=2e-3, seed=9
        )
        train(model, tokenizer, recipe, "GPT-2")
        save_model(model, tokenizer, target)
    return str(target)


def write_lines(folder: Path, count: int = DISTILLED_LINES) -> str:
    """Write whole lines of the first new language, for the distillation; return the file."""
    path = folder / "lines.jsonl"
    dictionary = make_dictionaries()[NEW_LANGUAGES[0]]
    lines = random_lines([dictionary], count, random.Random(200))
    path.write_text("".join(json.dumps({"line": line}) + "\n" for line in lines))
    return str(path)
