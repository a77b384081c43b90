# SPDX-License-Identifier: Apache-2.0
"""What encoding has in common: texts from rows, and samples of different length in one batch."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from mergekit_ace.training.config import DataConfig
from mergekit_ace.training.errors import TrainingError

Batch = dict[str, Tensor]


def text_of(row: dict[str, Any], data: DataConfig, purpose: str) -> str:
    """What a row has for `purpose`; an error if that is no text."""
    text = row[data.columns[purpose]]
    if not isinstance(text, str):
        raise TrainingError(
            f"data {data.path}: column {data.columns[purpose]} holds {text!r} instead of text"
        )
    return text


def pad(tensors: list[Tensor]) -> Tensor:
    """Vectors of different length as rows, (B, n), filled with 0."""
    return pad_sequence(tensors, batch_first=True)


def padding_mask(tensors: list[Tensor]) -> Tensor:
    """1 where `pad` has an entry, 0 where it has filled, (B, n)."""
    return pad([torch.ones(len(tensor), dtype=torch.long) for tensor in tensors])
