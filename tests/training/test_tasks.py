# SPDX-License-Identifier: Apache-2.0
"""Classifiers: wrong labels and images, padding, texts that are too long."""

from __future__ import annotations

import pytest
import torch
from families import tokenizer
from transformers import LlamaConfig, LlamaForSequenceClassification

from mergekit_ace.training.config import DataConfig
from mergekit_ace.training.state import TrainingError
from mergekit_ace.training.tasks import model_kind


@pytest.mark.parametrize("pad", [None, 0, 5])
def test_a_padded_batch_is_answered_like_each_alone(pad):
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=40,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_labels=3,
        pad_token_id=pad,
    )
    model = LlamaForSequenceClassification(config).eval()
    kind, data = model_kind("sequence-classification"), DataConfig(path="d", text="t")
    texts = ["w1 w2 w3 w4 w5 w6", "w7 w8", "w9 w10 w11 <pad>"]  # the last ends in token 0
    samples = [kind.encode({"t": text}, data, tokenizer()) for text in texts]
    if pad == 0:
        samples = samples[:2]
    with torch.no_grad():
        together = kind.logits(model, kind.collate(samples))
        alone = torch.cat([kind.logits(model, kind.collate([sample])) for sample in samples])
        states = [model.model(input_ids=s["input_ids"][None]).last_hidden_state for s in samples]
        naive = torch.cat([model.score(state[:, -1]) for state in states])
    torch.testing.assert_close(together, naive, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(alone, naive, rtol=1e-4, atol=1e-5)
    assert model.config.pad_token_id == pad


def test_texts_are_cut_to_what_the_model_can_read():
    words = tokenizer()
    words.model_max_length = 4
    data = DataConfig(path="d", text="t")
    sample = model_kind("sequence-classification").encode({"t": "w1 " * 9}, data, words)
    assert len(sample["input_ids"]) == 4


@pytest.fixture
def words():
    return tokenizer()


def encode(row, words, task="causal-lm", **columns):
    return model_kind(task).encode(row, DataConfig(path="d", **columns), words)


@pytest.mark.parametrize("label", ["cat", True, None])
def test_labels_that_are_no_classes(words, label):
    row = {"t": "w1 w2", "l": label}
    with pytest.raises(TrainingError, match="labels are the numbers of the classes"):
        encode(row, words, "sequence-classification", text="t", label="l")


def test_pixels_of_another_shape():
    with pytest.raises(TrainingError, match="arrays with 2 axes"):
        encode({"x": [[1.0, 2.0]]}, None, "image-classification", image="x")
