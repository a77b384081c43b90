# SPDX-License-Identifier: Apache-2.0
"""What a merge by many workers would take, on paper: nothing is merged, nothing is measured.

    python examples/benchmark/cluster.py
    python examples/benchmark/cluster.py --flops 1e12    # a CPU of sixteen cores instead of a GPU

Bytes, work and memory come from the plan and the estimate of the package, for `ace` on families of
full size, of which only headers exist. Rates are assumed. A worker reads, computes, writes and
hashes in turn; reading and writing go at its own rate, or at its share of what the file system
gives, whichever is less. Shards are taken to be spread evenly.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

import yaml
from llamas import SIZES, write_headers
from mergekit.options import MergeOptions

from mergekit_ace.planned import plan_merge, read_merge_config
from mergekit_ace.preflight.calibration import Rates
from mergekit_ace.preflight.checkpoints import read_checkpoint
from mergekit_ace.preflight.estimate import Estimate, estimate_merge

WORKERS = (1, 4, 16)
SHARDS = {"8B": 10**9}  # bytes of a file; mergekit's own default elsewhere


def estimate(folder: Path, size: str, experts: int) -> Estimate:
    """Of a family that is written, without its weights, to `folder`."""
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
    return estimate_merge(plan, checkpoints, Rates(operations=1, memory=1, read=1))


def phases(whole: Estimate, workers: int, rates: argparse.Namespace) -> dict[str, float]:
    """Seconds of all workers side by side, by what they are spent on."""
    return {
        "reading": whole.read / min(workers * rates.read, rates.shared_read),
        "computing": whole.operations[0] / (workers * rates.flops),
        "writing": whole.written / min(workers * rates.write, rates.shared_write),
        "hashing": whole.written / (workers * rates.hash),
    }


def in_words(seconds: float) -> str:
    """With two figures."""
    for unit, length in (("h", 3600), ("min", 60)):
        if seconds >= length:
            return f"{seconds / length:.2g} {unit}"
    return f"{seconds:.2g} s"


def in_petaflop(operations: float) -> str:
    """With two figures, and without an exponent."""
    number = operations / 1e15
    return f"{number:.0f}" if number >= 10 else f"{number:.2g}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--sizes", nargs="+", choices=SIZES, default=["8B", "70B", "405B"])
    parser.add_argument("--experts", type=int, default=3)
    parser.add_argument("--flops", type=float, default=30e12, help="of a worker, float32")
    parser.add_argument("--read", type=float, default=2e9, help="bytes/s of a worker")
    parser.add_argument("--write", type=float, default=1e9)
    parser.add_argument("--hash", type=float, default=1.5e9)
    parser.add_argument("--shared-read", type=float, default=10e9, help="bytes/s of all together")
    parser.add_argument("--shared-write", type=float, default=5e9)
    arguments = parser.parse_args()
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
            parts = phases(whole, workers, arguments)
            longest = max(parts, key=parts.__getitem__)
            cells.append(f"{in_words(sum(parts.values()))}, {longest}")
        plain, refined = (in_petaflop(operations) for operations in whole.operations)
        print(
            f"| {size} | {whole.read / 1e9:.0f} GB | {whole.written / 1e9:.0f} GB | "
            f"{plain} ({refined}) Pflop | {whole.memory / 1e9:.0f} GB | "
            f"{' | '.join(cells)} |",
            flush=True,
        )


if __name__ == "__main__":
    main()
