# SPDX-License-Identifier: Apache-2.0
"""Time the merge of single matrices against a plain transcription and against a lower bound.

    python examples/benchmark/kernels.py --model Llama-3.2-1B --experts 3 --json kernels.json

In every round each of the three runs once, in turn, so that whatever else the machine does hits all
of them; a ratio is the median over rounds. A model's total counts every matrix as often as a layer
(or, for GPT-2 and ViT-L/14, the whole model) has it.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass

import torch
from bound import measure, operations
from plain import plain_ace
from torch import Tensor

from mergekit_ace import AceOptions, merge_matrix
from mergekit_ace.files import write_text

# (out, in): how many there are
MODELS: dict[str, dict[tuple[int, int], int]] = {
    "Llama-3.2-1B": {(2048, 2048): 2, (512, 2048): 2, (8192, 2048): 2, (2048, 8192): 1},
    "Llama-3.1-8B": {(4096, 4096): 2, (1024, 4096): 2, (14336, 4096): 2, (4096, 14336): 1},
    "GPT-2": {
        (50257, 768): 1,
        (1024, 768): 1,
        (2304, 768): 12,
        (768, 768): 12,
        (3072, 768): 12,
        (768, 3072): 12,
    },
    "ViT-L/14": {(1024, 1024): 96, (4096, 1024): 24, (1024, 4096): 24},
}


@dataclass
class Row:
    """Medians for one matrix, in seconds; ratios are medians over rounds.

    `memory` is the peak of device memory in bytes, inputs and result included, what else is on the
    device not; None on a CPU.
    """

    model: str
    rows: int
    columns: int
    count: int
    experts: int
    heterogeneous: bool
    form: str
    precision: str
    condition: float
    ours: float
    plain: float | None
    bound: float
    speedup: float | None
    over_bound: float
    memory: int | None


@dataclass(frozen=True)
class Kind:
    """What the families are.

    Attributes:
        heterogeneous: whether experts differ in scale, by a factor of 30 altogether.
        stored: the dtype whose numbers the weights are, which are float32 themselves.
        spectrum: of task vectors, which are 1 % of the base: of rank 16 plus noise, or σ_j ∝ j^-½.
    """

    heterogeneous: bool
    stored: torch.dtype
    spectrum: str


def family(
    rows: int, columns: int, experts: int, kind: Kind, device: str
) -> tuple[Tensor, list[Tensor]]:
    """Return a base, and experts."""
    rng = torch.Generator(device).manual_seed(0)
    new = {"generator": rng, "device": device}

    def store(weight: Tensor) -> Tensor:
        return weight.to(kind.stored).float()

    base = store(0.02 * torch.randn(rows, columns, **new))
    members = []
    for t in range(experts):
        if kind.spectrum == "slow":
            side = min(rows, columns)
            fall = torch.arange(1, side + 1, device=device) ** -0.5
            delta = (torch.randn(rows, side, **new) * fall) @ torch.randn(side, columns, **new)
            delta /= delta.square().mean().sqrt()
        else:
            low = torch.randn(rows, 16, **new) @ torch.randn(16, columns, **new) / 4
            delta = (low + torch.randn(rows, columns, **new)) / 2**0.5
        scale = 30 ** (t / (experts - 1) - 0.5) if kind.heterogeneous else 1.0
        members.append(store(base + 2e-4 * scale * delta))
    return base, members


def time_matrix(
    model: str,
    shape: tuple[int, int],
    count: int,
    experts: int,
    kind: Kind,
    rounds: int,
    device: str,
    plain: bool,
) -> Row:
    """Time one matrix in `rounds` alternating rounds."""
    heterogeneous = kind.heterogeneous
    switch = "always" if heterogeneous else "never"
    options = AceOptions(adaptive_normalization=switch, spectral_refinement=switch)
    base, members = family(*shape, experts, kind, device)
    synchronize = torch.cuda.synchronize if device == "cuda" else lambda: None
    seconds: dict[str, list[float]] = {"ours": [], "plain": [], "bound": []}
    memory = None
    systems = operations(*shape, experts, heterogeneous, device)
    for turn in range(rounds + 1):  # the first one warms up
        if device == "cuda":
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated() - sum(w.nbytes for w in (base, *members))
        started = _clock(synchronize)
        _, record = merge_matrix(base, members, options=options)
        ours = _clock(synchronize) - started
        if device == "cuda":
            memory = torch.cuda.max_memory_allocated() - before
        bound = min(measure(system, synchronize) for system in systems.values())
        started = _clock(synchronize)
        if plain:
            plain_ace(base, members, heterogeneous=heterogeneous)
        theirs = _clock(synchronize) - started
        if turn > 0 or rounds == 0:
            for name, value in (("ours", ours), ("plain", theirs), ("bound", bound)):
                seconds[name].append(value)
    ratio = lambda a, b: statistics.median(x / y for x, y in zip(a, b, strict=True))  # noqa: E731
    return Row(
        model=model,
        rows=shape[0],
        columns=shape[1],
        count=count,
        experts=experts,
        heterogeneous=heterogeneous,
        form=record.form,
        precision=record.precision,
        condition=record.condition,
        ours=statistics.median(seconds["ours"]),
        plain=statistics.median(seconds["plain"]) if plain else None,
        bound=statistics.median(seconds["bound"]),
        speedup=ratio(seconds["plain"], seconds["ours"]) if plain else None,
        over_bound=ratio(seconds["ours"], seconds["bound"]),
        memory=memory,
    )


def _clock(synchronize: Callable[[], None]) -> float:
    synchronize()
    return time.perf_counter()


def print_row(row: Row) -> None:
    branch = "heterogeneous" if row.heterogeneous else "homogeneous"
    plain = f"{row.plain:8.3f} {row.speedup:8.2f}" if row.plain is not None else " " * 17
    print(
        f"{row.rows:6d} x {row.columns:<6d} {row.experts:2d}  {branch:13}  {row.form:6} "
        f"{row.precision:8} {row.condition:9.1e} {row.ours:8.3f} {plain} {row.bound:8.3f} "
        f"{row.over_bound:8.2f}",
        flush=True,
    )


def add_up(rows: list[Row]) -> dict:
    """Return the total of a model: seconds of all matrices, and the peak of device memory."""
    first = rows[0]
    memory = [row.memory for row in rows if row.memory is not None]
    known = all(row.plain is not None for row in rows)
    return {
        "model": first.model,
        "experts": first.experts,
        "heterogeneous": first.heterogeneous,
        "ours": sum(row.count * row.ours for row in rows),
        "bound": sum(row.count * row.bound for row in rows),
        "plain": sum(row.count * row.plain for row in rows) if known else None,
        "memory": max(memory, default=None),
    }


def print_total(total: dict) -> None:
    ours, bound, plain = (total[name] for name in ("ours", "bound", "plain"))
    line = f"  all together: ours {ours:.3f} s"
    if plain is not None:
        line += f", plain {plain:.3f} s ({plain / ours:.2f} times as long)"
    line += f", lower bound {bound:.3f} s (ours {ours / bound:.2f} times as long)"
    if total["memory"] is not None:
        line += f", at most {total['memory'] / 1e9:.2f} GB of device memory"
    print(line, flush=True)


def machine(device: str) -> dict[str, str | int]:
    """What the figures were measured on."""
    name = torch.cuda.get_device_name() if device == "cuda" else _processor()
    return {"device": name, "threads": torch.get_num_threads(), "torch": torch.__version__}


def _processor() -> str:
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as file:
            names = [line.split(":")[1].strip() for line in file if line.startswith("model name")]
    except OSError:
        names = []
    return names[0] if names else platform.processor() or platform.machine()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--model", nargs="+", choices=MODELS, default=["Llama-3.2-1B"])
    parser.add_argument("--experts", nargs="+", type=int, default=[3])
    parser.add_argument("--branch", nargs="+", choices=["homogeneous", "heterogeneous"])
    parser.add_argument("--stored", choices=["bfloat16", "float16", "float32"], default="bfloat16")
    parser.add_argument("--spectrum", choices=["low-rank", "slow"], default="low-rank")
    parser.add_argument("--rounds", type=int, default=3, help="0: a single one, not warmed up")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--divide", type=int, default=1, help="sides of all matrices by that")
    parser.add_argument("--no-plain", action="store_true", help="leave the plain one out")
    parser.add_argument("--json", help="write the figures there")
    arguments = parser.parse_args()
    if min(arguments.experts) < 2:
        parser.error("a merge of matrices takes at least two experts")
    about = machine(arguments.device)
    print(f"{about['device']}, {about['threads']} threads, torch {about['torch']}")
    print(
        "    matrix       T  branch         form   solved in condition     ours    plain"
        "  speedup    bound  x bound"
    )
    figures: dict = {"machine": about, "rows": [], "totals": []}

    def keep() -> None:
        if arguments.json:
            write_text(arguments.json, json.dumps(figures, indent=1))

    for model in arguments.model:
        for experts in arguments.experts:
            for branch in arguments.branch or ["homogeneous", "heterogeneous"]:
                print(f"{model}, {experts} experts, {branch}")
                stored = getattr(torch, arguments.stored)
                kind = Kind(branch == "heterogeneous", stored, arguments.spectrum)
                group = []
                for shape, count in MODELS[model].items():
                    row = time_matrix(
                        model,
                        (shape[0] // arguments.divide, shape[1] // arguments.divide),
                        count,
                        experts,
                        kind,
                        arguments.rounds,
                        arguments.device,
                        not arguments.no_plain,
                    )
                    print_row(row)
                    group.append(row)
                    figures["rows"].append(asdict(row))
                    keep()
                figures["totals"].append(add_up(group))
                print_total(figures["totals"][-1])
                keep()


if __name__ == "__main__":
    main()
