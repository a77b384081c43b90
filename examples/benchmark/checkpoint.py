# SPDX-License-Identifier: Apache-2.0
"""Merge whole Llama-shaped checkpoints with stock mergekit, by `ace` and by its neighbours.

    python examples/benchmark/checkpoint.py --size 1B --experts 3 --folder llamas

writes the family (once; nothing is downloaded), merges it in turn by each method, and prints wall
time and peak resident memory. Every merge is a process of its own. What follows `--` is passed on
to mergekit-yaml, for example `-- --cuda`.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import yaml
from kernels import print_machine
from llamas import SIZES, write_family

from mergekit_ace.files.saving import write_text

MERGEKIT_YAML = [sys.executable, "-m", "mergekit.scripts.run_yaml"]
# Starts a command and writes its peak of memory, to which that of a larger parent would count.
LAUNCHER = """
import resource, subprocess, sys
status = subprocess.call(sys.argv[2:])
open(sys.argv[1], "w").write(str(resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss))
sys.exit(status)
"""
EXPERT_PARAMETERS = {"task_arithmetic": {"weight": 0.3}, "ties": {"weight": 0.3, "density": 0.5}}


def command_of(method: str, folder: Path, models: list[Path], flags: list[str]) -> list[str]:
    """Return the command that merges by a method; write its `merge.yml`."""
    base, *experts = (f"./{path.relative_to(folder)}" for path in models)
    own = EXPERT_PARAMETERS.get(method, {})
    config = {
        "merge_method": method,
        "base_model": base,
        "models": [{"model": expert, "parameters": own} for expert in experts],
        "dtype": "bfloat16",
    }
    (folder / "merge.yml").write_text(yaml.safe_dump(config), encoding="utf-8")
    return [*MERGEKIT_YAML, "merge.yml", "merged", *flags]


def compare(
    rows: Sequence[str],
    command_of_row: Callable[[str], list[str]],
    folder: Path,
    rounds: int = 1,
    out: Path | None = None,
    **known: object,
) -> None:
    """Print the figures of every row in every round; write them to `out`, beside what is `known`.

    Commands run in `folder`, and what they write there is removed.
    """
    print("row                 wall s  x first   RSS GB")
    found: dict[str, list[dict[str, float]]] = {row: [] for row in rows}
    for _ in range(rounds):
        for row in rows:
            remove_results(folder)  # of a run that was killed
            figures = measure(command_of_row(row), folder)
            remove_results(folder)
            found[row].append(figures)
            ratio = figures["wall"] / found[rows[0]][-1]["wall"]
            memory = figures["resident_bytes"] / 1e9
            print(f"{row:16} {figures['wall']:9.1f} {ratio:8.2f} {memory:8.2f}", flush=True)
            if out:
                write_text(out, json.dumps({**known, "rows": found}, indent=1))


def remove_results(folder: Path) -> None:
    """Remove what commands have written in their folder."""
    for name in ("merged", "models"):
        shutil.rmtree(folder / name, ignore_errors=True)


def measure(command: list[str], folder: Path) -> dict[str, float]:
    """Run a command in a folder; return seconds of wall time, and bytes of peak resident memory.

    What it says is in `merge.log` there, which ends the program where the command fails.
    """
    environment = {**os.environ, "HF_HUB_OFFLINE": "1"}
    start = time.perf_counter()
    with open(folder / "merge.log", "wb") as log:
        launcher = [sys.executable, "-c", LAUNCHER, "memory.txt", *command]
        done = subprocess.run(launcher, cwd=folder, env=environment, stdout=log, stderr=log)
    wall = time.perf_counter() - start
    if done.returncode != 0:
        raise SystemExit((folder / "merge.log").read_text(encoding="utf-8"))
    return {"wall": wall, "resident_bytes": 1024 * int((folder / "memory.txt").read_text())}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--size", choices=SIZES, default="160M")
    parser.add_argument("--layers", type=int, help="only so many")
    parser.add_argument("--experts", type=int, default=3)
    parser.add_argument("--heterogeneous", action="store_true", help="experts of unequal scale")
    usual = ["task_arithmetic", "ties", "ace"]
    parser.add_argument("--methods", nargs="+", default=usual, metavar="METHOD")
    parser.add_argument("--folder", type=Path, required=True, help="for the family; stays")
    parser.add_argument("--json", type=Path, help="write the figures there")
    parser.add_argument("flags", nargs="*", help="of mergekit-yaml, after --")
    arguments = parser.parse_args()
    size = arguments.size
    branch = "heterogeneous" if arguments.heterogeneous else "homogeneous"
    folder = arguments.folder.resolve() / f"{size}-{arguments.layers or 'all'}-{branch}"
    layers = {"num_hidden_layers": arguments.layers} if arguments.layers else {}
    models = write_family(folder, size, arguments.experts, arguments.heterogeneous, **layers)
    machine = print_machine("cuda" if "--cuda" in arguments.flags else "cpu")
    known = {"machine": machine, "size": size, "heterogeneous": arguments.heterogeneous}
    print(f"{size}, {arguments.experts} experts, {branch}, bfloat16")
    command = partial(command_of, folder=folder, models=models, flags=arguments.flags)
    compare(arguments.methods, command, folder, out=arguments.json, **known)


if __name__ == "__main__":
    main()
