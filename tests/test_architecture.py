# SPDX-License-Identifier: Apache-2.0
"""How an architecture stores weights, and shapes from headers; see test_errors.py for errors."""

from __future__ import annotations

import os

import pytest
import torch
import transformers as tf
from mergekit.common import ModelReference
from safetensors.torch import save_file

from mergekit_ace.methods.architecture import check_shapes, is_table, is_transposed, stored_layout

SMALL = {"vocab_size": 40, "hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4}


def reference(config: tf.PretrainedConfig, architecture: str, folder) -> ModelReference:
    config.architectures = [architecture]
    config.save_pretrained(folder)
    return ModelReference.parse(str(folder))


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


def test_tables(tmp_path):
    """Those of Llama and GPT-2 are merged in test_relative.py."""
    t5 = tf.T5Config(
        vocab_size=40, d_model=8, d_kv=4, d_ff=8, num_layers=1, num_heads=2,
        feed_forward_proj="gated-gelu",
    )  # fmt: skip
    model = reference(t5, "T5ForConditionalGeneration", tmp_path)
    attention = "encoder.block.0.layer.0.SelfAttention"
    for table in ("shared.weight", f"{attention}.relative_attention_bias.weight"):
        assert is_table(model, table)
    for other in ("lm_head.weight", f"{attention}.q.weight", None):
        assert not is_table(model, other)
    assert not is_table(0, "shared.weight")


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


@pytest.fixture
def files(tmp_path) -> list[ModelReference]:
    models = []
    for n in range(2):
        path = tmp_path / f"{n}.safetensors"
        save_file({"w": torch.zeros(3, 4)}, path)
        models.append(ModelReference.parse(str(path)))
    return models


def test_a_file_that_changed_is_read_again(files):
    check_shapes("w", files[1:], files[0])
    path = files[1].model.path
    save_file({"w": torch.zeros(3, 5)}, path)
    os.utime(path, ns=(1, 1))
    with pytest.raises(RuntimeError, match=r"shape \(3, 5\) in .*1.safetensors, but \(3, 4\)"):
        check_shapes("w", files[1:], files[0])


@pytest.mark.parametrize("modern", [True, False])
def test_shapes_in_pickled_files(files, tmp_path, modern):
    pickled = tmp_path / "model.bin"
    torch.save({"w": torch.zeros(9), "step": 3}, pickled, _use_new_zipfile_serialization=modern)
    with pytest.raises(RuntimeError, match=r"shape \(9,\) in .*model.bin"):
        check_shapes("w", [ModelReference.parse(str(pickled))], files[0])


def test_what_has_no_header_is_left_to_mergekit(files, tmp_path):
    (tmp_path / "none.bin").write_bytes(b"none")
    others = [ModelReference.parse(str(tmp_path / name)) for name in ("none.bin", "missing")]
    check_shapes("w", [*others, 1], files[0])
    check_shapes("w", [1, 2], 0)
