# SPDX-License-Identifier: Apache-2.0
"""Texts that a model writes itself: its own distribution, one length, once."""

from __future__ import annotations

import json

import pytest
import torch
from checkpoints import tiny_llama
from families import tokenizer

from mergekit_ace.naming import ConfigError
from mergekit_ace.training.tasks import first_token, write_own_texts


@pytest.fixture
def model():
    """A model with a distribution far from uniform, and a generation config of its own."""
    torch.manual_seed(0)
    made = tiny_llama(max_position_embeddings=30)
    with torch.no_grad():
        made.lm_head.weight.normal_(std=0.5)
    usual = made.generation_config
    usual.temperature, usual.top_k, usual.do_sample = 0.1, 1, True
    usual.repetition_penalty, usual.eos_token_id = 5.0, list(range(20))
    return made.eval()


def read(data) -> list[list[int]]:
    """The texts as a reader of the file has them, behind their first token."""
    words = tokenizer()
    with open(data.path, encoding="utf-8") as file:
        return [words(json.loads(line)["text"])["input_ids"] for line in file]


def test_every_token_is_drawn_from_the_models_own_distribution(model, tmp_path):
    texts = torch.tensor(
        read(write_own_texts(model, tokenizer(), 300, tmp_path / "t.jsonl", quiet=True))
    )
    assert texts.shape == (300, 29), "as many tokens as the model has positions"
    first = torch.full((300, 1), tokenizer().bos_token_id)
    with torch.no_grad():
        logits = model.double()(torch.cat([first, texts[:, :-1]], dim=1)).logits
    expected = logits.softmax(dim=-1).sum(dim=(0, 1))
    found = texts.flatten().bincount(minlength=len(expected))
    assert expected.max() > 3 * expected.min(), "else a uniform draw would pass"
    assert ((found - expected).abs() <= 5 * expected.sqrt() + 1).all()
    assert len({tuple(text) for text in texts.tolist()}) > 290


def test_texts_are_written_once_and_leave_no_trace(model, tmp_path, monkeypatch):
    usual, state = model.generation_config, torch.get_rng_state()
    paths = [tmp_path / name / "t.jsonl" for name in ("a", "b")]
    made = [write_own_texts(model, tokenizer(), 20, path, quiet=True) for path in paths]
    assert paths[0].read_bytes() == paths[1].read_bytes()
    assert len(read(made[0])) == 20
    assert model.generation_config is usual
    assert torch.equal(torch.get_rng_state(), state)
    monkeypatch.setattr(model, "generate", None)
    assert write_own_texts(model, tokenizer(), 20, paths[0], quiet=True) == made[0]


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
