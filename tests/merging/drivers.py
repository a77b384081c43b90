# SPDX-License-Identifier: Apache-2.0
"""Merges in processes of their own, to be killed."""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import time
from contextlib import suppress
from pathlib import Path

import psutil
from mergekit.options import MergeOptions
from tqdm import tqdm

from mergekit_ace.merging import workers
from mergekit_ace.merging.run import run_shards

SHARD_BYTES = 6_000


def drive(config: Path, out: Path, bars_locked: bool) -> None:
    """A driver, and its two workers, in a process group of their own.

    Args:
        bars_locked: have the lock of its bars all the time, as if a worker had died with it.
    """
    os.setpgrp()
    out.parent.mkdir(parents=True, exist_ok=True)
    sys.stderr = open(errors_file(out), "w")  # noqa: SIM115  # open until the process ends
    # the process that this one was forked from has imported everything already
    workers.START_METHOD = "fork"
    options = MergeOptions(out_shard_size=SHARD_BYTES, quiet=True)
    if bars_locked:
        tqdm.get_lock().acquire()
    run_shards(config, out, options, workers=2)


def errors_file(out: Path) -> Path:
    """Where a driver writes what it says of errors."""
    return out.with_name("errors.txt")


class Driver:
    """A merge in another process."""

    def __init__(self, config: Path, out: Path, bars_locked: bool = False):
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(workers.PRELOADED)
        self.process = context.Process(target=drive, args=(config, out, bars_locked))
        self.process.start()

    def end(self) -> int | None:
        self.process.join(120)
        return self.process.exitcode

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
        try:
            if everything:
                os.killpg(self.process.pid, signal.SIGKILL)
        except ProcessLookupError:  # not yet a group of its own, or at its end
            pass
        self.process.kill()
        self.process.join()
        assert all(gone(worker) for worker in workers)  # forked, they have its lock


def gone(process: psutil.Process) -> bool:
    """Whether a process ends within half a minute."""
    for _ in range(3000):
        try:
            if process.status() == psutil.STATUS_ZOMBIE:
                return True
        except psutil.NoSuchProcess:
            return True
        time.sleep(0.01)
    return False
