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
from collections.abc import Callable, Generator, Sequence
from contextlib import suppress
from functools import partial
from multiprocessing.connection import Connection, wait
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
Results = Generator[tuple[Shard, ShardResult], None, None]
Compute = Callable[[Sequence[Shard], tqdm], Results]


def find_workers(job: MergeJob, count: int, address: str | None, memory: int) -> Compute:
    """Return a function that computes shards; closing its generator ends all workers.

    Args:
        address: of a Ray cluster, `auto` for the one at hand; None for this machine.
        memory: bytes that a worker of a cluster takes.
    """
    if address is not None:
        return partial(_compute_in_cluster, _find_cluster(job, address, memory), count)
    if count > 1:
        return partial(_compute_in_processes, job, assign_gpus(job.options.device, count))
    return lambda shards, bar: ((shard, compute_shard(job, shard, bar)) for shard in shards)


def assign_gpus(device: str | None, count: int) -> list[str | None]:
    """Return the GPU of every worker of this machine, of which several may share one."""
    names: Sequence[str | None] = [None]
    if str(device).startswith("cuda") and torch.cuda.is_available():
        visible = os.environ.get("CUDA_VISIBLE_DEVICES")
        names = visible.split(",") if visible else list(map(str, range(torch.cuda.device_count())))
    return [names[n % len(names)] for n in range(count)]


def _compute_in_processes(
    job: MergeJob, gpus: Sequence[str | None], shards: Sequence[Shard], bar: tqdm
) -> Results:
    """Compute shards in processes of this machine, one for each entry of `gpus`.

    Where one dies, the others go on without it: there may not be memory for all of them at once.
    """
    context = multiprocessing.get_context(START_METHOD)
    context.set_forkserver_preload(PRELOADED)
    waiting, deaths = deque(range(len(shards))), 0
    processes: dict[Connection, Any] = {}
    computing: dict[Any, int] = {}  # numbers of shards

    def start(gpu: str | None) -> None:
        here, there = context.Pipe()
        processes[here] = context.Process(target=_work, args=(job, shards, gpu, there), daemon=True)
        processes[here].start()
        there.close()

    try:
        for gpu in gpus[: len(shards)]:
            start(gpu)
        while waiting or computing:
            for idle in processes.keys() - computing.keys():
                if waiting:
                    computing[idle] = waiting.popleft()
                    with suppress(BrokenPipeError):  # it died; nothing will come back
                        idle.send(computing[idle])
            ready: list[Any] = wait(list(computing))
            for connection in ready:
                number = computing.pop(connection)
                try:
                    result = connection.recv()
                except (EOFError, OSError):
                    processes.pop(connection).join()
                    waiting.appendleft(number)
                    deaths += 1
                    text = "a worker died: out of memory, or killed"
                    if deaths == _ATTEMPTS:
                        text = f"{_ATTEMPTS} times {text}, before it was finished"
                        yield shards[number], ShardResult(error=f"{text}; give fewer --workers")
                    if not processes:
                        start(gpus[0])
                    tqdm.write(f"{text}; {len(processes)} go on", file=sys.stderr)
                else:
                    deaths = 0
                    yield shards[number], result
    finally:
        for process in processes.values():
            process.kill()


def _work(job: MergeJob, shards: Sequence[Shard], gpu: str | None, driver: Connection) -> None:
    """Compute shards in a process of its own, whichever numbers the driver sends."""
    if gpu is not None:
        os.environ["CUDA_VISIBLE_DEVICES"] = gpu  # before torch looks
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the driver decides
    # Forked workers share the lock of tqdm's bars, which mergekit's bars take even where none is
    # shown: a worker that is killed while it has the lock would stop all others.
    tqdm.set_lock(threading.RLock())
    threading.Thread(target=_exit_with_driver, daemon=True).start()
    while True:
        driver.send(compute_shard(job, shards[driver.recv()]))


def _exit_with_driver() -> None:
    """Exit as soon as the driver does: nobody would take what is computed."""
    driver = multiprocessing.parent_process()
    if driver is not None:
        driver.join()
        os._exit(1)


def _find_cluster(job: MergeJob, address: str, memory: int) -> Callable[[Shard], Any]:
    """Connect to a Ray cluster that is there already; return what submits a shard.

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
    on_gpu = str(job.options.device).startswith("cuda")
    needed = {"CPU": 1 if on_gpu else job.threads, "GPU": int(on_gpu), "memory": memory}
    nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
    if not any(all(node.get(name, 0) >= need for name, need in needed.items()) for node in nodes):
        ray.shutdown()
        raise ConfigError(  # instead of waiting for ever
            f"no node of the cluster has room for a worker: it needs {needed['CPU']} CPUs (threads "
            f"of torch: -j), {needed['GPU']} GPUs and {memory / 1e9:.1f} GB of memory (less with a "
            "smaller --out-shard-size)"
        )
    task = ray.remote(
        num_cpus=needed["CPU"],
        num_gpus=needed["GPU"],
        memory=memory,
        max_retries=_ATTEMPTS - 1,  # where a worker dies, or its node
        max_calls=0,  # a process computes many shards, also with a GPU
    )(compute_shard)
    return partial(task.remote, ray.put(job))


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
        ray.shutdown()
