# SPDX-License-Identifier: Apache-2.0
"""How many words of each language a model knows."""

from __future__ import annotations

from pathlib import Path

import torch
from dictionaries import encode, exam, make_dictionaries
from transformers import AutoModelForCausalLM, AutoTokenizer


@torch.no_grad()
def accuracies(folder: Path) -> dict[str, float]:
    """Share of right answers per language, 0 to 1, over an exam of every word in four orders.

    Loads the checkpoint as any user would; the model sees the right answers before each question.
    """
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    result = {}
    for language, dictionary in make_dictionaries().items():
        ids, labels = encode(exam(dictionary), tokenizer)
        guesses = model(input_ids=ids).logits[:, :-1].argmax(-1)
        asked = labels[:, 1:] != -100
        result[language] = (guesses == labels[:, 1:])[asked].float().mean().item()
    return result
