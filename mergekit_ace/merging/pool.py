# SPDX-License-Identifier: Apache-2.0
"""Who computes the shards: this process, or processes of this machine; `cluster.py` has Ray's."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from typing import Protocol

import torch
from mergekit.io.tasks import LoaderCache
from tqdm import tqdm

from mergekit_ace.merging.job import MergeError, MergeJob, Shard
from mergekit_ace.merging.worker import Event, ShardFailed, ShardWorker, TensorMerged

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


class WorkerDiedError(RuntimeError):
    """A worker ended before its shard was computed; the message says how."""


class PoolWorker(Protocol):
    """A worker as the driver sees it."""

    def submit(self, shard: Shard) -> None:
        """Have a shard computed; the one before is done."""

    def receive(self) -> Event | None:
        """Return what happens next to the shard; at first None, once the worker has started.

        Raises:
            WorkerDiedError: nothing will happen any more.
        """

    def end(self) -> None:
        """Tell it to end; returns at once."""

    def close(self, patience: float) -> None:
        """Give it so many seconds to end by itself, and then end it."""


# Not a `ProcessPoolExecutor`, which was tried and saves 30 lines: one worker that is killed breaks
# the whole pool. Where memory is too short for all workers at once, every shard in work would be
# lost each time, until the merge gave up with none finished; nor could it say which worker died.
class WorkerPool:
    """Workers that compute one shard after the other; one that dies is replaced.

    A shard waits for whichever worker is there first: those for which a cluster has no room, not
    yet or after it lost a node, never start.

    Args:
        start: starts a worker.
        wait: returns those of some workers that have something to say, once there are some.
        count: of workers, at most.
    """

    def __init__(
        self,
        start: Callable[[], PoolWorker],
        wait: Callable[[Sequence[PoolWorker]], Sequence[PoolWorker]],
        count: int,
    ):
        self._start, self._wait, self._count = start, wait, count
        self._starting: list[PoolWorker] = []
        self._idle: list[PoolWorker] = []
        self._busy: dict[PoolWorker, int] = {}
        self._waiting: deque[Shard] = deque()

    def free(self) -> int:
        """Return how many more shards would be computed at once."""
        return self._count - len(self._busy) - len(self._waiting)

    def submit(self, shard: Shard) -> None:
        """Have a shard computed."""
        self._waiting.append(shard)
        if self._idle:
            self._employ(self._idle.pop())
        elif len(self._starting) + len(self._busy) < self._count:
            self._starting.append(self._start())

    def events(self) -> Iterator[Event]:
        """Wait until something happens to workers and shards, and yield what happens to shards."""
        for worker in self._wait([*self._starting, *self._busy]):
            try:
                event = worker.receive()
            except WorkerDiedError as error:
                event = self._bury(worker, error)
            else:
                if event is None:
                    self._starting.remove(worker)
                    self._employ(worker)
                elif not isinstance(event, TensorMerged):
                    del self._busy[worker]
                    self._employ(worker)
            if event is not None:
                yield event

    def close(self) -> None:
        """Stop everything at once."""
        for worker in self._idle:
            worker.end()
        for worker in (*self._starting, *self._busy):
            worker.close(0)
        for worker in self._idle:
            worker.close(PATIENCE)

    def _employ(self, worker: PoolWorker) -> None:
        if not self._waiting:
            self._idle.append(worker)
            return
        shard = self._waiting.popleft()
        self._busy[worker] = shard.index
        worker.submit(shard)

    def _bury(self, worker: PoolWorker, error: WorkerDiedError) -> ShardFailed | None:
        """Return the failure of a dead worker's shard, or of the next one if it never started."""
        worker.close(0)
        if worker in self._busy:
            return ShardFailed(self._busy.pop(worker), f"the worker that computed it {error}")
        self._starting.remove(worker)
        if not self._waiting:
            return None
        return ShardFailed(self._waiting.popleft().index, f"a worker that was started {error}")


def make_pool(workers: WorkerOptions, job: MergeJob, memory: int, *, logs: bool) -> WorkerPool:
    """Make the pool that the command line asks for.

    Args:
        memory: bytes that a worker takes.
        logs: show what workers on other machines print.

    Raises:
        MergeError: there are not enough GPUs, or the cluster cannot be used.
    """
    if workers.ray is not None:
        from mergekit_ace.merging.cluster import RayPool

        return RayPool(job, workers, memory=memory, logs=logs)
    if workers.workers > 1:
        return _process_pool(job, workers)
    return WorkerPool(lambda: LocalWorker(job), list, 1)


class LocalWorker:
    """This process."""

    def __init__(self, job: MergeJob):
        self._worker = ShardWorker(job)
        self._events: Iterator[Event | None] = iter((None,))

    def submit(self, shard: Shard) -> None:
        self._events = self._worker.run(shard.index, shard.tensors)

    def receive(self) -> Event | None:
        return next(self._events)

    def end(self) -> None:
        self._worker.close()

    def close(self, patience: float) -> None:
        LoaderCache().flush_all()


def _process_pool(job: MergeJob, workers: WorkerOptions) -> WorkerPool:
    methods = multiprocessing.get_all_start_methods()
    start = workers.start or ("forkserver" if "forkserver" in methods else "spawn")
    context = multiprocessing.get_context(start)
    if start == "forkserver":
        context.set_forkserver_preload(PRELOADED)
    gpus = assign_gpus(job.options.device, workers)

    def ready(busy: Sequence[ProcessWorker]) -> list[ProcessWorker]:
        pipes = wait([worker.pipe for worker in busy])
        return [worker for worker in busy if worker.pipe in pipes]

    return WorkerPool(lambda: ProcessWorker(context, job, gpus), ready, workers.workers)


class ProcessWorker:
    """A process of this machine.

    Args:
        gpus: that no worker has yet, None for none; it takes one, and gives it back.
    """

    def __init__(self, context: multiprocessing.context.BaseContext, job: MergeJob, gpus: list):
        self.pipe, theirs = context.Pipe()
        self._gpu, self._gpus = gpus.pop(0), gpus
        self._process = context.Process(
            target=_serve, args=(job, theirs, self._gpu), daemon=True, name="merge-worker"
        )
        self._process.start()
        theirs.close()  # so that its death ends the pipe

    def submit(self, shard: Shard) -> None:
        with suppress(OSError):  # it has died: `receive` will tell
            self.pipe.send((shard.index, shard.tensors))

    def receive(self) -> Event | None:
        try:
            return self.pipe.recv()
        except (EOFError, OSError) as error:
            self._process.join()
            code = self._process.exitcode
            how = f"with status {code}"
            if code is not None and code < 0:
                how = f"by signal {-code} ({signal.Signals(-code).name})"
                how += ": out of memory, or killed" if -code == signal.SIGKILL else ""
            raise WorkerDiedError(f"ended {how}") from error

    def end(self) -> None:
        with suppress(OSError):
            self.pipe.send(None)

    def close(self, patience: float) -> None:
        self._process.join(patience)
        self._process.kill()
        self._process.join()
        self.pipe.close()
        self._gpus.append(self._gpu)


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
        pipe.send(None)
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
