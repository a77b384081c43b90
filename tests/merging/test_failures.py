# SPDX-License-Identifier: Apache-2.0
"""What goes wrong is said clearly, and nothing that is finished is lost."""

from __future__ import annotations

import resource
import shutil
from collections import namedtuple
from pathlib import Path

import pytest
import torch
from checkpoints import ace_config
from click.testing import CliRunner
from safetensors.torch import load_file, save_file
from sharded import (
    SHARDS,
    assert_same,
    command,
    finished,
    linear,
    refusal,
    save_llamas,
    write_config,
)

from mergekit_ace.cli import REFUSED_FLAGS, main
from mergekit_ace.merging import workers


@pytest.fixture
def config(tmp_path) -> Path:
    return write_config(tmp_path / "merge.yml", ace_config(save_llamas(tmp_path)))


@pytest.fixture
def whole(tmp_path, config) -> Path:
    command(config, tmp_path / "whole" / "merged", *SHARDS)
    return tmp_path / "whole" / "merged"


@pytest.fixture
def weights(tmp_path) -> Path:
    """The largest file of an expert."""
    return max(Path(tmp_path, "expert1").glob("*.safetensors"))


def test_a_full_disk_is_known_before(tmp_path, config, monkeypatch):
    """A merge that is done needs no room."""
    usage = namedtuple("usage", "total used free")(10**9, 10**9, 1000)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage)
    text = refusal(config, tmp_path / "merged", *SHARDS)
    assert "needs 0.0 GB more, and its disk has 0.0 GB free" in text
    monkeypatch.undo()
    command(config, tmp_path / "merged", *SHARDS)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage)
    assert "is complete" in command(config, tmp_path / "merged", *SHARDS)


def test_a_disk_that_is_full_by_then(tmp_path, config, whole):
    """No file of more than 10.7 kB can be written: the first four shards have less."""
    _, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (10_700, hard))
    try:
        text = refusal(config, tmp_path / "merged", *SHARDS)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (hard, hard))
    assert "File too large" in text
    assert "give the same command again" in text
    before = finished(tmp_path / "merged")
    assert before
    assert not (tmp_path / "merged" / "config.json").exists()
    command(config, tmp_path / "merged", *SHARDS)
    after = finished(tmp_path / "merged")
    assert {name: after[name] for name in before} == before
    assert_same(whole, tmp_path / "merged")


def test_an_input_truncated_later(tmp_path, config, weights, monkeypatch):
    out, stored, original = tmp_path / "merged", weights.read_bytes(), workers.compute_shard

    def cut(job, shard, bar):
        if shard.index == 2:
            weights.unlink()
            weights.write_bytes(stored[:-10])
        return original(job, shard, bar)

    monkeypatch.setattr(workers, "compute_shard", cut)
    assert f"{weights} is damaged" in refusal(config, out, *SHARDS)
    monkeypatch.undo()
    assert len(finished(out)) >= 2
    weights.write_bytes(stored)  # right again, but who knows: at another time
    assert "changed since it was begun: " in refusal(config, out, *SHARDS)


@pytest.mark.parametrize("count", [1, 2])
def test_a_failure(tmp_path, config, whole, count):
    """What is finished stays."""
    out = tmp_path / "merged"

    def fail():
        if len(finished(out)) == 2:
            raise RuntimeError("no such luck")
        return {}

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("mergekit_ace.merging.shards.take_notices", fail)
        text = refusal(config, out, *SHARDS)
    assert ".safetensors: RuntimeError: no such luck" in text
    assert "What is finished is kept: give the same command again" in text
    assert len(finished(out)) == 2
    command(config, out, *SHARDS, "--workers", count)
    assert_same(whole, out)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("--multi-gpu",), "with --cuda for a GPU each"),
        (("--async-write",), "with --cuda for a GPU each"),
        (("--write-threads", "2"), "with --cuda for a GPU each"),
        (("--no-safe-serialization",), "leave out --no-safe-serialization"),
    ],
)
def test_flags_that_are_refused(tmp_path, config, flags, message):
    assert message in refusal(config, tmp_path / "merged", *flags)
    text = CliRunner().invoke(main, ["merge", "--help"]).output
    assert "--read-to-gpu" in text
    assert not any(f"--{name.replace('_', '-')}" in text for name in REFUSED_FLAGS)


def test_sizes_of_shards(tmp_path, config, whole):
    command(config, tmp_path / "merged", "--out-shard-size", "12k")
    assert_same(whole, tmp_path / "merged")
    text = command(config, tmp_path / "none", "--out-shard-size", "1.5GB", code=2)
    assert "Invalid value for '--out-shard-size'" in text
    assert not (tmp_path / "none").exists()


@pytest.mark.parametrize(("method", "key"), [("ace", "dtype"), ("task_arithmetic", "out_dtype")])
def test_a_result_beyond_float16(tmp_path, method, key):
    """mergekit-yaml would write Inf for `out_dtype`, and for its own methods."""
    paths = save_llamas(tmp_path)
    parameters = {"lambda": 1e8, **({"weight": 1} if method == "task_arithmetic" else {})}
    config = ace_config(paths, merge_method=method, parameters=parameters, **{key: "float16"})
    text = refusal(write_config(tmp_path / "merge.yml", config), tmp_path / "merged", *SHARDS)
    assert "bfloat16" in text
    assert not list(tmp_path.glob("merged/*.safetensors"))


@pytest.mark.parametrize(("method", "workers"), [("linear", 1), ("ace", 2)])
def test_nan(tmp_path, config, whole, weights, method, workers):
    """Also one that a method of mergekit lets through; the remedy that is printed works."""
    out, good = tmp_path / "merged", weights.read_bytes()
    if method == "linear":
        write_config(config, linear([str(tmp_path / name) for name in ("base", "expert1")]))
    tensors = load_file(weights)
    name = next(name for name, tensor in tensors.items() if tensor.ndim == 2)
    bad = {**tensors, name: torch.full_like(tensors[name], float("nan"))}
    save_file(bad, weights, {"format": "pt"})
    text = refusal(config, out, *SHARDS, "--workers", workers)
    assert name in text
    assert "NaN" in text
    assert "give --overwrite instead, which begins anew" in text
    weights.write_bytes(good)
    assert "changed since it was begun: " in refusal(config, out, *SHARDS)
    command(config, out, *SHARDS, "--overwrite", "--workers", workers)
    if method == "ace":
        assert_same(whole, out)
