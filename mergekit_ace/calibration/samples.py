# SPDX-License-Identifier: Apache-2.0
"""Samples of the experts and of what should stay, and the batches that models read them in."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from mergekit_ace.training.config import DataConfig
from mergekit_ace.training.data import Batch, Example, read_rows
from mergekit_ace.training.language import CausalLanguageModel, pad, padding_mask
from mergekit_ace.training.state import TrainingError

SAMPLES = 64  # of each teacher, unless its data says otherwise
SEED = 0  # of the draw of samples
TOKENS = 4096  # of the samples that go through a layer together, or more of a longer one
# For the choice of λ, of each expert: tokens that are read, and those of them before which
# distributions are compared.
READ, COMPARED = 2048, 512


def read_samples(data: DataConfig, tokenizer: Any) -> list[Example]:
    """Return the samples of a teacher, as `CausalLanguageModel.encode` makes them, longest first.

    Raises:
        TrainingError: there are none.
    """
    data = data.model_copy(update={"samples": data.samples or SAMPLES})
    kind = CausalLanguageModel()
    encoded = (kind.encode(row, data, tokenizer) for row in read_rows(data, SEED))
    rows = sorted(filter(None, encoded), key=lambda one: len(one["input_ids"]), reverse=True)
    if not rows:
        raise TrainingError(f"data {data.path} has no text of two tokens or more")
    return rows


def calibration_batches(samples: Sequence[Example]) -> list[tuple[Tensor, Tensor]]:
    """Return tokens and which of them count, (n, length) each, longest samples first."""
    groups = [[one["input_ids"] for one in group] for group in _group(samples, TOKENS)]
    return [(pad(group), padding_mask(group).bool()) for group in groups]


def comparison_batches(samples: Sequence[Example]) -> list[Batch]:
    """Return some of the samples of an expert, supervised at some of their tokens.

    Args:
        samples: at least one, longest first. Where nothing is supervised, as in prompts without a
            completion, all tokens are.
    """
    tokens = sum(len(sample["input_ids"]) for sample in samples)
    chosen = samples[:: max(1, math.ceil(tokens / READ))]
    marks = [_predicted(sample) for sample in chosen]
    every = max(1, math.ceil(sum(int(own.sum()) for own in marks) / COMPARED))
    seen, compared = 0, []
    for sample, own in zip(chosen, marks, strict=True):
        numbers = own.cumsum(dim=0) - 1 + seen  # of the supervised tokens of all samples
        compared.append({**sample, "supervised": own & (numbers % every == 0)})
        seen += int(own.sum())
    return [CausalLanguageModel().collate(group) for group in _group(compared, READ)]


def _predicted(sample: Example) -> Tensor:
    """Mark the supervised tokens, or all, but for the first one, before which there is nothing."""
    own = sample["supervised"]
    marks = own.clone() if bool(own.any()) else torch.ones_like(own)
    marks[0] = False
    return marks


def _group(samples: Sequence[Example], tokens: int) -> list[list[Example]]:
    """Group samples, longest first, so that padded ones of a group have so many tokens at most.

    A single longer one is a group of its own.
    """
    groups: list[list[Example]] = []
    for sample in samples:
        if not groups or (len(groups[-1]) + 1) * len(groups[-1][0]["input_ids"]) > tokens:
            groups.append([])
        groups[-1].append(sample)
    return groups
