# SPDX-License-Identifier: Apache-2.0
"""Results: kept as lines of JSON, and written as Markdown tables and a page of answers."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from measure import mean_loss, share_kept

YARDSTICK = "task_arithmetic"  # at its best λ: what the others are compared with


@dataclass(frozen=True)
class Known:
    """Results of earlier runs and this one, by key; of several for a key, the last counts."""

    file: Path
    lines: dict[str, dict]

    @classmethod
    def read(cls, file: Path) -> Known:
        """Return the results of a file, of which the last line may be cut off."""
        lines = {}
        for text in file.read_text(encoding="utf-8").splitlines() if file.exists() else ():
            try:
                line = json.loads(text)
            except json.JSONDecodeError:  # a run was killed while it wrote
                continue
            lines[line["key"]] = line
        return cls(file, lines)

    def keep(self, line: dict) -> None:
        """Add a line here and in the file."""
        self.lines[line["key"]] = line
        whole = not self.file.exists() or self.file.read_bytes().endswith(b"\n")
        with open(self.file, "a", encoding="utf-8") as file:
            file.write("" if whole else "\n")
            file.write(json.dumps(line) + "\n")


@dataclass(frozen=True)
class Family:
    """The results of one family, to be compared.

    Attributes:
        title: which experts these are.
        base: scores of the base model.
        experts: scores of every expert.
        merges: lines of all merges, in the order of the table.
        untrained: names of the texts that nobody learned.
    """

    title: str
    base: Mapping[str, dict]
    experts: Mapping[str, Mapping[str, dict]]
    merges: Sequence[dict]
    untrained: Sequence[str]

    def shares(self, scores: Mapping[str, dict]) -> dict[str, tuple[float, list[float]]]:
        """Return for every expert what is kept of its gain; see `share_kept`."""
        return {
            name: share_kept(self.base[name], own[name], scores[name])
            for name, own in self.experts.items()
        }

    def mean_share(self, scores: Mapping[str, dict]) -> tuple[float, list[float]]:
        """Return the mean over experts of what is kept, and what adds up to its error."""
        shares = list(self.shares(scores).values())
        count = len(shares)
        away = [value / count for _, values in shares for value in values]
        return sum(share for share, _ in shares) / count, away

    def title_of(self, line: Mapping) -> str:
        """Return a row's name in the table."""
        return f"{line['row']}, best λ" if line["kind"] == "best" else line["row"]

    def difference(self, line: Mapping) -> tuple[float, float] | None:
        """Return by how much a merge keeps more than task arithmetic at its best λ, with its error.

        Both were measured on the same sequences, so that the error is that of paired differences.
        """
        best = [one for one in self.merges if one["row"] == YARDSTICK and one["kind"] == "best"]
        if not best or line is best[0]:
            return None
        return self.difference_from(line, best[0])

    def difference_from(self, line: Mapping, other: Mapping) -> tuple[float, float]:
        """Return by how much a merge keeps more than another, with its error."""
        ours, theirs = self.mean_share(line["scores"]), self.mean_share(other["scores"])
        away = [a - b for a, b in zip(ours[1], theirs[1], strict=True)]
        return ours[0] - theirs[0], root_of_squares(away)


def root_of_squares(values: Sequence[float]) -> float:
    return sum(value * value for value in values) ** 0.5


def share_of_right(score: Mapping[str, Sequence[int]]) -> str:
    """Return the share of questions that were answered right, with its standard error."""
    answers = score["answers"]
    share = sum(answers) / len(answers)
    return f"{share:.3f} ± {(share * (1 - share) / len(answers)) ** 0.5:.3f}"


def pages(families: Sequence[Family]) -> str:
    """Return the tables of all families, and what they say together before them."""
    together = ["## All families\n\n" + overview(families)] if len(families) > 1 else []
    return "\n\n".join([*together, *map(tables, families)]) + "\n"


def tables(family: Family) -> str:
    """Return the table of what is kept, and those of losses and of next tokens."""
    return f"## {family.title}\n\n" + "\n\n".join([
        kept_table(family),
        plain_table(family, "Loss, in nats per token", lambda score: f"{mean_loss(score):.3f}"),
        plain_table(
            family, "Next tokens that are the model's first choice",
            lambda score: f"{sum(score['right']) / sum(score['tokens']):.3f}",
        ),
    ])  # fmt: skip


def kept_table(family: Family) -> str:
    """Return the main table: what is kept, right answers, what nobody learned, and the time."""
    names = list(family.experts)
    asked = [name for name in names if "answers" in family.base[name]]
    header = ["merge", "λ", "kept", "against task arithmetic", *names,
              *(f"{name}, right answers" for name in asked),
              *(f"{name}, loss" for name in family.untrained), "seconds"]  # fmt: skip
    rows = []
    entries = [("base", family.base), *((f"expert {n}", s) for n, s in family.experts.items())]
    for title, scores in entries:
        rows.append([title, "", "", "", *own_cells(family, scores, title == "base"),
                     *tail_cells(family, asked, scores), ""])  # fmt: skip
    for line in family.merges:
        scores = line["scores"]
        share, away = family.mean_share(scores)
        difference = family.difference(line)
        rows.append([
            family.title_of(line), f"{line['scale']:g}",
            f"{share:.3f} ± {root_of_squares(away):.3f}",
            "" if difference is None else f"{difference[0]:+.3f} ± {difference[1]:.3f}",
            *own_cells(family, scores, False), *tail_cells(family, asked, scores),
            f"{line['seconds']:.0f}",
        ])  # fmt: skip
    return markdown(header, rows)


def overview(families: Sequence[Family]) -> str:
    """Return the table of what each merge keeps in every family, and its λ where that is chosen."""
    rows = list(dict.fromkeys(f.title_of(line) for f in families for line in f.merges))
    return markdown(
        ["merge", *(family.title.split(":")[0] for family in families), "mean"],
        [overview_row(families, title) for title in rows],
    )


def overview_row(families: Sequence[Family], title: str) -> list[str]:
    """Return a row of the overview; it has a mean only if every family has the merge."""
    cells, shares = [title], []
    for family in families:
        line = next((line for line in family.merges if family.title_of(line) == title), None)
        if line is None:
            cells.append("")
            continue
        share, away = family.mean_share(line["scores"])
        shares.append(share)
        chosen = f", λ {line['scale']:g}" if line["kind"] == "best" else ""
        cells.append(f"{share:.3f} ± {root_of_squares(away):.3f}{chosen}")
    whole = len(shares) == len(families)
    return [*cells, f"{sum(shares) / len(shares):.3f}" if whole else ""]


def own_cells(family: Family, scores: Mapping[str, dict], is_base: bool) -> list[str]:
    """Return what is kept of every expert's gain."""
    return [f"{0.0 if is_base else share:.2f}" for share, _ in family.shares(scores).values()]


def tail_cells(family: Family, asked: Sequence[str], scores: Mapping[str, dict]) -> list[str]:
    """Return right answers, and losses on what nobody learned."""
    losses = [f"{mean_loss(scores[name]):.3f}" for name in family.untrained]
    return [*(share_of_right(scores[name]) for name in asked), *losses]


def plain_table(family: Family, title: str, show) -> str:
    """Return a table with a column per text."""
    names = [*family.experts, *family.untrained]
    rows = [["base", *(show(family.base[name]) for name in names)]]
    rows += [
        [f"expert {expert}", *(show(scores[name]) for name in names)]
        for expert, scores in family.experts.items()
    ]
    rows += [
        [family.title_of(line), *(show(line["scores"][name]) for name in names)]
        for line in family.merges
    ]
    return f"{title}:\n\n" + markdown(["model", *names], rows)


def markdown(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join("| " + " | ".join(cells) + " |" for cells in lines)


def answers_page(
    title: str, prompts: Sequence[Mapping[str, str]], answers: Mapping[str, list[str]]
) -> str:
    """Return a page with every model's answer to every prompt.

    Args:
        title: of the family.
        prompts: in order.
        answers: by model.
    """
    parts = [f"# {title}"]
    for number, prompt in enumerate(prompts):
        said = prompt.get("chat") or prompt["text"]
        parts.append(f"## {number + 1}. {json.dumps(said, ensure_ascii=False)}")
        rows = [[model, json.dumps(given[number], ensure_ascii=False).replace("|", "\\|")]
                for model, given in answers.items()]  # fmt: skip
        parts.append(markdown(["model", "answer"], rows))
    return "\n\n".join(parts) + "\n"
