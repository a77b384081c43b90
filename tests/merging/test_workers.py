# SPDX-License-Identifier: Apache-2.0
"""Processes of this machine: which GPU each gets, how they are started."""

from __future__ import annotations

import multiprocessing
import os
from pathlib import Path

import pytest
from checkpoints import ace_config
from mergekit.options import MergeOptions
from sharded import SHARD_BYTES, assert_same, command, save_llamas, write_config

from mergekit_ace.files.saving import package_versions
from mergekit_ace.merging.shards import MERGE_PACKAGES, MergeError, MergeJob, Shard, compute_shard
from mergekit_ace.merging.workers import WorkerOptions, assign_gpus


def test_gpus(monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2,5")
    assert assign_gpus("cpu", WorkerOptions(3)) == [None] * 3
    assert assign_gpus("cuda", WorkerOptions(2)) == ["2", "5"]
    assert assign_gpus("cuda", WorkerOptions(4, gpus=0.5)) == ["2", "5", "2", "5"]
    assert assign_gpus("cuda", WorkerOptions(3, gpus=0)) == [None] * 3
    with pytest.raises(MergeError, match="3 workers with 1 GPUs each are more than the 2 GPUs"):
        assign_gpus("cuda", WorkerOptions(3))
    with pytest.raises(MergeError, match="a worker computes on one GPU"):
        assign_gpus("cuda", WorkerOptions(1, gpus=2))


@pytest.fixture
def config(tmp_path) -> Path:
    """Of models by relative paths, as seen from `tmp_path`."""
    names = [os.path.relpath(path, tmp_path) for path in save_llamas(tmp_path)]
    return write_config(tmp_path / "merge.yml", ace_config([f"./{name}" for name in names]))


@pytest.mark.parametrize(
    ("start", "size"),  # Linux and macOS; Windows, for which one worker that imports all will do
    [(None, SHARD_BYTES), ("spawn", 10**9)],
)
def test_processes(tmp_path, config, monkeypatch, start, size):
    monkeypatch.chdir(tmp_path)  # workers are started where this process was at first
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
    result = compute_shard(job, Shard(3, "model.safetensors", (), ()))
    assert "a worker has other packages" in result.error
    assert "'torch': '0.1'" in result.error
    assert not list(tmp_path.iterdir())
