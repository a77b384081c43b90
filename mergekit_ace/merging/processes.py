# SPDX-License-Identifier: Apache-2.0
"""Workers in processes of this machine; one that is killed is replaced."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait

from tqdm import tqdm

from mergekit_ace.merging.errors import MergeError
from mergekit_ace.merging.events import Event, ShardFailed, TensorMerged
from mergekit_ace.merging.job import MergeJob
from mergekit_ace.merging.shard import ShardWorker
from mergekit_ace.merging.shards import Shard
from mergekit_ace.merging.workers import failure, run_shard

# Imported once, by the process that all workers are forked from.
PRELOADED = ["mergekit_ace.merging.processes", "mergekit.merge_methods"]
PATIENCE = 10  # seconds for a worker that was told to end


@dataclass
class _Process:
    """A worker, as the driver sees it.

    Attributes:
        process: of the system.
        pipe: to it.
        shard: index of what it computes; None while it waits.
        device: number of its GPU; None without.
    """

    process: multiprocessing.process.BaseProcess
    pipe: Connection
    shard: int | None
    device: str | None


class LocalProcesses:
    """A few processes on one machine, each with a plan of its own.

    Args:
        job: the merge.
        count: of processes.
        gpus: that each of them has; None for one where the merge works on GPUs. Below 1 several
            share one.
        start: how processes are started, see `multiprocessing`; the best way of the system without.
    """

    def __init__(
        self, job: MergeJob, count: int, *, gpus: float | None = None, start: str | None = None
    ):
        methods = multiprocessing.get_all_start_methods()
        start = start or ("forkserver" if "forkserver" in methods else "spawn")
        self._context = multiprocessing.get_context(start)
        if start == "forkserver":
            self._context.set_forkserver_preload(PRELOADED)
        self._job = job
        self._devices = devices(job, count, gpus)
        self._all: list[_Process] = []

    def free(self) -> int:
        idle = sum(worker.shard is None for worker in self._all)
        return idle + len(self._devices) - len(self._all)

    def give(self, shard: Shard) -> None:
        worker = next((worker for worker in self._all if worker.shard is None), None)
        worker = worker or self._start()
        worker.shard = shard.index
        with suppress(OSError):  # it has died: `events` will tell
            worker.pipe.send((shard.index, shard.tensors))

    def events(self) -> Iterator[Event]:
        busy = [worker for worker in self._all if worker.shard is not None]
        ready = wait([worker.pipe for worker in busy])
        for worker in busy:
            if worker.pipe in ready:
                yield self._receive(worker)

    def close(self) -> None:
        for worker in self._all:
            if worker.shard is None:
                with suppress(OSError):
                    worker.pipe.send(None)
            else:
                worker.process.kill()
        for worker in self._all:
            worker.process.join(PATIENCE)
            worker.process.kill()  # should it not have gone by itself
            worker.process.join()
            worker.pipe.close()
        self._all.clear()

    def _start(self) -> _Process:
        ours, its = self._context.Pipe()
        taken = [worker.device for worker in self._all]
        device = next(d for d in self._devices if self._devices.count(d) > taken.count(d))
        process = self._context.Process(
            target=work, args=(self._job, its, device), daemon=True, name="merge-worker"
        )
        process.start()
        its.close()  # so that its death ends the pipe
        worker = _Process(process, ours, None, device)
        self._all.append(worker)
        return worker

    def _receive(self, worker: _Process) -> Event:
        """What a worker says; its death is the failure of its shard."""
        assert worker.shard is not None  # nobody else is listened to
        try:
            event: Event = worker.pipe.recv()
        except (EOFError, OSError):
            event = self._bury(worker)
        if not isinstance(event, TensorMerged):
            worker.shard = None
        return event

    def _bury(self, worker: _Process) -> ShardFailed:
        worker.process.join()
        worker.pipe.close()
        self._all.remove(worker)
        code = worker.process.exitcode
        how = f"with status {code}"
        if code is not None and code < 0:
            how = f"by signal {-code} ({signal.Signals(-code).name})"
            how += ": out of memory, or killed" if -code == signal.SIGKILL else ""
        return ShardFailed(worker.shard or 0, f"the worker that computed it ended {how}")


def devices(job: MergeJob, count: int, gpus: float | None) -> list[str | None]:
    """The GPU of every worker; None for those that need none.

    Raises:
        MergeError: there are not enough.
    """
    import torch

    wanted = job.merge_options.device.startswith("cuda") if gpus is None else gpus > 0
    if not wanted:
        return [None] * count
    share = 1 if gpus is None else gpus
    if share > 1:
        raise MergeError("a worker computes on one GPU: give --gpus-per-worker 1, or less to share")
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    names = visible.split(",") if visible else [str(n) for n in range(torch.cuda.device_count())]
    slots = [name for _ in range(int(1 / share + 1e-6)) for name in names]
    if len(slots) < count:
        raise MergeError(
            f"{count} workers with {share:g} GPUs each are more than the {len(names)} GPUs here; "
            "give fewer --workers, or a share such as --gpus-per-worker 0.5"
        )
    return slots[:count]


def work(job: MergeJob, pipe: Connection, device: str | None) -> None:
    """A worker's life: compute what comes through the pipe, until the driver is gone."""
    if device is not None:
        os.environ["CUDA_VISIBLE_DEVICES"] = device  # before torch looks
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the driver decides
    # Where workers are forked, they share the lock of the driver's bars, and mergekit's bars take
    # it even where none is shown: a worker that is killed while it has it would stop all others.
    tqdm.set_lock(threading.RLock())
    threading.Thread(target=_follow_driver, daemon=True).start()
    worker: ShardWorker | None = None
    while True:
        try:
            given = pipe.recv()
        except (EOFError, OSError):
            return
        if given is None:  # nothing is left to do
            return
        index, tensors = given
        try:
            worker = worker or ShardWorker(job)
        except Exception as error:
            pipe.send(failure(index, error))
            continue
        for event in run_shard(worker, index, tensors):
            pipe.send(event)


def _follow_driver() -> None:
    """End at once when the driver does: nobody would take what is computed."""
    driver = multiprocessing.parent_process()
    if driver is not None:
        driver.join()
        os._exit(1)
