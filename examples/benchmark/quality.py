# SPDX-License-Identifier: Apache-2.0
"""Compare all merge methods on small families where merging means something.

    python examples/benchmark/quality.py                    # all families, three seeds: hours
    python examples/benchmark/quality.py --families llama --seeds 0 --rows ace ties
    python examples/benchmark/quality.py --families llama --only-train    # a process per family

`pip install '.[examples,plots]'` first, for the images and `--pictures`. Families are trained here,
once, in `families/`; nothing is downloaded. Merges run through mergekit's own `merge_state_dicts`.
Each method is examined at its published defaults and at the
best λ of one grid, the same for all, chosen on a validation split. Results are kept in
`results-quality.jsonl`: what is there is not repeated, so a run that was stopped goes on; but all
of it is, row by row, once the code of the package has changed.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterable, Sequence
from pathlib import Path

os.environ.setdefault("OMP_WAIT_POLICY", "passive")  # before torch starts its threads
os.environ.setdefault("HF_HUB_OFFLINE", "1")  # nothing is downloaded
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")

from evidence.arguments import family_parser, parse_families
from evidence.families import CONTROLS, FAMILIES, GROUPED_FAMILIES, make_family
from evidence.results import changes, is_known, keep, key, print_tables, read_results, write_summary
from evidence.rows import (
    ENTROPY,
    GENERALISED,
    LEARNED,
    REGULARISED,
    SAMPLED,
    SCALES,
    STUDIED,
    SWEEPS,
    TABLE,
    Row,
)
from evidence.scoring import Examiner

NAMES = (*FAMILIES, *GROUPED_FAMILIES, *CONTROLS)
EVERY = TABLE + LEARNED + ENTROPY + SAMPLED + GENERALISED + REGULARISED + SWEEPS + STUDIED
RESULTS = Path(__file__).resolve().parent / "results-quality.jsonl"


def in_order(lines: Iterable[dict]) -> list[dict]:
    """Return known results by family, then row, as they are listed here."""
    rows = ["base", "each expert", *(row.name for row in EVERY)]
    places = {name: place for place, name in enumerate(rows)}
    known = [line for line in lines if line["row"] in places]
    return sorted(
        known,
        key=lambda line: (
            NAMES.index(line["family"]), line["experts"], places[line["row"]], line["seed"]
        ),
    )  # fmt: skip


def examine_row(examiner: Examiner, row: Row) -> dict:
    """Return a line of results: as published and, in the table, at the best λ."""
    merged, seconds = examiner.merge(row)
    origin = examiner.origin(row)
    curve = {}
    for scale in SCALES if row.group == "table" else ():
        examiner.put(origin, merged, scale)
        score = examiner.examine("validation")
        curve[f"{scale:g}"] = {"new": score.mean, "old": score.old, "whole": score.whole}
    line = {"seconds": round(seconds, 3)}
    scales = {"published": row.published}
    if curve:
        scales["best"] = max(SCALES, key=lambda scale: curve[f"{scale:g}"]["whole"])
        line |= {"curve": curve, "best_scale": scales["best"]}
    for name, scale in scales.items():
        examiner.put(origin, merged, scale)
        halved = row.with_data and examiner.family.halved
        score = examiner.examine("test", "unseen" if halved else None)
        line[name] = {"new": score.new, "mean": score.mean, "old": score.old}
        if halved:
            line[name]["seen"] = examiner.examine("test", "seen").mean
    return line


def examine_family(examiner: Examiner) -> list[dict]:
    """Return lines of results for the base, and for each expert on its own task."""
    lines = []
    score = examiner.examine("test")
    lines.append({"row": "base", "published": {"new": score.new, "mean": score.mean,
                                               "old": score.old}})  # fmt: skip
    own, old = {}, []
    for task, state in examiner.experts.items():
        examiner.put(state, state, 1.0)
        score = examiner.examine("test")
        own[task] = score.new[task]
        old.append(score.old)
    mean = sum(own.values()) / len(own)
    kept = None if None in old else sum(old) / len(old)
    score = {"new": own, "mean": mean, "old": kept}
    lines.append({"row": "each expert", "published": score, "spread": examiner.spread()})
    return lines


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = family_parser(__doc__, NAMES, FAMILIES, [0, 1, 2], RESULTS)
    parser.add_argument("--experts", type=int, help="only the first so many of a family")
    parser.add_argument("--rows", nargs="+", help="only these, or those that start so")
    parser.add_argument("--sweeps", action="store_true", help="ε over eight decades as well")
    parser.add_argument("--studies", action="store_true", help="rules for ε, λ and a balance, too")
    parser.add_argument(
        "--learning", action="store_true", help="coefficients by 16 to 512 samples, regularised"
    )
    parser.add_argument("--pictures", type=Path, help="draw them into this folder")
    parser.add_argument("--summary", type=Path, help="write them into this small JSON file")
    parser.add_argument("--against", type=Path, help="such a file: fail where results have moved")
    parser.add_argument("--only-train", action="store_true", help="the families, and their exam")
    parser.add_argument("--only-print", action="store_true", help="the table of what is known")
    return parse_families(parser, arguments)


def choose_rows(arguments: argparse.Namespace) -> list[Row]:
    """Return the rows that the command line asks for."""
    if arguments.only_train:
        return []
    rows = TABLE + LEARNED + ENTROPY + SWEEPS * arguments.sweeps + STUDIED * arguments.studies
    rows += (SAMPLED + GENERALISED + REGULARISED) * arguments.learning
    for start in arguments.rows or ():
        if not any(row.name.startswith(start) for row in rows):
            raise SystemExit(
                f"No row begins with {start!r}; some need --sweeps, --studies or --learning. "
                f"There are: {'; '.join(row.name for row in rows)}."
            )
    if arguments.rows:
        exact = {row.name for row in rows}.intersection(arguments.rows)
        starts = tuple(start for start in arguments.rows if start not in exact)
        rows = [row for row in rows if row.name in exact or row.name.startswith(starts)]
    return rows


def examine(arguments: argparse.Namespace, results: dict[tuple, dict]) -> None:
    """Train, merge and examine what is not among the results yet, and add it there."""
    rows = choose_rows(arguments)  # before anything is trained
    for seed in arguments.seeds:
        for name in arguments.families:
            family = make_family(name, seed, arguments.experts, arguments.folder, arguments.steps)
            family.train()
            examiner = Examiner(family)
            head = {"family": name, "seed": seed, "experts": len(family.tasks)}
            lines = []
            if not is_known(head, "base", results):
                lines = [{**head, **line, "group": "table"} for line in examine_family(examiner)]
                keep(lines, results, arguments.results)
            for row in rows:
                if is_known(head, row.name, results):
                    continue
                line = examine_row(examiner, row)
                keep([{**head, "row": row.name, "group": row.group, **line}], results,
                     arguments.results)  # fmt: skip


def main() -> None:
    arguments = parse()
    results = {key(line): line for line in read_results(arguments.results)}
    if not arguments.only_print:
        examine(arguments, results)
    lines = in_order(results.values())
    print_tables(lines)
    if arguments.summary:
        write_summary(lines, arguments.summary)
    if arguments.pictures:
        from evidence.pictures import draw_all

        for file in draw_all(lines, arguments.pictures):
            print(file)
    if arguments.against:
        moved = list(changes(lines, arguments.against))
        print(f"\n{len(moved)} of {len(lines)} results differ from {arguments.against}", *moved,
              sep="\n")  # fmt: skip
        raise SystemExit(bool(moved))


if __name__ == "__main__":
    main()
