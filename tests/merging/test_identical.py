# SPDX-License-Identifier: Apache-2.0
"""Every file is, byte for byte, the one that `mergekit-yaml` writes with the same flags."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from checkpoints import ace_config, save_family
from click.testing import CliRunner
from mergekit.config import MergeConfiguration
from mergekit.scripts.run_yaml import main as mergekit_yaml
from sharded import (
    INPUT_SHARDS,
    SHARDS,
    assert_same,
    command,
    finished,
    linear,
    save_speakers,
    write_config,
)
from tiny_models import tiny_model

from mergekit_ace.merging.output import Manifest


@pytest.fixture(autouse=True)
def in_order(monkeypatch):
    """Let mergekit list models by their names, as a merge of ours does, instead of by chance."""
    original = MergeConfiguration.referenced_models

    def referenced_models(self):
        return sorted(original(self), key=str)

    monkeypatch.setattr(MergeConfiguration, "referenced_models", referenced_models)


def compare(tmp_path: Path, config: dict, *flags: str) -> Path:
    """Merge by both commands, into directories of one name; that of ours."""
    path = write_config(tmp_path / "merge.yml", config)
    theirs, ours = tmp_path / "theirs" / "merged", tmp_path / "ours" / "merged"
    arguments = [str(path), str(theirs), *flags, "--quiet"]
    result = CliRunner().invoke(mergekit_yaml, arguments, catch_exceptions=False)
    assert result.exit_code == 0, result.output
    command(path, ours, *flags, "--quiet")
    assert Manifest.read(ours).complete
    assert_same(theirs, ours)
    return ours


@pytest.mark.parametrize(("method", "flags"), [("linear", ()), ("ace", SHARDS), ("slerp", SHARDS)])
def test_methods(tmp_path, llamas, method, flags):
    config = ace_config(llamas, merge_method=method, out_dtype="bfloat16")
    if method == "linear":
        config = linear(llamas)
    elif method == "slerp":
        config |= {"models": [{"model": path} for path in llamas[:2]], "parameters": {"t": 0.3}}
    ours = compare(tmp_path, config, *flags)
    files = len(list(ours.glob("*.safetensors")))
    assert files == len(finished(ours))
    assert (files > 3) == bool(flags)


@pytest.mark.parametrize(
    ("settings", "flags"),
    [
        ({"tokenizer": {"source": "union", "pad_to_multiple_of": 32}}, SHARDS),
        ({"tokenizer": {"source": "union"}, "chat_template": "auto"}, ()),
        ({"tokenizer": {"source": "base"}, "chat_template": "{{ messages | length }}!"}, SHARDS),
        ({}, (*SHARDS, "--unsafe-truncate-embeddings")),
    ],
)  # fmt: skip
def test_tokenizers(tmp_path, speakers, settings, flags):
    ours = compare(tmp_path, ace_config(speakers, **settings), *flags)
    assert (ours / "tokenizer.json").exists()
    assert (ours / "chat_template.jinja").exists()


@pytest.mark.parametrize("flags", [(), ("--no-write-model-card", "--no-copy-tokenizer")])
def test_a_tokenizer_that_is_loaded_and_saved_again(tmp_path, speakers, flags):
    ours = compare(tmp_path, linear(speakers[:1], chat_template="chatml"), *flags)
    assert (ours / "tokenizer.json").exists() == (ours / "README.md").exists() == (not flags)


def test_slices(tmp_path, llamas):
    sources = [{"model": path, "layer_range": [0, 2]} for path in llamas]
    config = {**ace_config(llamas), "slices": [{"sources": sources}, {"sources": sources}]}
    del config["models"]
    ours = compare(tmp_path, config, *SHARDS)
    assert '"num_hidden_layers": 4' in (ours / "config.json").read_text()


@pytest.mark.parametrize(
    ("name", "model_type", "save"),
    [
        ("GPT2LMHeadModel", "gpt2", {}),
        ("T5ForConditionalGeneration", "t5", {}),
        ("ViTForImageClassification", "vit", {"save_original_format": False}),
    ],
)
def test_architectures(tmp_path, name, model_type, save):
    """Weights stored (in, out), several modules, names that mergekit infers."""
    model = tiny_model(name, model_type, layers=1)
    paths = save_family(model, tmp_path, max_shard_size=INPUT_SHARDS, **save)
    compare(tmp_path, ace_config(paths), *SHARDS)


@pytest.mark.parametrize("flags", [(), ("--clone-tensors",)])
def test_a_layer_that_occurs_twice(tmp_path, llamas, flags):
    pieces = [{"sources": [{"model": llamas[0], "layer_range": [0, 1]}]}] * 2
    config = {"merge_method": "passthrough", "slices": pieces, "dtype": "float32"}
    compare(tmp_path, config, *flags)


def test_names_on_the_hub(tmp_path, monkeypatch):
    """Models that were downloaded before, by their names; what is there is told by an imitation."""
    cache, names = tmp_path / "cache", []
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(cache))
    for path in save_speakers(tmp_path):
        names.append(f"org/{Path(path).name}")
        folder = cache / f"models--org--{Path(path).name}"
        (folder / "refs").mkdir(parents=True)
        (folder / "refs" / "main").write_text("0123abc")
        (folder / "snapshots").mkdir()
        Path(path).rename(folder / "snapshots" / "0123abc")

    def list_repo_files(repo, *arguments, **named):
        return os.listdir(cache / f"models--{repo.replace('/', '--')}" / "snapshots" / "0123abc")

    monkeypatch.setattr("huggingface_hub.list_repo_files", list_repo_files)
    ours = compare(tmp_path, ace_config(names, tokenizer={"source": "base"}), *SHARDS)
    assert all(str(cache) in path for path in Manifest.read(ours).identity["inputs"])
