# SPDX-License-Identifier: Apache-2.0
"""Train a small family, merge it with stock `mergekit-yaml` by six methods, compare the results.

python examples/quickstart/quickstart.py            # train once, merge, evaluate
python examples/quickstart/quickstart.py --fresh    # forget the trained family first
python examples/quickstart/quickstart.py --ask "ruby moon ="
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

os.environ.setdefault("OMP_WAIT_POLICY", "passive")  # before torch starts its threads
os.environ.setdefault("HF_HUB_OFFLINE", "1")  # nothing is downloaded
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")

HERE = Path(__file__).resolve().parent
FAMILY, MERGED = HERE / "family", HERE / "merged"
TASK_ARITHMETIC_WEIGHTS = (0.3, 0.5, 0.7)


def merge(method: str, out: Path, weight: float | None = None) -> None:
    """Run mergekit-yaml, as a user would, on the method's config in this folder."""
    config = HERE / f"{method}.yml"
    if weight is not None:
        text = config.read_text().replace("weight: 0.5", f"weight: {weight}")
        config = MERGED / f"{method}-{weight}.yml"
        config.write_text(text)
    command = Path(sys.executable).with_name("mergekit-yaml")
    result = subprocess.run(
        [command, config, out, "--random-seed", "0", "--quiet"],
        cwd=HERE,
        capture_output=True,
        text=True,
    )
    if result.returncode != 0:
        sys.exit(f"mergekit-yaml {config.name} failed:\n{result.stderr}")


def merge_all() -> dict[str, Path]:
    """Merge by every method; the table's row names and the merged checkpoints."""
    shutil.rmtree(MERGED, ignore_errors=True)
    MERGED.mkdir()
    jobs = [("linear", "linear", None)]
    jobs += [
        (f"task_arithmetic, weight {w}", "task_arithmetic", w) for w in TASK_ARITHMETIC_WEIGHTS
    ]
    jobs += [("ties", "ties", None), ("dare_ties", "dare_ties", None), ("ace", "ace", None)]
    merged = {}
    for row, method, weight in jobs:
        start = time.perf_counter()
        out = MERGED / (method if weight is None else f"{method}-{weight}")
        merge(method, out, weight)
        print(f"merged {row} in {time.perf_counter() - start:.0f} s", flush=True)
        merged[row] = out
    return merged


def report(rows: dict[str, Path]) -> None:
    """Print the table of accuracies; of the task-arithmetic rows only the best."""
    from dictionaries import NEW_LANGUAGES, OLD_LANGUAGES
    from evaluate import accuracies

    results = {}
    for row, folder in rows.items():
        scores = accuracies(folder)
        new = [scores[language] for language in NEW_LANGUAGES]
        old = sum(scores[language] for language in OLD_LANGUAGES) / len(OLD_LANGUAGES)
        results[row] = [sum(new) / len(new), *new, old]
    arithmetic = [row for row in results if row.startswith("task_arithmetic")]
    best = max(arithmetic, key=lambda row: results[row][0])
    header = ["new skills", *NEW_LANGUAGES, "old skills"]
    print("\n" + f"{'accuracy':<36}" + "".join(f"{title:>11}" for title in header))
    for row, values in results.items():
        if row in arithmetic and row != best:
            continue
        title = row + " (best)" if row == best else row
        print(f"{title:<36}" + "".join(f"{value:>11.3f}" for value in values))


def ask(question: str) -> None:
    """Let the merged model complete one question."""
    from transformers import pipeline

    if not (MERGED / "ace").exists():
        sys.exit("Nothing is merged yet: run this program without --ask first.")
    writer = pipeline("text-generation", model=str(MERGED / "ace"))
    print(writer(question, max_new_tokens=1, do_sample=False)[0]["generated_text"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--fresh", action="store_true", help="train the family anew")
    parser.add_argument("--ask", metavar="TEXT", help='ask the merged model, e.g. "ruby moon ="')
    arguments = parser.parse_args()
    if arguments.ask:
        return ask(arguments.ask)
    from family import EXPERTS, train_family

    start = time.perf_counter()
    if arguments.fresh:
        shutil.rmtree(FAMILY, ignore_errors=True)
    train_family(FAMILY)
    rows = {"base": FAMILY / "base"}
    rows |= {f"expert {language}": FAMILY / language for language in EXPERTS}
    report(rows | merge_all())
    print(f"\n{time.perf_counter() - start:.0f} s in all; the merged models are in {MERGED}")
    return None


if __name__ == "__main__":
    main()
