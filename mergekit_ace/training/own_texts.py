# SPDX-License-Identifier: Apache-2.0
"""Texts that a language model writes itself: samples of what it is for, where no data is given."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm
from transformers import GenerationConfig, PreTrainedModel

from mergekit_ace.files.saving import write_text
from mergekit_ace.training.config import DataConfig
from mergekit_ace.training.state import TrainingError
from mergekit_ace.training.tasks import longest_input

LENGTH = 256  # tokens of a text
_AT_ONCE = 16  # texts that are written at once


def write_own_texts(
    model: PreTrainedModel, tokenizer: Any, count: int, path: Path, *, quiet: bool = False
) -> DataConfig:
    """Let a language model write texts, once; return their file as data.

    Args:
        count: of the texts. Each has `LENGTH` tokens, or as many as the model can read.
        path: of the file, a `.jsonl`; its folder need not exist.

    Raises:
        TrainingError: neither the tokenizer nor its template says how a text begins.
    """
    if not path.exists():
        length = min(LENGTH, longest_input(model) or LENGTH)
        start = first_token(tokenizer)
        written = []
        with tqdm(desc="writing texts", total=count, unit="text", disable=quiet) as bar:
            for done in range(0, count, _AT_ONCE):
                begun = torch.full((min(_AT_ONCE, count - done), 1), start, device=model.device)
                written.append(_write(model, begun, length, seed=done))
                bar.update(len(begun))
        # The tokenizer puts the first token before a text by itself, if texts have one.
        texts = tokenizer.batch_decode(
            torch.cat(written)[:, 1:], clean_up_tokenization_spaces=False
        )
        path.parent.mkdir(parents=True, exist_ok=True)
        write_text(path, "".join(json.dumps({"text": text}) + "\n" for text in texts))
    return DataConfig(path=str(path), text="text", max_length=LENGTH)


@torch.no_grad()
def _write(model: PreTrainedModel, begun: torch.Tensor, length: int, seed: int) -> torch.Tensor:
    """Go on with texts, (count, 1), by tokens of the model's own distribution; (count, length).

    Nothing of the distribution is cut off, and a text goes on after an end token.
    """
    usual = model.generation_config
    model.generation_config = GenerationConfig(  # without the model's end tokens and penalties
        do_sample=True, temperature=1.0, top_k=0, top_p=1.0, max_new_tokens=length - 1,
        pad_token_id=int(begun[0]),
    )  # fmt: skip
    try:
        with torch.random.fork_rng(range(torch.cuda.device_count())):
            torch.manual_seed(seed)
            return model.generate(begun, attention_mask=torch.ones_like(begun)).cpu()
    finally:
        model.generation_config = usual


def first_token(tokenizer: Any) -> int:
    """Return the token that a text begins with: of texts, of chats, or the end of the one before.

    Raises:
        TrainingError: the tokenizer has none of these.
    """
    if tokenizer.bos_token_id is not None:
        return tokenizer.bos_token_id
    if getattr(tokenizer, "chat_template", None):
        message = [{"role": "user", "content": "?"}]
        return tokenizer.apply_chat_template(message, return_dict=False)[0]
    if tokenizer.eos_token_id is not None:
        return tokenizer.eos_token_id
    raise TrainingError(
        "the tokenizer does not say how a text begins, so that models cannot write texts of their "
        "own: add `data` to every model"
    )
