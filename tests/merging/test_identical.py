# SPDX-License-Identifier: Apache-2.0
"""Every file is, byte for byte, the one that `mergekit-yaml` writes with the same flags."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest
from checkpoints import ace_config, save_family
from mergekit.config import MergeConfiguration
from sharded import INPUT_SHARDS, SHARDS, assert_same, finished, linear, save_speakers
from tiny_models import tiny_model

from mergekit_ace.merging.output import Manifest


@pytest.fixture
def compare(tmp_path, merge, mergekit_yaml, monkeypatch) -> Callable[..., Path]:
    """Merge by both commands, into directories of one name; that of ours.

    mergekit lists models by their names, as a merge of ours does, instead of by chance.
    """
    original = MergeConfiguration.referenced_models
    monkeypatch.setattr(
        MergeConfiguration, "referenced_models", lambda self: sorted(original(self), key=str)
    )

    def run(config: dict, *flags: str) -> Path:
        (tmp_path / "theirs").mkdir()
        theirs = mergekit_yaml(config, *flags, out="theirs/merged")
        merge(config, *flags, "--quiet", out="ours/merged")
        ours = tmp_path / "ours" / "merged"
        assert Manifest.read(ours).complete
        assert_same(theirs, ours)
        return ours

    return run


@pytest.mark.parametrize(("method", "flags"), [("linear", ()), ("ace", SHARDS), ("slerp", SHARDS)])
def test_methods(compare, llamas, method, flags):
    config = ace_config(llamas, merge_method=method, out_dtype="bfloat16")
    if method == "linear":
        config = linear(llamas)
    elif method == "slerp":
        config |= {"models": [{"model": path} for path in llamas[:2]], "parameters": {"t": 0.3}}
    assert (len(finished(compare(config, *flags))) > 3) == bool(flags)


@pytest.mark.parametrize(
    ("settings", "flags"),
    [
        ({"tokenizer": {"source": "union", "pad_to_multiple_of": 32}, "chat_template": "auto"}, ()),
        ({"tokenizer": {"source": "base"}, "chat_template": "{{ messages | length }}!"}, SHARDS),
        ({}, (*SHARDS, "--unsafe-truncate-embeddings")),
    ],
)  # fmt: skip
def test_tokenizers(compare, speakers, settings, flags):
    compare(ace_config(speakers, **settings), *flags)


@pytest.mark.parametrize("flags", [(), ("--no-write-model-card", "--no-copy-tokenizer")])
def test_a_tokenizer_that_is_loaded_and_saved_again(compare, speakers, flags):
    compare(linear(speakers[:1], chat_template="chatml"), *flags)


@pytest.mark.parametrize("counts", [(3, 3), (3, 2), (2, 3)])
def test_slices(compare, llamas, counts):
    """The head is merged of as many models as the first slice has."""
    slices = [
        {"sources": [{"model": path, "layer_range": layers} for path in llamas[:count]]}
        for count, layers in zip(counts, ([0, 2], [1, 2]), strict=True)
    ]
    config = {**ace_config(llamas), "slices": slices}
    del config["models"]
    compare(config, *SHARDS)


@pytest.mark.parametrize(
    ("name", "model_type", "save"),
    [
        ("GPT2LMHeadModel", "gpt2", {}),
        ("T5ForConditionalGeneration", "t5", {}),
        ("ViTForImageClassification", "vit", {"save_original_format": False}),
    ],
)
def test_architectures(tmp_path, compare, name, model_type, save):
    """Weights stored (in, out), several modules, names that mergekit infers."""
    model = tiny_model(name, model_type, layers=1)
    paths = save_family(model, tmp_path, max_shard_size=INPUT_SHARDS, **save)
    compare(ace_config(paths), *SHARDS)


@pytest.mark.parametrize("flags", [(), ("--clone-tensors",)])
def test_a_layer_that_occurs_twice(compare, llamas, flags):
    pieces = [{"sources": [{"model": llamas[0], "layer_range": [0, 1]}]}] * 2
    config = {"merge_method": "passthrough", "slices": pieces, "dtype": "float32"}
    compare(config, *flags)


def test_names_on_the_hub(tmp_path, compare, merge, monkeypatch):
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
    ours = compare(ace_config(names, tokenizer={"source": "base"}), *SHARDS)
    assert all(str(cache) in path for path in Manifest.read(ours).identity["inputs"])
    # offline, and by workers, which do not know of this cache
    monkeypatch.setattr("huggingface_hub.list_repo_files", None)
    merge(linear(names[:1]), *SHARDS, "--workers", "2", out="offline")
    assert (tmp_path / "offline" / "tokenizer.json").is_file()
