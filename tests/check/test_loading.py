# SPDX-License-Identifier: Apache-2.0
"""transformers tells from headers alone what it would make of a checkpoint, and of a result."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from checkpoints import tiny_llama
from mergekit.io import ShardedTensorIndex
from safetensors.torch import load_file, save_file
from test_architectures import MODELS
from transformers import AutoConfig

from mergekit_ace.check.loading import (
    NotLoadedError,
    load_headers,
    merged_model,
    verify_model,
    wanted_names,
)
from mergekit_ace.files.headers import TensorHeader, read_file_header
from mergekit_ace.methods.architecture import build_empty


def saved(folder: Path, name: str) -> tuple[AutoConfig, dict[str, TensorHeader]]:
    torch.manual_seed(0)
    MODELS[name][0]().save_pretrained(folder)
    headers = read_file_header(folder / "model.safetensors")
    return AutoConfig.from_pretrained(folder), headers


@pytest.mark.parametrize("name", MODELS)
def test_every_architecture_is_whole(tmp_path, name):
    """Renamed, packed and tied tensors are no false alarms, nor are shards and buffers."""
    torch.manual_seed(0)
    MODELS[name][0]().save_pretrained(tmp_path, max_shard_size="20KB")
    assert problem(tmp_path, tmp_path / "never looked at") == ""
    names = set(ShardedTensorIndex.from_disk(str(tmp_path)).tensor_paths)
    model = build_empty(AutoConfig.from_pretrained(tmp_path), trust_remote_code=False)
    assert {parameter.device.type for parameter in model.parameters()} == {"meta"}
    assert wanted_names(model, [*names, "mtp.layers.0.weight"]) == (names, set())


@pytest.mark.parametrize("name", ["llama", "gpt2", "vit", "t5", "mixtral", "qwen3_moe"])
def test_a_tensor_that_is_missing_or_too_large(tmp_path, name):
    config, headers = saved(tmp_path, name)
    gone = next(n for n in headers if "layer" in n or ".h." in n or "block." in n)
    rest = {n: header for n, header in headers.items() if n != gone}
    found = load_headers(config, rest, trust_remote_code=False)
    # one expert less is another shape, or fits together no longer
    assert found.missing or found.mismatched or found.failure
    header = headers[gone]
    odd = TensorHeader(header.dtype, (*header.shape[:-1], header.shape[-1] + 1), "")
    found = load_headers(config, {**headers, gone: odd}, trust_remote_code=False)
    assert found.mismatched or found.failure


def test_tied_weights_are_not_needed():
    names = ["model.embed_tokens.weight", "lm_head.weight"]
    config = tiny_llama(tie_word_embeddings=True).config
    config.architectures = ["LlamaForCausalLM"]
    model = build_empty(config, trust_remote_code=False)
    assert wanted_names(model, names) == ({names[0]}, {names[1]})
    config.tie_word_embeddings = False
    assert wanted_names(build_empty(config, trust_remote_code=False), names) == (set(names), set())


def test_what_is_found(tmp_path):
    config, headers = saved(tmp_path, "llama")
    name = "model.layers.1.mlp.up_proj.weight"
    headers[f"{name}.more"] = headers.pop(name)
    headers["model.norm.weight"] = TensorHeader("BF16", (31,), "")
    headers["model.layers.0.self_attn.rotary_emb.inv_freq"] = TensorHeader("F32", (4,), "")
    found = load_headers(config, headers, trust_remote_code=False)
    assert found.missing == {name}
    assert found.unexpected == {f"{name}.more"}
    assert found.mismatched == {"model.norm.weight": ((31,), (32,))}
    assert not found.failure


@pytest.mark.parametrize("name", ["NoSuchModel", "pipeline", "AutoModel"])
def test_unknown_architectures(name):
    config = tiny_llama().config
    config.architectures = [name]
    if name != "NoSuchModel":  # mergekit takes it for a language model, as this one is
        assert build_empty(config, trust_remote_code=False).config.model_type == "llama"
        return
    config.model_type = "unheard"
    config.__class__ = type("UnheardConfig", (config.__class__,), {"model_type": "unheard"})
    assert load_headers(config, {}, trust_remote_code=False).failure


def problem(result: Path, origin: Path) -> str:
    return verify_model(result, merged_model(origin), origin, trust_remote_code=False)


def rewrite(folder: Path, change) -> None:
    file = folder / "model.safetensors"
    tensors = load_file(file)
    change(tensors)
    save_file(tensors, file, {"format": "pt"})


@pytest.fixture
def folders(tmp_path) -> tuple[Path, Path]:
    """A result and the model whose config it has, equal so far."""
    for name in ("result", "origin"):
        tiny_llama().save_pretrained(tmp_path / name)
    return tmp_path / "result", tmp_path / "origin"


def test_faults_are_named(folders):
    name = "model.layers.0.mlp.up_proj.weight"

    def spoil(tensors: dict) -> None:
        tensors["model.layers.7.mlp.up_proj.weight"] = tensors.pop(name)
        tensors["lm_head.weight"] = torch.zeros(41, 32)

    rewrite(folders[0], spoil)
    text = problem(*folders)
    assert f"it lacks 1 tensors: {name}" in text
    assert "no place for 1 tensors: model.layers.7.mlp.up_proj.weight" in text
    assert "lm_head.weight (41, 32) instead of (40, 32)" in text


def test_faults_of_the_origin_are_not_the_merges(folders):
    for folder in folders:
        rewrite(folder, lambda tensors: tensors.pop("model.layers.0.mlp.up_proj.weight"))
        rewrite(folder, lambda tensors: tensors.update(odd=torch.zeros(2)))
    assert problem(*folders) == ""
    rewrite(folders[0], lambda tensors: tensors.pop("model.layers.0.mlp.down_proj.weight"))
    assert "it lacks 1 tensors: model.layers.0.mlp.down_proj.weight" in problem(*folders)


def test_experts_that_do_not_fit_together(tmp_path):
    for name in ("result", "origin"):
        torch.manual_seed(0)
        MODELS["mixtral"][0]().save_pretrained(tmp_path / name)
    part = "model.layers.0.block_sparse_moe.experts.1.w1.weight"
    rewrite(tmp_path / "result", lambda tensors: tensors.pop(part))
    assert "cannot be put together" in problem(tmp_path / "result", tmp_path / "origin")


def test_a_model_that_transformers_does_not_load_either(folders):
    for folder in folders:
        rewrite(folder, lambda tensors: tensors.clear())
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps({**config, "hidden_act": "none such"}))
    with pytest.raises(NotLoadedError, match="origin either"):
        problem(*folders)


def test_a_folder_of_any_name(tmp_path):
    folder = tmp_path / "merged+by@me"
    tiny_llama().save_pretrained(folder)
    assert problem(folder, folder) == ""


def test_pickles(folders):
    result, _ = folders
    torch.save(load_file(result / "model.safetensors"), result / "pytorch_model.bin")
    (result / "model.safetensors").unlink()
    assert problem(*folders) == ""
    config = json.loads((result / "config.json").read_text())
    (result / "config.json").write_text(json.dumps(config | {"intermediate_size": 50}))
    assert "6 tensors have another shape than in its config" in problem(*folders)
