# SPDX-License-Identifier: Apache-2.0
"""What encoding has in common: texts from rows, and samples of different length in one batch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from mergekit_ace.training.config import DataConfig
from mergekit_ace.training.errors import TrainingError
from mergekit_ace.training.examples import Example

Batch = dict[str, Tensor]
_TEXT_INPUTS = ("input_ids", "token_type_ids")


class Told:
    """Of models that answer at once: no expert has to write an answer first."""

    def unanswered(self, sample: Example) -> bool:
        """Never."""
        return False

    def complete(self, model, samples, data, processor) -> list[Example]:
        """Nothing is missing."""
        return list(samples)


def text_of(row: dict[str, Any], data: DataConfig, purpose: str) -> str:
    """What a row has for `purpose`; an error if that is no text."""
    text = row[data.columns[purpose]]
    if not isinstance(text, str):
        raise TrainingError(
            f"data {data.path}: column {data.columns[purpose]} holds {text!r} instead of text"
        )
    return text


def encode_texts(row: dict[str, Any], data: DataConfig, tokenizer: Any) -> Example:
    """A text, or a pair, with the tokenizer's special tokens, cut to its or the data's length.

    Returns:
        `input_ids` (n,) and, of some tokenizers, `token_type_ids` (n,).
    """
    texts = [text_of(row, data, "text")]
    if data.text_pair is not None:
        texts.append(text_of(row, data, "text_pair"))
    longest = min(data.max_length, tokenizer.model_max_length)
    encoded = tokenizer(*texts, truncation=True, max_length=longest)
    return {name: torch.tensor(encoded[name]) for name in _TEXT_INPUTS if name in encoded}


def collate_texts(samples: Sequence[Example]) -> Batch:
    """What `encode_texts` gave of several samples, (B, n), and `attention_mask`."""
    names = [name for name in _TEXT_INPUTS if name in samples[0]]
    batch = {name: pad([sample[name] for sample in samples]) for name in names}
    return batch | {"attention_mask": padding_mask([sample["input_ids"] for sample in samples])}


def pad(tensors: list[Tensor]) -> Tensor:
    """Vectors of different length as rows, (B, n), filled with 0."""
    return pad_sequence(tensors, batch_first=True)


def padding_mask(tensors: list[Tensor]) -> Tensor:
    """1 where `pad` has an entry, 0 where it has filled, (B, n)."""
    return pad([torch.ones(len(tensor), dtype=torch.long) for tensor in tensors])
