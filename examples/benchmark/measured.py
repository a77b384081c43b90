# SPDX-License-Identifier: Apache-2.0
"""What covariances and Fisher information that were measured on samples are worth in a merge.

    python examples/benchmark/measured.py                       # three families, three seeds
    python examples/benchmark/measured.py --families llama --seeds 0 --samples 16

Families are those of `quality.py`, trained where they are not there yet. Samples ask every second
word of the experts' languages; a row is scored by the words that no sample asks, and beside that by
those that they do ask. Results are kept in `results-measured.jsonl`: what this
code has made is not repeated.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_WAIT_POLICY", "passive")  # before torch starts its threads
os.environ.setdefault("HF_HUB_OFFLINE", "1")  # nothing is downloaded
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")

from evidence.arguments import family_parser, parse_families
from evidence.families import GROUPED_FAMILIES, LANGUAGE_FAMILIES, Family, make_family
from evidence.results import is_known, keep, key, print_tables, read_results
from evidence.rows import Row
from evidence.scoring import Examiner

from mergekit_ace.training.measuring import StatisticsConfig, measure_statistics

NAMES = (*LANGUAGE_FAMILIES, *GROUPED_FAMILIES)
DEFAULT = ("llama", "llama-strengths", "gpt2")
MIXES = (0.25, 0.5, 0.75, 1.0)
RESULTS = Path(__file__).resolve().parent / "results-measured.jsonl"


def make_rows(samples: int) -> list[Row]:
    """Return the rows for so many samples per expert; those without data are among them."""
    drawn = f"{samples} samples"

    def row(name: str, method: str, file: str | None = None, **parameters: Any) -> Row:
        given = {file: None, **parameters} if file else parameters
        title = f"{name}, {drawn}" if file else f"{name}, no data"
        return Row(title, method, given, with_base=method != "linear", group="measured")

    return [
        row("linear (mean)", "linear", weight=1.0),
        row("fisher", "fisher", "statistics"),
        row("regmean", "regmean", "statistics"),
        row("regmean, ridge 0.01", "regmean", "statistics", off_diagonal=1.0, epsilon=0.01),
        *(
            row(f"{method}, mix {mix:g}", method, "covariances", mix=mix)
            if mix
            else row(method, method)
            for method in ("ace", "ace_relative")
            for mix in (0, *MIXES)
        ),
    ]


def measure(family: Family, samples: int) -> Path:
    """Return the statistics of a family; they are measured unless they are there."""
    name = f"{family.name}-{family.seed}-{len(family.tasks)}-{samples}"
    config = family.unlabelled(samples) | {"measure": ["covariances", "fisher"]}
    folder = family.folder / "measured" / name
    return measure_statistics(StatisticsConfig.model_validate(config), folder, quiet=True)


def examine_row(examiner: Examiner, row: Row, statistics: Path) -> dict:
    """Return a line of results, by words that no sample asks, and by those that they ask."""
    files = {name: str(statistics) for name in ("statistics", "covariances")}
    given = {**row.parameters, **{n: files[n] for n in files if n in row.parameters}}
    merged, seconds = examiner.merge(row, given)
    examiner.put(examiner.base, merged, 1.0)
    score, seen = (examiner.examine("test", half) for half in ("unseen", "seen"))
    published = {"new": score.new, "mean": score.mean, "seen": seen.mean, "old": score.old}
    return {"published": published, "seconds": round(seconds, 3)}


def examine(arguments: argparse.Namespace, results: dict[tuple, dict]) -> None:
    """Measure, merge and examine what is not among the results yet, and add it there."""
    for seed in arguments.seeds:
        for name in arguments.families:
            family = make_family(name, seed, None, arguments.folder, arguments.steps)
            family.train()
            examiner = Examiner(family)
            head = {"family": name, "seed": seed, "experts": len(family.tasks)}
            for samples in arguments.samples:
                for row in make_rows(samples):
                    if is_known(head, row.name, results):
                        continue
                    line = examine_row(examiner, row, measure(family, samples))
                    keep([{**head, "row": row.name, "group": row.group, **line}], results,
                         arguments.results)  # fmt: skip


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = family_parser(__doc__, NAMES, DEFAULT, [0, 1, 2], RESULTS)
    parser.add_argument(
        "--samples", nargs="+", type=int, default=[128], help="so many lines of every expert"
    )
    return parse_families(parser, arguments)


def main() -> None:
    arguments = parse()
    results = {key(line): line for line in read_results(arguments.results)}
    examine(arguments, results)
    print_tables(list(results.values()))


if __name__ == "__main__":
    main()
