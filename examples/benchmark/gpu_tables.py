# SPDX-License-Identifier: Apache-2.0
"""The results of `gpu.py` as tables of a README; stages without figures are left out of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

GB = 1e9
Results = Mapping[str, dict]


def markdown(results: Results) -> str:
    """Return all tables, the machine first, and last what became of every stage."""
    parts = [
        _machine(results),
        _tests(results),
        _table(
            "Single matrices, each as often as a layer, or the whole model, has it",
            ("model", "experts", "branch", "seconds", "lower bound", "ours / bound", "GPU memory"),
            results,
            "kernels",
            _kernels,
        ),
        _table(
            "Whole checkpoints in bfloat16",
            ("model", "branch", "method", "wall time", "× first", "computing", "memory", "GPU"),
            results,
            "checkpoint",
            _checkpoint,
        ),
        _table(
            "Training coefficients: memory above one model and its activations, in models",
            ("experts", "kept", "memory", "step / plain", "step"),
            results,
            "trainer",
            _trainer,
        ),
        _table(
            "Adapters", ("command", "seconds", "× first", "memory"), results, "adapters", _adapters
        ),
        _table("A worker's rates", ("rate", "per second"), results, "cluster", _cluster),
        _stages(results),
    ]
    return "\n\n".join(filter(None, parts)) + "\n"


def _figures(results: Results, name: str) -> dict:
    return results.get(name, {}).get("figures") or {}


def _machine(results: Results) -> str:
    known = _figures(results, "machine").get("machine")
    if not known:
        return ""
    gpu = known["gpu"] or "no GPU"
    if "gpu_memory" in known:
        gpu += f" ({known['gpu_memory'] / GB:.0f} GB)"
    return (
        f"{gpu}, {known['processors']} processors, {known['memory'] / GB:.0f} GB of memory, "
        f"torch {known['torch']}, Python {known['python']}"
    )


def _tests(results: Results) -> str:
    count = _figures(results, "tests")
    if not count:
        return ""
    return (
        f"Tests on the device: {count['passed']} passed, {count['failed']} failed, "
        f"{count['skipped']} left out."
    )


def _table(
    title: str,
    columns: Sequence[str],
    results: Results,
    kind: str,
    rows: Callable[[dict], list[tuple[object, ...]]],
) -> str:
    """Return a table of all stages whose names begin with `kind`, and their commands."""
    names = [name for name in results if name.partition("-")[0] == kind]
    known = [name for name in names if _figures(results, name)]
    if not known:
        return ""
    lines = [_row(columns), "|---" * len(columns) + "|"]
    lines += [_row(row) for name in known for row in rows(_figures(results, name))]
    commands = "\n".join(f"    {results[name]['command']}" for name in known)
    return f"**{title}**\n\n" + "\n".join(lines) + f"\n\n{commands}"


def _row(cells: Sequence[object]) -> str:
    return f"| {' | '.join(str(cell) for cell in cells)} |"


def _branch(heterogeneous: bool) -> str:
    return "refined" if heterogeneous else "homogeneous"


def _kernels(figures: dict) -> list[tuple[object, ...]]:
    return [
        (
            total["model"],
            total["experts"],
            _branch(total["heterogeneous"]),
            f"{total['ours']:.3f}",
            f"{total['bound']:.3f}",
            f"{total['ours'] / total['bound']:.2f}",
            _gigabytes(total["memory"]),
        )
        for total in figures["totals"]
    ]


def _checkpoint(figures: dict) -> list[tuple[object, ...]]:
    rows = figures["rows"]
    return [
        (
            f"{figures['size']}, {figures['layers']} layers",
            _branch(figures["heterogeneous"]),
            row["method"],
            f"{row['wall']:.1f} s",
            f"{row['wall'] / rows[0]['wall']:.2f}",
            f"{row['compute']:.1f} s",
            _gigabytes(row["resident_bytes"]),
            _gigabytes(row.get("device_bytes")),
        )
        for row in rows
    ]


def _trainer(figures: dict) -> list[tuple[object, ...]]:
    memory = {row["experts"]: f"{row['models']:.2f}" for row in figures["memory"]}
    timed = [
        (
            row["experts"],
            f"on {row['storage']}",
            memory.get(row["experts"], "") if row["storage"] == "disk" else "",
            f"{row['ratio']:.2f}",
            f"{row['seconds']:.2f} s",
        )
        for row in figures["time"]
    ]
    on_disk = {row["experts"] for row in figures["time"] if row["storage"] == "disk"}
    return timed + [(k, "on disk", m, "", "") for k, m in memory.items() if k not in on_disk]


def _adapters(figures: dict) -> list[tuple[object, ...]]:
    measured = {name: rounds[0] for name, rounds in figures["rows"].items() if rounds}
    first = next(iter(measured.values()))["wall"]
    return [
        (
            name,
            f"{one['wall']:.1f} s",
            f"{one['wall'] / first:.2f}",
            _gigabytes(one["resident_bytes"]),
        )
        for name, one in measured.items()
    ]


def _cluster(figures: dict) -> list[tuple[object, ...]]:
    return [(name, f"{rate:.3g}") for name, rate in figures["rates"].items()]


def _gigabytes(size: float | None) -> str:
    return "" if size is None else f"{size / GB:.2f} GB"


def _stages(results: Results) -> str:
    lines = [_row(("stage", "result", "seconds")), "|---|---|---|"]
    lines += [
        _row((name, result["state"], result.get("seconds", ""))) for name, result in results.items()
    ]
    return "\n".join(lines)
