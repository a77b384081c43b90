# SPDX-License-Identifier: Apache-2.0
"""Estimate how long a merge by many workers would take; nothing is merged.

    python examples/cluster/estimate.py --measure .       # workers like this machine
    python examples/cluster/estimate.py                   # workers with a GPU, an H100

Bytes, work and memory come from the plan and the estimate of the package, for `ace` on families of
full size, of which only headers exist. A worker's rates are measured (a layer merged; a gigabyte
written, hashed and read) or given. It reads, computes, writes and hashes in turn; reading and
writing go at its own rate, or at its share of what the file system gives, whichever is less.
Shards are taken to be spread evenly.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
import yaml
from mergekit.options import MergeOptions

from mergekit_ace import merge_tensor
from mergekit_ace.files import flush_to_disk, sha256, write_text
from mergekit_ace.planning import plan_merge, read_merge_config
from mergekit_ace.preflight import estimate as preflight_estimate
from mergekit_ace.preflight.checkpoints import read_checkpoint
from mergekit_ace.preflight.estimate import Estimate, estimate_merge

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "benchmark"))

from kernels import machine
from llamas import SIZES, write_headers

WORKERS = (1, 4, 16)
SHARDS = {"8B": 10**9}  # bytes of a file; mergekit's own default elsewhere
SAMPLE = 2**30  # bytes written and read
BLOCK = 2**23


@dataclass(frozen=True)
class Rates:
    """Rates of a worker, per second; by default those measured on a machine with an H100.

    Attributes:
        flops: floating-point operations of a merge in float32.
        read, write, hash: bytes.
    """

    flops: float = 11e12
    read: float = 1.9e9
    write: float = 1.7e9
    hash: float = 1.2e9


def estimate(folder: Path, size: str, experts: int) -> Estimate:
    """Return the estimate of a family, which is written to `folder` without its weights."""
    base, *others = write_headers(folder, size, experts)
    config = {
        "merge_method": "ace",
        "base_model": str(base),
        "models": [{"model": str(expert)} for expert in others],
        "dtype": "bfloat16",
    }
    path = folder / "ace.yml"
    path.write_text(yaml.safe_dump(config), encoding="utf-8")
    shard = {"out_shard_size": SHARDS[size]} if size in SHARDS else {}
    plan = plan_merge(*read_merge_config(path), MergeOptions(**shard))
    checkpoints = {model: read_checkpoint(model) for model in plan.config.referenced_models()}
    nothing = preflight_estimate.Rates(operations=1, memory=1, read=1)
    return estimate_merge(plan, checkpoints, nothing)


def measure(
    folder: Path, device: str, experts: int, size: str | None = None, sample: int = SAMPLE
) -> Rates:
    """Return the rates of this machine.

    Args:
        folder: on the disk that is meant.
        device: of the merge.
        experts: T.
        size: of the model of which a layer is merged; by default one that keeps the device busy.
        sample: bytes that are written, hashed and read.
    """
    size = size or ("8B" if device.startswith("cuda") else "1B")
    with tempfile.TemporaryDirectory() as headers:
        tensors = estimate(Path(headers), size, experts).tensors
    layer = [tensor for tensor in tensors if tensor.name.startswith("model.layers.0.")]
    seconds_of_merge(layer[0].shape, device, experts)  # warms up
    seconds = sum(seconds_of_merge(tensor.shape, device, experts) for tensor in layer)
    written, hashed, read = seconds_of_files(folder, sample)
    return Rates(
        flops=sum(tensor.operations[0] for tensor in layer) / seconds,
        read=sample / read,
        write=sample / written,
        hash=sample / hashed,
    )


def seconds_of_merge(shape: tuple[int, ...], device: str, experts: int) -> float:
    """Time the merge of one tensor by `ace`, bfloat16 in memory; the experts are noise."""
    generator = torch.Generator().manual_seed(0)
    base = 0.02 * torch.randn(shape, generator=generator)
    versions = [base]
    versions += [base + 1e-3 * torch.randn(shape, generator=generator) for _ in range(experts)]
    versions = [version.to(device, torch.bfloat16) for version in versions]
    start = time.perf_counter()
    merge_tensor(versions[0], versions[1:])
    if device.startswith("cuda"):
        torch.cuda.synchronize()
    return time.perf_counter() - start


def seconds_of_files(folder: Path, sample: int = SAMPLE) -> tuple[float, float, float]:
    """Time `sample` bytes written and flushed, hashed from memory, and read from the disk."""
    path = folder / "cluster-sample.bin"
    block = os.urandom(BLOCK)
    try:
        start = time.perf_counter()
        with open(path, "wb") as file:
            for _ in range(sample // BLOCK):
                file.write(block)
        flush_to_disk(path)
        written = time.perf_counter() - start
        start = time.perf_counter()
        sha256(path)
        hashed = time.perf_counter() - start
        with open(path, "rb", buffering=0) as file:
            os.posix_fadvise(file.fileno(), 0, sample, os.POSIX_FADV_DONTNEED)
            start = time.perf_counter()
            while file.read(BLOCK):
                pass
        return written, hashed, time.perf_counter() - start
    finally:
        path.unlink(missing_ok=True)


def phases(whole: Estimate, workers: int, rates: Rates, read: float, write: float) -> dict:
    """Return the seconds of all workers side by side, by what they are spent on.

    Args:
        read, write: bytes per second that the file system gives all workers together.
    """

    def moved(what: str, size: int, own: float, shared: float) -> tuple[str, float]:
        if workers * own <= shared:
            return what, size / (workers * own)
        return f"shared {what}", size / shared

    return dict(
        [
            moved("reading", whole.read, rates.read, read),
            ("computing", whole.operations[0] / (workers * rates.flops)),
            moved("writing", whole.written, rates.write, write),
            ("hashing", whole.written / (workers * rates.hash)),
        ]
    )


def in_words(seconds: float) -> str:
    """Return a time with two figures and its unit."""
    for unit, length in (("h", 3600), ("min", 60)):
        if seconds >= length:
            return f"{two_figures(seconds / length)} {unit}"
    return f"{two_figures(seconds)} s"


def two_figures(number: float) -> str:
    """Return a number with two figures, or all before the point, without an exponent."""
    return f"{number:.0f}" if number >= 10 else f"{number:.2g}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--sizes", nargs="+", choices=SIZES, default=["8B", "70B", "405B"])
    parser.add_argument("--experts", type=int, default=3)
    parser.add_argument("--measure", type=Path, metavar="FOLDER", help="rates of this machine")
    parser.add_argument("--device", default="cpu", help="that is measured")
    parser.add_argument("--layer-of", choices=SIZES, help="a layer that keeps the device busy")
    parser.add_argument("--sample", type=int, default=SAMPLE, help="bytes written and read")
    parser.add_argument("--json", type=Path, help="write the rates there")
    for name, rate in asdict(Rates()).items():
        unit = "operations/s" if name == "flops" else "bytes/s"
        parser.add_argument(f"--{name}", type=float, help=f"{unit} of a worker; {rate:g}")
    parser.add_argument("--shared-read", type=float, default=10e9, help="bytes/s of all together")
    parser.add_argument("--shared-write", type=float, default=5e9)
    arguments = parser.parse_args()
    rates = asdict(Rates())
    if arguments.measure:
        about = machine(arguments.device)
        print(f"{about['device']}, {about['threads']} threads, torch {about['torch']}")
        rates = asdict(
            measure(
                arguments.measure,
                arguments.device,
                arguments.experts,
                arguments.layer_of,
                arguments.sample,
            )
        )
    rates |= {name: given for name in rates if (given := getattr(arguments, name))}
    print(", ".join(f"{name} {rate:.3g}/s" for name, rate in rates.items()), end="\n\n")
    if arguments.json:
        about = machine(arguments.device)
        write_text(arguments.json, json.dumps({"machine": about, "rates": rates}, indent=1))
    columns = " | ".join(f"{n} worker{'s' * (n > 1)}" for n in WORKERS)
    print(
        f"| family | read | written | work (refined everywhere) | memory of a worker | {columns} |"
    )
    print("|---" * (5 + len(WORKERS)) + "|")
    for size in arguments.sizes:
        with tempfile.TemporaryDirectory() as folder:
            whole = estimate(Path(folder), size, arguments.experts)
        cells = []
        for workers in WORKERS:
            shared = (arguments.shared_read, arguments.shared_write)
            parts = phases(whole, workers, Rates(**rates), *shared)
            longest = max(parts, key=parts.__getitem__)
            cells.append(f"{in_words(sum(parts.values()))}, {longest}")
        plain, refined = (two_figures(operations / 1e15) for operations in whole.operations)
        print(
            f"| {size} | {whole.read / 1e9:.0f} GB | {whole.written / 1e9:.0f} GB | "
            f"{plain} ({refined}) Pflop | {whole.memory / 1e9:.0f} GB | "
            f"{' | '.join(cells)} |",
            flush=True,
        )


if __name__ == "__main__":
    main()
