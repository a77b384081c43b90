# SPDX-License-Identifier: Apache-2.0
"""Write unlabelled samples for `train.yml`: questions without answers.

    python examples/quickstart/questions.py

128 for each new language, which its expert will answer, and as many for the old ones together,
which the base will.
"""

from __future__ import annotations

import json
import random
from pathlib import Path

from dictionaries import KEYS, NEW_LANGUAGES, OLD_LANGUAGES

COUNT = 128
FOLDER = Path(__file__).resolve().parent / "questions"


def questions(languages: tuple[str, ...], count: int) -> list[str]:
    """Return `count` questions, in turns of the languages."""
    rng = random.Random(" ".join(languages))
    return [f"{languages[n % len(languages)]} {rng.choice(KEYS)} =" for n in range(count)]


def write_questions(folder: Path) -> None:
    """Write a file of questions per new language, and one for the old ones together."""
    folder.mkdir(exist_ok=True)
    sources = {language: (language,) for language in NEW_LANGUAGES} | {"old": OLD_LANGUAGES}
    for name, languages in sources.items():
        lines = [json.dumps({"question": text}) for text in questions(languages, COUNT)]
        (folder / f"{name}.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")
    print(f"{COUNT} questions each in {folder}")


if __name__ == "__main__":
    write_questions(FOLDER)
