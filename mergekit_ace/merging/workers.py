# SPDX-License-Identifier: Apache-2.0
"""Workers: who computes the shards of a merge: this process, others of this machine, or Ray's."""

from __future__ import annotations

import logging
import multiprocessing
import os
import signal
import socket
import sys
import threading
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from tqdm import tqdm

from mergekit_ace.merging.shards import (
    ATTEMPTS,
    MergeError,
    MergeJob,
    Shard,
    ShardResult,
    compute_shard,
)

# Imported once, by the process from which all workers are forked.
PRELOADED = ["mergekit_ace.merging.workers", "mergekit.merge_methods"]
_WORK: list[Any] = []  # in a worker process: the job, and all shards
Compute = Callable[[Sequence[Shard]], Iterator[tuple[Shard, ShardResult]]]


@dataclass(frozen=True)
class WorkerOptions:
    """Who computes the shards.

    Attributes:
        workers: number of processes; 1 without a cluster: this one.
        ray: address of a Ray cluster, `auto` for the one at hand; None without.
        gpus: per worker; None for one where the merge works on GPUs. Below 1 several share one.
    """

    workers: int = 1
    ray: str | None = None
    gpus: float | None = None


@contextmanager
def open_workers(
    workers: WorkerOptions, job: MergeJob, memory: int, progress: Callable[[str], None]
) -> Iterator[Compute]:
    """Open the workers that the command line asks for.

    Args:
        memory: bytes that a worker takes.
        progress: called with the name of every tensor that this process computes.

    Yields:
        A function that computes shards, and yields each of them as it is done. Close its iterator,
        which ends all workers.

    Raises:
        MergeError: there are not enough GPUs, or the cluster cannot be used.
    """
    if workers.ray is not None:
        with _cluster(workers, job, memory) as compute:
            yield compute
    elif workers.workers > 1:
        yield partial(_compute_in_processes, job, assign_gpus(job.options.device, workers))
    else:
        yield lambda shards: ((shard, compute_shard(job, shard, progress)) for shard in shards)


def _compute_in_processes(
    job: MergeJob, gpus: Sequence[str | None], shards: Sequence[Shard]
) -> Iterator[tuple[Shard, ShardResult]]:
    """Compute shards in processes of this machine, one for each entry of `gpus`.

    Each has a pool of its own, as the death of a process breaks its pool. Where others are left it
    is not replaced: there may not be memory for all of them at once.
    """
    others = set(multiprocessing.active_children())
    idle = {_process_pool(job, shards, gpu): gpu for gpu in gpus[: len(shards)]}
    waiting, running, deaths = deque(range(len(shards))), {}, Counter[int]()
    try:
        while waiting or running:
            while waiting and idle:
                (pool, gpu), index = idle.popitem(), waiting.popleft()
                running[_submit(pool, index)] = pool, gpu, index
            for future in wait(running, return_when=FIRST_COMPLETED).done:
                pool, gpu, index = running.pop(future)
                if not isinstance(future.exception(), BrokenProcessPool):
                    idle[pool] = gpu
                    yield shards[index], future.result()
                    continue
                text = "died: out of memory, or killed"
                deaths[index] += 1
                if deaths[index] == ATTEMPTS:
                    yield shards[index], ShardResult(error=f"{ATTEMPTS} workers {text}")
                waiting.append(index)
                if not running and not idle:
                    idle[_process_pool(job, shards, gpu)] = gpu
                tqdm.write(f"a worker {text}; {len(running) + len(idle)} go on", file=sys.stderr)
        for pool in idle:
            pool.shutdown()
    finally:
        for process in set(multiprocessing.active_children()) - others:
            process.kill()


def _submit(pool: ProcessPoolExecutor, index: int) -> Future[ShardResult]:
    """Have a shard computed; a process that died between two shards fails it as any other."""
    try:
        return pool.submit(_compute_here, index)
    except BrokenProcessPool as error:
        future: Future[ShardResult] = Future()
        future.set_exception(error)
        return future


def _process_pool(job: MergeJob, shards: Sequence[Shard], gpu: str | None) -> ProcessPoolExecutor:
    """Return a pool of one process.

    Nothing that is larger than what a pipe takes at once is sent to the process later, or back:
    where one is killed in the midst of a message, some versions of Python wait for the rest.
    """
    methods = multiprocessing.get_all_start_methods()
    best = "forkserver" if "forkserver" in methods else "spawn"
    start = multiprocessing.get_start_method(allow_none=True) or best
    context = multiprocessing.get_context(start)
    if start == "forkserver":
        context.set_forkserver_preload(PRELOADED)
    return ProcessPoolExecutor(1, context, _start_worker, (job, shards, gpu))


def _start_worker(job: MergeJob, shards: Sequence[Shard], gpu: str | None) -> None:
    """Prepare a process of a pool."""
    _WORK[:] = job, shards
    if gpu is not None:
        os.environ["CUDA_VISIBLE_DEVICES"] = gpu  # before torch looks
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the driver decides
    # Forked workers share the lock of tqdm's bars, which mergekit's bars take even where none is
    # shown: a worker that is killed while it has the lock would stop all others.
    tqdm.set_lock(threading.RLock())
    threading.Thread(target=_exit_with_driver, daemon=True).start()


def _compute_here(index: int) -> ShardResult:
    job, shards = _WORK
    return compute_shard(job, shards[index])


def _exit_with_driver() -> None:
    """Exit as soon as the driver does: nobody would take what is computed."""
    driver = multiprocessing.parent_process()
    if driver is not None:
        driver.join()
        os._exit(1)


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


@contextmanager
def _cluster(workers: WorkerOptions, job: MergeJob, memory: int) -> Iterator[Compute]:
    """Connect to a Ray cluster that is there already.

    A task has as many CPUs to itself as torch has threads, or GPUs, and the memory of the estimate.

    Raises:
        MergeError: Ray is not installed, no cluster is there, or none of its nodes has room.
    """
    try:
        import ray
    except ImportError as error:
        raise MergeError("--ray needs: pip install ray") from error
    ours = not ray.is_initialized()
    _connect(ray, str(workers.ray), logs=not job.options.quiet)
    try:
        on_gpu = job.options.device.startswith("cuda")
        gpus = float(on_gpu) if workers.gpus is None else workers.gpus
        needed = {"CPU": 1 if on_gpu else job.threads, "GPU": gpus, "memory": memory}
        check_room(ray.nodes(), needed)
        task = ray.remote(
            num_cpus=needed["CPU"],
            num_gpus=gpus,
            memory=memory,
            max_retries=ATTEMPTS - 1,  # where a worker dies, or its node
            max_calls=0,  # a process computes many shards, also with a GPU
        )(compute_shard)
        yield partial(_compute_in_cluster, ray, partial(task.remote, ray.put(job)), workers.workers)
    finally:
        if ours:
            ray.shutdown()


def _compute_in_cluster(
    ray: Any, submit: Callable[[Shard], Any], count: int, shards: Sequence[Shard]
) -> Iterator[tuple[Shard, ShardResult]]:
    """Compute shards as tasks in a cluster, at most `count` at once."""
    waiting, running = deque(shards), {}
    try:
        while waiting or running:
            while waiting and len(running) < count:
                shard = waiting.popleft()
                running[submit(shard)] = shard
            (reference, *_), _ = ray.wait(list(running))
            try:
                result = ray.get(reference)
            except ray.exceptions.RayError as error:
                first = str(error).strip().splitlines() or [type(error).__name__]
                result = ShardResult(error=f"the worker that computed it died: {first[0]}")
            yield running.pop(reference), result
    finally:
        for reference in running:
            ray.cancel(reference, force=True)


def check_room(nodes: Sequence[dict[str, Any]], needed: dict[str, float]) -> None:
    """Refuse a cluster of which no node can hold a worker: the merge would wait for ever.

    Args:
        nodes: as `ray.nodes` lists them.
        needed: resources of a worker: CPU, GPU, memory in bytes.

    Raises:
        MergeError: no node can.
    """
    alive = [node["Resources"] for node in nodes if node["Alive"]]
    if any(all(node.get(name, 0) >= need for name, need in needed.items()) for node in alive):
        return
    raise MergeError(
        f"no node of the cluster has room for a worker: it needs {needed['CPU']:g} CPUs (threads "
        f"of torch: -j), {needed['GPU']:g} GPUs (--gpus-per-worker) and "
        f"{needed['memory'] / 1e9:.1f} GB of memory (less with a smaller --out-shard-size)"
    )


def _connect(ray: Any, address: str, *, logs: bool) -> None:
    host, _, port = address.rpartition(":")
    try:
        if port.isdigit() and "//" not in address:  # where nobody listens, Ray tries for minutes
            socket.create_connection((host, int(port)), timeout=10).close()
        ray.init(
            address=address,
            ignore_reinit_error=True,
            log_to_driver=logs,
            logging_level=logging.WARNING,
        )
    except OSError as error:  # Ray's ConnectionError is one
        raise MergeError(f"there is no Ray cluster at {address}: {error}") from error
