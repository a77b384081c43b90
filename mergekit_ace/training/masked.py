# SPDX-License-Identifier: Apache-2.0
"""Masked language models: which tokens are asked for."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from mergekit_ace.training.config import DataConfig
from mergekit_ace.training.encoding import Batch, Told, collate_texts, encode_texts, pad
from mergekit_ace.training.errors import TrainingError
from mergekit_ace.training.examples import Example

if TYPE_CHECKING:
    from transformers import PreTrainedModel


class MaskedLanguageModel(Told):
    """Supervised at the masks of a text or, where it has none, at tokens that are masked here."""

    auto_class = "AutoModelForMaskedLM"
    has_heads = False

    def encode(self, row: dict[str, Any], data: DataConfig, processor: Any) -> Example | None:
        """What the tokenizer makes of the text, and `supervised` (n,), where the masks are.

        Of a text without masks a share of `data.masking_rate`, at least one token and none of the
        tokenizer's special ones, is masked; the same ones whenever the text is the same. What they
        were is then `true`. None where there is nothing to mask.
        """
        if processor.mask_token_id is None:
            raise TrainingError("task: masked-lm needs a tokenizer that has a mask token")
        example = encode_texts(row, data, processor)
        ids = example["input_ids"]
        asked = ids == processor.mask_token_id
        if bool(asked.any()):
            return example | {"supervised": asked}
        special = processor.get_special_tokens_mask(ids.tolist(), already_has_special_tokens=True)
        places = (torch.tensor(special) == 0).nonzero()[:, 0]
        if not len(places):
            return None
        generator = torch.Generator().manual_seed(zlib.crc32(ids.numpy().tobytes()))
        order = torch.randperm(len(places), generator=generator)
        asked[places[order[: max(round(data.masking_rate * len(places)), 1)]]] = True
        masked = ids.masked_fill(asked, processor.mask_token_id)
        return example | {"input_ids": masked, "supervised": asked, "true": ids[asked]}

    def collate(self, samples: Sequence[Example]) -> Batch:
        """Samples padded at the end, (B, n)."""
        return collate_texts(samples) | {"supervised": pad([s["supervised"] for s in samples])}

    def logits(self, model: PreTrainedModel, batch: Batch) -> Tensor:
        """What the model says at each mask, (P, vocabulary)."""
        inputs = {name: tensor for name, tensor in batch.items() if name != "supervised"}
        return model(**inputs).logits[batch["supervised"]]
