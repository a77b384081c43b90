# SPDX-License-Identifier: Apache-2.0
"""Results as Markdown tables: the mean over seeds, and how far they spread."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

TITLES = {
    "published": "as published (λ and all else at the defaults)",
    "best": "at the best λ of the validation split",
}
KEPT = 0.99  # share of what the base knew that needs no mention


def print_tables(lines: Sequence[dict]) -> None:
    """A table per group of rows and kind of λ: a line per row, a column per family."""
    groups: dict[str, list[dict]] = defaultdict(list)
    for line in lines:
        groups[line["group"]].append(line)
    for group, members in groups.items():
        for kind, title in TITLES.items():
            if any(kind in line for line in members):
                print(f"\n{group}, {title}: accuracy on the experts' tasks, ± half the range\n")
                print(table(members, kind))


def table(lines: Sequence[dict], kind: str) -> str:
    """Rows by method, columns by family.

    Args:
        lines: of results.
        kind: ``published`` or ``best``.
    """
    families = list(dict.fromkeys((line["family"], line["experts"]) for line in lines))
    names = list(dict.fromkeys(line["row"] for line in lines if kind in line))
    counts = {family: sum(other[0] == family[0] for other in families) for family in families}
    titles = [
        name if counts[name, experts] == 1 else f"{name}, {experts} experts"
        for name, experts in families
    ]
    text = ["| | " + " | ".join(titles) + " |", "|---" * (1 + len(families)) + "|"]
    for name in names:
        cells = []
        for family in families:
            own = [
                line[kind]
                for line in lines
                if line["row"] == name
                and (line["family"], line["experts"]) == family
                and kind in line
            ]
            cells.append(cell(own))
        text.append(f"| {name} | " + " | ".join(cells) + " |")
    return "\n".join(text)


def cell(scores: Sequence[dict]) -> str:
    """Mean and half the range over seeds, and what the base knew where that suffered."""
    if not scores:
        return ""
    values = [score["mean"] for score in scores]
    text = f"{sum(values) / len(values):.3f}"
    if len(values) > 1:
        text += f" ± {(max(values) - min(values)) / 2:.3f}"
    old = [score["old"] for score in scores if score["old"] is not None]
    if old and sum(old) / len(old) < KEPT:
        text += f" (old {sum(old) / len(old):.2f})"
    return text
