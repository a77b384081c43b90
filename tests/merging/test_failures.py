# SPDX-License-Identifier: Apache-2.0
"""What goes wrong is said clearly, and nothing that is finished is lost; who computes what."""

from __future__ import annotations

import multiprocessing
import os
import resource
import shutil
from collections import namedtuple
from pathlib import Path

import pytest
import torch
from checkpoints import ace_config
from click.testing import CliRunner
from mergekit.options import MergeOptions
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

from mergekit_ace.cli import ONE_PROCESS_FLAGS, main
from mergekit_ace.files.saving import package_versions
from mergekit_ace.merging import workers
from mergekit_ace.merging.shards import MERGE_PACKAGES, MergeJob, Shard, compute_shard
from mergekit_ace.merging.workers import assign_gpus


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


def limited(config: Path, out: Path, code) -> None:
    """A merge that cannot write files of more than 10.7 kB, as on a disk that is full by then."""
    resource.setrlimit(resource.RLIMIT_FSIZE, (10_700, resource.RLIM_INFINITY))
    text = refusal(config, out, *SHARDS)
    print(text)
    code.value = "File too large" in text and "give the same command again" in text


def test_a_disk_that_is_full_by_then(tmp_path, config, whole):
    """The first four shards have less, the fifth has more."""
    context = multiprocessing.get_context("forkserver")
    code = context.Value("b", 0)
    process = context.Process(target=limited, args=(config, tmp_path / "merged", code))
    process.start()
    process.join()
    assert code.value == 1
    before = finished(tmp_path / "merged")
    assert before
    assert not (tmp_path / "merged" / "config.json").exists()
    command(config, tmp_path / "merged", *SHARDS)
    after = finished(tmp_path / "merged")
    assert {name: after[name] for name in before} == before
    assert_same(whole, tmp_path / "merged")


def test_an_output_that_cannot_be_written(tmp_path, config):
    (tmp_path / "file").write_text("")
    assert str(tmp_path / "file") in refusal(config, tmp_path / "file" / "merged")


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


@pytest.mark.parametrize("flags", [("--multi-gpu",), ("--async-write",), ("--write-threads", "2")])
def test_flags_for_one_process(tmp_path, config, flags):
    assert "with --cuda for a GPU each" in refusal(config, tmp_path / "merged", *flags)
    text = CliRunner().invoke(main, ["merge", "--help"]).output
    assert "--read-to-gpu" in text
    assert not any(f"--{name.replace('_', '-')}" in text for name in ONE_PROCESS_FLAGS)


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        (("--out-shard-size", "1.5GB"), "Invalid value for '--out-shard-size'"),
        (("--workers", "0"), "--workers"),
    ],
)
def test_values_of_flags(tmp_path, config, flags, expected):
    result = CliRunner().invoke(main, ["merge", str(config), str(tmp_path / "merged"), *flags])
    assert result.exit_code == 2, result.output
    assert flags[0] in result.output
    assert expected in result.output
    assert not (tmp_path / "merged").exists()


@pytest.mark.parametrize("size", ["12k", "012000"])
def test_sizes_of_shards(tmp_path, config, whole, size):
    command(config, tmp_path / "merged", "--out-shard-size", size)
    assert_same(whole, tmp_path / "merged")


@pytest.mark.parametrize("method", ["ace", "task_arithmetic"])
@pytest.mark.parametrize("key", ["dtype", "out_dtype"])
def test_a_result_beyond_float16(tmp_path, method, key):
    """mergekit-yaml would write Inf for `out_dtype`, and for its own methods."""
    paths = save_llamas(tmp_path)
    parameters = {"lambda": 1e8, **({"weight": 1} if method == "task_arithmetic" else {})}
    config = ace_config(paths, merge_method=method, parameters=parameters, **{key: "float16"})
    text = refusal(write_config(tmp_path / "merge.yml", config), tmp_path / "merged", *SHARDS)
    assert "bfloat16" in text
    assert not list(tmp_path.glob("merged/*.safetensors"))


@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.parametrize("method", ["linear", "ace"])
def test_nan(tmp_path, weights_with_nan, workers, method):
    """Also one that a method of mergekit lets through; the remedy that is printed works."""
    paths, name, repair = weights_with_nan
    settings = linear(paths) if method == "linear" else ace_config(paths)
    config, out = write_config(tmp_path / "merge.yml", settings), tmp_path / "merged"
    text = refusal(config, out, *SHARDS, "--workers", workers)
    assert name in text
    assert "NaN" in text
    assert "give --overwrite instead, which begins anew" in text
    repair()
    assert "changed since it was begun: " in refusal(config, out, *SHARDS)
    command(config, out, *SHARDS, "--overwrite", "--workers", workers)
    command(config, tmp_path / "again" / "merged", *SHARDS)
    assert_same(tmp_path / "again" / "merged", out)


@pytest.fixture
def weights_with_nan(tmp_path):
    """A family, the name of a tensor of it with NaN, and a function that repairs it."""
    paths = save_llamas(tmp_path)
    file = max(Path(paths[1]).glob("*.safetensors"))
    good = load_file(file)
    name = next(name for name, tensor in good.items() if tensor.ndim == 2)
    bad = {**good, name: torch.full_like(good[name], float("nan"))}
    save_file(bad, file, {"format": "pt"})
    return paths, name, lambda: save_file(good, file, {"format": "pt"})


def test_gpus(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2,5")
    assert assign_gpus("cpu", 3) == [None] * 3
    assert assign_gpus("cuda", 2) == ["2", "5"]
    assert assign_gpus("cuda", 3) == ["2", "5", "2"]


@pytest.mark.parametrize(
    ("start", "size"),  # Linux and macOS; Windows, for which one worker that imports all will do
    [(None, "12000"), ("spawn", "1B")],
)
def test_processes(tmp_path, monkeypatch, start, size):
    """Models by relative paths: workers are started where this process was at first."""
    names = [os.path.relpath(path, tmp_path) for path in save_llamas(tmp_path)]
    config = write_config(tmp_path / "merge.yml", ace_config([f"./{name}" for name in names]))
    monkeypatch.chdir(tmp_path)
    multiprocessing.set_start_method(start, force=True)
    try:
        command(config, "two/merged", "--workers", 2, "--out-shard-size", size, "--quiet")
    finally:
        multiprocessing.set_start_method(None, force=True)
    command(config, tmp_path / "one" / "merged", "--out-shard-size", size, "--quiet")
    assert_same(tmp_path / "one" / "merged", tmp_path / "two" / "merged")


def test_other_packages(tmp_path):
    """On a node of a cluster that was set up at another time."""
    versions = {**package_versions(*MERGE_PACKAGES), "torch": "0.1"}
    job = MergeJob(MergeOptions(), None, None, str(tmp_path), versions=versions)
    result = compute_shard(job, Shard(3, "model.safetensors", (), {}))
    assert "a worker has other packages" in result.error
    assert "'torch': '0.1'" in result.error
    assert not list(tmp_path.iterdir())
