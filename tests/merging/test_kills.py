# SPDX-License-Identifier: Apache-2.0
"""`kill -9` at ten moments, of each kind: the result is the same, nothing is done twice."""

from __future__ import annotations

import random
import shutil
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import psutil
import pytest
from checkpoints import ace_config
from drivers import SHARD_BYTES, Driver, deaths, drive_with_bars_locked
from sharded import assert_same, command, finished, save_llamas, shards_of, tensors_of, write_config

from mergekit_ace.merging.manifest import Manifest

KILLS = 10
SHARDS = ("--out-shard-size", str(SHARD_BYTES), "--quiet")


@pytest.fixture(scope="module")
def merge(tmp_path_factory) -> tuple[Path, Path]:
    """A config, and its result without any kill; about as many shards as tensors."""
    folder = tmp_path_factory.mktemp("killed")
    paths = save_llamas(folder, num_hidden_layers=1)
    report = {"report": str(folder / "report.jsonl")}
    config = write_config(folder / "merge.yml", ace_config(paths, parameters=report))
    assert Driver(config, folder / "reference" / "merged", 1).end() == 0
    (folder / "report.jsonl").unlink()
    return config, folder / "reference" / "merged"


@pytest.fixture(scope="module")
def duration(merge) -> float:
    """About how long a merge takes on this machine: where the kills have to fall."""
    config, _ = merge
    start = time.monotonic()
    assert Driver(config, config.parent / "first", 2).end() == 0
    return time.monotonic() - start


@pytest.fixture(params=[20], ids="seed{}".format)
def moments(duration, request) -> list[float]:
    """Seconds from the start: parts of `duration` that the seed draws."""
    print(f"a merge takes {duration:.2f} s")  # shown if the test fails
    source = random.Random(request.param)
    return [source.uniform(0.0, duration) for _ in range(KILLS)]


def until_something_is_finished(out: Path, process) -> None:
    while process.is_alive() and not finished(out):
        time.sleep(0.002)


def killed_and_resumed(
    merge: tuple[Path, Path], moments: list[float], kill: Callable[[Driver], None]
) -> int:
    """Kill and resume; how many kills came between the first shard and the end."""
    config, reference = merge
    between = 0
    for n, moment in enumerate(moments):
        out = config.parent / "killed" / "merged"
        shutil.rmtree(out, ignore_errors=True)
        (config.parent / "report.jsonl").unlink(missing_ok=True)
        driver = Driver(config, out, 2)
        if n % 2:  # half of them after the first shard, wherever that is
            until_something_is_finished(out, driver.process)
            moment /= 4
        time.sleep(moment)
        kill(driver)
        before = finished(out)
        manifest = Manifest.read(out)
        between += bool(before) and manifest is not None and not manifest.complete
        command(config, out, *SHARDS)
        after = finished(out)
        assert {name: after[name] for name in before} == before
        assert_same(reference, out)
        lines = (config.parent / "report.jsonl").read_text().splitlines()
        assert len(lines) == len(tensors_of(*map(out.joinpath, shards_of(out))))
    return between


def test_the_driver(merge, moments):
    assert killed_and_resumed(merge, moments, Driver.kill) > 0


def test_everything(merge, moments):
    assert killed_and_resumed(merge, moments, Driver.kill_all) > 0


def test_workers(merge, moments):
    """The run goes on with one worker less; what is finished is not computed again."""
    config, reference = merge
    died = 0
    for moment in moments:
        out = config.parent / "workers" / "merged"
        shutil.rmtree(out, ignore_errors=True)
        (config.parent / "report.jsonl").unlink(missing_ok=True)
        driver = Driver(config, out, 2)
        while driver.process.is_alive() and not driver.workers():
            time.sleep(0.002)
        time.sleep(moment / 4)
        for worker in driver.workers()[:1]:
            with suppress(psutil.NoSuchProcess):
                worker.kill()
        before = finished(out)
        assert driver.end() == 0
        after = finished(out)
        assert {name: after[name] for name in before} == before
        assert_same(reference, out)
        lines = (config.parent / "report.jsonl").read_text().splitlines()
        assert len(lines) == len(tensors_of(*map(out.joinpath, shards_of(out))))
        assert deaths(out) <= 1
        died += deaths(out)
    assert died > 0


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
