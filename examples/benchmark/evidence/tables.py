# SPDX-License-Identifier: Apache-2.0
"""Results as Markdown tables: the mean over seeds, and how far they spread."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence


def print_tables(lines: Sequence[dict]) -> None:
    """A table per group of rows: a line per row, two columns per family."""
    groups: dict[str, list[dict]] = defaultdict(list)
    for line in lines:
        groups[line["group"]].append(line)
    for group, members in groups.items():
        print(f"\n**{group}**: accuracy on the experts' tasks, mean over seeds (± half the range)")
        print(table(members))


def table(lines: Sequence[dict]) -> str:
    """Rows by method, columns by family: as published, and at the best λ."""
    families = list(dict.fromkeys((line["family"], line["experts"]) for line in lines))
    names = list(dict.fromkeys(line["row"] for line in lines))
    titles = [f"{name} ({experts})" for name, experts in families]
    text = ["| | " + " | ".join(f"{title} | best λ" for title in titles) + " |"]
    text.append("|---" * (1 + 2 * len(families)) + "|")
    for name in names:
        cells = []
        for family, experts in families:
            own = [
                line
                for line in lines
                if (line["row"], line["family"], line["experts"]) == (name, family, experts)
            ]
            cells += [cell(own, "published"), cell(own, "best")]
        text.append(f"| {name} | " + " | ".join(cells) + " |")
    return "\n".join(text)


def cell(lines: Sequence[dict], kind: str) -> str:
    """Mean, half the range over seeds, and old skills where they suffered."""
    values = [line[kind]["mean"] for line in lines if kind in line]
    if not values:
        return ""
    text = f"{sum(values) / len(values):.3f}"
    if len(values) > 1:
        text += f" ± {(max(values) - min(values)) / 2:.3f}"
    old = [line[kind]["old"] for line in lines if kind in line and line[kind]["old"] is not None]
    if old and sum(old) / len(old) < 0.99:
        text += f" (old {sum(old) / len(old):.2f})"
    return text
