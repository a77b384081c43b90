# SPDX-License-Identifier: Apache-2.0
"""Time merge methods on the matrices of a model, beside `ace` written down as lean as can be.

    python examples/benchmark/kernels.py --model Llama-3.2-1B --json kernels.json
    python examples/benchmark/kernels.py --ways ace tsv_m ties --spectrum slow

All ways run in turn in every round, so that whatever else the machine does hits each of them;
seconds and ratios are medians over rounds. Memory is the peak beside the inputs: resident on a CPU,
else of the device. A model's total counts every matrix as often as a layer of a Llama, or the whole
of another model, has it.
"""

from __future__ import annotations

import argparse
import json
import platform
import re
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from statistics import median

import torch
from lean import lean_ace
from mergekit.merge_methods import merge_tensors
from torch import Tensor

from mergekit_ace.files.saving import write_text

# (out, in): how many there are
MODELS: dict[str, dict[tuple[int, int], int]] = {
    "Llama-3.2-1B": {(2048, 2048): 2, (512, 2048): 2, (8192, 2048): 2, (2048, 8192): 1},
    "Llama-3.1-8B": {(4096, 4096): 2, (1024, 4096): 2, (14336, 4096): 2, (4096, 14336): 1},
    "GPT-2": {(50257, 768): 1, (1024, 768): 1}
    | dict.fromkeys([(2304, 768), (768, 768), (3072, 768), (768, 3072)], 12),
    "SmolLM2": {(576, 576): 60, (192, 576): 60, (1536, 576): 60, (576, 1536): 30, (49152, 576): 1},
    "ViT-L/14": {(1024, 1024): 96, (4096, 1024): 24, (1024, 4096): 24},
}
_SWITCHES = ("adaptive_normalization", "spectral_refinement")
# mergekit's name of a method, and parameters that are not the default.
METHODS: dict[str, tuple[str, dict]] = {
    "ace": ("ace", dict.fromkeys(_SWITCHES, "never")),
    "ace-refined": ("ace", dict.fromkeys(_SWITCHES, "always")),
    "wudi-exact": ("wudi", {"solver": "exact"}),
    "task_arithmetic": ("task_arithmetic", {"weight": 0.4, "normalize": False}),
    "ties": ("ties", {"weight": 1.0, "density": 0.2}),
}
LEAN = {"lean": False, "lean-refined": True}  # whether the branch is the heterogeneous one


def family(
    shape: tuple[int, int],
    experts: int,
    heterogeneous: bool = False,  # experts differ in scale, by a factor of 30 altogether
    spectrum: str = "slow",  # of task vectors: σ_j ∝ j^-½; or "low-rank": 16, plus noise
    device: str = "cpu",
) -> tuple[Tensor, list[Tensor]]:
    """Return a base, (o, i), and experts whose task vectors have 1 % of its norm, by bfloat16."""
    rows, columns = shape
    rng = torch.Generator(device).manual_seed(0)
    new = {"generator": rng, "device": device}
    base = (0.02 * torch.randn(rows, columns, **new)).bfloat16().float()
    members = []
    for t in range(experts):
        if spectrum == "slow":
            side = min(rows, columns)
            fall = torch.arange(1, side + 1, device=device) ** -0.5
            delta = (torch.randn(rows, side, **new) * fall) @ torch.randn(side, columns, **new)
            delta /= delta.square().mean().sqrt()
        else:
            low = torch.randn(rows, 16, **new) @ torch.randn(16, columns, **new) / 4
            delta = (low + torch.randn(rows, columns, **new)) / 2**0.5
        scale = 30 ** (t / (experts - 1) - 0.5) if heterogeneous else 1.0
        members.append((base + 2e-4 * scale * delta).bfloat16().float())
    return base, members


def timed(call: Callable[[], object], device: str) -> tuple[float, object]:
    """Return the seconds that a call takes, and its result."""
    synchronize = torch.cuda.synchronize if device == "cuda" else lambda: None
    synchronize()
    start = time.perf_counter()
    result = call()
    synchronize()
    return time.perf_counter() - start, result


def merge_by(way: str, base: Tensor, experts: list[Tensor]) -> Tensor:
    """Merge matrices by `lean.py`, or by a method of mergekit."""
    if way in LEAN:
        return lean_ace(base, experts, heterogeneous=LEAN[way])
    name, parameters = METHODS.get(way, (way, {}))
    return merge_tensors([base, *experts], name, base_index=0, parameters=parameters)


def reset_peak(device: str) -> int:
    """Start counting the peak of memory anew; return what is in use."""
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()
        return torch.cuda.memory_allocated()
    Path("/proc/self/clear_refs").write_text("5", encoding="utf-8")  # of Linux
    return process_bytes("VmRSS")


def peak(device: str) -> int:
    """Return the most bytes that were in use since `reset_peak`."""
    return torch.cuda.max_memory_allocated() if device == "cuda" else process_bytes("VmHWM")


def time_matrix(shape: tuple[int, int], experts: int, options: argparse.Namespace) -> list[dict]:
    """Return seconds, their ratio to those of the first way, and memory of every way."""
    models = family(shape, experts, options.heterogeneous, options.spectrum, options.device)
    seconds: dict[str, list[float]] = {way: [] for way in options.ways}
    memory = dict.fromkeys(options.ways, 0)
    for _ in range(options.rounds + 1):  # the first one warms up
        for way in options.ways:
            before = reset_peak(options.device)
            seconds[way].append(timed(partial(merge_by, way, *models), options.device)[0])
            memory[way] = max(memory[way], peak(options.device) - before)
    kept = {way: every[1:] or every for way, every in seconds.items()}
    first = kept[options.ways[0]]
    return [
        {
            "way": way,
            "seconds": median(own),
            "ratio": median(a / b for a, b in zip(own, first, strict=True)),
            "memory": memory[way],
        }
        for way, own in kept.items()
    ]


def time_model(model: str, options: argparse.Namespace) -> tuple[list[dict], list[dict]]:
    """Print and return the figures of a model's matrices, and of all of them together."""
    rows, totals = [], []
    for (outputs, inputs), count in MODELS[model].items():
        shape = (outputs // options.divide, inputs // options.divide)
        for row in time_matrix(shape, options.experts, options):
            print_row(f"{shape[0]} x {shape[1]}", row)
            rows.append({"model": model, "shape": shape, "count": count, **row})
    for way in options.ways:
        own = [row for row in rows if row["way"] == way]
        seconds = sum(row["count"] * row["seconds"] for row in own)
        ratio = seconds / totals[0]["seconds"] if totals else 1.0
        total = {"way": way, "seconds": seconds, "ratio": ratio}
        total["memory"] = max(row["memory"] for row in own)
        print_row(model, total)
        totals.append({"model": model, "experts": options.experts, **total})
    return rows, totals


def print_row(what: str, row: dict) -> None:
    """Print the figures of a way for a matrix or a model."""
    figures = f"{row['seconds']:9.4f} {row['ratio']:8.2f} {row['memory'] / 1e6:8.0f}"
    print(f"{what:16} {row['way']:16} {figures}", flush=True)


def process_bytes(field: str) -> int:
    """Return a figure of the memory of this process, as Linux calls it, in bytes."""
    lines = Path("/proc/self/status").read_text(encoding="utf-8").splitlines()
    return next(1024 * int(line.split()[1]) for line in lines if line.startswith(f"{field}:"))


def print_machine(device: str) -> dict[str, str | int]:
    """Print what the figures are measured on, and return it."""
    text = Path("/proc/cpuinfo").read_text(encoding="utf-8")
    names = re.findall(r"^model name\s*: (.*)$", text, re.MULTILINE)
    name = torch.cuda.get_device_name() if device == "cuda" else [*names, platform.machine()][0]
    threads = torch.get_num_threads()
    print(f"{name}, {threads} threads, torch {torch.__version__}", flush=True)
    return {"device": name, "threads": threads, "torch": torch.__version__}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--model", nargs="+", choices=MODELS, default=["Llama-3.2-1B"])
    parser.add_argument("--ways", nargs="+", default=["ace", "lean", "ace-refined", "lean-refined"])
    parser.add_argument("--experts", type=int, default=3)
    parser.add_argument("--heterogeneous", action="store_true", help="experts of unequal scale")
    parser.add_argument("--spectrum", choices=["low-rank", "slow"], default="low-rank")
    parser.add_argument("--rounds", type=int, default=3, help="0: a single one, not warmed up")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--divide", type=int, default=1, help="sides of all matrices by that")
    parser.add_argument("--json", help="write the figures there")
    options = parser.parse_args()
    if options.experts < 2:
        parser.error("a merge of matrices takes at least two experts")
    figures: dict = {"machine": print_machine(options.device), "rows": [], "totals": []}
    print("matrix           way                seconds  x first       MB")
    for model in options.model:
        rows, totals = time_model(model, options)
        figures["rows"] += rows
        figures["totals"] += totals
        if options.json:
            write_text(options.json, json.dumps(figures, indent=1))


if __name__ == "__main__":
    main()
