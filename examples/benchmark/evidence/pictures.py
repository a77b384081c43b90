# SPDX-License-Identifier: Apache-2.0
"""The results as pictures: bars, and accuracy against λ, ε and the number of experts."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

# Rows in the pictures with one line per method.
SHOWN = ("linear (mean)", "task_arithmetic", "ties", "tsv_m", "iso_c", "iso_cts", "wudi (exact)",
         "ace, ε = 1e-05", "ace, ε = 0.01", "ace_relative")  # fmt: skip
Points = Mapping[float, Sequence[float]]


def draw_all(lines: Sequence[dict], folder: Path) -> list[Path]:
    """Every picture that the results are enough for; their files."""
    folder.mkdir(parents=True, exist_ok=True)
    table = [line for line in lines if line["group"] == "table"]
    made = []
    for family, experts in dict.fromkeys((line["family"], line["experts"]) for line in table):
        own = [line for line in table if (line["family"], line["experts"]) == (family, experts)]
        title = f"{family}, {experts} experts"
        made.append(_bars(own, title, folder / f"bars-{family}-{experts}.png"))
        curves = {name: _over_scales(own, name) for name in SHOWN}
        made.append(_lines(curves, title, "λ", folder / f"scale-{family}-{experts}.png"))
    for family in dict.fromkeys(line["family"] for line in lines):
        own = [line for line in lines if line["family"] == family]
        curves = {group: _over_epsilons(own, group) for group in _epsilon_groups(own)}
        if curves:
            made.append(_lines(curves, family, "ε", folder / f"epsilon-{family}.png", log=True))
        counts = {line["experts"] for line in own if line["group"] == "table"}
        if len(counts) > 1:
            curves = {name: _over_experts(own, name) for name in SHOWN}
            file = folder / f"experts-{family}.png"
            made.append(_lines(curves, family, "number of experts", file))
    return made


def _bars(lines: Sequence[dict], title: str, file: Path) -> Path:
    """Published defaults and best λ, a pair of bars per row, with the range over seeds."""
    names = list(dict.fromkeys(line["row"] for line in lines))
    figure, axes = plt.subplots(figsize=(7, 0.32 * len(names) + 1.2))
    for offset, kind in ((-0.2, "published"), (0.2, "best")):
        for place, name in enumerate(names):
            values = [line[kind]["mean"] for line in lines if line["row"] == name and kind in line]
            if not values:
                continue
            mean = sum(values) / len(values)
            spread = [[mean - min(values)], [max(values) - mean]]
            color = "tab:gray" if kind == "published" else "tab:blue"
            label = {"published": "published defaults", "best": "best λ"}[kind]
            axes.barh(
                place + offset, mean, 0.38, xerr=spread, color=color, ecolor="black",
                label=label if place == len(names) - 1 else None,
            )  # fmt: skip
    axes.set_yticks(range(len(names)), names)
    axes.invert_yaxis()
    axes.set_xlim(0, 1)
    axes.set_xlabel("accuracy on the experts' tasks (bars: mean over seeds; lines: range)")
    axes.set_title(title)
    axes.legend(loc="lower right")
    return _save(figure, file)


def _lines(
    curves: Mapping[str, Points], title: str, what: str, file: Path, *, log: bool = False
) -> Path:
    figure, axes = plt.subplots(figsize=(7, 4))
    for name, points in curves.items():
        if not points:
            continue
        places = sorted(points)
        means = [sum(points[place]) / len(points[place]) for place in places]
        (line,) = axes.plot(places, means, marker="o", markersize=3, label=name)
        low = [min(points[place]) for place in places]
        high = [max(points[place]) for place in places]
        axes.fill_between(places, low, high, alpha=0.12, color=line.get_color(), linewidth=0)
    if log:
        axes.set_xscale("log")
    axes.set_ylim(0, 1)
    axes.set_xlabel(what)
    axes.set_ylabel("accuracy on the experts' tasks")
    axes.set_title(f"{title}: mean and range over seeds")
    axes.grid(alpha=0.3)
    axes.legend(fontsize=7)
    return _save(figure, file)


def _save(figure, file: Path) -> Path:
    figure.savefig(file, dpi=130, bbox_inches="tight")
    plt.close(figure)
    return file


def _over_scales(lines: Iterable[dict], name: str) -> Points:
    points: dict[float, list[float]] = defaultdict(list)
    for line in lines:
        if line["row"] == name:
            for scale, score in line.get("curve", {}).items():
                points[float(scale)].append(score["new"])
    return points


def _epsilon_groups(lines: Iterable[dict]) -> list[str]:
    return [g for g in dict.fromkeys(line["group"] for line in lines) if g.endswith("over ε")]


def _over_epsilons(lines: Iterable[dict], group: str) -> Points:
    def epsilon(line: dict) -> float:
        return float(line["row"].rpartition("= ")[2])

    return _collect((line for line in lines if line["group"] == group), epsilon, "published")


def _over_experts(lines: Iterable[dict], name: str) -> Points:
    own = (line for line in lines if line["row"] == name and "best" in line)
    return _collect(own, lambda line: line["experts"], "best")


def _collect(lines: Iterable[dict], place: Callable[[dict], float], kind: str) -> Points:
    points: dict[float, list[float]] = defaultdict(list)
    for line in lines:
        points[place(line)].append(line[kind]["mean"])
    return points
