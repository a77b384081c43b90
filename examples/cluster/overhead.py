# SPDX-License-Identifier: Apache-2.0
"""Time `mergekit-ace merge` beside `mergekit-yaml`, with one worker or several.

    python examples/cluster/overhead.py --size 1B --methods linear ace --folder llamas

writes the family (once; nothing is downloaded). In every round both commands merge it in turn, each
a process of its own, and in every other round in the other order; a ratio is that of one round, and
the median over rounds is printed. The results are compared byte for byte. What follows `--` goes
to both commands, for example `-- --cuda`.
"""

from __future__ import annotations

import argparse
import filecmp
import os
import shutil
import statistics
import subprocess
import sys
import time
from pathlib import Path

import yaml

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "benchmark"))

from kernels import machine
from llamas import SIZES, write_family

COMMANDS = {
    "mergekit-yaml": ["mergekit.scripts.run_yaml"],
    "mergekit-ace merge": ["mergekit_ace.cli", "merge"],
}


def write_config(folder: Path, method: str, models: list[Path]) -> None:
    """Write `merge.yml`, with paths relative to the folder."""
    names = [f"./{path.relative_to(folder)}" for path in models]
    config = {
        "merge_method": method,
        "models": [{"model": name, "parameters": {"weight": 0.3}} for name in names[1:]],
        "dtype": "bfloat16",
    }
    if method != "linear":
        config["base_model"] = names[0]
    (folder / "merge.yml").write_text(yaml.safe_dump(config), encoding="utf-8")


def run(folder: Path, command: list[str], out: str, flags: list[str]) -> float:
    """Run one command; return its seconds from start to end."""
    shutil.rmtree(folder / out, ignore_errors=True)
    arguments = [sys.executable, "-m", *command, "merge.yml", out, "--quiet", *flags]
    environment = {**os.environ, "HF_HUB_OFFLINE": "1"}
    start = time.perf_counter()
    done = subprocess.run(arguments, cwd=folder, env=environment, capture_output=True, text=True)
    seconds = time.perf_counter() - start
    if done.returncode != 0:
        raise SystemExit(done.stderr)
    return seconds


def check_equal(folder: Path) -> None:
    """End the program if a weight file of one result differs from that of the other."""
    names = sorted(path.name for path in (folder / "theirs").glob("*.safetensors"))
    ours = sorted(path.name for path in (folder / "ours").glob("*.safetensors"))
    different = filecmp.cmpfiles(folder / "theirs", folder / "ours", names, shallow=False)[1:]
    if names != ours or any(different):
        raise SystemExit(f"the results differ: {different}, {names}, {ours}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--size", choices=SIZES, default="160M")
    parser.add_argument("--layers", type=int, help="fewer layers than the size has")
    parser.add_argument("--experts", type=int, default=3)
    parser.add_argument("--methods", nargs="+", default=["linear", "ace"], metavar="METHOD")
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--folder", type=Path, required=True, help="for the family; stays")
    parser.add_argument("flags", nargs="*", help="of both commands, after --")
    arguments = parser.parse_args()
    folder = arguments.folder.resolve() / f"{arguments.size}-{arguments.layers or 'all'}-merge"
    models = write_family(folder, arguments.size, arguments.experts, False, arguments.layers)
    about = machine("cuda" if "--cuda" in arguments.flags else "cpu")
    print(f"{about['device']}, {about['threads']} threads, torch {about['torch']}")
    print(f"{arguments.size}, {arguments.experts} experts, {arguments.workers} workers")
    print(f"{'method':16} {'mergekit-yaml s':>16} {'merge s':>10} {'ratio':>7}")
    own = {"mergekit-yaml": [], "mergekit-ace merge": ["--workers", str(arguments.workers)]}
    for method in arguments.methods:
        write_config(folder, method, models)
        ratios = []
        for n in range(arguments.rounds):
            order = list(COMMANDS) if n % 2 == 0 else list(COMMANDS)[::-1]
            seconds = {}
            for name in order:
                out = "theirs" if name == "mergekit-yaml" else "ours"
                seconds[name] = run(folder, COMMANDS[name], out, [*arguments.flags, *own[name]])
            check_equal(folder)
            theirs, ours = seconds.values() if n % 2 == 0 else list(seconds.values())[::-1]
            ratios.append(ours / theirs)
            print(f"{method:16} {theirs:16.1f} {ours:10.1f} {ours / theirs:7.2f}", flush=True)
        print(f"{method:16} {'median':>27} {statistics.median(ratios):7.2f}", flush=True)
    for out in ("theirs", "ours"):
        shutil.rmtree(folder / out, ignore_errors=True)


if __name__ == "__main__":
    main()
