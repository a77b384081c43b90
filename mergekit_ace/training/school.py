# SPDX-License-Identifier: Apache-2.0
"""Teacher and student of a distillation, and the data as each of them reads it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from tqdm import tqdm

from mergekit_ace.training.data import SPLITS, Rows, load_rows
from mergekit_ace.training.distill_config import DistillConfig
from mergekit_ace.training.errors import TrainingError
from mergekit_ace.training.examples import Example, Examples, load_examples, save_examples
from mergekit_ace.training.losses import distillation_loss
from mergekit_ace.training.models import load_model, load_processor
from mergekit_ace.training.processes import own_batches, samples_per_step, sum_over_processes
from mergekit_ace.training.state import RunFolder, with_prefix
from mergekit_ace.training.tasks import CausalLanguageModel, Kind
from mergekit_ace.training.teachers import move

if TYPE_CHECKING:
    from accelerate import Accelerator
    from transformers import PreTrainedModel


@dataclass
class School:
    """Teacher, student and what they read.

    Attributes:
        config, kind, accelerator: of the run.
        teacher: None where its words are known already.
        student: starts as the base.
        processor: the student's.
        mine, theirs: samples by split as the student and the teacher read them, position by
            position the same.
    """

    config: DistillConfig
    kind: Kind
    accelerator: Accelerator
    teacher: PreTrainedModel | None
    student: PreTrainedModel
    processor: Any
    mine: dict[str, Examples]
    theirs: dict[str, Examples]

    @classmethod
    def open(
        cls,
        config: DistillConfig,
        kind: Kind,
        places: Sequence[str],
        folder: RunFolder,
        accelerator: Accelerator,
        *,
        quiet: bool,
    ) -> School:
        """Load both models and encode the data for each."""
        theirs_at, mine_at = places
        processors = [load_processor([place], kind, config) for place in places]
        teacher = load_model(theirs_at, kind, config).to(accelerator.device)
        written = isinstance(kind, CausalLanguageModel) and _by_text(config, *processors)
        path = folder.state / "data.safetensors"
        if accelerator.is_main_process and not path.exists():
            rows = load_rows(config.data, config.training.seed)
            sides = _encode(config, kind, teacher, rows, processors, written, quiet=quiet)
            save_examples(sides, path, {})
        accelerator.wait_for_everyone()
        splits, _ = load_examples(path)
        torch.manual_seed(config.training.seed)
        options = {}
        if kind.has_heads:
            options = {
                "num_labels": teacher.config.num_labels,
                "id2label": teacher.config.id2label,
                "label2id": teacher.config.label2id,
                "ignore_mismatched_sizes": True,
            }
        student = load_model(mine_at, kind, config, getattr(torch, config.dtype), **options)
        if not written and not kind.has_heads:
            _check_vocabulary(teacher, student)
        return cls(
            config,
            kind,
            accelerator,
            None if written else teacher,
            student.to(accelerator.device).requires_grad_(True).train(),
            processors[1],
            with_prefix(splits, "mine-"),
            with_prefix(splits, "theirs-"),
        )

    @property
    def batch(self) -> int:
        """Samples in a step, all processes together."""
        training = self.config.training
        return samples_per_step(
            self.accelerator, training.batch_size, training.gradient_accumulation
        )

    def shares(self, indices: list[int]) -> list[list[int]]:
        """This process's samples, in batches."""
        return own_batches(self.accelerator, indices, self.config.training.batch_size)

    def loss(self, split: str, indices: list[int]) -> tuple[Tensor, int, int]:
        """Summed loss, how often the student says what the teacher says, and positions."""
        samples = [self.mine[split][index] for index in indices]
        with self.accelerator.autocast():
            batch = move(self.kind.collate(samples), self.accelerator.device)
            answers = self.kind.logits(self.student, batch)
        if self.teacher is None:
            words = torch.cat([s["input_ids"][s["supervised"]] for s in samples])
            logits, labels = None, words.to(answers.device)
        else:
            logits = self._asked([self.theirs[split][index] for index in indices])
            labels = logits.argmax(-1)
        loss = distillation_loss(
            answers, logits, labels, self.config.alpha, self.config.temperature
        )
        return loss, int((answers.argmax(-1) == labels).sum()), len(labels)

    @torch.no_grad()
    def _asked(self, samples: list[Example]) -> Tensor:
        assert self.teacher is not None
        batch = move(self.kind.collate(samples), self.accelerator.device)
        return self.kind.logits(self.teacher, batch)

    @torch.no_grad()
    def evaluate(self, split: str) -> tuple[float, float]:
        """Mean loss per position, and the share of answers that are the teacher's."""
        self.student.eval()
        totals = torch.zeros(3, dtype=torch.float64)
        for part in self.shares(list(range(len(self.mine[split])))):
            loss, right, positions = self.loss(split, part)
            totals += torch.tensor([float(loss), right, positions], dtype=torch.float64)
        self.student.train()
        loss, right, positions = sum_over_processes(self.accelerator, totals).tolist()
        return loss / positions, right / positions


def _by_text(config: DistillConfig, theirs: Any, mine: Any) -> bool:
    """Whether the student learns the teacher's words instead of its logits."""
    same = theirs.get_vocab() == mine.get_vocab()
    if config.signal == "logits" and not same:
        raise TrainingError(
            "signal: logits needs one tokenizer, but teacher and student have different ones; use "
            "signal: text, with the `prompt` column"
        )
    written = config.signal == "text" or (config.signal == "auto" and not same)
    if written and config.data.prompt is None:
        raise TrainingError(
            "teacher and student have different tokenizers, so the teacher has to write text; give "
            "the `prompt` column that it answers"
        )
    return written


def _check_vocabulary(teacher: PreTrainedModel, student: PreTrainedModel) -> None:
    sizes = [model.get_output_embeddings().weight.shape[0] for model in (teacher, student)]
    if sizes[0] != sizes[1]:
        raise TrainingError(
            f"the teacher has {sizes[0]} logits and the student {sizes[1]}, though their "
            "tokenizers agree; resize the embeddings of one, or use signal: text"
        )


def _encode(
    config: DistillConfig,
    kind: Kind,
    teacher: PreTrainedModel,
    rows: Rows,
    processors: Sequence[Any],
    written: bool,
    *,
    quiet: bool,
) -> dict[str, Examples]:
    """`mine-train`, `theirs-train`, …: the rows as both models read them."""
    theirs, mine = processors
    sides = {}
    for split in SPLITS:
        pairs = []
        for row in tqdm(getattr(rows, split), desc=f"encoding {split}", disable=quiet):
            if written:
                row = _answered(row, config, kind, teacher, theirs)
            data = config.data
            if written:
                data = data.model_copy(update={"completion": "completion"})
            pair = (kind.encode(row, data, mine), kind.encode(row, data, theirs))
            if pair[0] is not None and pair[1] is not None:
                pairs.append(pair)
        if not pairs:
            raise TrainingError(f"data {config.data.path}: nothing to learn in the {split} split")
        pairs = [
            _completed(pair, config, kind, teacher, theirs) if kind.unanswered(pair[0]) else pair
            for pair in pairs
        ]
        sides[f"mine-{split}"] = Examples.pack([pair[0] for pair in pairs])
        sides[f"theirs-{split}"] = Examples.pack([pair[1] for pair in pairs])
    return sides


def _answered(
    row: dict[str, Any], config: DistillConfig, kind: Kind, teacher: PreTrainedModel, theirs: Any
) -> dict[str, Any]:
    """A row with what the teacher writes to its prompt, as text."""
    data = config.data.model_copy(update={"completion": None})
    prompt = kind.encode(row, data, theirs)
    if prompt is None:
        return {**row, "completion": ""}
    (completed,) = kind.complete(teacher, [prompt], data, theirs)
    words = completed["input_ids"][completed["supervised"]]
    return {**row, "completion": theirs.decode(words, skip_special_tokens=True)}


def _completed(
    pair: tuple[Example, Example],
    config: DistillConfig,
    kind: Kind,
    teacher: PreTrainedModel,
    theirs: Any,
) -> tuple[Example, Example]:
    """One tokenizer: what the teacher writes is the same tokens for both."""
    (completed,) = kind.complete(teacher, [pair[1]], config.data, theirs)
    return completed, completed
