# SPDX-License-Identifier: Apache-2.0
"""How an architecture stores weights; see test_errors.py for errors by shapes of files."""

from __future__ import annotations

import pytest
import transformers as tf
from mergekit.common import ModelReference

from mergekit_ace.methods.storage import is_table, stored_layout

LLAMA = {
    "hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4,
    "architectures": ["LlamaForCausalLM"],
}  # fmt: skip
UNTIED = tf.LlamaConfig(**LLAMA, vocab_size=40)
TIED = tf.LlamaConfig(**LLAMA, vocab_size=32, tie_word_embeddings=True)
TOY = tf.LlamaConfig(**LLAMA, vocab_size=31, tie_word_embeddings=True)  # fewer tokens than columns
T5 = tf.T5Config(
    vocab_size=40, d_model=8, d_kv=4, d_ff=8, num_layers=1, num_heads=2,
    architectures=["T5ForConditionalGeneration"],
)  # fmt: skip
EMBEDDING, ATTENTION = "model.embed_tokens.weight", "encoder.block.0.layer.0.SelfAttention"


def test_an_architecture_that_cannot_be_built_is_reported_once(tmp_path, caplog):
    name = "transformer.h.1.attn.c_attn.weight"
    assert stored_layout("auto", 0, name, 2) == "matrix"  # of tensors in memory
    assert not caplog.records
    (tmp_path / "config.json").write_text('{"model_type": "nonesuch"}')
    model = ModelReference.parse(str(tmp_path))
    assert {stored_layout("auto", model, name, 2) for _ in range(2)} == {"matrix"}
    (record,) = [r for r in caplog.records if r.name.startswith("mergekit_ace")]
    assert str(tmp_path) in record.getMessage()
    assert "layout: transposed" in record.getMessage()


@pytest.mark.parametrize(
    ("config", "name", "looked_up", "layout"),
    [
        (UNTIED, EMBEDDING, True, "table"),
        (TIED, EMBEDDING, True, "matrix"),
        (TOY, EMBEDDING, True, "table"),
        (T5, "shared.weight", True, "matrix"),
        (T5, f"{ATTENTION}.relative_attention_bias.weight", True, "table"),
        (T5, f"{ATTENTION}.q.weight", False, "matrix"),
        (T5, "lm_head.weight", False, "matrix"),
        (T5, None, False, "matrix"),
    ],
)
def test_tables(tmp_path, config, name, looked_up, layout):
    """Those of Llama and GPT-2 are merged in test_variants.py."""
    config.save_pretrained(tmp_path)
    model = ModelReference.parse(str(tmp_path))
    assert is_table(model, name) == looked_up
    assert stored_layout("auto", model, name, 2, tables=True) == layout
    assert stored_layout("auto", model, name, 2) == "matrix"
    assert stored_layout("table", model, name, 2, tables=True) == "table"
