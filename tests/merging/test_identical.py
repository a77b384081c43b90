# SPDX-License-Identifier: Apache-2.0
"""Every file is, byte for byte, the one that `mergekit-yaml` writes with the same flags."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from checkpoints import ace_config, save_family, tiny_llama
from click.testing import CliRunner
from mergekit.config import MergeConfiguration
from mergekit.scripts.run_yaml import main as mergekit_yaml
from safetensors.torch import load_file
from sharded import (
    INPUT_SHARDS,
    SHARDS,
    assert_same,
    command,
    finished,
    linear,
    save_llamas,
    save_speakers,
    write_config,
)
from test_architectures import MODELS, SAVE

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


@pytest.mark.parametrize("flags", [SHARDS, ()], ids=["shards", "one-file"])
@pytest.mark.parametrize("method", ["linear", "ties", "ace", "statsmerging", "slerp"])
def test_methods(tmp_path, method, flags):
    paths = save_llamas(tmp_path)
    config = ace_config(paths, merge_method=method, out_dtype="bfloat16")
    weights = [{"model": path, "parameters": {"weight": 0.4}} for path in paths[1:]]
    if method == "linear":
        config = linear(paths)
    elif method == "slerp":
        config |= {"models": [{"model": path} for path in paths[:2]], "parameters": {"t": 0.3}}
    elif method != "ace":
        config["models"] = weights
    ours = compare(tmp_path, config, *flags)
    files = len(list(ours.glob("*.safetensors")))
    assert files == len(finished(ours))
    assert (files > 3) == bool(flags)


@pytest.mark.parametrize(
    ("settings", "flags"),
    [
        ({"tokenizer": {"source": "union"}}, SHARDS),
        ({"tokenizer": {"source": "union", "pad_to_multiple_of": 32}}, SHARDS),
        ({"tokenizer": {"source": "base"}}, SHARDS),
        ({"tokenizer": {"source": "base"}, "chat_template": "auto"}, ()),
        ({"tokenizer": {"source": "base"}, "chat_template": "chatml"}, ()),
        ({"tokenizer": {"source": "base"}, "chat_template": "{{ messages | length }}!"}, ()),
        ({}, (*SHARDS, "--unsafe-truncate-embeddings")),
    ],
)  # fmt: skip
def test_tokenizers(tmp_path, settings, flags):
    ours = compare(tmp_path, ace_config(save_speakers(tmp_path), **settings), *flags)
    assert (ours / "tokenizer.json").exists()
    assert (ours / "chat_template.jinja").exists()


@pytest.mark.parametrize("flags", [(), ("--no-write-model-card", "--no-copy-tokenizer")])
def test_a_tokenizer_that_is_loaded_and_saved_again(tmp_path, flags):
    ours = compare(tmp_path, linear(save_speakers(tmp_path)[:1], chat_template="chatml"), *flags)
    assert (ours / "tokenizer.json").exists() == (ours / "README.md").exists() == (not flags)


def test_slices(tmp_path):
    paths = save_llamas(tmp_path)
    sources = [{"model": path, "layer_range": [0, 2]} for path in paths]
    config = {**ace_config(paths), "slices": [{"sources": sources}, {"sources": sources}]}
    del config["models"]
    ours = compare(tmp_path, config, *SHARDS)
    assert '"num_hidden_layers": 4' in (ours / "config.json").read_text()


@pytest.mark.parametrize("name", ["gpt2", "roberta", "t5", "vit"])
def test_architectures(tmp_path, name):
    """Weights stored (in, out), several modules, names that mergekit infers."""
    build, _ = MODELS[name]
    torch.manual_seed(0)
    paths = save_family(build(), tmp_path, max_shard_size=INPUT_SHARDS, **SAVE.get(name, {}))
    compare(tmp_path, ace_config(paths), *SHARDS)


@pytest.mark.parametrize("flags", [(), ("--clone-tensors",)])
def test_a_layer_that_occurs_twice(tmp_path, flags):
    paths = save_llamas(tmp_path)
    pieces = [{"sources": [{"model": paths[0], "layer_range": [0, 1]}]}] * 2
    config = {"merge_method": "passthrough", "slices": pieces, "dtype": "float32"}
    compare(tmp_path, config, *flags)


def test_old_pickles(tmp_path):
    paths = save_family(tiny_llama(), tmp_path)
    for path in paths:
        file = Path(path, "model.safetensors")
        torch.save(load_file(file), Path(path, "pytorch_model.bin"))
        file.unlink()
    compare(tmp_path, ace_config(paths), *SHARDS)


def test_pickles_as_result(tmp_path):
    """The name of the file is in its bytes, and only there differs from mergekit's."""
    paths = save_llamas(tmp_path)
    path = write_config(tmp_path / "merge.yml", ace_config(paths))
    flags = [*SHARDS, "--no-safe-serialization", "--quiet"]
    theirs, ours = tmp_path / "theirs", tmp_path / "ours"
    CliRunner().invoke(mergekit_yaml, [str(path), str(theirs), *flags], catch_exceptions=False)
    command(path, ours, *flags)
    index = "pytorch_model.bin.index.json"
    assert (theirs / index).read_bytes() == (ours / index).read_bytes()
    files = sorted(file.name for file in theirs.glob("*.bin"))
    assert len(files) > 3
    for file in files:
        expected, got = torch.load(theirs / file), torch.load(ours / file)
        assert list(expected) == list(got)
        assert all(torch.equal(expected[name], got[name]) for name in expected)


BOTH = """
import sys
from mergekit.config import MergeConfiguration
from mergekit.scripts.run_yaml import main as mergekit_yaml
from mergekit_ace.cli import main

original = MergeConfiguration.referenced_models
MergeConfiguration.referenced_models = lambda self: sorted(original(self), key=str)

if __name__ == "__main__":
    config, theirs, ours, *flags = sys.argv[1:]
    mergekit_yaml([config, theirs, *flags], standalone_mode=False)
    main(["merge", config, ours, *flags, "--workers", "2"], standalone_mode=False)
"""
LISTING = """
import os
import huggingface_hub

def list_repo_files(repo, *arguments, **named):
    folder = f"{os.environ['HF_HUB_CACHE']}/models--{repo.replace('/', '--')}/snapshots/0123abc"
    return os.listdir(folder)

huggingface_hub.list_repo_files = list_repo_files
"""


def test_names_on_the_hub(tmp_path):
    """Models that were downloaded before, by their names; what is there is told by an imitation.

    A process says its notices once, and leaves nothing behind.
    """
    cache, names = tmp_path / "cache", []
    (tmp_path / "sitecustomize.py").write_text(LISTING)  # for all processes
    for path in save_speakers(tmp_path):
        name, commit = f"org/{Path(path).name}", "0123abc"
        names.append(name)
        folder = cache / f"models--{name.replace('/', '--')}"
        (folder / "refs").mkdir(parents=True)
        (folder / "refs" / "main").write_text(commit)
        (folder / "snapshots").mkdir()
        Path(path).rename(folder / "snapshots" / commit)
    parameters = {"lambda": 1e7}  # entries that float16 does not hold, which is a notice
    settings = ace_config(names, tokenizer={"source": "base"}, parameters=parameters)
    config = write_config(tmp_path / "merge.yml", settings)
    theirs, ours = tmp_path / "theirs" / "merged", tmp_path / "ours" / "merged"
    path = os.pathsep.join(filter(None, [str(tmp_path), os.environ.get("PYTHONPATH")]))
    environment = {
        **os.environ,
        "HF_HUB_CACHE": str(cache),
        "HF_HUB_OFFLINE": "1",
        "PYTHONPATH": path,
    }
    arguments = [str(config), str(theirs), str(ours), *SHARDS]
    program = [sys.executable, "-W", "default", "-c", BOTH, *arguments]
    done = subprocess.run(program, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert_same(theirs, ours)
    assert all(str(cache) in path for path in Manifest.read(ours).identity["inputs"])
    # once for mergekit-yaml, ours and its workers
    assert done.stderr.count("came out with entries above 65504") == 1
    assert "resource_tracker" not in done.stderr
    assert "leaked" not in done.stderr
