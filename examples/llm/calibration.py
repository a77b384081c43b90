# SPDX-License-Identifier: Apache-2.0
"""Calibrate merges of a real language model on a few texts, and measure what that gains.

    python examples/llm/calibration.py
    python examples/llm/calibration.py --kinds lora --row "ace, from outputs" --scale 0.7

The experts, texts and results are those of run.py, in the same output folder. Merges are calibrated
as by `mergekit-ace calibrate`, on sequences from all over the training texts.
"""

from __future__ import annotations

import json
import os
import shutil
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import product
from pathlib import Path

os.environ.setdefault("OMP_WAIT_POLICY", "passive")  # before torch starts its threads
os.environ.setdefault("TQDM_DISABLE", "1")  # or every model read draws a bar

import torch
from experts import DEVICE, Recipe, digest, digest_of_files, prepare_base
from measure import State, read_tensors
from merges import PACKAGE, Merge
from results import Family, Known, markdown, own_cells, root_of_squares, share_of_right
from run import Study, choose_rows, choose_texts, family_parser, parse
from safetensors.torch import save_file
from sources import Texts, end_token, read_sources
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

from mergekit_ace.calibration.layerwise import RIDGE, Calibration, SampleTeacher

KEEP = "english"  # the text on which the merge should stay as it is; nobody learned it
EVERY = 4  # tokens of which one counts in the sums, which saves time
GROUP = 16  # sequences that go through a layer together


@dataclass(frozen=True)
class Calibrated(Merge):
    """A merge that was calibrated: a checkpoint that is made when it is asked for.

    Attributes:
        way: share of the way from the merge to what its layers were solved to.
        samples: sequences per teacher.
        ridge: of the closed form, in mean squares s̄ of the inputs.
        keep: text on which the merge should stay as it is, if any.
    """

    way: float
    samples: int
    ridge: float
    keep: Texts | None

    @property
    def start(self) -> Merge:
        """The merge without data."""
        return Merge(self.row, self.scale, self.base, self.experts, self.texts, self.folder)

    @cached_property
    def target(self) -> Path:
        """Folder of the checkpoint; its name says what it depends on."""
        kept = self.keep and self.keep.fingerprint
        code = digest_of_files(PACKAGE / "calibration", Path(__file__))
        settings = (self.samples, self.ridge, EVERY, kept, self.way, code)
        return self.folder / f"calibrated-{digest(self.start.target.name, *settings)}"

    def make(self) -> Path:
        """Return the folder of the checkpoint; calibrate unless it is there."""
        if self.target.exists():
            return self.target
        start = self.start.make()
        if self.way != 1.0:
            whole = replace(self, way=1.0)
            solved, merged = read_tensors(whole.make()), read_tensors(start)
            tensors = {n: merged[n].float().lerp(solved[n].float(), self.way) for n in solved}
            seconds = whole.seconds
        else:
            began = time.perf_counter()
            tensors = self._solve(start)
            seconds = time.perf_counter() - began
            print(f"calibrated {self.target.name}: {seconds:.0f} s", flush=True)
        partial = self.target.with_name(self.target.name + ".partial")
        shutil.rmtree(partial, ignore_errors=True)
        shutil.copytree(self.base, partial, ignore=shutil.ignore_patterns("*.safetensors*"))
        stored = {name: tensor.to(torch.bfloat16).contiguous() for name, tensor in tensors.items()}
        save_file(stored, partial / "model.safetensors", {"format": "pt"})
        (partial / "seconds.json").write_text(json.dumps(round(seconds, 1)))
        os.replace(partial, self.target)
        return self.target

    def _solve(self, start: Path) -> State:
        tokenizer = AutoTokenizer.from_pretrained(self.base)
        merged = read_tensors(start)

        def teacher(weights: State, texts: Texts, weight: float) -> SampleTeacher:
            ids, _ = texts.sequences("train", tokenizer, self.samples)
            used = tokens_before_padding(ids, end_token(tokenizer))
            used &= torch.arange(ids.shape[1]) % EVERY == 0
            batches = list(zip(ids.split(GROUP), used.split(GROUP), strict=True))
            return SampleTeacher(weights, batches, weight)

        teachers = [
            teacher(read_tensors(folder), self.texts[name], 1 / len(self.experts))
            for name, folder in self.experts.items()
        ]
        if self.keep is not None:
            teachers.append(teacher(merged, self.keep, 1.0))
        model = AutoModelForCausalLM.from_pretrained(self.base)
        result = dict(merged)
        for layer in Calibration(model, merged, teachers, DEVICE, self.ridge).layers():
            result |= layer
        return result


def tokens_before_padding(ids: Tensor, end: int) -> Tensor:
    """Return which of (n, length) tokens come before the run of `end` that closes a sequence."""
    return (ids != end).flip(1).cummax(1).values.flip(1)


def calibrated_table(study: Study) -> str:
    """Measure a merge before and after it is calibrated; return the table that compares them."""
    settings = study.settings
    row, *others = choose_rows([settings.row])
    if others:
        raise SystemExit(f"{settings.row!r} begins several rows; give the name of one.")
    start = study.merge(row, settings.scale)
    own = {name: getattr(start, name) for name in Merge.__dataclass_fields__}
    keep = None if settings.nothing_kept else study.untrained[KEEP]
    ways = {"calibrated, all of the way": 1.0, "calibrated, half of the way": 0.5}
    merges: dict[str, Merge] = {f"{row.name}, λ {settings.scale:g}": start} | {
        name: Calibrated(**own, way=way, samples=settings.samples, ridge=settings.ridge, keep=keep)
        for name, way in ways.items()
    }
    base, experts = study.scores("test")
    lines = {name: study.measure(merge) for name, merge in merges.items()}
    if not settings.only_print:
        for merge in merges.values():
            merge.remove()
    return comparison(Family("", base, experts, [], list(study.untrained)), lines)


def comparison(family: Family, lines: Mapping[str, dict]) -> str:
    """Return a table that compares merges with the first of them.

    Args:
        family: with the scores of base and experts.
        lines: results by name.
    """
    first = next(iter(lines.values()))
    asked = [name for name in family.experts if "answers" in family.base[name]]
    header = ["merge", "kept", "against the start", *family.experts,
              *(f"{name}, right" for name in asked), *family.untrained, "seconds"]  # fmt: skip
    rows = []
    for name, line in lines.items():
        scores, reference = line["scores"], first["scores"]
        share, away = family.mean_share(scores)
        cells = [name, f"{share:.3f} ± {root_of_squares(away):.3f}",
                 with_error(*family.difference_from(line, first)),
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
    parser.add_argument("--row", default="ace", help="of run.py: the merge to start from")
    parser.add_argument("--scale", type=float, default=1.0, help="its λ")
    parser.add_argument("--samples", type=int, default=64, help="sequences of each text")
    parser.add_argument("--ridge", type=float, default=RIDGE, help="of the calibration")
    parser.add_argument("--nothing-kept", action="store_true", help=f"without {KEEP} to keep")
    settings = parse(parser)
    data = read_sources(settings.data)
    if KEEP not in data.untrained and not settings.nothing_kept:
        raise SystemExit(f"{settings.data} has no text {KEEP!r} under `untrained`, on which merges "
                         "should stay as they are: add one, or give --nothing-kept.")  # fmt: skip
    texts = choose_texts(settings, data)
    folder = settings.output / "texts"
    untrained = {name: Texts(source, folder) for name, source in data.untrained.items()}
    base = prepare_base(settings.base, settings.output / "models", settings.untied)
    known = Known.read(settings.output / "results.jsonl")
    for kind, steps, seed in product(settings.kinds, sorted(settings.steps), settings.seeds):
        recipe = Recipe(kind, seed, steps, settings.stored)
        study = Study(base, recipe, texts, untrained, known, settings, data)
        table = calibrated_table(study)
        print(f"## {recipe.title}: {', '.join(texts)}\n\n{table}\n", flush=True)


if __name__ == "__main__":
    main()
