# SPDX-License-Identifier: Apache-2.0
"""Merge the checkpoints that the papers merged, evaluate, and print our figures beside theirs.

python examples/llm/tables.py --suite glue-gpt2 --dry-run     # what it would download and run
python examples/llm/tables.py --suite glue-gpt2               # needs the Hub; resumable
python examples/llm/tables.py --suite clip-8 --methods ace tsv_m --limit 500

Suites: mergebench-3b, glue-gpt2, glue-roberta, clip-8, or a file like those in suites/.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from statistics import fmean
from typing import TypeAlias

import yaml

os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")

from evaluators import device, load_encoder, scorer
from suite import Checkpoint, HarnessSuite, Suite, load_suite

from mergekit_ace.files.saving import write_text
from mergekit_ace.plugin import our_methods

Scores: TypeAlias = Mapping[str, float]  # by task
Line: TypeAlias = tuple[str, Scores, float | None]  # of a table, with the mean as published
BASE, EXPERTS = "base", "experts"
NEEDS = {"harness": "lm_eval", "glue": "sklearn", "clip": "PIL"}
# `mergekit-ace train` or `mergekit-ace statistics` would have to run first.
NEEDS_SAMPLES = ("statsmerging", "regmean", "fisher")


def merge_configs(suite: Suite) -> dict[str, dict]:
    """Return the merges by row: the mean, the suite's own, and our methods at their defaults."""
    mean = {"merge_method": "task_arithmetic", "parameters": {"weight": 1 / len(suite.experts)}}
    rows = {"mean": mean}
    for name, row in suite.rows.items():
        rows[name] = {"merge_method": row.merge_method, "parameters": row.parameters}
    for method in our_methods():
        if method.spec.name not in NEEDS_SAMPLES:
            rows[method.spec.name] = {"merge_method": method.spec.name}
    return rows


class Run:
    """One run of a suite, by at most `limit` samples of each task, in its folder of results.

    The folder gets `encoders/` (what is merged, if that is not whole checkpoints), `merged/`,
    `results/` with a JSON file per row, and `tables.md`. What is there is not done again.
    """

    def __init__(self, suite: Suite, folder: Path, limit: int | None, run_code: bool):
        self.suite, self.folder, self.limit = suite, folder, limit
        runs = {name: getattr(task, "runs_code", False) for name, task in suite.tasks.items()}
        self.tasks = [name for name in runs if run_code or not runs[name]]

    def prepare(self) -> None:
        """Make the folder; end the program if it has the results of a suite that was another."""
        path = self.folder / "suite.json"
        suite = self.suite.model_dump(mode="json", exclude={"rows", "published"})
        if path.exists() and json.loads(path.read_text(encoding="utf-8")) != suite:
            sys.exit(f"{self.folder} has results of other models or tasks: give another --out")
        for part in ("encoders", "merged", "results"):
            (self.folder / part).mkdir(parents=True, exist_ok=True)
        write_text(path, json.dumps(suite, indent=1))

    def checkpoint(self, name: str) -> str:
        """Return what mergekit merges of the base or an expert: the model, or its encoder."""
        source = self.suite.base if name == BASE else self.suite.experts[name]
        if isinstance(self.suite, HarnessSuite):
            return source.model
        folder = self.folder / "encoders" / name
        if not folder.exists():
            save_encoder(self.suite.encoder, self.suite.base, source, folder)
        return str(folder)

    def config(self, row: dict) -> dict:
        """Return the whole config of a merge for mergekit."""
        config = {
            **row,
            "base_model": self.checkpoint(BASE),
            "models": [{"model": self.checkpoint(name)} for name in self.suite.experts],
            "dtype": self.suite.dtype,
        }
        if self.suite.out_dtype:
            config["out_dtype"] = self.suite.out_dtype
        if isinstance(self.suite, HarnessSuite):
            config["tokenizer"] = {"source": "base"}
        return config

    def place(self, part: str, row: str, suffix: str = "") -> Path:
        """Return the path of a row's folder or file in a part of the results."""
        return self.folder / part / (re.sub(r"\W+", "-", row) + suffix)

    def known(self, row: str, config: dict | None) -> dict:
        """Return the results of a row so far; those of another config or limit do not count."""
        stamp = {"config": config, "limit": self.limit}
        path = self.place("results", row, ".json")
        known = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
        same = known and {key: known[key] for key in stamp} == stamp
        return known if same else stamp | {"tasks": {}}

    def merge(self, row: str, config: dict) -> None:
        """Merge a row, unless that was done, or all of its results are known."""
        folder, path = self.place("merged", row), self.place("merged", row, ".yml")
        if folder.exists() and yaml.safe_load(path.read_text(encoding="utf-8")) == config:
            return
        if set(self.tasks) <= set(self.known(row, config)["tasks"]):
            return
        print(f"merging {row}", flush=True)
        shutil.rmtree(folder, ignore_errors=True)
        path.write_text(yaml.safe_dump(config, sort_keys=False), encoding="utf-8")
        run_mergekit(path, folder)

    def scores(self, row: str, config: dict | None = None) -> dict[str, float]:
        """Evaluate a row on every task, as far as that is not done; return its scores."""
        known = self.known(row, config)
        loaded, score = None, None
        for name in self.tasks:
            if name in known["tasks"]:
                continue
            checkpoint = str(self.place("merged", row))
            if row in (BASE, EXPERTS):
                checkpoint = self.checkpoint(BASE if row == BASE else self.suite.tasks[name].expert)
            if checkpoint != loaded:
                score = None  # frees the memory of the model before
                loaded, score = checkpoint, scorer(self.suite, checkpoint, self.limit)
            start = time.perf_counter()
            value, samples = score(name)
            seconds = round(time.perf_counter() - start, 1)
            known["tasks"][name] = {"score": value, "samples": samples, "seconds": seconds}
            write_text(self.place("results", row, ".json"), json.dumps(known, indent=1))
            print(f"{row}: {name} {value:.3f} ({samples} samples, {seconds} s)", flush=True)
        return {name: known["tasks"][name]["score"] for name in self.tasks}


def save_encoder(kind: str, base: Checkpoint, expert: Checkpoint, folder: Path) -> None:
    """Save an expert's encoder in a model of class `kind`; all else in that model is the base's."""
    model = load_encoder(kind, base.model, subfolder=base.subfolder)
    if expert is not base:
        own = load_encoder(kind, expert.model, subfolder=expert.subfolder)
        model.base_model.load_state_dict(own.base_model.state_dict())
    unfinished = folder.with_name(folder.name + ".partial")
    # With the names that tensors have in memory; mergekit silently leaves out what has others.
    model.save_pretrained(unfinished, save_original_format=False)
    unfinished.rename(folder)


def run_mergekit(config: Path, folder: Path) -> None:
    """Run mergekit-yaml as a user would; the folder is there when the merge is whole."""
    unfinished = folder.with_name(folder.name + ".partial")
    shutil.rmtree(unfinished, ignore_errors=True)
    command = [sys.executable, "-m", "mergekit.scripts.run_yaml", str(config), str(unfinished)]
    command += ["--quiet", "--random-seed", "0"] + ["--cuda"] * (device() == "cuda")
    result = subprocess.run(command, capture_output=True, text=True)
    if result.returncode != 0:
        sys.exit(f"mergekit-yaml {config} failed:\n{result.stderr}")
    unfinished.rename(folder)


def plan(run: Run, rows: dict[str, dict]) -> Iterator[str]:
    """Say what a run would download, merge and evaluate."""
    suite = run.suite
    checkpoints = [suite.base, *suite.experts.values()]
    total = sum(checkpoint.gigabytes for checkpoint in checkpoints)
    yield f"checkpoints to download, {total:.1f} GB unless they are cached:"
    for checkpoint in checkpoints:
        name = "/".join(filter(None, (checkpoint.model, checkpoint.subfolder)))
        yield f"  {checkpoint.gigabytes:5.1f} GB  {name}"
    size = max(checkpoint.gigabytes for checkpoint in suite.experts.values())
    yield f"merges, about {size:.1f} GB of disk each, {size * len(rows):.1f} GB together:"
    for row, config in rows.items():
        parameters = json.dumps(config.get("parameters", {})) if "parameters" in config else ""
        yield f"  {row}: {config['merge_method']} {parameters}".rstrip()
    yield f"evaluations of {len(rows) + 2} rows (base, experts and the merges):"
    for name, task in suite.tasks.items():
        data = getattr(task, "data", {"path": "lm-evaluation-harness"})
        counts = [run.limit, getattr(task, "first", None), task.samples]
        samples = min(filter(None, counts), default="all")
        skipped = "" if name in run.tasks else "  LEFT OUT: it runs code that models write"
        yield f"  {name}: {samples} samples, {' '.join(map(str, data.values()))}{skipped}"


def mean_over_experts(suite: Suite, tasks: Sequence[str], scores: Scores) -> float | None:
    """Average each expert's tasks, then the experts; None where a task is missing."""
    if any(task not in scores for task in tasks):
        return None
    by_expert = defaultdict(list)
    for task in tasks:
        by_expert[suite.tasks[task].expert].append(scores[task])
    return fmean(map(fmean, by_expert.values()))


def shares(scores: Scores, experts: Scores) -> dict[str, float]:
    """Return each score as a percentage of the expert's, where both are known."""
    return {task: 100 * scores[task] / experts[task] for task in scores if experts.get(task)}


def table(heading: str, suite: Suite, tasks: Sequence[str], lines: Iterable[Line]) -> Iterator[str]:
    """Yield the lines of a Markdown table."""
    yield f"| {heading} | " + " | ".join([*tasks, "mean"]) + " |"
    yield "|---" * (len(tasks) + 2) + "|"
    for title, scores, published in lines:
        mean = mean_over_experts(suite, tasks, scores)
        # Scores are rounded, so that the mean as published is the better one, if of these tasks.
        if published is not None and (mean is None or set(tasks) == set(suite.tasks)):
            mean = published
        values = [*map(scores.get, tasks), mean]
        if any(value is not None for value in values):
            cells = ["–" if value is None else f"{value:.1f}" for value in values]
            yield "| " + " | ".join([title, *cells]) + " |"


def compare(suite: Suite, tasks: Sequence[str], ours: Mapping[str, Scores]) -> str:
    """Return two Markdown tables: scores in percent, and shares of the experts' scores.

    `ours` are scores between 0 and 1 by row and task; published rows are in italics below them.
    """
    scores: list[Line] = []
    of_experts: list[Line] = []
    for row, values in ours.items():
        scores.append((row, {task: 100 * score for task, score in values.items()}, None))
        of_experts.append((row, shares(values, ours[EXPERTS]), None))
    reference = next((row.scores for row in suite.published if row.row == EXPERTS), {})
    for number, row in enumerate(suite.published, 1):
        title = f"*{row.row}* [{number}]"
        scores.append((title, row.scores, row.mean))
        of_experts.append((title, shares(row.scores, reference), row.share))
    lines = [
        *table("score in %", suite, tasks, scores),
        "",
        *table("share of the experts in %", suite, tasks, of_experts),
        "",
        *(f"[{number}] {row.source}" for number, row in enumerate(suite.published, 1)),
    ]
    return "\n".join(lines).rstrip() + "\n"


def parse() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--suite", required=True, help="one of suites/*.yml by its name, or a file")
    parser.add_argument("--methods", nargs="+", metavar="ROW", help="merge only by these")
    parser.add_argument("--limit", type=int, metavar="N", help="at most N samples of each task")
    parser.add_argument("--dry-run", action="store_true", help="only say what would be done")
    parser.add_argument("--out", type=Path, help="folder for results; default tables-SUITE here")
    parser.add_argument(
        "--confirm-run-unsafe-code",
        action="store_true",
        help="evaluate coding tasks too, which runs programs that the models write",
    )
    return parser.parse_args()


def main() -> None:
    arguments = parse()
    try:
        suite, name = load_suite(arguments.suite), Path(arguments.suite).stem
    except ValueError as error:
        sys.exit(f"{arguments.suite}: {error}")
    rows = merge_configs(suite)
    unknown = sorted(set(arguments.methods or ()) - set(rows))
    if unknown:
        sys.exit(f"{name} has no row {', '.join(unknown)}; its rows are {', '.join(rows)}")
    rows = {row: rows[row] for row in arguments.methods or rows}
    folder = (arguments.out or Path(__file__).parent / f"tables-{name}").resolve()
    run = Run(suite, folder, arguments.limit, arguments.confirm_run_unsafe_code)
    if arguments.dry_run:
        print("\n".join(plan(run, rows)))
        return
    if find_spec(NEEDS[suite.evaluator]) is None:
        sys.exit(f"{NEEDS[suite.evaluator]} is not installed: pip install '.[tables]'")
    run.prepare()
    configs = {row: run.config(config) for row, config in rows.items()}
    for row, config in configs.items():  # before a model for evaluation fills the GPU
        run.merge(row, config)
    ours = {row: run.scores(row) for row in (BASE, EXPERTS)}
    ours |= {row: run.scores(row, config) for row, config in configs.items()}
    text = compare(suite, run.tasks, ours)
    write_text(folder / "tables.md", text)
    print(f"\n{text}")


if __name__ == "__main__":
    main()
