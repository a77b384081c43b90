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
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from pathlib import Path

os.environ.setdefault("OMP_WAIT_POLICY", "passive")  # before torch starts its threads

import torch
from experts import DEVICE, digest
from layerwise import Calibration, Settings, Teacher
from measure import Examiner, State, read_tensors
from merges import ROWS, Merge
from run import Study
from safetensors.torch import save_file
from sources import Texts, end_token
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

HERE = Path(__file__).resolve().parent
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
    """

    start: str = "ace"
    scale: float = 1.0
    samples: int = 16
    settings: Settings = field(default_factory=Settings)
    keep: dict[str, float] = field(default_factory=dict)
    mixture: float = 1.0


VARIANTS: dict[str, Variant] = {
    "ace": Variant(samples=0),
    "ace 0.7": Variant(scale=0.7, samples=0),
}


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
        tensors = self._mix(start) if self.variant.mixture != 1.0 else self._calibrate(start)
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

    def _mix(self, start: Path) -> State:
        whole = replace(self, variant=replace(self.variant, mixture=1.0)).make()
        ends = read_tensors(start), read_tensors(whole)
        return {
            name: torch.lerp(tensor.float(), ends[1][name].float(), self.variant.mixture)
            for name, tensor in ends[0].items()
        }

    def _calibrate(self, start: Path) -> State:
        tokenizer = AutoTokenizer.from_pretrained(self.base)
        model = AutoModelForCausalLM.from_pretrained(self.base, dtype=torch.float32).eval()
        merged, base = read_tensors(start), read_tensors(self.base)

        def teacher(weights: State, texts: Texts, weight: float) -> Teacher:
            ids, _ = texts.sequences("train", tokenizer, self.variant.samples)
            used = tokens_before_padding(ids, end_token(tokenizer))
            on_device = {name: tensor.to(DEVICE) for name, tensor in weights.items()}
            return Teacher(on_device, ids.to(DEVICE), used.to(DEVICE), weight)

        teachers = [
            teacher(read_tensors(folder), self.texts[name], 1 / len(self.experts))
            for name, folder in self.experts.items()
        ]
        for name, weight in self.variant.keep.items():
            teachers.append(teacher({"base": base, "start": merged}[name], self.neutral, weight))
        return Calibration(model.to(DEVICE), merged, base, teachers, self.variant.settings).run()


def tokens_before_padding(ids: Tensor, end: int) -> Tensor:
    """Return which of (n, length) tokens come before the run of `end` that closes a sequence."""
    return (ids != end).flip(1).cummax(1).values.flip(1)


class CalibrationStudy(Study):
    """A family whose validation part also has the texts that nobody learned."""

    @cached_property
    def examiner(self) -> Examiner:
        examiner = super().examiner
        count = self.settings.sizes.untrained
        self.exams["validation"] = digest(self.exams["validation"], count, "untrained")
        examiner.exams["validation"] |= {
            name: texts.sequences("validation", examiner.tokenizer, count)
            for name, texts in self.untrained.items()
        }
        return examiner

    def calibrated(self, variant: Variant) -> Merge:
        """Return a merge of the family, calibrated or not."""
        (row,) = (row for row in ROWS if row.name == variant.start)
        merge = self.merge(row, variant.scale)
        if not variant.samples:
            return merge
        return Calibrated(**vars(merge), variant=variant, neutral=self.untrained.get(NEUTRAL))
