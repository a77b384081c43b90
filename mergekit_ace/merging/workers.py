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
from collections import deque
from collections.abc import Callable, Generator, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any

import torch
from tqdm import tqdm

from mergekit_ace.merging.shards import MergeJob, Shard, ShardResult, compute_shard
from mergekit_ace.naming import ConfigError

_ATTEMPTS = 3  # with workers that die before a shard is finished
# Never a fork of this process, which has threads of torch, though tqdm makes that the default.
START_METHOD = "spawn" if os.name == "nt" else "forkserver"
# Imported once, by the process from which all workers are forked.
PRELOADED = ["mergekit_ace.merging.run", "mergekit.merge_methods"]
_WORK: list[Any] = []  # in a worker process: the job, and its shards
Results = Generator[tuple[Shard, ShardResult], None, None]
Compute = Callable[[Sequence[Shard], tqdm], Results]


@contextmanager
def find_workers(job: MergeJob, count: int, address: str | None, memory: int) -> Iterator[Compute]:
    """Yield a function that computes shards; closing its generator ends all workers.

    Args:
        address: of a Ray cluster, `auto` for the one at hand; None for this machine.
        memory: bytes that a worker of a cluster takes.
    """
    if address is not None:
        with _cluster(job, address, memory) as submit:
            yield partial(_compute_in_cluster, submit, count)
    elif count > 1:
        yield partial(_compute_in_processes, job, assign_gpus(job.options.device, count))
    else:
        yield lambda shards, bar: ((shard, compute_shard(job, shard, bar)) for shard in shards)


def assign_gpus(device: str | None, count: int) -> list[str | None]:
    """Return the GPU of every worker of this machine, of which several may share one."""
    names: Sequence[str | None] = [None]
    if device == "cuda" and torch.cuda.is_available():
        visible = os.environ.get("CUDA_VISIBLE_DEVICES")
        names = visible.split(",") if visible else list(map(str, range(torch.cuda.device_count())))
    return [names[n % len(names)] for n in range(count)]


def _compute_in_processes(
    job: MergeJob, gpus: Sequence[str | None], shards: Sequence[Shard], _: tqdm
) -> Results:
    """Compute shards in processes of this machine, one for each entry of `gpus`.

    The death of one breaks their pool. Another pool with one process less computes what is missing:
    there may not be memory for all of them at once.
    """
    others = set(multiprocessing.active_children())
    missing, fruitless = list(shards), 0
    while missing:
        done = set()
        pool = _process_pool(job, missing, gpus[: len(missing)])
        try:
            with suppress(BrokenProcessPool, BrokenPipeError):
                futures = {pool.submit(_compute_here, n): n for n in range(len(missing))}
                for future in as_completed(futures):
                    if not future.exception():
                        done.add(futures[future])
                        yield missing[futures[future]], future.result()
        finally:
            # At once: a worker that died while others wait for their end may have locked a queue.
            pool.shutdown(wait=False, cancel_futures=True)
            for process in set(multiprocessing.active_children()) - others:
                process.kill()
        missing = [shard for n, shard in enumerate(missing) if n not in done]
        if missing:
            fruitless = 0 if done else fruitless + 1
            gpus = gpus[: max(1, len(gpus) - 1)]
            text = "a worker died: out of memory, or killed"
            if fruitless == _ATTEMPTS:
                text = f"{_ATTEMPTS} times {text}; give fewer --workers"
                yield missing[0], ShardResult(error=text)
            tqdm.write(f"{text}; {min(len(gpus), len(missing))} go on", file=sys.stderr)


def _process_pool(
    job: MergeJob, shards: Sequence[Shard], gpus: Sequence[str | None]
) -> ProcessPoolExecutor:
    """Return a pool with a process for each entry of `gpus`.

    Nothing that is larger than what a pipe takes at once is sent to a process later, or back:
    where one is killed in the midst of a message, some versions of Python wait for the rest.
    """
    context = multiprocessing.get_context(START_METHOD)
    context.set_forkserver_preload(PRELOADED)
    names = context.SimpleQueue()
    for name in gpus:
        names.put(name)
    return ProcessPoolExecutor(len(gpus), context, _start_worker, (job, shards, names))


def _start_worker(job: MergeJob, shards: Sequence[Shard], gpus: Any) -> None:
    """Prepare a process of a pool."""
    _WORK[:] = job, shards
    if (gpu := gpus.get()) is not None:
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


@contextmanager
def _cluster(job: MergeJob, address: str, memory: int) -> Iterator[Callable[[Shard], Any]]:
    """Connect to a Ray cluster that is there already; yield what submits a shard.

    A worker takes as many CPUs as torch has threads, or a GPU, and the memory of the estimate.
    """
    try:
        import ray
    except ImportError as error:
        raise ConfigError("--ray needs: pip install ray") from error
    host, _, port = address.rpartition(":")
    try:
        if port.isdigit() and "//" not in address:  # where nobody listens, Ray tries for minutes
            socket.create_connection((host, int(port)), timeout=10).close()
        quiet = {"log_to_driver": not job.options.quiet, "logging_level": logging.WARNING}
        ray.init(address=address, ignore_reinit_error=True, **quiet)
    except OSError as error:  # Ray's ConnectionError is one
        raise ConfigError(f"there is no Ray cluster at {address}: {error}") from error
    try:
        on_gpu = str(job.options.device).startswith("cuda")
        needed = {"CPU": 1 if on_gpu else job.threads, "GPU": int(on_gpu), "memory": memory}
        nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
        if not any(all(node.get(n, 0) >= need for n, need in needed.items()) for node in nodes):
            raise ConfigError(  # instead of waiting for ever
                f"no node of the cluster has room for a worker: {needed['CPU']} CPUs (-j), "
                f"{needed['GPU']} GPUs, {memory / 1e9:.1f} GB of memory (--out-shard-size)"
            )
        task = ray.remote(
            num_cpus=needed["CPU"],
            num_gpus=needed["GPU"],
            memory=memory,
            max_retries=_ATTEMPTS - 1,  # where a worker dies, or its node
            max_calls=0,  # a process computes many shards, also with a GPU
        )(compute_shard)
        yield partial(task.remote, ray.put(job))
    finally:
        ray.shutdown()


def _compute_in_cluster(
    submit: Callable[[Shard], Any], count: int, shards: Sequence[Shard], bar: tqdm
) -> Results:
    """Compute shards as tasks in a cluster, at most `count` at once."""
    import ray
    from ray.exceptions import RayError

    waiting, running = deque(shards), {}
    try:
        while waiting or running:
            while waiting and len(running) < count:
                shard = waiting.popleft()
                running[submit(shard)] = shard
            (reference, *_), _ = ray.wait(list(running))
            try:
                result = ray.get(reference)
            except RayError as error:
                result = ShardResult(error=f"the worker that computed it died: {error}")
            yield running.pop(reference), result
    finally:
        for reference in running:
            ray.cancel(reference, force=True)
