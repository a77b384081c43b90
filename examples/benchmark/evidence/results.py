# SPDX-License-Identifier: Apache-2.0
"""Results: kept as lines of JSON, printed as Markdown tables, compared with earlier ones."""

from __future__ import annotations

import hashlib
import json
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path

import mergekit_ace

# Folders of the package that results come from.
CODE = ("algebra", "coefficients", "methods", "training")
# With 1,536 answers a family and seed, a difference below this is noise.
NOISE = 0.03
Summary = dict[str, dict[str, float]]
TITLES = {
    "published": "as published (λ and all else at the defaults)",
    "best": "at the best λ of the validation split",
}
KEPT = 0.99  # share of what the base knew that needs no mention


def key(line: dict) -> tuple:
    """Return what identifies a result."""
    return tuple(line[part] for part in ("family", "seed", "experts", "row"))


@cache
def code_version() -> str:
    """Return eight digits that stand for the code that merges, and that learns coefficients."""
    package = Path(mergekit_ace.__file__).parent
    files = sorted(file for folder in CODE for file in (package / folder).rglob("*.py"))
    return hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()[:8]


def is_known(head: dict, row: str, results: Mapping[tuple, dict]) -> bool:
    """Tell whether the row of a family has a result that this code has made."""
    return results.get(key({**head, "row": row}), {}).get("code") == code_version()


def read_results(path: Path) -> list[dict]:
    """Return the results of a file; of several for the same key, the last."""
    if not path.exists():
        return []
    found = {}
    for text in path.read_text(encoding="utf-8").splitlines():
        line = json.loads(text)
        found[key(line)] = line
    return list(found.values())


def keep(lines: list[dict], results: dict, path: Path) -> None:
    """Add lines to the results and to the file, and print them."""
    with open(path, "a", encoding="utf-8") as file:
        for line in lines:
            line = {**line, "code": code_version()}
            results[key(line)] = line
            file.write(json.dumps(line) + "\n")
            best = ""
            if "best" in line:
                best = f", best λ {line['best_scale']:g}: {line['best']['mean']:.3f}"
            print(
                f"{line['family']} {line['seed']} {line['row']}: "
                f"{line['published']['mean']:.3f}{best}",
                flush=True,
            )


def print_tables(lines: Sequence[dict]) -> None:
    """Print a table per group of rows and kind of λ: a line per row, a column per family."""
    groups: dict[str, list[dict]] = defaultdict(list)
    for line in lines:
        groups[line["group"]].append(line)
    for group, members in groups.items():
        for kind, title in TITLES.items():
            scores = [line[kind] for line in members if kind in line]
            if scores:
                halves = any("seen" in score for score in scores)
                what = "words that no sample asks, ± half the range / the others" * halves
                what = what or "the experts' tasks, ± half the range"
                print(f"\n{group}, {title}: accuracy on {what}\n")
                print(table(members, kind))


def table(lines: Sequence[dict], kind: str) -> str:
    """Return a Markdown table: a line per method, a column per family.

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
    """Return mean and half the range over seeds, and what the base knew where that suffered.

    Where samples asked half of the words, their mean follows that of the others.
    """
    if not scores:
        return ""
    if any("error" in score for score in scores):
        return "error"
    values = [score["mean"] for score in scores]
    text = f"{sum(values) / len(values):.3f}"
    if len(values) > 1:
        text += f" ± {(max(values) - min(values)) / 2:.3f}"
    seen = [score["seen"] for score in scores if "seen" in score]
    if seen:
        text += f" / {sum(seen) / len(seen):.3f}"
    old = [score["old"] for score in scores if score["old"] is not None]
    if old and sum(old) / len(old) < KEPT:
        text += f" (old {sum(old) / len(old):.2f})"
    return text


def summarise(lines: Iterable[dict]) -> Summary:
    """Return accuracy by place ("family/experts/seed/row") and kind ("published", "best")."""
    summary: Summary = {}
    for line in lines:
        place = "/".join(str(line[part]) for part in ("family", "experts", "seed", "row"))
        kinds = [kind for kind in ("published", "best") if kind in line]
        summary[place] = {kind: round(line[kind]["mean"], 4) for kind in kinds}
    return summary


def write_summary(lines: Iterable[dict], file: Path) -> None:
    """Write a line per place, so that versions can be compared."""
    places = [f"{json.dumps(k)}: {json.dumps(v)}" for k, v in summarise(lines).items()]
    file.write_text("{\n" + ",\n".join(places) + "\n}\n", encoding="utf-8")


def changes(lines: Iterable[dict], file: Path) -> Iterator[str]:
    """Yield a sentence per place whose accuracy differs from the file's by more than noise."""
    known = json.loads(file.read_text(encoding="utf-8"))
    for place, scores in summarise(lines).items():
        for kind, value in scores.items():
            before = known.get(place, {}).get(kind)
            if before is not None and abs(value - before) > NOISE:
                yield f"{place}, {kind}: {before:.3f} before, {value:.3f} now"
