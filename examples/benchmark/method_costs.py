# SPDX-License-Identifier: Apache-2.0
"""Time all merge methods on the matrices of a model, and measure the memory that they take.

    python examples/benchmark/method_costs.py --model Llama-3.2-1B --json costs.json
    python examples/benchmark/method_costs.py --model 2048x2048 512x2048

Every method runs in a process of its own, on experts stored in bfloat16 whose task vectors have a
slowly falling spectrum. A model's total counts every matrix as often as the model has it: a layer
of a Llama, a block of ViT-L/14, the whole of GPT-2. Memory is the peak beside the inputs.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
from functools import partial
from pathlib import Path

from kernels import MODELS, family, print_machine, process_bytes, timed
from mergekit.merge_methods import merge_tensors
from torch import Tensor

# The number of experts, and how many matrices there are of each shape.
CASES: dict[str, tuple[int, dict[tuple[int, int], int]]] = {
    "Llama-3.2-1B": (3, MODELS["Llama-3.2-1B"]),
    "ViT-L/14": (8, {shape: count // 24 for shape, count in MODELS["ViT-L/14"].items()}),
    "GPT-2": (7, MODELS["GPT-2"]),
    "2048x2048": (3, {(2048, 2048): 1}),
    "512x2048": (3, {(512, 2048): 1}),
}
# mergekit's name, and parameters that are not the default.
METHODS: dict[str, tuple[str, dict]] = {
    "ace": ("ace", {}),
    "ace (refined)": ("ace", {"adaptive_normalization": "always", "spectral_refinement": "always"}),
    "ace_relative": ("ace_relative", {}),
    "tsv_m": ("tsv_m", {}),
    "iso_c": ("iso_c", {}),
    "iso_cts": ("iso_cts", {}),
    "cart": ("cart", {}),
    "wudi (exact)": ("wudi", {"solver": "exact"}),
    "wudi (Adam)": ("wudi", {}),
    "consensus_ta": ("consensus_ta", {}),
    "lines": ("lines", {}),
    "task_arithmetic": ("task_arithmetic", {"weight": 0.4, "normalize": False}),
    "ties": ("ties", {"weight": 1.0, "density": 0.2}),
}


def merge_by(method: str, base: Tensor, experts: list[Tensor]) -> Tensor:
    """Merge matrices by a method of mergekit."""
    name, parameters = METHODS[method]
    return merge_tensors([base, *experts], name, base_index=0, parameters=parameters)


def measure_here(model: str, method: str, rounds: int, divide: int) -> dict:
    """Return seconds and memory of a method for all matrices of a model together.

    `seconds` adds up medians over rounds; `memory` is the most bytes beside the inputs, None where
    the system does not tell.
    """
    experts, matrices = CASES[model]
    total, memory = 0.0, None
    for (rows, columns), count in matrices.items():
        models = family((rows // divide, columns // divide), experts)
        small = [one[:300, :300].clone() for one in (models[0], *models[1])]
        merge_by(method, small[0], small[1:])  # libraries are loaded, and allocate buffers
        seconds = []
        for _ in range(rounds):
            before = reset_peak()
            seconds.append(timed(partial(merge_by, method, *models), "cpu")[0])
            if before is not None:
                memory = max(memory or 0, process_bytes("VmHWM") - before)
        total += count * statistics.median(seconds)
    return {"seconds": total, "memory": memory}


def reset_peak() -> int | None:
    """Start counting the peak of resident memory anew; return what is in use, in bytes."""
    try:
        Path("/proc/self/clear_refs").write_text("5", encoding="utf-8")
    except OSError:
        return None
    return process_bytes("VmRSS")


def measure_apart(*given: object) -> dict:
    """Return the same, measured in a process of its own."""
    command = [sys.executable, __file__, "--here", json.dumps(given)]
    found = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    return json.loads(found.stdout.splitlines()[-1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--model", nargs="+", choices=CASES, default=["Llama-3.2-1B"])
    usual = [method for method in METHODS if method != "wudi (Adam)"]  # 300 steps: half an hour
    parser.add_argument("--method", nargs="+", choices=METHODS, default=usual)
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--divide", type=int, default=1, help="sides of all matrices by that")
    parser.add_argument("--json", type=Path, help="write the figures there")
    parser.add_argument("--here", type=json.loads, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.here:
        print(json.dumps(measure_here(*arguments.here)))
        return
    about, rows = print_machine("cpu"), []
    for model in arguments.model:
        print(f"{model}, {CASES[model][0]} experts\n{'':16} {'seconds':>8} {'MB':>6}")
        for method in arguments.method:
            row = measure_apart(model, method, arguments.rounds, arguments.divide)
            memory = "" if row["memory"] is None else f"{row['memory'] / 1e6:6.0f}"
            print(f"{method:16} {row['seconds']:8.3f} {memory}", flush=True)
            rows.append({"model": model, "method": method, **row})
    if arguments.json:
        arguments.json.write_text(json.dumps({"machine": about, "rows": rows}, indent=1), "utf-8")


if __name__ == "__main__":
    main()
