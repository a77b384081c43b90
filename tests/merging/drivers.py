# SPDX-License-Identifier: Apache-2.0
"""Merges in processes of their own, to be killed."""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import psutil
from mergekit.options import MergeOptions
from tqdm import tqdm

from mergekit_ace.merging.plan import MergeSettings
from mergekit_ace.merging.run import run_shards
from mergekit_ace.merging.workers import PRELOADED

SHARD_BYTES = 6_000


def drive(config: Path, out: Path, workers: int) -> None:
    """A driver, and its workers, in a process group of their own."""
    os.setpgrp()
    out.parent.mkdir(parents=True, exist_ok=True)
    sys.stderr = open(errors_file(out), "w")  # noqa: SIM115  # open until the process ends
    # the process that this one was forked from has imported everything already
    multiprocessing.set_start_method("fork", force=True)
    options = MergeOptions(out_shard_size=SHARD_BYTES, quiet=True)
    run_shards(config, str(out), options, MergeSettings(workers))


def errors_file(out: Path) -> Path:
    """Where a driver writes what it says of errors."""
    return out.with_name("errors.txt")


def deaths(out: Path) -> int:
    """How often a worker died."""
    return errors_file(out).read_text().count("a worker died")


def drive_with_bars_locked(config: Path, out: Path, workers: int) -> None:
    """A driver that has the lock of its bars all the time, as if a worker had died with it."""
    with tqdm.get_lock():
        drive(config, out, workers)


class Driver:
    """A merge in another process."""

    def __init__(
        self,
        config: Path,
        out: Path,
        workers: int,
        target: Callable[[Path, Path, int], None] = drive,
    ):
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload([*PRELOADED, "mergekit_ace.merging.run"])
        self.process = context.Process(target=target, args=(config, out, workers))
        self.process.start()

    def end(self) -> int | None:
        self.process.join(120)
        return self.process.exitcode

    def workers(self) -> list[psutil.Process]:
        try:
            return psutil.Process(self.process.pid).children()
        except psutil.NoSuchProcess:
            return []

    def stopped(self) -> list[psutil.Process]:
        """Stop the driver, so that it starts no more workers; those that it has."""
        with suppress(psutil.NoSuchProcess):
            psutil.Process(self.process.pid).suspend()
        return self.workers()

    def kill(self) -> None:
        """Kill the driver alone; its workers end by themselves."""
        workers = self.stopped()
        self.process.kill()
        self.process.join()
        assert all(gone(worker) for worker in workers)

    def kill_all(self) -> None:
        """Kill the driver and its workers at once."""
        workers = self.stopped()
        try:
            os.killpg(self.process.pid, signal.SIGKILL)
        except ProcessLookupError:  # not yet a group of its own, or at its end
            self.process.kill()
        self.process.join()
        assert all(gone(worker) for worker in workers)  # forked, they have its lock


def gone(process: psutil.Process) -> bool:
    """Whether a process ends within half a minute."""
    for _ in range(300):
        try:
            if process.status() == psutil.STATUS_ZOMBIE:
                return True
        except psutil.NoSuchProcess:
            return True
        time.sleep(0.1)
    return False
