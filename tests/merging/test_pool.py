# SPDX-License-Identifier: Apache-2.0
"""Processes of this machine: which GPU each gets, how they are started, how they leave."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from checkpoints import ace_config
from mergekit.options import MergeOptions
from sharded import SHARD_BYTES, SHARDS, assert_same, command, save_llamas, write_config

from mergekit_ace.merging.driver import run_shards
from mergekit_ace.merging.job import MergeError
from mergekit_ace.merging.pool import WorkerOptions, assign_gpus


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
    [("forkserver", SHARD_BYTES), ("spawn", 10**9)],
)
def test_processes(tmp_path, config, monkeypatch, start, size):
    monkeypatch.chdir(tmp_path)  # workers are started where this process was at first
    options = MergeOptions(out_shard_size=size, quiet=True)
    run_shards(config, "two/merged", options, WorkerOptions(2, start=start))
    command(config, tmp_path / "one" / "merged", "--out-shard-size", size, "--quiet")
    assert_same(tmp_path / "one" / "merged", tmp_path / "two" / "merged")


def test_what_workers_say_at_the_end(tmp_path, config):
    """Notices once by every process that merges, and no warning of what processes left behind."""
    parameters = {"adaptive_normalization": "always", "spectral_refinement": "always"}
    parameters |= {"refinement_mean": "ridged", "epsilon": 1.0}
    settings = {**yaml.safe_load(config.read_text()), "parameters": parameters}
    config.write_text(yaml.safe_dump(settings))
    program = [sys.executable, "-W", "default", "-m", "mergekit_ace.cli", "merge"]
    arguments = [str(config), str(tmp_path / "merged"), *SHARDS, "--workers", "2", "--quiet"]
    path = os.pathsep.join(filter(None, [os.getcwd(), os.environ.get("PYTHONPATH")]))
    done = subprocess.run(
        [*program, *arguments],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert 1 <= done.stderr.count("refinement_mean: ridged has turned the refinement of") <= 2
    assert "resource_tracker" not in done.stderr
    assert "leaked" not in done.stderr
