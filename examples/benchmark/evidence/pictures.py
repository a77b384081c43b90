# SPDX-License-Identifier: Apache-2.0
"""The results as pictures: bars, and accuracy against λ, ε, number and strengths of experts."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

# Rows in the pictures with one line per method.
SHOWN = ("linear (mean)", "task_arithmetic", "ties", "tsv_m", "iso_c", "wudi (exact)",
         "ace, ε = 1e-05", "ace, ε = 0.01", "ace_relative")  # fmt: skip
# Families that are one but for how far the strengths of their experts are apart.
STRENGTHS = ("llama", "llama-spread", "llama-strengths")
Points = Mapping[float, Sequence[float]]
Panels = Mapping[str, Mapping[str, Points]]


def draw_all(lines: Sequence[dict], folder: Path) -> list[Path]:
    """Draw every picture that the results are enough for; return their files."""
    folder.mkdir(parents=True, exist_ok=True)
    table = [line for line in lines if line["group"] == "table"]
    members: dict[tuple[str, int], list[dict]] = defaultdict(list)
    for line in table:
        members[line["family"], line["experts"]].append(line)
    largest: dict[str, int] = {}
    for family, experts in members:
        largest[family] = max(experts, largest.get(family, 0))
    whole = {family: members[family, experts] for family, experts in largest.items()}
    made = [
        _panels(whole, _bars, folder / "bars.png", height=0.2 * len(_names(table)) + 0.8),
        _curves(
            {f: {name: _over_scales(own, name) for name in SHOWN} for f, own in whole.items()},
            "λ",
            folder / "scale.png",
        ),
    ]
    own = {f: [line for line in lines if line["family"] == f] for f in whole}
    epsilons = {
        f: {group: _over_epsilons(ls, group) for group in _epsilon_groups(ls)}
        for f, ls in own.items()
    }
    epsilons = {f: curves for f, curves in epsilons.items() if curves}
    if epsilons:
        made.append(_curves(epsilons, "ε", folder / "epsilon.png", log=True))
    # the families of the same experts, some of them
    counts = {
        f: {name: _over_experts(ls, name) for name in SHOWN}
        for f, ls in own.items()
        if len({experts for family, experts in members if family == f}) > 1
    }
    if counts:
        made.append(_curves(counts, "number of experts", folder / "experts.png"))
    spreads = {name: _over_spreads(table, name) for name in SHOWN}
    if any(len(points) > 1 for points in spreads.values()):
        what = "largest ‖Δ‖² over the smallest"
        file = folder / "strengths.png"
        made.append(_curves({"llama, four experts": spreads}, what, file, log=True))
    return made


def _names(lines: Iterable[dict]) -> list[str]:
    return list(dict.fromkeys(line["row"] for line in lines))


def _panels(
    content: Mapping, draw: Callable, file: Path, *, height: float = 3.0, width: float = 4.2
) -> Path:
    """Draw a picture with a panel for each of `content`, its title the key."""
    across = min(len(content), 4)
    down = math.ceil(len(content) / across)
    figure, axes = plt.subplots(
        down, across, figsize=(width * across, height * down), squeeze=False, sharey=True
    )
    for place, (title, one) in zip(axes.flat, content.items(), strict=False):
        draw(place, one)
        place.set_title(title)
    for place in list(axes.flat)[len(content) :]:
        place.axis("off")
    handles = {}
    for place in axes.flat:
        found = place.get_legend_handles_labels()
        handles |= dict(zip(found[1], found[0], strict=True))
    figure.legend(
        handles.values(), handles.keys(), loc="lower center", ncols=5, bbox_to_anchor=(0.5, 1.0)
    )
    figure.tight_layout()
    figure.savefig(file, dpi=80, bbox_inches="tight")
    plt.close(figure)
    return file


def _bars(axes, lines: Sequence[dict]) -> None:
    """Draw a pair of bars per row, published defaults and best λ, with the range over seeds."""
    names = _names(lines)
    for offset, kind in ((-0.2, "published"), (0.2, "best")):
        for place, name in enumerate(names):
            values = [line[kind]["mean"] for line in lines if line["row"] == name and kind in line]
            if not values:
                continue
            mean = sum(values) / len(values)
            spread = [[mean - min(values)], [max(values) - mean]]
            color = "tab:gray" if kind == "published" else "tab:blue"
            label = {"published": "published defaults", "best": "best λ"}[kind]
            axes.barh(place + offset, mean, 0.38, xerr=spread, color=color, label=label)
    axes.set_yticks(range(len(names)), names)
    axes.set_ylim(len(names) - 0.4, -0.6)
    axes.set_xlim(0, 1)
    axes.set_xlabel("accuracy; lines: range over seeds")


def _curves(panels: Panels, what: str, file: Path, *, log: bool = False) -> Path:
    """Draw a panel per family, a line per method: the mean over seeds, the range shaded."""
    labels = list(dict.fromkeys(name for curves in panels.values() for name in curves))
    colors = {name: f"C{number % 10}" for number, name in enumerate(labels)}

    def draw(axes, curves: Mapping[str, Points]) -> None:
        for name, points in curves.items():
            places = sorted(points)
            if not places:
                continue
            means = [sum(points[place]) / len(points[place]) for place in places]
            axes.plot(places, means, marker="o", markersize=3, label=name, color=colors[name])
            low = [min(points[place]) for place in places]
            high = [max(points[place]) for place in places]
            axes.fill_between(places, low, high, alpha=0.12, color=colors[name], linewidth=0)
        if log:
            axes.set_xscale("log")
        axes.set_xlabel(what)
        axes.set_ylabel("accuracy")
        axes.grid(alpha=0.3)

    return _panels(panels, draw, file, width=6.0 if len(panels) == 1 else 4.2)


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


def _over_spreads(lines: Sequence[dict], name: str) -> Points:
    """Return the scores of a row over the mean spread of each of `STRENGTHS`."""
    points: dict[float, list[float]] = {}
    for family in STRENGTHS:
        own = [line for line in lines if line["family"] == family]
        spreads = [line["spread"] for line in own if "spread" in line]
        scores = [line["best"]["mean"] for line in own if line["row"] == name and "best" in line]
        if spreads and scores:
            points[math.exp(sum(map(math.log, spreads)) / len(spreads))] = scores
    return points


def _collect(lines: Iterable[dict], place: Callable[[dict], float], kind: str) -> Points:
    points: dict[float, list[float]] = defaultdict(list)
    for line in lines:
        points[place(line)].append(line[kind]["mean"])
    return points
