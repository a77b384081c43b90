# SPDX-License-Identifier: Apache-2.0
"""Fine-tune a real language model into experts, merge them by every method, measure what is left.

    python examples/llm/run.py                              # SmolLM2-135M, five experts
    python examples/llm/run.py --kinds lora --rows task_arithmetic ace
    python examples/llm/run.py --base HuggingFaceTB/SmolLM2-135M-Instruct --data my.yml

`pip install '.[llm]'` first. Everything that was made is kept in the output folder under a name
that says from what, so that a run that was stopped goes on where it was. The table comes out as
`table.md`, the picture as `picture.png`, the answers to ten prompts as `answers.md`, and all
figures as `results.jsonl`.
"""

from __future__ import annotations

import argparse
import os
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import cached_property
from itertools import product
from pathlib import Path

os.environ.setdefault("OMP_WAIT_POLICY", "passive")  # before torch starts its threads
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
os.environ.setdefault("TQDM_DISABLE", "1")  # or every model read draws a bar

from experts import (
    RATES,
    Recipe,
    digest,
    digest_of_files,
    expert_folder,
    prepare_base,
    train_expert,
)
from measure import Examiner, Sizes, share_kept
from merges import ON_DEMAND, ROWS, SCALES, Merge, Row
from picture import draw
from results import Family, Known, answers_page, pages
from sources import LENGTH, Data, Part, Texts, read_sources

HERE = Path(__file__).resolve().parent
SOURCES = HERE / "data" / "sources.yml"
EXAM = (HERE / "measure.py", HERE / "sources.py")  # the code that results come from


class NotMeasured(SystemExit):
    """A result is not among those of earlier runs, and nothing is to be measured."""

    def __init__(self) -> None:
        super().__init__("This is not measured yet: run the same without --only-print.")


class Study:
    """One family of experts: trained, merged by every row, measured.

    Args:
        base: folder of the base model.
        recipe: of all experts.
        texts: by name of the expert.
        untrained: texts that nobody learns.
        known: results.
        settings: of the command line.
        data: with the prompts.
    """

    def __init__(
        self,
        base: Path,
        recipe: Recipe,
        texts: dict[str, Texts],
        untrained: dict[str, Texts],
        known: Known,
        settings: argparse.Namespace,
        data: Data,
    ):
        self.base, self.recipe, self.texts, self.untrained = base, recipe, texts, untrained
        self.known, self.settings, self.data = known, settings, data
        self.seconds: Counter[str] = Counter()
        make = expert_folder if settings.only_print else train_expert
        with self.timed("training"):
            self.experts = {
                name: make(base, own, recipe, settings.output / "models")
                for name, own in texts.items()
            }
        learned = {name: own.fingerprint for name, own in texts.items()}
        others = {name: own.fingerprint for name, own in untrained.items()}
        sizes, code = settings.sizes, digest_of_files(*EXAM)
        self.exams: dict[Part, str] = {
            "validation": digest(sizes.validation, learned, code),
            "test": digest(sizes.test, learned, sizes.untrained, others, data.prompts, code),
        }

    @contextmanager
    def timed(self, what: str) -> Iterator[None]:
        """Add the seconds that a block takes to what the program says at its end."""
        start = time.perf_counter()
        yield
        self.seconds[what] += time.perf_counter() - start

    @cached_property
    def examiner(self) -> Examiner:
        """The base model in memory, once something has to be measured."""
        return Examiner(self.base, self.texts, self.untrained, self.settings.sizes, self.data)

    def measure(self, model: Path | Merge, part: Part = "test", factor: float = 1.0) -> dict:
        """Return the line of a model; measure it unless it is known.

        Args:
            model: a folder, or a merge that is made only if needed.
            part: what is measured; answers to prompts belong to the test.
            factor: that the model's task vector is multiplied by here.
        """
        folder = model.target if isinstance(model, Merge) else model
        key = digest(folder.name, part, factor, self.exams[part])
        if key not in self.known.lines:
            if self.settings.only_print:
                raise NotMeasured()
            if isinstance(model, Merge):
                with self.timed("merging"):
                    model.make()
            with self.timed("exams"):
                self.examiner.put(folder, factor)
                line = {"key": key, "model": folder.name, "part": part, "factor": factor,
                        "scores": self.examiner.examine(part)}  # fmt: skip
                if part == "test":
                    line["answers"] = self.examiner.answer_prompts()
            if isinstance(model, Merge):
                line |= {"row": model.row.name, "scale": model.scale * factor}
                line["seconds"] = model.seconds
            self.known.keep(line)
            print(f"measured {folder.name} · {factor:.3g}, {part}", flush=True)
        return self.known.lines[key]

    def scores(self, part: Part) -> tuple[dict, dict[str, dict]]:
        """Return the scores of the base, and of every expert."""
        experts = {n: self.measure(path, part)["scores"] for n, path in self.experts.items()}
        return self.measure(self.base, part)["scores"], experts

    def merge(self, row: Row, scale: float) -> Merge:
        """Return a merge of the family's experts."""
        return Merge(row, scale, self.base, self.experts, self.texts,
                     self.settings.output / "merges")  # fmt: skip

    def lines_of(self, row: Row) -> Iterator[dict]:
        """Yield the line of a row as it is, and at its best λ: of one merge, which is scaled."""
        merge = self.merge(row, row.published)
        yield {**self.measure(merge), "kind": "published"}
        if row.scaled:
            factor = self.best_scale(merge) / merge.scale
            yield {**self.measure(merge, factor=factor), "kind": "best"}
        if not self.settings.keep and not self.settings.only_print:
            merge.remove()

    def best_scale(self, merge: Merge) -> float:
        """Return the λ that keeps most on the validation part.

        From the row's own λ on, the next one is tried in both directions as long as it is better.
        """
        base, experts = self.scores("validation")

        def kept(place: int) -> float:
            factor = SCALES[place] / merge.scale
            scores = self.measure(merge, "validation", factor)["scores"]
            return sum(
                share_kept(base[name], own[name], scores[name])[0] for name, own in experts.items()
            )

        best = SCALES.index(merge.scale)
        for direction in (-1, 1):
            while 0 <= best + direction < len(SCALES) and kept(best + direction) > kept(best):
                best += direction
        return SCALES[best]

    def run(self, rows: Sequence[Row]) -> tuple[Family, dict[str, list[str]]]:
        """Return all results of the family, and all answers."""
        base, experts = self.scores("test")
        merges: list[dict] = []
        for row in rows:
            with suppress(NotMeasured):
                for line in self.lines_of(row):
                    merges.append(line)
        title = f"{self.recipe.title}: {', '.join(self.texts)}"
        family = Family(title, base, experts, merges, list(self.untrained))
        answers = {"base": self.measure(self.base)["answers"]}
        answers |= {f"expert {n}": self.measure(p)["answers"] for n, p in self.experts.items()}
        return family, answers | {family.title_of(line): line["answers"] for line in merges}


def family_parser(description: str) -> argparse.ArgumentParser:
    """Return a parser of what says which families are made, and how they are measured."""
    parser = argparse.ArgumentParser(description=description.split("\n\n")[0])
    parser.add_argument("--base", help="folder, or name on the Hub, instead of the wheel's model")
    parser.add_argument("--untied", action="store_true",
                        help="a head of its own instead of the embeddings")  # fmt: skip
    parser.add_argument("--data", type=Path, default=SOURCES, help="texts and prompts")
    parser.add_argument("--output", type=Path, default=HERE / "output", help="for everything made")
    parser.add_argument("--experts", nargs="+", help="which of the data's, instead of all")
    parser.add_argument("--kinds", nargs="+", choices=RATES, default=["full"], help="of training")
    parser.add_argument("--steps", nargs="+", type=int, default=[40], help="of training")
    parser.add_argument("--seeds", nargs="+", type=int, default=[0], help="of training")
    parser.add_argument("--stored", choices=["bfloat16", "float32"], default="bfloat16",
                        help="dtype of the experts' checkpoints")  # fmt: skip
    parser.add_argument("--only-print", action="store_true", help="the table of what is known")
    parser.add_argument(
        "--sizes", nargs=3, type=int, default=[12, 16, 8], metavar=("VALIDATION", "TEST", "OTHER"),
        help=f"sequences of {LENGTH} tokens that are measured of an expert's texts, and of others",
    )  # fmt: skip
    return parser


def parse(
    parser: argparse.ArgumentParser, arguments: Sequence[str] | None = None
) -> argparse.Namespace:
    """Read a command line by a parser that was made by `family_parser`."""
    chosen = parser.parse_args(arguments)
    chosen.sizes = Sizes(*chosen.sizes)
    chosen.output = chosen.output.resolve()
    return chosen


def choose_texts(settings: argparse.Namespace, data: Data) -> dict[str, Texts]:
    """Return the texts of the experts that the command line asks for."""
    names = settings.experts or [name for name, one in data.experts.items() if one.trained]
    unknown = set(names) - set(data.experts)
    if unknown:
        raise SystemExit(f"{settings.data} has no expert {', '.join(sorted(unknown))}; it has "
                         f"{', '.join(data.experts)}.")  # fmt: skip
    if len(names) < 2:
        raise SystemExit("A merge needs at least two experts.")
    return {name: Texts(data.experts[name], settings.output / "texts") for name in names}


def choose_rows(wanted: Sequence[str] | None) -> list[Row]:
    """Return the rows of these names, or whose names start so where no row has such a name."""
    if wanted is None:
        return ROWS
    rows = [*ROWS, *ON_DEMAND]
    names = [row.name for row in rows]
    starts = tuple(one for one in wanted if one not in names)
    for one in starts:
        if not any(name.startswith(one) for name in names):
            raise SystemExit(f"No row begins with {one!r}. There are: {'; '.join(names)}.")
    return [row for row in rows if row.name in wanted or row.name.startswith(starts)]


def main() -> None:
    parser = family_parser(__doc__)
    parser.add_argument("--rows", nargs="+", help="only these, or those that start so")
    parser.add_argument("--keep", action="store_true", help="do not delete merges once measured")
    settings = parse(parser)
    rows = choose_rows(settings.rows)
    start, seconds = time.perf_counter(), Counter(training=0.0, merging=0.0, exams=0.0)
    data = read_sources(settings.data)
    texts = choose_texts(settings, data)
    untrained = {
        name: Texts(source, settings.output / "texts") for name, source in data.untrained.items()
    }
    base = prepare_base(settings.base, settings.output / "models", settings.untied)
    known = Known.read(settings.output / "results.jsonl")
    families, answered = [], []
    for kind, steps, seed in product(settings.kinds, sorted(settings.steps), settings.seeds):
        recipe = Recipe(kind, seed, steps, settings.stored)
        study = Study(base, recipe, texts, untrained, known, settings, data)
        family, answers = study.run(rows)
        seconds.update(study.seconds)
        families.append(family)
        answered.append(answers_page(family.title, data.prompts, answers))
    (settings.output / "table.md").write_text(pages(families))
    (settings.output / "answers.md").write_text("\n".join(answered))
    draw(families, settings.output / "picture.png")
    print((settings.output / "table.md").read_text())
    spent = ", ".join(f"{value:.0f} s of {what}" for what, value in seconds.items())
    print(f"{spent}; {time.perf_counter() - start:.0f} s in all. Everything is in "
          f"{settings.output}")  # fmt: skip


if __name__ == "__main__":
    main()
