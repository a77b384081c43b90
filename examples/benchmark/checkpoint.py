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


def merge(method: str, models: list[Path], folder: Path, flags: list[str]) -> dict[str, float]:
    """Merge in a process of its own; return seconds, and bytes of memory."""
    base, *experts = (f"./{path.relative_to(folder)}" for path in models)
    own = EXPERT_PARAMETERS.get(method, {})
    config = {
        "merge_method": method,
        "base_model": base,
        "models": [{"model": expert, "parameters": own} for expert in experts],
        "dtype": "bfloat16",
    }
    (folder / "merge.yml").write_text(yaml.safe_dump(config), encoding="utf-8")
    shutil.rmtree(folder / "merged", ignore_errors=True)
    figures = measure([*MERGEKIT_YAML, "merge.yml", "merged", *flags], folder)
    shutil.rmtree(folder / "merged")
    return figures


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
    folder = arguments.folder.resolve() / f"{size}-{branch}"
    models = write_family(folder, size, arguments.experts, arguments.heterogeneous)
    machine = print_machine("cuda" if "--cuda" in arguments.flags else "cpu")
    known = {"machine": machine, "size": size, "heterogeneous": arguments.heterogeneous}
    print(f"{size}, {arguments.experts} experts, {branch}, bfloat16")
    print("method              wall s  x first   RSS GB")
    rows: list[dict] = []
    for method in arguments.methods:
        figures = merge(method, models, folder, arguments.flags)
        rows.append({"method": method, **figures})
        ratio, memory = figures["wall"] / rows[0]["wall"], figures["resident_bytes"] / 1e9
        print(f"{method:16} {figures['wall']:9.1f} {ratio:8.2f} {memory:8.2f}", flush=True)
        if arguments.json:
            write_text(arguments.json, json.dumps({**known, "rows": rows}, indent=1))


if __name__ == "__main__":
    main()
