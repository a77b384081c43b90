# SPDX-License-Identifier: Apache-2.0
"""Two nodes of a Ray cluster on this machine give the bytes of one process, whatever dies."""

from __future__ import annotations

import os
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
import ray
import torch
from checkpoints import ace_config
from sharded import SHARDS, assert_same, command, finished, reported, tensors_of, write_config


@pytest.fixture(scope="module")
def cluster():
    from ray.cluster_utils import Cluster

    soon = {"health_check_period_ms": 500, "health_check_initial_delay_ms": 0}  # a node is missed
    head = {"num_cpus": 1, "include_dashboard": False, "_system_config": soon}
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_worker_niceness", "0")  # or they wait for minutes while others compute
        nodes = Cluster(initialize_head=True, head_node_args=head)
        nodes.add_node(num_cpus=1)
        yield nodes
        nodes.shutdown()


def kill_workers_and_a_node(cluster, out: Path) -> int:
    """Once a shard is finished, kill all workers and all of the second node; how many workers."""
    deadline = time.monotonic() + 120
    while not finished(out) and time.monotonic() < deadline:
        time.sleep(0.002)
    raylets = [node.all_processes["raylet"][0].process.pid for node in cluster.list_all_nodes()]
    found: list[psutil.Process] = []
    while not found and time.monotonic() < deadline:  # none may be at work
        children = [c for pid in raylets for c in psutil.Process(pid).children(recursive=True)]
        found = [c for c in children if any("ray::compute_shard" in part for part in c.cmdline())]
    for process in found:
        process.kill()
    (node,) = cluster.worker_nodes
    cluster.remove_node(node, allow_graceful=False)
    return len(found)


def test_two_nodes(cluster, here, speakers):
    """Workers die, one of them with its node; their shards are computed on the first node."""
    report = here / "report.jsonl"
    settings = ace_config(
        [os.path.relpath(path) for path in speakers],
        tokenizer={"source": "base"},
        parameters={"report": str(report)},
    )
    config = write_config(here / "merge.yml", settings)
    command(config, "one/merged", *SHARDS)
    report.unlink()
    out = here / "two" / "merged"
    with ThreadPoolExecutor(1) as pool:
        killed = pool.submit(kill_workers_and_a_node, cluster, out)
        command(config, out, *SHARDS, "--ray", cluster.address, "--workers", 2)
    assert_same(here / "one" / "merged", out)
    assert killed.result() in (1, 2)
    assert set(reported(report)) == set(tensors_of(out))


@pytest.mark.parametrize(
    ("address", "message"),
    [
        ("127.0.0.1:1", "there is no Ray cluster at 127.0.0.1:1"),
        ("auto", "--ray needs: pip install ray"),
    ],
)
def test_without_a_cluster(tmp_path, llamas, merge, monkeypatch, address, message):
    if address == "auto":
        monkeypatch.setitem(sys.modules, "ray", None)
    assert message in merge(ace_config(llamas), "--ray", address, fails=True)
    assert not (tmp_path / "merged").exists()


@pytest.mark.parametrize("flags", [("-j", 5), ("--device", "cuda"), ()])
def test_a_cluster_without_room(cluster, tmp_path, llamas, merge, monkeypatch, request, flags):
    """The merge would wait for ever; nor does it stay connected where a disk has none."""
    # Five threads on two cores would slow down whatever this process tests afterwards.
    request.addfinalizer(partial(torch.set_num_threads, torch.get_num_threads()))
    monkeypatch.setattr("torch.get_num_threads", lambda: 5 if flags else 1)
    monkeypatch.setattr("shutil.disk_usage", lambda _: SimpleNamespace(free=1))
    text = merge(ace_config(llamas), "--ray", cluster.address, *flags, fails=True)
    no_disk = "needs 0.0 GB more, and its disk has 0.0 GB free"
    assert ("no node of the cluster has room for a worker" if flags else no_disk) in text
    assert not ray.is_initialized()
    assert not flags or not (tmp_path / "merged").exists()
