# SPDX-License-Identifier: Apache-2.0
"""Calibrate merges of a real language model on a few samples, and measure what that gains.

    python examples/llm/calibration.py                  # every variant, on the validation part
    python examples/llm/calibration.py --part test --variants "ace 0.7" "stream 1, 64"

The experts, texts and results are those of run.py, in the same output folder.
"""

from __future__ import annotations

import json
import os
import shutil
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from itertools import product
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_WAIT_POLICY", "passive")  # before torch starts its threads

import torch
from experts import DEVICE, Recipe, digest, prepare_base
from layerwise import Calibration, Settings, Teacher
from measure import Examiner, State, read_tensors
from merges import ROWS, Merge
from results import Family, Known, markdown, own_cells, root_of_squares, share_of_right
from run import NotMeasured, Study, choose_texts, family_parser, parse
from safetensors.torch import save_file
from sources import Part, Texts, end_token, read_sources
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.utils.logging import disable_progress_bar

NEUTRAL = "english"  # the text that says what should stay; nobody learned it


@dataclass(frozen=True)
class Variant:
    """A merge without data, and how it is calibrated.

    Attributes:
        start: row of the merge.
        scale: λ of the merge.
        samples: sequences per expert; 0 leaves the merge as it is.
        settings: of the calibration.
        keep: weights of further teachers on the neutral text, `base` or `start`.
        mixture: share of the way from the merge to the calibrated model.
        every: only every so many-th token of a sequence counts, which saves time.
    """

    start: str = "ace"
    scale: float = 1.0
    samples: int = 16
    settings: Settings = field(default_factory=Settings)
    keep: dict[str, float] = field(default_factory=dict)
    mixture: float = 1.0
    every: int = 1


def variants() -> dict[str, Variant]:
    """Return what is tried, by the name in the table."""
    halved = {"scale": 0.7, "every": 2, "keep": {"start": 0.5}}
    best = {"samples": 64, "every": 4, "keep": {"start": 1.0}}
    loose, no_ridge = Settings(ridge=0.1), Settings(1e-4, "weights", off_diagonal=0.9)
    return {
        "ace, λ 0.7": Variant(scale=0.7, samples=0),
        "ace, λ 0.85": Variant(scale=0.85, samples=0),
        "16 samples, nothing kept": Variant(scale=0.7),
        "16 samples": Variant(**halved),
        "16 samples, ridge 0.1": Variant(**halved, settings=loose),
        "16 samples, targets not corrected": Variant(
            **halved, settings=Settings(targets="outputs")
        ),
        "16 samples, RegMean++": Variant(scale=0.7, every=2, settings=no_ridge),
        "64 samples": Variant(scale=0.7, **best),
        "64 samples, λ 0.85": Variant(scale=0.85, **best),
        "64 samples, half of the way": Variant(scale=0.7, **best, mixture=0.5),
        "64 samples, λ 0.85, half of the way": Variant(scale=0.85, **best, mixture=0.5),
    }


VARIANTS = variants()


@dataclass(frozen=True)
class Calibrated(Merge):
    """A merge that was calibrated: a checkpoint that is made when it is asked for.

    Attributes:
        variant: of the calibration.
        neutral: text of which the variant's further teachers say what should stay.
    """

    variant: Variant = field(default_factory=Variant)
    neutral: Texts | None = None

    @property
    def start(self) -> Merge:
        """The merge without data."""
        return Merge(self.row, self.scale, self.base, self.experts, self.texts, self.folder)

    @cached_property
    def target(self) -> Path:
        """Folder of the checkpoint; its name says what it depends on."""
        return self.folder / f"calibrated-{digest(self.start.target.name, asdict(self.variant))}"

    def make(self) -> Path:
        """Return the folder of the checkpoint; calibrate unless it is there."""
        if self.target.exists():
            return self.target
        start = self.start.make()
        began = time.perf_counter()
        if self.variant.mixture != 1.0:
            whole = replace(self, variant=replace(self.variant, mixture=1.0))
            tensors = self._mix(start, whole.make())
            seconds = whole.seconds
        else:
            tensors = self._calibrate(start)
            seconds = time.perf_counter() - began
        partial = self.target.with_name(self.target.name + ".partial")
        shutil.rmtree(partial, ignore_errors=True)
        shutil.copytree(self.base, partial, ignore=shutil.ignore_patterns("*.safetensors*"))
        stored = {name: tensor.to(torch.bfloat16).contiguous() for name, tensor in tensors.items()}
        save_file(stored, partial / "model.safetensors", {"format": "pt"})
        (partial / "seconds.json").write_text(json.dumps(round(seconds, 1)))
        os.replace(partial, self.target)
        print(f"calibrated {self.variant}: {seconds:.0f} s", flush=True)
        return self.target

    def _mix(self, start: Path, whole: Path) -> State:
        merged, calibrated = read_tensors(start), read_tensors(whole)
        return {
            name: torch.lerp(tensor.float(), calibrated[name].float(), self.variant.mixture)
            for name, tensor in merged.items()
        }

    def _calibrate(self, start: Path) -> State:
        tokenizer = AutoTokenizer.from_pretrained(self.base)
        model = AutoModelForCausalLM.from_pretrained(self.base, dtype=torch.float32).eval()
        merged, base = read_tensors(start), read_tensors(self.base)

        def teacher(weights: State, texts: Texts, weight: float) -> Teacher:
            ids, _ = texts.sequences("train", tokenizer, self.variant.samples)
            used = tokens_before_padding(ids, end_token(tokenizer))
            used &= torch.arange(ids.shape[1]) % self.variant.every == 0
            on_device = {name: tensor.to(DEVICE) for name, tensor in weights.items()}
            return Teacher(on_device, ids.to(DEVICE), used.to(DEVICE), weight)

        teachers = [
            teacher(read_tensors(folder), self.texts[name], 1 / len(self.experts))
            for name, folder in self.experts.items()
        ]
        for name, weight in self.variant.keep.items():
            teachers.append(teacher({"base": base, "start": merged}[name], self.neutral, weight))
        return Calibration(model.to(DEVICE), merged, teachers, self.variant.settings).run()


def tokens_before_padding(ids: Tensor, end: int) -> Tensor:
    """Return which of (n, length) tokens come before the run of `end` that closes a sequence."""
    return (ids != end).flip(1).cummax(1).values.flip(1)


class CalibrationStudy(Study):
    """A family whose validation part also has the texts that nobody learned."""

    def __init__(self, *given: Any):
        super().__init__(*given)
        count = self.settings.sizes.untrained
        self.exams["validation"] = digest(self.exams["validation"], count, "untrained")

    @cached_property
    def examiner(self) -> Examiner:
        """The base model in memory, and all exams."""
        examiner = super().examiner
        examiner.exams["validation"] |= {
            name: texts.sequences("validation", examiner.tokenizer, self.settings.sizes.untrained)
            for name, texts in self.untrained.items()
        }
        return examiner

    def calibrated(self, variant: Variant) -> Merge:
        """Return a merge of the family, calibrated unless the variant has no samples."""
        (row,) = (row for row in ROWS if row.name == variant.start)
        merge = self.merge(row, variant.scale)
        if not variant.samples:
            return merge
        neutral = self.untrained.get(NEUTRAL)
        own = {name: getattr(merge, name) for name in Merge.__dataclass_fields__}
        return Calibrated(**own, variant=variant, neutral=neutral)

    def table(self, names: Sequence[str], part: Part) -> str:
        """Measure variants, and return the table that compares them with the best without data."""
        base, experts = self.scores(part)
        family = Family("", base, experts, [], list(self.untrained))
        lines = {}
        for name in names:
            with suppress(NotMeasured):
                lines[name] = self.measure(self.calibrated(VARIANTS[name]), part)
        plain = [name for name in lines if not VARIANTS[name].samples]
        best = max(plain, key=lambda name: family.mean_share(lines[name]["scores"])[0])
        return comparison(family, lines, best)


def comparison(family: Family, lines: Mapping[str, dict], best: str) -> str:
    """Return a table of variants.

    Args:
        family: with the scores of base and experts.
        lines: results by name of the variant.
        best: name of the one that others are compared with.
    """
    asked = [name for name in family.experts if "answers" in family.base[name]]
    header = ["merge", "kept", f"against {best}", *family.experts,
              *(f"{name}, right answers" for name in asked),
              *(f"{name}, loss against {best}" for name in family.untrained),
              "seconds"]  # fmt: skip
    rows = []
    for name, line in lines.items():
        scores, reference = line["scores"], lines[best]["scores"]
        share, away = family.mean_share(scores)
        cells = [name, f"{share:.3f} ± {root_of_squares(away):.3f}",
                 with_error(*family.difference_from(line, lines[best])),
                 *own_cells(family, scores, False),
                 *(share_of_right(scores[text]) for text in asked),
                 *(with_error(*loss_difference(scores[text], reference[text]))
                   for text in family.untrained),
                 f"{line['seconds']:.0f}"]  # fmt: skip
        rows.append(["" if cell == "+0.000 ± 0.000" else cell for cell in cells])
    return markdown(header, rows)


def with_error(value: float, error: float) -> str:
    """Return a difference as a cell of a table."""
    return f"{value:+.3f} ± {error:.3f}"


def loss_difference(
    ours: Mapping[str, Sequence[float]], theirs: Mapping[str, Sequence[float]]
) -> tuple[float, float]:
    """Return by how many nats per token a loss is greater, with the standard error over sequences.

    Args:
        ours: scores on one text.
        theirs: scores of another model on the same sequences.
    """
    away = torch.tensor(ours["loss"]) - torch.tensor(theirs["loss"])
    away /= torch.tensor(ours["tokens"])
    error = away.std() / len(away) ** 0.5 if len(away) > 1 else 0.0
    return float(away.mean()), float(error)


def main() -> None:
    parser = family_parser(__doc__)
    parser.add_argument("--variants", nargs="+", choices=VARIANTS, default=list(VARIANTS))
    parser.add_argument("--part", choices=["validation", "test"], default="validation")
    settings = parse(parser)
    disable_progress_bar()
    data = read_sources(settings.data)
    texts = choose_texts(settings, data)
    folder = settings.output / "texts"
    untrained = {name: Texts(source, folder) for name, source in data.untrained.items()}
    base = prepare_base(settings.base, settings.output / "models")
    known = Known.read(settings.output / "results.jsonl")
    for kind, steps, seed in product(settings.kinds, sorted(settings.steps), settings.seeds):
        recipe = Recipe(kind, seed, steps)
        study = CalibrationStudy(base, recipe, texts, untrained, known, settings, data)
        table = study.table(settings.variants, settings.part)
        print(f"## {kind}, {steps} steps, seed {seed}, {settings.part}\n\n{table}\n", flush=True)


if __name__ == "__main__":
    main()
