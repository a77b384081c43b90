# SPDX-License-Identifier: Apache-2.0
"""The parts that need no merge: files, queue, pace, GPUs, reports."""

from __future__ import annotations

import json

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from mergekit.io.tensor_writer import TensorWriter

from mergekit_ace.merging.errors import MergeError
from mergekit_ace.merging.events import ShardFailed
from mergekit_ace.merging.job import MergeJob
from mergekit_ace.merging.processes import devices
from mergekit_ace.merging.progress import Pace
from mergekit_ace.merging.queue import ATTEMPTS, ShardQueue
from mergekit_ace.merging.reports import append_lines, drop_lines, report_sizes
from mergekit_ace.merging.shards import Shard, file_name, group_tensors, plan_shards


@given(st.lists(st.integers(0, 40), min_size=1, max_size=20), st.integers(-1, 60))
def test_files_by_the_rule_of_mergekit(tmp_path_factory, sizes, limit):
    folder = tmp_path_factory.mktemp("written")
    writer = TensorWriter(str(folder), max_shard_size=limit)
    named = {f"t{n}": size for n, size in enumerate(sizes)}
    for name, size in named.items():
        writer.save_tensor(name, torch.zeros(size, dtype=torch.uint8))
    writer.finalize()
    groups = group_tensors(named, limit)
    files = [file_name(n, len(groups), safetensors=True) for n in range(len(groups))]
    expected = {name: file for file, group in zip(files, groups, strict=True) for name in group}
    if len(groups) > 1:
        index = json.loads((folder / "model.safetensors.index.json").read_text())
        assert index["weight_map"] == expected
    assert sorted(path.name for path in folder.glob("*.safetensors")) == sorted(files)


def shards(*work: float) -> list[Shard]:
    names = {f"t{n}": 10 for n in range(len(work))}
    return plan_shards(names, dict(zip(names, work, strict=True)), 10, safetensors=True)


def test_the_queue():
    in_order = ShardQueue(shards(1, 3, 2), largest_first=False)
    assert [in_order.take().index for _ in range(3)] == [0, 1, 2]
    queue = ShardQueue(shards(1, 3, 2), largest_first=True)
    assert [queue.take().index for _ in range(3)] == [1, 2, 0]
    assert queue
    assert not queue.waiting()
    queue.done(2)
    for n in range(1, ATTEMPTS + 1):
        if n == ATTEMPTS:
            with pytest.raises(MergeError, match="failed 3 times, the last time with: no luck"):
                queue.failed(ShardFailed(1, "no luck"))
        else:
            assert queue.failed(ShardFailed(1, "no luck")).index == 1
            assert queue.take().index == 1
    with pytest.raises(MergeError, match=r"00001-of-00003.safetensors: full\n"):
        queue.failed(ShardFailed(0, "full", final=True))
    assert not queue


def test_the_pace():
    now = [100.0]
    pace = Pace({"a": 10, "b": 30}, {"a": 1.0, "b": 3.0}, clock=lambda: now[0])
    assert pace.left is None
    now[0] = 102.0
    pace.add("a", 2.0)
    assert (pace.bytes, pace.rate, pace.left) == (10, 5.0, 6.0)
    pace.add("b", 1.0)
    assert pace.slowest() == [("a", 2.0), ("b", 1.0)]
    assert pace.left == 0
    pace.take_back(["b", "c"])
    assert pace.left == 6.0


def job(device: str) -> MergeJob:
    return MergeJob("", {"device": device}, (), None, "", "", 1)


def test_gpus(monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2,5")
    assert devices(job("cpu"), 3, None) == [None] * 3
    assert devices(job("cuda"), 2, None) == ["2", "5"]
    assert devices(job("cuda"), 4, 0.5) == ["2", "5", "2", "5"]
    assert devices(job("cuda"), 3, 0) == [None] * 3
    with pytest.raises(MergeError, match="3 workers with 1 GPUs each are more than the 2 GPUs"):
        devices(job("cuda"), 3, None)
    with pytest.raises(MergeError, match="a worker computes on one GPU"):
        devices(job("cuda"), 1, 2)


def test_reports(tmp_path):
    path = str(tmp_path / "report.jsonl")
    assert report_sizes([path]) == {path: 0}
    drop_lines(path, 0, {"a"})  # there is none
    append_lines({path: '{"tensor": "a"}\n'})
    sizes = report_sizes([path])
    append_lines({path: '{"tensor": "a"}\n{"tensor": "b"}\n{"tens'})
    drop_lines(path, sizes[path], {"a"})
    assert (tmp_path / "report.jsonl").read_text() == '{"tensor": "a"}\n{"tensor": "b"}\n'
