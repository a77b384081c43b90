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
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

os.environ.setdefault("OMP_WAIT_POLICY", "passive")  # before torch starts its threads
os.environ.setdefault("HF_HUB_OFFLINE", "1")  # nothing is downloaded
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")

import yaml
from dictionaries import DICTIONARIES, NEW_LANGUAGES, OLD_LANGUAGES
from family import EXPERTS, accuracies, train_family
from transformers import pipeline

HERE = Path(__file__).resolve().parent
FAMILY, MERGED = HERE / "family", HERE / "merged"
METHODS = ("linear", "task_arithmetic", "ties", "dare_ties", "ace", "ace_plus")
TASK_ARITHMETIC_WEIGHTS = (0.3, 0.5, 0.7)


def merge(config: dict, out: Path) -> None:
    """Run mergekit-yaml, as a user would, on a config that is saved beside `out`."""
    path = out.with_suffix(".yml")
    path.write_text(yaml.safe_dump(config, sort_keys=False))
    command = [sys.executable, "-m", "mergekit.scripts.run_yaml", str(path), str(out)]
    command += ["--random-seed", "0", "--quiet"]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}  # two merges run side by side, one a core
    result = subprocess.run(command, cwd=HERE, env=environment, capture_output=True, text=True)
    if result.returncode != 0:
        sys.exit(f"mergekit-yaml {path.name} failed:\n{result.stderr}")


def all_merges() -> dict[str, dict]:
    """Return the table's row names and their configs."""
    configs = {}
    for name in METHODS:
        config = yaml.safe_load((HERE / f"{name}.yml").read_text())
        if name == "task_arithmetic":
            for weight in TASK_ARITHMETIC_WEIGHTS:
                configs[f"{name}, weight {weight}"] = config | {"parameters": {"weight": weight}}
        else:
            configs[name] = config
    return configs


def merge_all() -> dict[str, Path]:
    """Merge by every method; return the table's row names and the merged checkpoints."""
    shutil.rmtree(MERGED, ignore_errors=True)
    MERGED.mkdir()

    def run(row: str, config: dict) -> tuple[str, Path]:
        out = MERGED / row.replace(", weight ", "-").replace(".", "_")
        merge(config, out)
        print(f"merged {row}", flush=True)
        return row, out

    configs = all_merges()
    with ThreadPoolExecutor(2) as pool:
        return dict(pool.map(run, configs.keys(), configs.values()))


def report(rows: dict[str, Path]) -> None:
    """Print the table of accuracies; of the task-arithmetic rows only the best."""
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
    """Let the merged model answer one question, such as "ruby moon ="."""
    if not (MERGED / "ace_plus").exists():
        sys.exit("Nothing is merged yet: run this program without --ask first.")
    writer = pipeline("text-generation", model=str(MERGED / "ace_plus"))
    options = {"max_new_tokens": 1, "do_sample": False, "return_full_text": False}
    answer = writer(question, **options)[0]["generated_text"].strip()
    language, key, *_ = [*question.split(), "", ""]
    expected = DICTIONARIES.get(language, {}).get(key)
    note = f"   (the dictionary says {expected})" if expected else ""
    print(f"{question} {answer}{note}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--fresh", action="store_true", help="train the family anew")
    parser.add_argument("--ask", metavar="TEXT", help='ask the merged model, e.g. "ruby moon ="')
    arguments = parser.parse_args()
    if arguments.ask:
        ask(arguments.ask)
        return
    start = time.perf_counter()
    if arguments.fresh:
        shutil.rmtree(FAMILY, ignore_errors=True)
    train_family(FAMILY)
    rows = {"base": FAMILY / "base"}
    rows |= {f"expert {language}": FAMILY / language for language in EXPERTS}
    report(rows | merge_all())
    print(f"\n{time.perf_counter() - start:.0f} s in all; the merged models are in {MERGED}")


if __name__ == "__main__":
    main()
