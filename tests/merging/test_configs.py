# SPDX-License-Identifier: Apache-2.0
"""The `config.json` of a result says what its tensors are, which keep a dtype of their own."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from checkpoints import ace_config, save_family, tiny_llama
from safetensors.torch import load_file, save_file
from sharded import SHARDS, command, write_config
from transformers import Mamba2Config, Mamba2ForCausalLM

EMBEDDING = "model.embed_tokens.weight"


@pytest.mark.parametrize("flags", [(), SHARDS, ("--no-safe-serialization",)])
@pytest.mark.parametrize("moved", [0.0, 0.02])
def test_heads_that_experts_of_a_tied_base_store(tmp_path, flags, moved):
    paths = save_family(tiny_llama(tie_word_embeddings=True), tmp_path)
    for seed, path in enumerate(paths[1:]):
        file = Path(path, "model.safetensors")
        tensors = load_file(file)
        noise = torch.randn(40, 32, generator=torch.Generator().manual_seed(seed))
        tensors["lm_head.weight"] = tensors[EMBEDDING] + moved * noise
        save_file(tensors, file, {"format": "pt"})
    config, out = write_config(tmp_path / "merge.yml", ace_config(paths)), tmp_path / "merged"
    command(config, out, *flags)
    assert json.loads((out / "config.json").read_text())["tie_word_embeddings"] is (moved == 0)


def test_infinity(tmp_path):
    """transformers writes it as an object, in the configs of many hybrids."""
    shape = {"num_heads": 4, "head_dim": 16, "n_groups": 1, "state_size": 8}
    network = Mamba2Config(vocab_size=40, hidden_size=32, num_hidden_layers=2, **shape)
    paths = save_family(Mamba2ForCausalLM(network), tmp_path)
    config, out = write_config(tmp_path / "merge.yml", ace_config(paths)), tmp_path / "merged"
    command(config, out)
    assert json.loads((out / "config.json").read_text())["time_step_limit"] == [
        0.0,
        {"__float__": "Infinity"},
    ]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_tensors_that_all_models_keep_in_float32(tmp_path, dtype):
    """Nobody has changed them, and they are in the result bit for bit."""
    norm = torch.rand(32, generator=torch.Generator().manual_seed(1))
    paths = save_family(tiny_llama(), tmp_path)
    for path in paths:
        file = Path(path, "model.safetensors")
        tensors = {name: tensor.bfloat16() for name, tensor in load_file(file).items()}
        save_file({**tensors, "model.norm.weight": norm}, file, {"format": "pt"})
    settings = ace_config(paths, dtype=dtype, out_dtype="bfloat16")
    command(write_config(tmp_path / "merge.yml", settings), tmp_path / "merged")
    merged = load_file(tmp_path / "merged" / "model.safetensors")
    assert torch.equal(merged.pop("model.norm.weight"), norm)
    assert {tensor.dtype for tensor in merged.values()} == {torch.bfloat16}
