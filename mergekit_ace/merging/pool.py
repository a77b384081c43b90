# SPDX-License-Identifier: Apache-2.0
"""Who computes the shards: this process, or processes of this machine; `cluster.py` has Ray's."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import Protocol

import torch
from mergekit.io.tasks import LoaderCache
from tqdm import tqdm

from mergekit_ace.merging.job import MergeError, MergeJob, Shard
from mergekit_ace.merging.worker import Event, ShardFailed, ShardWorker, TensorMerged
from mergekit_ace.planning import PlannedMerge

# Imported once, by the process that all workers are forked from.
PRELOADED = ["mergekit_ace.merging.pool", "mergekit.merge_methods"]
PATIENCE = 10  # seconds for a worker that was told to end


@dataclass(frozen=True)
class WorkerOptions:
    """Who computes the shards.

    Attributes:
        workers: number of processes; 1 without a cluster: this one.
        ray: address of a Ray cluster, `auto` for the one at hand; None without.
        gpus: per worker; None for one where the merge works on GPUs. Below 1 several share one.
        start: how processes are started, see `multiprocessing`; None for the system's best way.
    """

    workers: int = 1
    ray: str | None = None
    gpus: float | None = None
    start: str | None = None


class WorkerPool(Protocol):
    """Workers that compute shards, wherever they are; it replaces one that dies."""

    def free(self) -> int:
        """Return how many more shards would be computed at once."""

    def submit(self, shard: Shard) -> None:
        """Have a shard computed."""

    def events(self) -> Iterator[Event]:
        """Wait until something happens to a shard that was submitted, and yield what it is."""

    def close(self) -> None:
        """Stop everything at once."""


def make_pool(
    workers: WorkerOptions, job: MergeJob, plan: PlannedMerge, memory: int, *, logs: bool
) -> WorkerPool:
    """Make the pool that the command line asks for.

    Args:
        logs: show what workers on other machines print.

    Raises:
        MergeError: there are not enough GPUs, or the cluster cannot be used.
    """
    if workers.ray is not None:
        from mergekit_ace.merging.cluster import RayPool

        return RayPool(job, workers, memory=memory, logs=logs)
    if workers.workers > 1:
        return ProcessPool(job, workers)
    return SerialPool(job, plan)


class SerialPool:
    """Computes one shard after the other in this process."""

    def __init__(self, job: MergeJob, plan: PlannedMerge):
        self._worker = ShardWorker(job)
        self._worker.plan = plan  # it need not plan again
        self._shard: Shard | None = None

    def free(self) -> int:
        return int(self._shard is None)

    def submit(self, shard: Shard) -> None:
        self._shard = shard

    def events(self) -> Iterator[Event]:
        assert self._shard is not None  # the driver waits only for what it has submitted
        yield from self._worker.run(self._shard.index, self._shard.tensors)
        self._shard = None

    def close(self) -> None:
        self._worker.close()
        LoaderCache().flush_all()


@dataclass
class _Process:
    """A worker, as the driver sees it.

    Attributes:
        gpu: name of its GPU; None without.
        shard: index of what it computes; None while it waits.
    """

    process: BaseProcess
    pipe: Connection
    gpu: str | None
    shard: int | None = None


# Not a `ProcessPoolExecutor`, which was tried and saves 30 lines: one worker that is killed breaks
# the whole pool. Where memory is too short for all workers at once, every shard in work would be
# lost each time, until the merge gave up with none finished; nor could it say which worker died.
class ProcessPool:
    """A few processes on this machine, each with a plan of its own.

    Raises:
        MergeError: there are not enough GPUs.
    """

    def __init__(self, job: MergeJob, workers: WorkerOptions):
        methods = multiprocessing.get_all_start_methods()
        start = workers.start or ("forkserver" if "forkserver" in methods else "spawn")
        self._context = multiprocessing.get_context(start)
        if start == "forkserver":
            self._context.set_forkserver_preload(PRELOADED)
        self._job = job
        self._gpus = assign_gpus(job.merge_options.device, workers)
        self._processes: list[_Process] = []

    def free(self) -> int:
        return len(self._gpus) - sum(one.shard is not None for one in self._processes)

    def submit(self, shard: Shard) -> None:
        idle = next((one for one in self._processes if one.shard is None), None)
        process = idle or self._start()
        process.shard = shard.index
        with suppress(OSError):  # it has died: `events` will tell
            process.pipe.send((shard.index, shard.tensors))

    def events(self) -> Iterator[Event]:
        busy = [one for one in self._processes if one.shard is not None]
        ready = wait([one.pipe for one in busy])
        for process in busy:
            if process.pipe in ready:
                yield self._receive(process)

    def close(self) -> None:
        for one in self._processes:
            if one.shard is not None:
                one.process.kill()
            with suppress(OSError):
                one.pipe.send(None)
        for one in self._processes:
            one.process.join(PATIENCE)
            one.process.kill()  # should it not have gone by itself
            one.process.join()
            one.pipe.close()
        self._processes.clear()

    def _start(self) -> _Process:
        ours, theirs = self._context.Pipe()
        taken = [one.gpu for one in self._processes]
        gpu = next(gpu for gpu in self._gpus if self._gpus.count(gpu) > taken.count(gpu))
        process = self._context.Process(
            target=_serve, args=(self._job, theirs, gpu), daemon=True, name="merge-worker"
        )
        process.start()
        theirs.close()  # so that its death ends the pipe
        self._processes.append(_Process(process, ours, gpu))
        return self._processes[-1]

    def _receive(self, process: _Process) -> Event:
        """Return what a worker says; its death is the failure of its shard."""
        assert process.shard is not None  # nobody else is listened to
        try:
            event: Event = process.pipe.recv()
        except (EOFError, OSError):
            event = self._remove_dead(process, process.shard)
        if not isinstance(event, TensorMerged):
            process.shard = None
        return event

    def _remove_dead(self, process: _Process, shard: int) -> ShardFailed:
        process.process.join()
        process.pipe.close()
        self._processes.remove(process)
        code = process.process.exitcode
        how = f"with status {code}"
        if code is not None and code < 0:
            how = f"by signal {-code} ({signal.Signals(-code).name})"
            how += ": out of memory, or killed" if -code == signal.SIGKILL else ""
        return ShardFailed(shard, f"the worker that computed it ended {how}")


def assign_gpus(device: str, workers: WorkerOptions) -> list[str | None]:
    """Return the GPU of every worker of this machine; None for those that need none.

    Args:
        device: of the merge's matrix work, as torch names it.
        workers: how many, with which share of a GPU.

    Raises:
        MergeError: there are not enough.
    """
    count, share = workers.workers, workers.gpus
    if share is None:
        share = float(device.startswith("cuda"))
    if share == 0:
        return [None] * count
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


def _serve(job: MergeJob, pipe: Connection, gpu: str | None) -> None:
    """Compute the shards that come through a pipe, until None comes or the driver is gone."""
    if gpu is not None:
        os.environ["CUDA_VISIBLE_DEVICES"] = gpu  # before torch looks
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the driver decides
    # Where workers are forked, they share the lock of the driver's bars, and mergekit's bars take
    # it even where none is shown: a worker that is killed while it has it would stop all others.
    tqdm.set_lock(threading.RLock())
    threading.Thread(target=_exit_with_driver, daemon=True).start()
    worker = ShardWorker(job)
    with suppress(EOFError, OSError):  # the driver is gone
        while (shard := pipe.recv()) is not None:
            for event in worker.run(*shard):
                pipe.send(event)
    worker.close()


def _exit_with_driver() -> None:
    """Exit as soon as the driver does: nobody would take what is computed."""
    driver = multiprocessing.parent_process()
    if driver is not None:
        driver.join()
        os._exit(1)
