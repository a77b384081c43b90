# SPDX-License-Identifier: Apache-2.0
"""Make every table and the picture of the documents from results.json: in pages, between marks."""

from __future__ import annotations

import hashlib
import json
import re
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path
from statistics import mean, variance
from typing import Any

HERE = Path(__file__).resolve().parent
RESULTS, PICTURE = HERE / "results.json", HERE / "frontiers.png"
PAGES = (HERE / "README.md", HERE.parents[1] / "README.md")
MARK = re.compile(r"(<!-- table: (.+?) -->\n).*?(<!-- end of table -->)", re.DOTALL)
SMALL = ("llama", "llama-strengths", "llama-muon", "gpt2", "roberta", "images")
LANGUAGE = ("smollm-control, 40 steps", "smollm, 40 steps, GPU", "smollm, 160 steps, GPU",
            "smollm-muon, 40 steps", "smollm-sparse, 40 steps",
            "smollm-lora, 40 steps", "smollm-lora-fast, 40 steps")  # fmt: skip
ROUNDED = ("smollm, 160", "smollm-muon, 160")
HEADLINE = "smollm, 40 steps"
DRAWN = {"ace_plus": "tab:purple", "ace": "tab:red", "tsv_m": "tab:blue", "iso_c": "tab:green",
         "task_arithmetic": "black", "ties": "tab:gray"}  # fmt: skip
Figure, Result = tuple[float, float], dict[str, Any]  # number and standard error; a row


def read_results(path: Path = RESULTS) -> list[Result]:
    """Return all results of a file, which may not be there yet."""
    return json.loads(path.read_text(encoding="utf-8")) if path.exists() else []


def pool(figures: list[Figure]) -> Figure:
    """Return the mean over seeds; sequences are the same in all seeds, so their error stays."""
    values = [value for value, _ in figures]
    between = variance(values) / len(values) if len(values) > 1 else 0.0
    return mean(values), (mean(error**2 for _, error in figures) + between) ** 0.5


def by_family(results: list[Result]) -> dict[str, dict[str, list[Result]]]:
    """Return results by the title of their family, and by method."""
    families: dict[str, dict[str, list[Result]]] = defaultdict(lambda: defaultdict(list))
    for result in results:
        if "method" in result:
            title = ", ".join(filter(None, (result["family"], result["variant"])))
            families[title][result["method"]].append(result)
    return families


def pool_at(results: list[Result], scale: float, what: str) -> Figure:
    """Return `kept` or `forgot` of all seeds at a λ that was measured."""
    return pool([result[what][result["scales"].index(scale)] for result in results])


def table(head: list[str], rows: list[list[str]]) -> str:
    """Return a Markdown table."""
    lines = [head, ["---"] * len(head), *rows]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def family_table(methods: dict[str, list[Result]]) -> str:
    """Return a family's table: kept at the budget, and both scores at the default λ."""
    rows = []
    for name, results in methods.items():
        budget = pool([result["at_budget"] for result in results])
        scale = mean(result["best_scale"] for result in results)
        kept, forgot = (pool_at(results, 1.0, what) for what in ("kept", "forgot"))
        best, default = ("{:.3f} ± {:.3f}".format(*figure) for figure in (budget, kept))
        line = [f"`{name}`", best, f"{scale:.2f}", default, f"{forgot[0]:+.3f}"]
        rows.append((budget[0], line))
    head = ["method", "kept at the budget", "at λ", "kept at λ = 1", "forgot at λ = 1"]
    return table(head, [line for _, line in sorted(rows, reverse=True)])


def compared(families: dict[str, dict[str, list[Result]]], wanted: Iterable[str]) -> str:
    """Return what each method keeps of some families at the budget, by its share of the best."""
    names = [name for name in wanted if name in families]
    methods = list(dict.fromkeys(method for name in names for method in families[name]))
    columns = [
        {key: pool([one["at_budget"] for one in seeds]) for key, seeds in families[name].items()}
        for name in names
    ]
    rows = []
    for method in methods:
        shares = [own[method][0] / max(own.values())[0] for own in columns if method in own]
        cells = (own.get(method) for own in columns)
        shown = (f"{f[0]:.3f}({1000 * f[1]:.0f})" if f else "–" for f in cells)
        rows.append((mean(shares), [f"`{method}`", *shown]))
    titles = [name.removeprefix("smollm-").partition(" steps")[0] for name in names]
    return table(["method", *titles], [row for _, row in sorted(rows, reverse=True)])


def make_tables(results: list[Result]) -> dict[str, str]:
    """Return every table by its name: of a family, and of several."""
    families = by_family(results)
    tables = {title: family_table(methods) for title, methods in families.items()}
    tables["small families"] = compared(families, SMALL)
    tables["language families"] = compared(families, LANGUAGE)
    rounded = [f"{name} steps, bfloat16" for name in ROUNDED]
    tables["bfloat16 families"] = compared(families, rounded)
    return tables


def fill_in(text: str, tables: dict[str, str]) -> str:
    """Return a page with the present tables between its marks."""
    return MARK.sub(lambda mark: mark[1] + tables[mark[2]] + mark[3], text)


def digest(path: Path = RESULTS) -> str:
    """Return what the picture bears as the mark of the results that it was drawn from."""
    return hashlib.sha256(path.read_bytes()).hexdigest()


def draw(results: list[Result], path: Path = PICTURE) -> None:
    """Draw the frontiers of the headline family: kept over forgot, with λ = 1 as a dot."""
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(8, 5), layout="constrained")
    methods = by_family(results)[HEADLINE]
    for name, color in DRAWN.items():
        seeds = methods[name]
        scales = [s for s in seeds[0]["scales"] if all(s in seed["scales"] for seed in seeds)]
        forgot, kept = (
            [pool_at(seeds, scale, what)[0] for scale in scales] for what in ("forgot", "kept")
        )
        axes.plot(forgot, kept, ".-", color=color, label=name, markersize=4)
        axes.plot(*(line[scales.index(1.0)] for line in (forgot, kept)), "o", color=color)
    axes.axvline(0.05, color="silver", zorder=0, label="budget")
    axes.set(xlim=(None, 0.5), ylim=(0.2, 1.0), ylabel="kept", xlabel="forgot, nats per token")
    figure.legend(loc="outside right upper", title="large dots: λ = 1")
    figure.savefig(path, dpi=110, metadata={"Results": digest()})


def main() -> None:
    results = read_results()
    for page in PAGES:
        page.write_text(fill_in(page.read_text("utf-8"), make_tables(results)), encoding="utf-8")
    draw(results)


if __name__ == "__main__":
    main()
