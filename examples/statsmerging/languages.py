# SPDX-License-Identifier: Apache-2.0
"""The quickstart's Llama family as one for StatsMerging: its questions, without the answers."""

from __future__ import annotations

import json
import random
import sys
from pathlib import Path

QUICKSTART = Path(__file__).resolve().parents[1] / "quickstart"
sys.path.insert(0, str(QUICKSTART))

from dictionaries import KEYS, NEW_LANGUAGES, PAIRS, make_dictionaries  # noqa: E402
from family import train_family  # noqa: E402

LINES = {"train": 256, "validation": 128, "test": 384}


def write_data(folder: Path) -> None:
    """For each new language lines that end in a question, and their answers for evaluation."""
    folder.mkdir(parents=True, exist_ok=True)
    for number, language in enumerate(NEW_LANGUAGES):
        rng = random.Random(100 + number)
        dictionary = make_dictionaries()[language]
        for split, count in LINES.items():
            with open(folder / f"{language}-{split}.jsonl", "w", encoding="utf-8") as file:
                for _ in range(count):
                    line = dictionary.line(rng.sample(KEYS, rng.randint(1, PAIRS)))
                    question, _, answer = line.rpartition(" ")
                    file.write(json.dumps({"question": question, "answer": answer}) + "\n")


def expert_configs(folder: Path) -> list[dict]:
    """The experts as a `train.yml` lists them; each writes its own one-word answers."""
    return [
        {
            "model": str(QUICKSTART / "family" / language),
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
    """The lines as `datasets` keeps splits together."""
    from datasets import DatasetDict, load_dataset

    for language in NEW_LANGUAGES:
        if not (folder / language).exists():
            files = {split: str(folder / f"{language}-{split}.jsonl") for split in LINES}
            data = load_dataset("json", data_files=files)
            assert isinstance(data, DatasetDict)
            data.save_to_disk(folder / language)


def prepare(folder: Path) -> str:
    """Train the family, if the quickstart has not, and write the data; the base's folder."""
    train_family(QUICKSTART / "family")
    write_data(folder)
    save_splits(folder)
    return str(QUICKSTART / "family" / "base")
