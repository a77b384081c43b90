# SPDX-License-Identifier: Apache-2.0
"""What goes wrong is said clearly, and nothing that is finished is lost."""

from __future__ import annotations

import math
import re
import resource
from pathlib import Path

import pytest
from checkpoints import ace_config
from safetensors.torch import load_file, save_file
from sharded import SHARDS, command, finished, linear, refusal, save_llamas, write_config

from mergekit_ace.merging import workers


@pytest.fixture
def own(tmp_path) -> tuple[Path, Path]:
    """A config of models that a test may damage, and the largest file of an expert."""
    config = write_config(tmp_path / "merge.yml", ace_config(save_llamas(tmp_path)))
    return config, max(Path(tmp_path, "expert1").glob("*.safetensors"))


def test_a_file_that_cannot_be_written(tmp_path, llamas, merge):
    """What is finished stays; two workers compute the rest."""
    out = tmp_path / "merged"
    _, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (10_700, hard))  # the first four shards have less
    try:
        text = merge(ace_config(llamas), *SHARDS, fails=True)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (hard, hard))
    assert re.search(r"\.safetensors: \w+: .*File too large", text)
    assert "What is finished is kept: give the same command again" in text
    before = finished(out)
    assert len(before) == 4
    assert not (out / "config.json").exists()
    merge(ace_config(llamas), *SHARDS, "--workers", 2)
    assert finished(out).items() > before.items()


def test_an_input_truncated_later(tmp_path, own, monkeypatch):
    (config, weights), out, original = own, tmp_path / "merged", workers.compute_shard
    stored = weights.read_bytes()

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
    assert "changed since then: " in refusal(config, out, *SHARDS)


@pytest.mark.parametrize("flag", ["multi-gpu", "async-write", "no-safe-serialization"])
def test_flags_that_are_refused(tmp_path, llamas, merge, flag):
    said = merge(ace_config(llamas), f"--{flag}", fails=True)
    assert "(give --workers N, with --cuda for a GPU each)" in said
    assert f"--{flag}" in said
    assert f"--{flag}" not in command("--help")
    said = merge(ace_config(llamas), "--out-shard-size", "1.5GB", fails=True)
    assert "Invalid value for '--out-shard-size'" in said
    assert not (tmp_path / "merged").exists()


@pytest.mark.parametrize(("method", "key"), [("ace", "dtype"), ("task_arithmetic", "out_dtype")])
def test_a_result_beyond_float16(tmp_path, llamas, merge, method, key):
    """mergekit-yaml would write Inf for `out_dtype`, and for its own methods."""
    parameters = {"lambda": 1e8, **({"weight": 1} if method == "task_arithmetic" else {})}
    config = ace_config(llamas, merge_method=method, parameters=parameters, **{key: "float16"})
    assert "bfloat16" in merge(config, *SHARDS, fails=True)
    assert not list(tmp_path.glob("merged/*.safetensors"))


@pytest.mark.parametrize(("method", "workers"), [("linear", 1), ("ace", 2)])
def test_nan(tmp_path, own, method, workers):
    """Also one that a method of mergekit lets through; the remedy that is printed works."""
    config, weights = own
    out, good = tmp_path / "merged", load_file(weights)
    if method == "linear":
        write_config(config, linear([str(tmp_path / name) for name in ("base", "expert1")]))
    name = next(name for name, tensor in good.items() if tensor.ndim == 2)
    save_file({**good, name: good[name] * math.nan}, weights, {"format": "pt"})
    text = refusal(config, out, *SHARDS, "--workers", workers)
    assert all(part in text for part in (name, "NaN", "--overwrite to begin anew"))
    save_file(good, weights, {"format": "pt"})
    command(config, out, *SHARDS, "--overwrite", "--workers", workers)
    assert (out / "config.json").exists()
