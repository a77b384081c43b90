# SPDX-License-Identifier: Apache-2.0
"""Write unlabelled samples for `train.yml`, and score what was learned from them.

    python examples/quickstart/questions.py
    python examples/quickstart/questions.py --score merged/learned merged/ace

The samples are questions without answers: 128 for each new language, which its expert will answer,
and as many for the old ones together, which the base will. They ask every second word only. The
score is by these words and by the others, since a merge may have learned the samples' own answers.
"""

from __future__ import annotations

import argparse
import json
import random
from pathlib import Path

from dictionaries import ASKED, NEW_LANGUAGES, OLD_LANGUAGES, UNASKED
from family import accuracies

COUNT = 128
FOLDER = Path(__file__).resolve().parent / "questions"


def questions(languages: tuple[str, ...], count: int) -> list[str]:
    """Return `count` questions, in turns of the languages."""
    rng = random.Random(" ".join(languages))
    return [f"{languages[n % len(languages)]} {rng.choice(ASKED)} =" for n in range(count)]


def write_questions(folder: Path) -> None:
    """Write a file of questions per new language, and one for the old ones together."""
    folder.mkdir(exist_ok=True)
    sources = {language: (language,) for language in NEW_LANGUAGES} | {"old": OLD_LANGUAGES}
    for name, languages in sources.items():
        lines = [json.dumps({"question": text}) for text in questions(languages, COUNT)]
        (folder / f"{name}.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")
    print(f"{COUNT} questions each in {folder}")


def score(folder: Path) -> str:
    """Return a row of a Markdown table: accuracy of a model by both halves of the words."""
    cells = []
    columns = ((NEW_LANGUAGES, UNASKED), (NEW_LANGUAGES, ASKED), (OLD_LANGUAGES, UNASKED))
    for languages, words in columns:
        found = accuracies(folder, words)
        cells.append(f"{sum(found[name] for name in languages) / len(languages):.3f}")
    return f"| {folder.name} | {' | '.join(cells)} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--score", nargs="+", type=Path, metavar="MODEL", help="score merges")
    models = parser.parse_args().score
    if models is None:
        write_questions(FOLDER)
        return
    print("| | new languages, other words | words of the samples | old languages, other words |")
    print("|---|---|---|---|")
    for folder in models:
        print(score(folder), flush=True)


if __name__ == "__main__":
    main()
