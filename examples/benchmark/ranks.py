# SPDX-License-Identifier: Apache-2.0
"""Merge the adapter families as adapters, whole and cut to ranks, beside the merge of full models.

    python examples/benchmark/ranks.py

Families are those of `quality.py`, trained where they are not there yet. A row is merged three
times: full models through mergekit's own `merge_state_dicts`; the experts' adapters by
`mergekit-ace adapter`; and these cut to each rank by `--rank`. The tables give the accuracy on the
experts' tasks, on the old languages in brackets where that is below 0.99, by how many of 3072
right answers the first two differ, and the share of ‖X‖² that a rank loses. Results are kept in
`results-ranks.jsonl`: what this code has made is not repeated.
"""

from __future__ import annotations

import argparse
import os
import tempfile
from collections.abc import Sequence
from pathlib import Path

os.environ.setdefault("OMP_WAIT_POLICY", "passive")  # before torch starts its threads
os.environ.setdefault("HF_HUB_OFFLINE", "1")  # nothing is downloaded
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")

import yaml
from evidence.arguments import family_parser, parse_families
from evidence.dictionaries import OLD, ROUNDS, WORDS
from evidence.families import ADAPTER, make_family
from evidence.results import cell, is_known, keep, key, read_results
from evidence.rows import TABLE, Row
from evidence.scoring import Examiner, Score, State
from mergekit.options import MergeOptions
from peft import PeftModel

from mergekit_ace.adapters.adapter_run import merge_adapters

NAMES = ("llama-lora", "llama-lora-gentle", "llama-lora-grouped", "llama-lora-gentle-grouped")
CHOSEN = ("task_arithmetic", "tsv_m", "iso_c", "wudi (exact)")
OUTPUTS = {"side": "outputs"}  # as adapters have it by themselves; full models have to be told
ROWS = (
    Row("ace", "ace", OUTPUTS),
    *(row for row in TABLE if row.name in CHOSEN),
    Row("ace_relative", "ace_relative", OUTPUTS),
)
RANKS = (32, 16, 8)
RESULTS = Path(__file__).resolve().parent / "results-ranks.jsonl"


def merge_as_adapter(examiner: Examiner, row: Row, rank: int | None = None) -> State:
    """Return the base's tensors with the merged adapter, of a rank at most, added by PEFT."""
    family = examiner.family
    config = {
        "merge_method": row.method,
        "base_model": str(family.base),
        "models": [{"model": str(folder / ADAPTER)} for folder in family.experts.values()],
        "parameters": row.parameters,
        "dtype": "float32",
    }
    with tempfile.TemporaryDirectory() as folder:
        path, out = Path(folder, "config.yml"), Path(folder, "adapter")
        path.write_text(yaml.safe_dump(config), encoding="utf-8")
        merge_adapters(path, out, MergeOptions(quiet=True), rank=rank)
        model = PeftModel.from_pretrained(family.load(family.base), str(out))
        return model.merge_and_unload().state_dict()


def energy(examiner: Examiner, merged: State) -> float:
    """Return ‖X‖² over all tensors."""
    pairs = ((merged[name].double(), tensor) for name, tensor in examiner.base.items())
    return sum(float((tensor - origin).square().sum()) for tensor, origin in pairs)


def apart(one: Score, other: Score) -> int:
    """Return by how many right answers two scores differ, summed over languages.

    The old languages count as one.
    """
    new = sum(abs(one.new[task] - share) for task, share in other.new.items())
    return round((new + len(OLD) * abs(one.old - other.old)) * ROUNDS["test"] * WORDS)


def examine_row(examiner: Examiner, row: Row) -> dict:
    """Return a line of results: of the full models, of the adapters, and cut to every rank."""

    def examine(merged: State) -> Score:
        examiner.put(examiner.base, merged, row.published)
        return examiner.examine("test")

    def entry(score: Score) -> dict:
        return {"new": score.new, "mean": score.mean, "old": score.old}

    full = examine(examiner.merge(row)[0])
    merged = merge_as_adapter(examiner, row)
    whole, before = examine(merged), energy(examiner, merged)
    cuts = {}
    for rank in RANKS:
        merged = merge_as_adapter(examiner, row, rank)
        lost = 1 - energy(examiner, merged) / before
        cuts[str(rank)] = {**entry(examine(merged)), "lost": lost}
    return {"full": entry(full), "published": entry(whole), "apart": apart(full, whole), **cuts}


def print_tables(lines: Sequence[dict]) -> None:
    """Print a table per family: a line per row, means over seeds."""
    for family in dict.fromkeys(line["family"] for line in lines):
        titles = ["", "full models", "as an adapter", "answers apart"]
        titles += [f"cut to rank {rank}" for rank in RANKS]
        print(f"\n{family}\n\n| {' | '.join(titles)} |\n{'|---' * len(titles)}|")
        for row in ROWS:
            own = [line for line in lines if (line["family"], line["row"]) == (family, row.name)]
            cells = [cell([line[kind] for line in own]) for kind in ("full", "published")]
            cells.append(", ".join(str(line["apart"]) for line in own))
            for rank in map(str, RANKS):
                lost = sum(line[rank]["lost"] for line in own) / max(len(own), 1)
                cells.append(f"{cell([line[rank] for line in own])}; {abs(lost):.1%} lost")
            if own:
                print(f"| {row.name} | {' | '.join(cells)} |")


def examine(arguments: argparse.Namespace, results: dict[tuple, dict]) -> None:
    """Train, merge and examine what is not among the results yet, and add it there."""
    for seed in arguments.seeds:
        for name in arguments.families:
            family = make_family(name, seed, None, arguments.folder, arguments.steps)
            head = {"family": name, "seed": seed, "experts": len(family.tasks)}
            missing = [row for row in ROWS if not is_known(head, row.name, results)]
            if missing:
                family.train()
                examiner = Examiner(family)
            for row in missing:
                line = {**head, "row": row.name, **examine_row(examiner, row)}
                keep([line], results, arguments.results)


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = family_parser(__doc__, NAMES, NAMES[:2], [0], RESULTS)
    return parse_families(parser, arguments)


def main() -> None:
    arguments = parse()
    results = {key(line): line for line in read_results(arguments.results)}
    examine(arguments, results)
    print_tables(list(results.values()))


if __name__ == "__main__":
    main()
