# SPDX-License-Identifier: Apache-2.0
"""Texts that a model writes itself: its own distribution, one length, once."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from checkpoints import tiny_llama
from families import tokenizer

from mergekit_ace.naming import ConfigError
from mergekit_ace.training.config import DataConfig
from mergekit_ace.training.tasks import first_token, write_own_texts


def write(model, path: Path) -> tuple[DataConfig, torch.Tensor]:
    """100 texts, as a reader of the file has them, behind their first token."""
    words, data = tokenizer(), write_own_texts(model, tokenizer(), 100, path, quiet=True)
    lines = Path(data.path).read_text(encoding="utf-8").splitlines()
    return data, torch.tensor([words(json.loads(line)["text"])["input_ids"] for line in lines])


@torch.no_grad()
def test_every_token_is_drawn_from_the_models_own_distribution(tmp_path, monkeypatch):
    """Whatever the generation config says, once, and without a trace."""
    model = tiny_llama(max_position_embeddings=30)
    model.lm_head.weight.normal_(std=0.5)  # far from uniform
    usual, state = model.generation_config, torch.get_rng_state()
    usual.temperature, usual.top_k, usual.do_sample = 0.1, 1, True
    usual.repetition_penalty, usual.eos_token_id = 5.0, list(range(20))
    data, texts = write(model, tmp_path / "a" / "t.jsonl")
    assert torch.equal(write(model, tmp_path / "b" / "t.jsonl")[1], texts)
    assert model.generation_config is usual
    assert torch.equal(torch.get_rng_state(), state)
    assert texts.shape == (100, 29), "as many tokens as the model has positions"
    first = torch.full((100, 1), tokenizer().bos_token_id)
    logits = model.double()(torch.cat([first, texts[:, :-1]], dim=1)).logits
    expected = logits.softmax(dim=-1).sum(dim=(0, 1))
    found = texts.flatten().bincount(minlength=len(expected))
    assert expected.max() > 3 * expected.min(), "else a uniform draw would pass"
    assert ((found - expected).abs() <= 5 * expected.sqrt() + 1).all()
    assert len({tuple(text) for text in texts.tolist()}) > 95
    monkeypatch.setattr(model, "generate", None)
    assert write(model, tmp_path / "a" / "t.jsonl")[0] == data


def test_how_a_text_begins():
    words = tokenizer()
    assert first_token(words) == words.bos_token_id
    words.bos_token = None
    assert first_token(words) == words.eos_token_id
    words.chat_template = "{% for one in messages %}w7 {{ one['content'] }}{% endfor %}"
    assert first_token(words) == words.convert_tokens_to_ids("w7")
    words.chat_template = words.eos_token = None
    with pytest.raises(ConfigError, match="how a text begins: add `data` to every model"):
        first_token(words)
