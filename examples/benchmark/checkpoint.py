# SPDX-License-Identifier: Apache-2.0
"""Merge whole Llama-shaped checkpoints with stock mergekit, by `ace` and by its neighbours.

    python examples/benchmark/checkpoint.py --size 1B --experts 3 --folder llamas

writes the family (once; nothing is downloaded), merges it in turn by each method, and prints wall
time, time per stage, peak resident memory and, on a GPU, peak device memory. Every merge is a
process of its own. What follows `--` is passed on to mergekit-yaml, for example `-- --cuda`.
`--methods ace inspect` compares a merge by `ace` with `mergekit-ace inspect` of the same config;
`--methods ace ace_relative tsv_m` our methods with each other.
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
from kernels import machine
from llamas import SIZES, write_family

from mergekit_ace.files import write_text

METHODS = ["task_arithmetic", "ties", "ace"]
EXPERT_PARAMETERS = {
    "task_arithmetic": {"weight": 0.3},
    "ties": {"weight": 0.3, "density": 0.5},
}


def merge(method: str, models: list[Path], folder: Path, flags: list[str]) -> dict[str, float]:
    """Merge in a process of its own; return seconds by stage, and bytes of memory."""
    listed = [
        {"model": f"./{path.relative_to(folder)}", "parameters": EXPERT_PARAMETERS.get(method, {})}
        for path in models[1:]
    ]
    config = {
        "merge_method": "ace" if method == "inspect" else method,
        "base_model": f"./{models[0].relative_to(folder)}",
        "models": listed,
        "dtype": "bfloat16",
    }
    (folder / "merge.yml").write_text(yaml.safe_dump(config), encoding="utf-8")
    shutil.rmtree(folder / "merged", ignore_errors=True)
    program = Path(__file__).with_name("stages.py").resolve()
    command = [sys.executable, str(program), "figures.json", "merge.yml", "merged", *flags]
    if method == "inspect":
        command = [sys.executable, "-m", "mergekit_ace.cli", "inspect", "merge.yml", "merged"]
        command += flags
    measured = measure(command, folder)
    shutil.rmtree(folder / "merged")
    figures = dict.fromkeys(("read", "compute", "write"), float("nan"))
    if method != "inspect":
        figures = json.loads((folder / "figures.json").read_text(encoding="utf-8"))
    return {**measured, **figures}


def measure(command: list[str], folder: Path) -> dict[str, float]:
    """Run a command in a folder; return seconds of wall time, and bytes of peak resident memory.

    What it says is in `merge.log` there, which ends the program where the command fails.
    """
    environment = {**os.environ, "HF_HUB_OFFLINE": "1"}
    start = time.perf_counter()
    with open(folder / "merge.log", "wb") as log:
        process = subprocess.Popen(command, cwd=folder, env=environment, stdout=log, stderr=log)
        _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    wall = time.perf_counter() - start
    if process.returncode != 0:
        raise SystemExit((folder / "merge.log").read_text(encoding="utf-8"))
    return {"wall": wall, "resident_bytes": usage.ru_maxrss * 1024}


def print_figures(method: str, figures: dict[str, float], first: dict[str, float]) -> None:
    stages = " ".join(f"{figures[stage]:9.1f}" for stage in ("wall", "read", "compute", "write"))
    line = f"{method:16} {stages} {figures['wall'] / first['wall']:8.2f}"
    line += f" {figures['resident_bytes'] / 1e9:9.2f}"
    if "device_bytes" in figures:
        line += f" {figures['device_bytes'] / 1e9:9.2f}"
    print(line, flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--size", choices=SIZES, default="160M")
    parser.add_argument("--layers", type=int, help="fewer layers than the size has")
    parser.add_argument("--experts", type=int, default=3)
    parser.add_argument("--heterogeneous", action="store_true", help="experts of unequal scale")
    parser.add_argument("--methods", nargs="+", default=METHODS, metavar="METHOD")
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--folder", type=Path, required=True, help="for the family; stays")
    parser.add_argument("--json", type=Path, help="write the figures there")
    parser.add_argument("flags", nargs="*", help="of mergekit-yaml, after --")
    arguments = parser.parse_args()
    branch = "heterogeneous" if arguments.heterogeneous else "homogeneous"
    folder = arguments.folder.resolve() / f"{arguments.size}-{arguments.layers or 'all'}-{branch}"
    models = write_family(
        folder, arguments.size, arguments.experts, arguments.heterogeneous, arguments.layers
    )
    about = machine("cuda" if "--cuda" in arguments.flags else "cpu")
    print(f"{about['device']}, {about['threads']} threads, torch {about['torch']}")
    print(f"{arguments.size}, {arguments.experts} experts, {branch}, bfloat16")
    print("method             wall s    read s compute s   write s  x first     RSS GB  device GB")
    known = {
        "machine": about,
        "size": arguments.size,
        "layers": arguments.layers or SIZES[arguments.size]["num_hidden_layers"],
        "heterogeneous": arguments.heterogeneous,
    }
    rows = []
    for _ in range(arguments.rounds):
        first = None
        for method in arguments.methods:
            figures = merge(method, models, folder, arguments.flags)
            first = first or figures
            print_figures(method, figures, first)
            rows.append({"method": method, **figures})
            if arguments.json:
                write_text(arguments.json, json.dumps({**known, "rows": rows}, indent=1))


if __name__ == "__main__":
    main()
