# SPDX-License-Identifier: Apache-2.0
"""Time `ace` on single matrices beside the paper written down as lean as can be (`lean.py`).

    python examples/benchmark/kernels.py --model Llama-3.2-1B --experts 3 --json kernels.json

Both run in turn in every round, so that whatever else the machine does hits both; seconds and
ratios are medians over rounds. A model's total counts every matrix as often as a layer (or, for
GPT-2 and ViT-L/14, the whole model) has it.
"""

from __future__ import annotations

import argparse
import json
import platform
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import TypeVar

import torch
from lean import lean_ace
from torch import Tensor

from mergekit_ace import AceOptions, merge_matrix
from mergekit_ace.files.saving import write_text

Result = TypeVar("Result")
# (out, in): how many there are
MODELS: dict[str, dict[tuple[int, int], int]] = {
    "Llama-3.2-1B": {(2048, 2048): 2, (512, 2048): 2, (8192, 2048): 2, (2048, 8192): 1},
    "Llama-3.1-8B": {(4096, 4096): 2, (1024, 4096): 2, (14336, 4096): 2, (4096, 14336): 1},
    "GPT-2": {(50257, 768): 1, (1024, 768): 1}
    | dict.fromkeys([(2304, 768), (768, 768), (3072, 768), (768, 3072)], 12),
    "ViT-L/14": {(1024, 1024): 96, (4096, 1024): 24, (1024, 4096): 24},
}
BRANCHES = ["homogeneous", "heterogeneous"]


def family(
    shape: tuple[int, int],
    experts: int,
    heterogeneous: bool = False,  # experts differ in scale, by a factor of 30 altogether
    stored: torch.dtype = torch.bfloat16,  # the weights are float32 that this dtype can hold
    spectrum: str = "slow",  # of task vectors: σ_j ∝ j^-½; or "low-rank": 16, plus noise
    device: str = "cpu",
) -> tuple[Tensor, list[Tensor]]:
    """Return a base, (o, i), and experts whose task vectors have 1 % of its norm."""
    rows, columns = shape
    rng = torch.Generator(device).manual_seed(0)
    new = {"generator": rng, "device": device}
    base = (0.02 * torch.randn(rows, columns, **new)).to(stored).float()
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
        members.append((base + 2e-4 * scale * delta).to(stored).float())
    return base, members


def timed(call: Callable[[], Result], device: str) -> tuple[float, Result]:
    """Return the seconds that a call takes, and its result."""
    synchronize = torch.cuda.synchronize if device == "cuda" else lambda: None
    synchronize()
    start = time.perf_counter()
    result = call()
    synchronize()
    return time.perf_counter() - start, result


def time_matrix(
    shape: tuple[int, int], experts: int, heterogeneous: bool, arguments: argparse.Namespace
) -> dict:
    """Return seconds and more for one matrix, both ways in turn in every round.

    `memory` is the peak of device memory in bytes, inputs and result included, what else is on the
    device not; None on a CPU.
    """
    device, stored = arguments.device, getattr(torch, arguments.stored)
    switch = "always" if heterogeneous else "never"
    options = AceOptions(adaptive_normalization=switch, spectral_refinement=switch)
    base, members = family(shape, experts, heterogeneous, stored, arguments.spectrum, device)
    pairs, memory = [], None
    for _ in range(arguments.rounds + 1):  # the first one warms up
        if device == "cuda":
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated() - sum(w.nbytes for w in (base, *members))
        seconds, (_, record) = timed(lambda: merge_matrix(base, members, options=options), device)
        if device == "cuda":
            memory = torch.cuda.max_memory_allocated() - before
        lean, _ = timed(lambda: lean_ace(base, members, heterogeneous=heterogeneous), device)
        pairs.append((seconds, lean))
    pairs = pairs[1:] or pairs
    return {
        "rows": shape[0],
        "columns": shape[1],
        "experts": experts,
        "heterogeneous": heterogeneous,
        "form": record.form,
        "precision": record.precision,
        "error": record.error,
        "ours": median(ours for ours, _ in pairs),
        "lean": median(lean for _, lean in pairs),
        "over_lean": median(ours / lean for ours, lean in pairs),
        "memory": memory,
    }


def print_row(row: dict) -> None:
    print(
        f"{row['rows']:6d} x {row['columns']:<6d} {row['experts']:2d}  "
        f"{BRANCHES[row['heterogeneous']]:13}  {row['form']:6} {row['precision']:8} "
        f"{row['error']:9.1e} {row['ours']:9.4f} {row['lean']:9.4f} {row['over_lean']:6.2f}",
        flush=True,
    )


def print_total(rows: list[dict]) -> dict:
    """Print and return the seconds of a model's matrices, and the peak of device memory."""
    total = {name: rows[0][name] for name in ("model", "experts", "heterogeneous")}
    total |= {way: sum(row["count"] * row[way] for row in rows) for way in ("ours", "lean")}
    total["memory"] = max((row["memory"] for row in rows if row["memory"]), default=None)
    line = f"  all together: ours {total['ours']:.3f} s, lean {total['lean']:.3f} s"
    if total["memory"]:
        line += f", at most {total['memory'] / 1e9:.2f} GB of device memory"
    print(line, flush=True)
    return total


def process_bytes(field: str) -> int:
    """Return a figure of the memory of this process, as Linux calls it, in bytes."""
    lines = Path("/proc/self/status").read_text(encoding="utf-8").splitlines()
    return next(1024 * int(line.split()[1]) for line in lines if line.startswith(f"{field}:"))


def machine(device: str) -> dict[str, str | int]:
    """Return what the figures are measured on."""
    known = Path("/proc/cpuinfo")
    lines = known.read_text(encoding="utf-8").splitlines() if known.exists() else []
    names = [line.split(":")[1].strip() for line in lines if line.startswith("model name")]
    name = names[0] if names else platform.processor() or platform.machine()
    name = torch.cuda.get_device_name() if device == "cuda" else name
    return {"device": name, "threads": torch.get_num_threads(), "torch": torch.__version__}


def print_machine(device: str) -> dict[str, str | int]:
    """Print what the figures are measured on, and return it."""
    about = machine(device)
    print(f"{about['device']}, {about['threads']} threads, torch {about['torch']}", flush=True)
    return about


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--model", nargs="+", choices=MODELS, default=["Llama-3.2-1B"])
    parser.add_argument("--experts", nargs="+", type=int, default=[3])
    parser.add_argument("--branch", nargs="+", choices=BRANCHES, default=BRANCHES)
    parser.add_argument("--stored", choices=["bfloat16", "float16", "float32"], default="bfloat16")
    parser.add_argument("--spectrum", choices=["low-rank", "slow"], default="low-rank")
    parser.add_argument("--rounds", type=int, default=3, help="0: a single one, not warmed up")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--divide", type=int, default=1, help="sides of all matrices by that")
    parser.add_argument("--json", help="write the figures there")
    arguments = parser.parse_args()
    if min(arguments.experts) < 2:
        parser.error("a merge of matrices takes at least two experts")
    figures: dict = {"machine": print_machine(arguments.device), "rows": [], "totals": []}
    print("    matrix       T  branch         form   solved in   error      ours      lean   over")

    def keep(kind: str, figure: dict) -> None:
        figures[kind].append(figure)
        if arguments.json:
            write_text(arguments.json, json.dumps(figures, indent=1))

    for model in arguments.model:
        for experts in arguments.experts:
            for branch in arguments.branch:
                print(f"{model}, {experts} experts, {branch}")
                for (rows, columns), count in MODELS[model].items():
                    shape = (rows // arguments.divide, columns // arguments.divide)
                    row = time_matrix(shape, experts, branch == "heterogeneous", arguments)
                    print_row(row)
                    keep("rows", {"model": model, "count": count, **row})
                keep("totals", print_total(figures["rows"][-len(MODELS[model]) :]))


if __name__ == "__main__":
    main()
