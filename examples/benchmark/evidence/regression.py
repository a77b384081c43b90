# SPDX-License-Identifier: Apache-2.0
"""Results as one small JSON file, and what has changed since it was written."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from pathlib import Path

# With 1,536 answers a family and seed, a difference below this is noise.
NOISE = 0.03
Summary = dict[str, dict[str, float]]


def summarise(lines: Iterable[dict]) -> Summary:
    """Accuracy by place ("family/experts/seed/row") and kind ("published", "best")."""
    summary: Summary = {}
    for line in lines:
        place = "/".join(str(line[part]) for part in ("family", "experts", "seed", "row"))
        kinds = [kind for kind in ("published", "best") if kind in line]
        summary[place] = {kind: round(line[kind]["mean"], 4) for kind in kinds}
    return summary


def write_summary(lines: Iterable[dict], file: Path) -> None:
    """A line per place, so that versions can be compared."""
    places = [f"{json.dumps(k)}: {json.dumps(v)}" for k, v in summarise(lines).items()]
    file.write_text("{\n" + ",\n".join(places) + "\n}\n", encoding="utf-8")


def changes(lines: Iterable[dict], file: Path) -> Iterator[str]:
    """In words, every place of both whose accuracy differs by more than noise."""
    known = json.loads(file.read_text(encoding="utf-8"))
    for place, scores in summarise(lines).items():
        for kind, value in scores.items():
            before = known.get(place, {}).get(kind)
            if before is not None and abs(value - before) > NOISE:
                yield f"{place}, {kind}: {before:.3f} before, {value:.3f} now"
