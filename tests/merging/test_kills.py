# SPDX-License-Identifier: Apache-2.0
"""Processes: `kill -9` of each kind leaves the result the same, and nothing is done twice."""

from __future__ import annotations

import multiprocessing
import os
import random
import shutil
import signal
import sys
import time
from contextlib import suppress
from pathlib import Path

import psutil
import pytest
import torch
from checkpoints import ace_config
from mergekit.options import MergeOptions
from sharded import assert_same, command, finished, reported, save_llamas, tensors_of, write_config
from tqdm import tqdm

from mergekit_ace.merging import workers
from mergekit_ace.merging.output import Manifest
from mergekit_ace.merging.run import run_shards
from mergekit_ace.merging.workers import assign_gpus

SHARDS = ("--out-shard-size", "6000", "--quiet")
KILLS = 5  # of each kind


def drive(config: Path, out: Path) -> None:
    """A driver, and its two workers, in a process group of their own."""
    os.setpgrp()
    sys.stderr = open(out.with_name("errors.txt"), "w")  # noqa: SIM115  # until the process ends
    # the process that this one was forked from has imported everything already
    workers.START_METHOD = "fork"
    tqdm.get_lock().acquire()  # as if a worker had died with it: nobody may wait for it
    run_shards(config, out, MergeOptions(out_shard_size=6_000, quiet=True), workers=2)


class Driver:
    """A merge in another process, into `killed/merged` beside its config."""

    def __init__(self, config: Path):
        self.config, self.out = config, config.parent / "killed" / "merged"
        shutil.rmtree(self.out.parent, ignore_errors=True)
        self.out.parent.mkdir()
        self.report.unlink(missing_ok=True)
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload([*workers.PRELOADED, __name__])
        self.process = context.Process(target=drive, args=(config, self.out))
        self.process.start()

    @property
    def report(self) -> Path:
        return self.config.parent / "base" / "report.jsonl"

    def wait_for(self, shards: int) -> None:
        """Wait until so many shards are finished, and a worker is there."""
        while self.process.is_alive() and (len(finished(self.out)) < shards or not self.workers()):
            time.sleep(0.002)

    def end(self) -> tuple[int | None, str]:
        """Wait for the end; the exit code, and what was said of errors."""
        self.process.join(120)
        return self.process.exitcode, self.out.with_name("errors.txt").read_text()

    def workers(self) -> list[psutil.Process]:
        try:
            return psutil.Process(self.process.pid).children()
        except psutil.NoSuchProcess:
            return []

    def kill_workers(self, most: int | None = None) -> None:
        for worker in self.workers()[:most]:
            with suppress(psutil.NoSuchProcess):
                worker.kill()

    def kill(self, *, everything: bool) -> None:
        """Kill the driver, at once with its workers, or alone: they end by themselves."""
        with suppress(psutil.NoSuchProcess):
            psutil.Process(self.process.pid).suspend()  # so that it starts no more workers
        workers = self.workers()
        with suppress(ProcessLookupError):  # not yet a group of its own, or at its end
            if everything:
                os.killpg(self.process.pid, signal.SIGKILL)
        self.process.kill()
        self.process.join()
        _, alive = psutil.wait_procs(workers, timeout=30)  # forked, they have its lock
        assert not [one for one in alive if one.status() != psutil.STATUS_ZOMBIE]

    def check(self, before: dict[str, tuple[int, int]]) -> None:
        """Compare with the result without any kill; the report has every tensor."""
        after = finished(self.out)
        assert {name: after[name] for name in before} == before
        assert_same(self.config.parent / "reference" / "merged", self.out)
        assert set(reported(self.report)) == set(tensors_of(self.out))


@pytest.fixture(scope="module")
def config(tmp_path_factory) -> Path:
    """A config, beside its result without any kill; about as many shards as tensors.

    The report lies in a model that is merged.
    """
    folder = tmp_path_factory.mktemp("killed")
    paths = save_llamas(folder, num_hidden_layers=1)
    report = {"report": str(folder / "base" / "report.jsonl")}
    config = write_config(folder / "merge.yml", ace_config(paths, parameters=report))
    command(config, folder / "reference" / "merged", *SHARDS)
    return config


@pytest.fixture(scope="module")
def duration(config) -> float:
    """Seconds that a merge with two workers takes on this machine."""
    driver, start = Driver(config), time.monotonic()
    assert driver.end()[0] == 0
    driver.check({})
    return time.monotonic() - start


@pytest.mark.parametrize("everything", [False, True], ids=["driver", "everything"])
def test_kills_and_resumes(config, duration, everything):
    """At moments by chance, and after one or two shards."""
    source, between = random.Random(20), 0  # kills between the first shard and the end
    for n in range(KILLS):
        driver = Driver(config)
        if n % 2:
            driver.wait_for(n // 2 + 1)
        else:
            time.sleep(source.uniform(0, duration))
        driver.kill(everything=everything)
        before, manifest = finished(driver.out), Manifest.read(driver.out)
        between += bool(before) and manifest is not None and not manifest.complete
        command(config, driver.out, *SHARDS)
        driver.check(before)
    assert between > 0


def test_workers(config):
    """The run goes on with one worker less; what is finished is not computed again."""
    died = []
    for shards in range(KILLS):
        driver = Driver(config)
        driver.wait_for(shards)
        driver.kill_workers(1)
        before = finished(driver.out)
        code, errors = driver.end()
        assert code == 0
        driver.check(before)
        died.append(errors.count("a worker died"))
    assert max(died) == 1


def test_workers_that_always_die(config):
    """The run ends, says why, and keeps what is finished."""
    driver = Driver(config)
    while driver.process.is_alive():
        driver.kill_workers()
        time.sleep(0.002)
    code, errors = driver.end()
    assert code == 1
    assert "3 times a worker died: out of memory, or killed" in errors
    command(config, driver.out, *SHARDS)
    driver.check({})


def test_processes(here, llamas, monkeypatch, caplog):
    """Models by relative paths, which workers know, too; their notices are said once.

    They are not forked from this process, whose threads they would wait for.
    """
    monkeypatch.setattr("os.fork", lambda: pytest.fail("a fork of a process with threads"))
    models = [os.path.relpath(path) for path in llamas]
    config = write_config(Path("merge.yml"), ace_config(models, parameters={"lambda": 1e7}))
    flags = ("--out-shard-size", "12000", "--no-check")
    command(config, "two/merged", *flags, "--workers", 2)
    assert caplog.text.count("came out with entries above 65504") == 1
    command(config, "one/merged", *flags)
    assert_same(Path("one/merged"), Path("two/merged"))


def test_gpus(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2,5")
    assert assign_gpus("cpu", 3) == [None] * 3
    assert assign_gpus("cuda", 2) == ["2", "5"]
    assert assign_gpus("cuda", 3) == ["2", "5", "2"]


def test_other_packages(llamas, merge, monkeypatch):
    """On a node of a cluster that was set up at another time."""
    versions = iter([{"torch": "0.1"}, {"torch": "0.2"}])  # of the driver, and of its worker
    monkeypatch.setattr("mergekit_ace.merging.shards.package_versions", lambda *_: next(versions))
    text = merge(ace_config(llamas), fails=True)
    assert "a worker has other packages ({'torch': '0.2'}) than the driver" in text
