# SPDX-License-Identifier: Apache-2.0
"""Which weights an architecture stores (in, out)."""

from __future__ import annotations

import pytest
import transformers as tf
from mergekit.common import ModelReference

from mergekit_ace.methods.architecture import is_table, is_transposed, stored_layout

SMALL = {"vocab_size": 40, "hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4}


def reference(config: tf.PretrainedConfig, architecture: str, folder) -> ModelReference:
    config.architectures = [architecture]
    config.save_pretrained(folder)
    return ModelReference.parse(str(folder))


@pytest.mark.parametrize("architecture", ["GPT2LMHeadModel", "GPT2ForSequenceClassification"])
def test_conv1d_by_kind_not_by_number_or_prefix(tmp_path, architecture):
    config = tf.GPT2Config(vocab_size=40, n_positions=8, n_embd=8, n_layer=2, n_head=2)
    model = reference(config, architecture, tmp_path)
    for name in (
        "transformer.h.1.attn.c_attn.weight",
        "h.0.mlp.c_proj.weight",
        "transformer.h.11.mlp.c_fc.weight",  # a taller stack than the base
    ):
        assert is_transposed(model, name)
    for name in (
        "transformer.wte.weight",
        "transformer.h.1.attn.c_attn.bias",
        "lm_head.weight",
        "score.weight",
        "other_c_attn.weight",
    ):
        assert not is_transposed(model, name)


def test_packed_experts(tmp_path):
    oss = tf.GptOssConfig(**SMALL, num_local_experts=2, intermediate_size=16, head_dim=8)
    model = reference(oss, "GptOssForCausalLM", tmp_path / "oss")
    assert is_transposed(model, "model.layers.0.mlp.experts.gate_up_proj")
    assert not is_transposed(model, "model.layers.0.mlp.experts.gate_up_proj_bias")
    assert not is_transposed(model, "model.layers.0.self_attn.q_proj.weight")
    scout = tf.Llama4TextConfig(**SMALL, num_local_experts=2, intermediate_size=16, head_dim=8)
    model = reference(scout, "Llama4ForCausalLM", tmp_path / "scout")
    assert is_transposed(model, "model.layers.0.feed_forward.experts.down_proj")
    mixtral = tf.MixtralConfig(**SMALL, num_local_experts=2, intermediate_size=16)
    model = reference(mixtral, "MixtralForCausalLM", tmp_path / "mixtral")
    assert not is_transposed(model, "model.layers.0.mlp.experts.down_proj")


def test_no_architecture_is_no_transposition(tmp_path, caplog):
    assert not is_transposed(0, "transformer.h.1.attn.c_attn.weight")
    file = tmp_path / "w.safetensors"
    file.write_bytes(b"")
    assert not is_transposed(ModelReference.parse(str(file)), "h.1.attn.c_attn.weight")
    assert not caplog.records


def test_an_architecture_that_cannot_be_built_is_reported_once(tmp_path, caplog):
    (tmp_path / "config.json").write_text('{"model_type": "nonesuch"}')
    model = ModelReference.parse(str(tmp_path))
    assert not is_transposed(model, "h.1.attn.c_attn.weight")
    assert not is_transposed(model, "h.2.attn.c_attn.weight")
    (record,) = [r for r in caplog.records if r.name.startswith("mergekit_ace")]
    assert str(tmp_path) in record.getMessage()
    assert "layout: transposed" in record.getMessage()


@pytest.mark.parametrize(
    ("config", "architecture", "tables", "others"),
    [
        (
            tf.LlamaConfig(**SMALL),
            "LlamaForCausalLM",
            ["model.embed_tokens.weight"],
            ["lm_head.weight", "model.norm.weight", "model.layers.0.mlp.up_proj.weight"],
        ),
        (
            tf.GPT2Config(vocab_size=40, n_positions=8, n_embd=8, n_layer=1, n_head=2),
            "GPT2LMHeadModel",
            ["transformer.wte.weight", "wpe.weight"],
            ["h.0.attn.c_attn.weight", "lm_head.weight"],
        ),
        (
            tf.T5Config(
                vocab_size=40,
                d_model=8,
                d_kv=4,
                d_ff=8,
                num_layers=1,
                num_heads=2,
                feed_forward_proj="gated-gelu",
            ),
            "T5ForConditionalGeneration",
            [
                "shared.weight",
                "encoder.block.0.layer.0.SelfAttention.relative_attention_bias.weight",
            ],
            ["lm_head.weight", "encoder.block.0.layer.0.SelfAttention.q.weight"],
        ),
    ],
    ids=["llama", "gpt2", "t5"],
)
def test_tables(tmp_path, config, architecture, tables, others):
    model = reference(config, architecture, tmp_path)
    assert [name for name in (*tables, *others) if is_table(model, name)] == tables
    assert not is_table(0, tables[0])
    assert not is_table(model, None)


@pytest.mark.parametrize(
    ("tied", "tokens", "expected"),
    [(False, 40, "table"), (True, 40, "matrix"), (True, 32, "matrix"), (True, 31, "table")],
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


def test_embeddings_without_a_head_are_tables(tmp_path):
    """A classifier's config says that embeddings are tied, but no head is there."""
    config = tf.GPT2Config(vocab_size=40, n_positions=8, n_embd=8, n_layer=1, n_head=2)
    model = reference(config, "GPT2ForSequenceClassification", tmp_path)
    assert stored_layout("auto", model, "transformer.wte.weight", 2, tables=True) == "table"
