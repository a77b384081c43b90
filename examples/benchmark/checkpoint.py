# SPDX-License-Identifier: Apache-2.0
"""Merge whole Llama-shaped checkpoints with stock mergekit, by `ace` and by its neighbours.

    python examples/benchmark/checkpoint.py --size 1B --experts 3 --folder llamas

writes the family (once; nothing is downloaded), merges it in turn by each method, and prints wall
time, time per stage, peak resident memory and, on a GPU, peak device memory. Every merge is a
process of its own. What follows `--` is passed on to mergekit-yaml, for example `-- --cuda`.
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

# A process that is `mergekit-yaml`, and writes its times by stages to `figures.json`.
TIMED = [sys.executable, str(Path(__file__).resolve()), "--timed", "figures.json"]
# Starts a command and writes its peak of memory, to which that of a larger parent would count.
LAUNCHER = """
import resource, subprocess, sys
status = subprocess.call(sys.argv[2:])
open(sys.argv[1], "w").write(str(resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss))
sys.exit(status)
"""
EXPERT_PARAMETERS = {"task_arithmetic": {"weight": 0.3}, "ties": {"weight": 0.3, "density": 0.5}}


def merge(method: str, models: list[Path], folder: Path, flags: list[str]) -> dict[str, float]:
    """Merge in a process of its own; return seconds by stage, and bytes of memory."""
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
    measured = measure([*TIMED, "merge.yml", "merged", *flags], folder)
    shutil.rmtree(folder / "merged")
    return {**measured, **json.loads((folder / "figures.json").read_text(encoding="utf-8"))}


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


def merge_timed(figures: str, arguments: list[str]) -> None:
    """Run mergekit-yaml in this process; write seconds by stage, and bytes of device memory.

    Reading and writing are the tasks of mergekit that do just that; a checkpoint that is
    memory-mapped is read when it is first touched, which may be later. The rest is planning and
    computation.
    """
    import torch
    from mergekit.io.tasks import FinalizeModel, LoadTensor, SaveTensor
    from mergekit.scripts.run_yaml import main as mergekit_yaml

    from mergekit_ace.plugin import register

    seconds = {"read": 0.0, "write": 0.0}

    def clock(task: type, stage: str) -> None:
        execute = task.execute

        def timed(self, *args, **kwargs):
            start = time.perf_counter()
            result = execute(self, *args, **kwargs)
            seconds[stage] += time.perf_counter() - start
            return result

        task.execute = timed

    for task, stage in ((LoadTensor, "read"), (SaveTensor, "write"), (FinalizeModel, "write")):
        clock(task, stage)
    register()  # where the package is not installed, but on the path
    start = time.perf_counter()
    mergekit_yaml(arguments, standalone_mode=False)
    seconds["merge"] = time.perf_counter() - start
    seconds["compute"] = seconds["merge"] - seconds["read"] - seconds["write"]
    if torch.cuda.is_available():
        seconds["device_bytes"] = torch.cuda.max_memory_allocated()
    Path(figures).write_text(json.dumps(seconds), encoding="utf-8")


def print_figures(method: str, figures: dict[str, float], first: float) -> None:
    """Print seconds, the ratio of the wall time to the first method's, and memory."""
    stages = " ".join(f"{figures[stage]:9.1f}" for stage in ("wall", "read", "compute", "write"))
    memory = [figures[kind] for kind in ("resident_bytes", "device_bytes") if kind in figures]
    line = f"{method:16} {stages} {figures['wall'] / first:8.2f}"
    print(line, *(f"{size / 1e9:9.2f}" for size in memory), flush=True)


def main() -> None:
    if sys.argv[1:2] == ["--timed"]:
        merge_timed(sys.argv[2], sys.argv[3:])
        return
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--size", choices=SIZES, default="160M")
    parser.add_argument("--layers", type=int, help="fewer layers than the size has")
    parser.add_argument("--experts", type=int, default=3)
    parser.add_argument("--heterogeneous", action="store_true", help="experts of unequal scale")
    usual = ["task_arithmetic", "ties", "ace"]
    parser.add_argument("--methods", nargs="+", default=usual, metavar="METHOD")
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--folder", type=Path, required=True, help="for the family; stays")
    parser.add_argument("--json", type=Path, help="write the figures there")
    parser.add_argument("flags", nargs="*", help="of mergekit-yaml, after --")
    arguments = parser.parse_args()
    size, layers = arguments.size, arguments.layers
    branch = "heterogeneous" if arguments.heterogeneous else "homogeneous"
    folder = arguments.folder.resolve() / f"{size}-{layers or 'all'}-{branch}"
    models = write_family(folder, size, arguments.experts, arguments.heterogeneous, layers)
    known = {
        "machine": print_machine("cuda" if "--cuda" in arguments.flags else "cpu"),
        "size": size,
        "layers": layers or SIZES[size]["num_hidden_layers"],
        "heterogeneous": arguments.heterogeneous,
    }
    print(f"{size}, {known['layers']} layers, {arguments.experts} experts, {branch}, bfloat16")
    print("method             wall s    read s compute s   write s  x first     RSS GB  device GB")
    rows = []
    for _ in range(arguments.rounds):
        first = None
        for method in arguments.methods:
            figures = merge(method, models, folder, arguments.flags)
            first = first or figures["wall"]
            print_figures(method, figures, first)
            rows.append({"method": method, **figures})
            if arguments.json:
                write_text(arguments.json, json.dumps({**known, "rows": rows}, indent=1))


if __name__ == "__main__":
    main()
