# SPDX-License-Identifier: Apache-2.0
"""Time all merge methods on the matrices of a model, and measure the memory that they take.

    python examples/benchmark/method_costs.py --model Llama-3.2-1B --json costs.json
    python examples/benchmark/method_costs.py --model 2048x2048 512x2048 --plain

Every method runs in a process of its own, on experts stored in bfloat16 whose task vectors have a
slowly falling spectrum. A model's total counts every matrix as often as the model has it: a layer
of a Llama, a block of ViT-L/14, the whole of GPT-2. Memory is the peak beside the inputs.
"""

from __future__ import annotations

import argparse
import json
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from kernels import MODELS, Kind, family, machine
from mergekit.merge_methods import merge_tensors
from plain import PLAIN_PEERS
from torch import Tensor

Shape = tuple[int, int]

# The number of experts, and how many matrices there are of each shape.
CASES: dict[str, tuple[int, dict[Shape, int]]] = {
    "Llama-3.2-1B": (3, MODELS["Llama-3.2-1B"]),
    "ViT-L/14": (8, {shape: count // 24 for shape, count in MODELS["ViT-L/14"].items()}),
    "GPT-2": (7, MODELS["GPT-2"]),
    "2048x2048": (3, {(2048, 2048): 1}),
    "512x2048": (3, {(512, 2048): 1}),
}
# mergekit's name, and parameters that are not the default.
METHODS: dict[str, tuple[str, dict]] = {
    "ace": ("ace", {}),
    "ace (refined)": (
        "ace",
        {"adaptive_normalization": "always", "spectral_refinement": "always"},
    ),
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


@dataclass(frozen=True)
class MatrixCost:
    """What a method takes for one matrix.

    Attributes:
        seconds: the median over rounds.
        memory: bytes at its peak beside the inputs; None where the system does not tell.
    """

    seconds: float
    memory: int | None


def merge_by(method: str, base: Tensor, experts: list[Tensor]) -> Tensor:
    """Merge matrices by a method of mergekit."""
    name, parameters = METHODS[method]
    return merge_tensors([base, *experts], name, base_index=0, parameters=parameters)


def merge_plainly(method: str, base: Tensor, experts: list[Tensor]) -> Tensor:
    """Merge them by the plain transcription of a method."""
    return base + PLAIN_PEERS[method]([expert.double() - base for expert in experts])


def measure_method(
    merge: Callable[[Tensor, list[Tensor]], Tensor], shape: Shape, experts: int, rounds: int
) -> MatrixCost:
    """Time a merge of one matrix in some rounds, and measure its memory."""
    kind = Kind(heterogeneous=False, stored=torch.bfloat16, spectrum="slow")
    base, members = family(*shape, experts, kind, "cpu")
    small = [member[:300, :300].clone() for member in (base, *members)]
    merge(small[0], small[1:])  # libraries are loaded, and allocate buffers of their own
    seconds, memory = [], None
    for _ in range(rounds):
        before = reset_peak()
        started = time.perf_counter()
        merge(base, members)
        seconds.append(time.perf_counter() - started)
        memory = peak() - before if before is not None else None
    return MatrixCost(statistics.median(seconds), memory)


def reset_peak() -> int | None:
    """Start counting the peak of resident memory anew; return what is in use, in bytes."""
    try:
        Path("/proc/self/clear_refs").write_text("5", encoding="utf-8")
    except OSError:
        return None
    pages = int(Path("/proc/self/statm").read_text(encoding="utf-8").split()[1])
    return pages * resource.getpagesize()


def peak() -> int:
    """Return the peak of resident memory in bytes, on Linux."""
    lines = Path("/proc/self/status").read_text(encoding="utf-8").splitlines()
    return next(1024 * int(line.split()[1]) for line in lines if line.startswith("VmHWM"))


def measure_here(model: str, method: str, plain: bool, rounds: int, divide: int) -> dict:
    """Return seconds and memory of a method for all matrices of a model together."""
    experts, matrices = CASES[model]
    merge = merge_plainly if plain else merge_by
    seconds, memory = 0.0, None
    for (rows, columns), count in matrices.items():
        cost = measure_method(
            lambda base, members: merge(method, base, members),
            (rows // divide, columns // divide),
            experts,
            rounds,
        )
        seconds += count * cost.seconds
        memory = None if cost.memory is None else max(memory or 0, cost.memory)
    return asdict(MatrixCost(seconds, memory))


def measure_apart(arguments: argparse.Namespace, model: str, method: str, plain: bool) -> dict:
    """Return the same, measured in a process of its own."""
    command = [sys.executable, __file__, "--model", model, "--here", "--method", method]
    command += ["--rounds", str(arguments.rounds), "--divide", str(arguments.divide)]
    command += ["--plain"] if plain else []
    found = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    return json.loads(found.stdout.splitlines()[-1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--model", nargs="+", choices=CASES, default=["Llama-3.2-1B"])
    usual = [method for method in METHODS if method != "wudi (Adam)"]  # 300 steps: half an hour
    parser.add_argument("--method", nargs="+", choices=METHODS, default=usual)
    parser.add_argument("--plain", action="store_true", help="plain transcriptions, too")
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--divide", type=int, default=1, help="sides of all matrices by that")
    parser.add_argument("--json", type=Path, help="write the figures there")
    parser.add_argument("--here", action="store_true", help="one method, in this process")
    arguments = parser.parse_args()
    if arguments.here:
        given = arguments.model[0], arguments.method[0], arguments.plain
        print(json.dumps(measure_here(*given, arguments.rounds, arguments.divide)))
        return
    about, rows = machine("cpu"), []
    print(f"{about['device']}, {about['threads']} threads, torch {about['torch']}", flush=True)
    for model in arguments.model:
        print(f"{model}, {CASES[model][0]} experts\n{'':16} {'seconds':>8} {'MB':>6}")
        for method in arguments.method:
            for plain in (False, True) if arguments.plain and method in PLAIN_PEERS else (False,):
                row = measure_apart(arguments, model, method, plain)
                memory = "" if row["memory"] is None else f"{row['memory'] / 1e6:6.0f}"
                name = "  plainly" if plain else method
                print(f"{name:16} {row['seconds']:8.3f} {memory}", flush=True)
                rows.append({"model": model, "method": method, "plain": plain, **row})
    if arguments.json:
        arguments.json.write_text(json.dumps({"machine": about, "rows": rows}, indent=1), "utf-8")


if __name__ == "__main__":
    main()
