# SPDX-License-Identifier: Apache-2.0
"""What the programs on small families have in common on their command lines."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from evidence.families import FOLDER


def family_parser(
    description: str,
    names: Sequence[str],
    default: Sequence[str],
    seeds: Sequence[int],
    results: Path,
) -> argparse.ArgumentParser:
    """Return a parser that knows families, seeds, and where all is kept.

    Args:
        description: of the program; its first paragraph is shown.
        names, default: families that may be chosen, and that are by default.
        seeds: by default.
        results: the file that lines are kept in by default.
    """
    parser = argparse.ArgumentParser(description=description.split("\n\n")[0])
    parser.add_argument("--families", nargs="+", choices=names, default=list(default))
    parser.add_argument("--seeds", nargs="+", type=int, default=list(seeds))
    parser.add_argument("--folder", type=Path, default=FOLDER, help="where families are kept")
    parser.add_argument("--results", type=Path, default=results, help="a line per result")
    parser.add_argument(
        "--small", type=Path, metavar="FOLDER",
        help="see that it runs: one layer, two training steps a model, all in this folder",
    )  # fmt: skip
    return parser


def parse_families(
    parser: argparse.ArgumentParser, arguments: Sequence[str] | None
) -> argparse.Namespace:
    """Parse a command line; with `--small`, folder, results and `steps` are those of a trial."""
    chosen = parser.parse_args(arguments)
    chosen.steps = None
    if chosen.small:
        chosen.folder, chosen.steps = chosen.small, 2
        chosen.results = chosen.small / "results.jsonl"
    return chosen
