# SPDX-License-Identifier: Apache-2.0
"""How an architecture stores weights, and shapes from headers; see test_errors.py for errors."""

from __future__ import annotations

import pytest
import torch
import transformers as tf
from mergekit.common import ModelReference
from safetensors.torch import save_file

from mergekit_ace.methods.architecture import check_shapes, is_table, stored_layout

SMALL = {"vocab_size": 40, "hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4}


def reference(config: tf.PretrainedConfig, architecture: str, folder) -> ModelReference:
    config.architectures = [architecture]
    config.save_pretrained(folder)
    return ModelReference.parse(str(folder))


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


def test_tables(tmp_path):
    """Those of Llama and GPT-2 are merged in test_variants.py."""
    sizes = {"vocab_size": 40, "d_model": 8, "d_kv": 4, "d_ff": 8, "num_layers": 1, "num_heads": 2}
    model = reference(tf.T5Config(**sizes), "T5ForConditionalGeneration", tmp_path)
    attention = "encoder.block.0.layer.0.SelfAttention"
    for table in ("shared.weight", f"{attention}.relative_attention_bias.weight"):
        assert is_table(model, table)
    for other in ("lm_head.weight", f"{attention}.q.weight", None):
        assert not is_table(model, other)


@pytest.mark.parametrize(
    ("tied", "tokens", "expected"),
    [(False, 40, "table"), (True, 32, "matrix"), (True, 31, "table")],
)
def test_tied_embeddings_are_matrices_but_for_toys(tmp_path, tied, tokens, expected):
    """A vocabulary smaller than the model's width is a toy's."""
    config = tf.LlamaConfig(**SMALL | {"vocab_size": tokens, "tie_word_embeddings": tied})
    model = reference(config, "LlamaForCausalLM", tmp_path)
    name = "model.embed_tokens.weight"
    assert is_table(model, name)
    assert stored_layout("auto", model, name, 2, tables=True) == expected
    assert stored_layout("auto", model, name, 2) == "matrix"
    assert stored_layout("table", model, name, 2, tables=True) == "table"


def test_shapes_in_files(tmp_path):
    def files(*names: str) -> list[ModelReference]:
        return [ModelReference.parse(str(tmp_path / name)) for name in names]

    save_file({"w": torch.zeros(3, 4)}, tmp_path / "base.safetensors")
    save_file({"w": torch.zeros(3, 5)}, tmp_path / "other.safetensors")
    base, other, *unreadable = files("base.safetensors", "other.safetensors", "w.bin", "missing")
    check_shapes("w", [*unreadable, 1], base)  # which is left to mergekit
    with pytest.raises(RuntimeError, match=r"shape \(3, 5\) in .*other.safetensors, but \(3, 4\)"):
        check_shapes("w", [other], base)
