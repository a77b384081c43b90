# SPDX-License-Identifier: Apache-2.0
"""Sweep the ridge of `ace` and `ace_relative` down to 0 where keys and values have grouped heads.

    python examples/benchmark/epsilons.py                   # three families, stored in two ways
    python examples/benchmark/epsilons.py --families llama-grouped \\
        --parameters '{"ridge_floor": true}' '{"ridge_floor": false}'
    python examples/benchmark/epsilons.py --methods ace --epsilons 1e-5 --spectral 0.003 0.005 0.01

Families are those of `quality.py`, trained where they are not there yet. With four experts the
keys and values of `llama-grouped` have just as many rows, over all experts, as columns (T·o/i = 1),
those of its two sisters 0.92 and 1.08 times as many. A family stored in bfloat16 is rounded once,
base and experts, and merged with `dtype: float32`. Per ε the tables give the accuracy on the
experts' tasks, then how far the worst smaller ε falls behind the best one, and the amplification
‖X‖ / max ‖Δ_t‖ by kind of tensor. `--spectral` puts other values in the place of `SPECTRAL_RIDGE`,
the share of tr(S²)/tr(S) below which `ridge_floor` lets no ridge fall. Results are kept in
`results-epsilons.jsonl`: what this code has made is not repeated.
"""

from __future__ import annotations

import argparse
import json
import math
import os
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

os.environ.setdefault("OMP_WAIT_POLICY", "passive")  # before torch starts its threads
os.environ.setdefault("HF_HUB_OFFLINE", "1")  # nothing is downloaded
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")

import torch
from evidence.arguments import family_parser, parse_families
from evidence.families import GROUPED_FAMILIES, LANGUAGE_FAMILIES, make_family
from evidence.results import is_known, keep, key, read_results, table
from evidence.rows import Row
from evidence.scoring import Examiner, State

from mergekit_ace.algebra import ridge_floor

METHODS = ("ace", "ace_relative")
EPSILONS = (0.0, 1e-8, 1e-6, 1e-5, 1e-4, 1e-3, 1e-2, 3e-2, 0.1, 0.3, 1.0)
NAMES = (*LANGUAGE_FAMILIES, *GROUPED_FAMILIES)
NEAR_THRESHOLD = ("llama-grouped-0.9", "llama-grouped", "llama-grouped-1.1")
STORED = {"float32": torch.float32, "bfloat16": torch.bfloat16}
RESULTS = Path(__file__).resolve().parent / "results-epsilons.jsonl"


def make_rows(
    parameters: Mapping[str, Any],
    methods: Sequence[str] = METHODS,
    epsilons: Sequence[float] = EPSILONS,
    suffix: str = "",
) -> list[Row]:
    """Return methods at every ε, with further parameters, which their names say before a suffix."""
    further = "".join(f", {name}: {json.dumps(value)}" for name, value in parameters.items())
    further += suffix
    return [
        Row(f"{method}{further}, ε = {e:g}", method, {**parameters, "epsilon": e},
            group=f"{method}{further}")
        for method in methods
        for e in epsilons
    ]  # fmt: skip


def all_rows(arguments: argparse.Namespace) -> list[tuple[float, Row]]:
    """Return the rows that are asked for, each with the `SPECTRAL_RIDGE` that it is merged with."""
    usual = ridge_floor.SPECTRAL_RIDGE
    return [
        (share, row)
        for share in arguments.spectral or [usual]
        for given in arguments.parameters
        for row in make_rows(
            given,
            arguments.methods,
            arguments.epsilons,
            "" if share == usual else f", {share:g} of the spectrum",
        )
    ]


def amplification(base: State, experts: Sequence[State], merged: State) -> dict[str, list[float]]:
    """Return ‖X‖ / max ‖Δ_t‖ of each layer by kind of matrix, such as ``v_proj``."""
    found = defaultdict(list)
    for name, origin in base.items():
        parts = name.split(".")
        if origin.ndim == 2 and any(part.isdigit() for part in parts):
            largest = max(float((expert[name] - origin).norm()) for expert in experts)
            found[parts[-2]].append(float((merged[name] - origin).norm()) / largest)
    return dict(found)


def examine_row(examiner: Examiner, row: Row) -> dict:
    """Return a line of results, which names the error where the system is too ill-conditioned."""
    try:
        merged, seconds = examiner.merge(row)
    except ValueError as error:
        return {"published": {"mean": math.nan, "old": None, "error": str(error)}}
    examiner.put(examiner.base, merged, 1.0)
    score = examiner.examine("test")
    return {
        "published": {"new": score.new, "mean": score.mean, "old": score.old},
        "amplification": amplification(examiner.base, list(examiner.experts.values()), merged),
        "seconds": round(seconds, 3),
    }


def examine(arguments: argparse.Namespace, results: dict[tuple, dict]) -> None:
    """Train, merge and examine what is not among the results yet, and add it there."""
    rows = all_rows(arguments)
    for seed in arguments.seeds:
        for name in arguments.families:
            for stored in arguments.stored:
                head = {"family": f"{name}, {stored}", "seed": seed}
                family = make_family(name, seed, None, arguments.folder, arguments.steps)
                head["experts"] = len(family.tasks)
                missing = [(s, row) for s, row in rows if not is_known(head, row.name, results)]
                if not missing:
                    continue
                family.train()
                if stored != "float32":
                    family.store_as(STORED[stored])
                examiner = Examiner(family)
                for share, row in missing:
                    line = {**head, "row": row.name, "group": row.group,
                            "epsilon": row.parameters["epsilon"]}  # fmt: skip
                    with mock.patch.object(ridge_floor, "SPECTRAL_RIDGE", share):
                        line |= examine_row(examiner, row)
                    keep([line], results, arguments.results)


def regret(lines: Sequence[dict]) -> tuple[float, float, bool]:
    """Return the best ε, how far the worst smaller one falls behind it, and whether one failed.

    Args:
        lines: of results of one family and method; means are taken over seeds.
    """
    scores = defaultdict(list)
    for line in lines:
        scores[line["epsilon"]].append(line["published"]["mean"])
    means = {e: sum(found) / len(found) for e, found in scores.items()}
    valid = {e: mean for e, mean in means.items() if not math.isnan(mean)}
    if not valid:
        return math.nan, math.nan, True
    best = max(valid, key=lambda e: (valid[e], e))
    worst = min(mean for e, mean in valid.items() if e <= best)
    return best, valid[best] - worst, any(e not in valid for e in means if e <= best)


def regrets(lines: Sequence[dict]) -> str:
    """Return the last line of a table: the regret of each family."""
    cells = []
    for family in dict.fromkeys(line["family"] for line in lines):
        best, behind, failed = regret([line for line in lines if line["family"] == family])
        cells.append(f"{behind:.3f} (best ε {best:g}{', errors' if failed else ''})")
    return "| **a smaller ε loses** | " + " | ".join(cells) + " |"


def amplifications(lines: Sequence[dict]) -> Iterator[str]:
    """Yield a Markdown table per family: mean over layers and the largest, by ε and kind."""
    for family in dict.fromkeys(line["family"] for line in lines):
        own = [line for line in lines if line["family"] == family and "amplification" in line]
        kinds = list(dict.fromkeys(kind for line in own for kind in line["amplification"]))
        bound = 2 * math.sqrt(own[0]["experts"]) if own else 0.0
        text = [
            f"{family}: ‖X‖ / max ‖Δ_t‖, mean over layers (largest); bold above {bound:.3g}",
            "",
        ]
        text += ["| | " + " | ".join(kinds) + " |", "|---" * (1 + len(kinds)) + "|"]
        for row in dict.fromkeys(line["row"] for line in own):
            found = [line["amplification"] for line in own if line["row"] == row]
            cells = []
            for kind in kinds:
                values = [value for each in found for value in each[kind]]
                cell = f"{sum(values) / len(values):.2f} ({max(values):.2f})"
                cells.append(f"**{cell}**" if max(values) > bound else cell)
            text.append(f"| {row} | " + " | ".join(cells) + " |")
        yield "\n".join(text)


def print_tables(lines: Sequence[dict]) -> None:
    """Print, per method and its parameters, accuracy and amplification over ε."""
    for group in dict.fromkeys(line["group"] for line in lines):
        members = [line for line in lines if line["group"] == group]
        print(f"\n{group}: accuracy on the experts' tasks\n\n{table(members, 'published')}")
        print(regrets(members))
        for text in amplifications(members):
            print(f"\n{text}")


def in_order(lines: Sequence[dict]) -> list[dict]:
    """Return results by family, precision, seed and ε."""
    families = [f"{name}, {stored}" for name in NAMES for stored in STORED]
    return sorted(
        lines, key=lambda line: (families.index(line["family"]), line["seed"], line["epsilon"])
    )


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = family_parser(__doc__, NAMES, NEAR_THRESHOLD, [0], RESULTS)
    parser.add_argument("--stored", nargs="+", choices=STORED, default=list(STORED))
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=METHODS)
    parser.add_argument("--epsilons", nargs="+", type=float, default=EPSILONS)
    parser.add_argument("--spectral", nargs="+", type=float, help="in place of SPECTRAL_RIDGE")
    parser.add_argument(
        "--parameters", nargs="+", type=json.loads, default=[{}], metavar="JSON",
        help="further parameters of the methods; a sweep for each object",
    )  # fmt: skip
    parser.add_argument("--only-print", action="store_true", help="the tables of what is known")
    return parse_families(parser, arguments)


def main() -> None:
    arguments = parse()
    results = {key(line): line for line in read_results(arguments.results)}
    if not arguments.only_print:
        examine(arguments, results)
    print_tables(in_order(list(results.values())))


if __name__ == "__main__":
    main()
