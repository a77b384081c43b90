# SPDX-License-Identifier: Apache-2.0
"""`kill -9` at ten moments, of each kind: the result is the same, nothing is done twice."""

from __future__ import annotations

import json
import random
import shutil
import time
from contextlib import suppress
from pathlib import Path

import psutil
import pytest
from checkpoints import ace_config
from drivers import SHARD_BYTES, Driver, deaths, drive_with_bars_locked, errors_file
from sharded import assert_same, command, finished, save_llamas, tensors_of, write_config

from mergekit_ace.merging.output import Manifest

SHARDS = ("--out-shard-size", str(SHARD_BYTES), "--quiet")


@pytest.fixture(scope="module")
def merge(tmp_path_factory) -> tuple[Path, Path]:
    """A config, and its result without any kill; about as many shards as tensors."""
    folder = tmp_path_factory.mktemp("killed")
    paths = save_llamas(folder, num_hidden_layers=1)
    report = {"report": str(folder / "report.jsonl")}
    config = write_config(folder / "merge.yml", ace_config(paths, parameters=report))
    assert Driver(config, folder / "reference" / "merged", 1).end() == 0
    return config, folder / "reference" / "merged"


@pytest.fixture(scope="module")
def moments(merge) -> list[float]:
    """Ten seconds from the start, while a merge takes on this machine."""
    config, _ = merge
    start = time.monotonic()
    assert Driver(config, config.parent / "first", 2).end() == 0
    duration, source = time.monotonic() - start, random.Random(20)
    print(f"a merge takes {duration:.2f} s")  # shown if the test fails
    return [source.uniform(0.0, duration) for _ in range(10)]


def begin(merge: tuple[Path, Path]) -> tuple[Path, Driver]:
    """Start a merge with two workers."""
    config, _ = merge
    out = config.parent / "killed" / "merged"
    shutil.rmtree(out, ignore_errors=True)
    (config.parent / "report.jsonl").unlink(missing_ok=True)
    return out, Driver(config, out, 2)


def check(merge: tuple[Path, Path], out: Path, before: dict[str, int]) -> None:
    """Compare with the result without any kill; the report has every tensor."""
    config, reference = merge
    after = finished(out)
    assert {name: after[name] for name in before} == before
    assert_same(reference, out)
    lines = (config.parent / "report.jsonl").read_text().splitlines()
    assert {json.loads(line)["tensor"] for line in lines} == set(tensors_of(out))


@pytest.mark.parametrize("kill", [Driver.kill, Driver.kill_all], ids=["driver", "everything"])
def test_kills_and_resumes(merge, moments, kill):
    between = 0  # kills between the first shard and the end
    for n, moment in enumerate(moments):
        out, driver = begin(merge)
        if n % 2:  # half of them after one to five shards, wherever that is
            while driver.process.is_alive() and len(finished(out)) <= n // 2:
                time.sleep(0.002)
        else:
            time.sleep(moment)
        kill(driver)
        before, manifest = finished(out), Manifest.read(out)
        between += bool(before) and manifest is not None and not manifest.complete
        command(merge[0], out, *SHARDS)
        check(merge, out, before)
    assert between > 0


def test_workers(merge):
    """The run goes on with one worker less; what is finished is not computed again."""
    died = 0
    for shards in range(10):
        out, driver = begin(merge)
        while driver.process.is_alive() and len(finished(out)) < shards:
            time.sleep(0.002)
        while driver.process.is_alive() and not driver.workers():
            time.sleep(0.002)
        for worker in driver.workers()[:1]:
            with suppress(psutil.NoSuchProcess):
                worker.kill()
        before = finished(out)
        assert driver.end() == 0
        check(merge, out, before)
        assert deaths(out) <= 1
        died += deaths(out)
    assert died > 0


def test_workers_that_always_die(merge):
    """The run ends, says why, and keeps what is finished."""
    out, driver = begin(merge)
    while driver.process.is_alive():
        for worker in driver.workers():
            with suppress(psutil.NoSuchProcess):
                worker.kill()
        time.sleep(0.002)
    assert driver.end() == 1
    assert "3 times a worker died: out of memory, or killed" in errors_file(out).read_text()
    command(merge[0], out, *SHARDS)
    check(merge, out, {})


def test_a_lock_that_nobody_gives_back(merge):
    """Workers wait for no lock of the driver, or of each other: its owner may be killed."""
    config, reference = merge
    out = config.parent / "locked" / "merged"
    driver = Driver(config, out, 2, target=drive_with_bars_locked)
    try:
        assert driver.end() == 0
    finally:
        driver.kill_all()
    assert_same(reference, out)
