# SPDX-License-Identifier: Apache-2.0
"""Workers in a Ray cluster; one that dies is replaced, wherever there is room.

They are actors, not tasks: an actor keeps its plan from shard to shard, whereas Ray starts a new
process for every task that has a GPU.
"""

from __future__ import annotations

import logging
import socket
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from mergekit_ace.merging.job import MergeError, MergeJob, Shard
from mergekit_ace.merging.pool import PATIENCE, WorkerOptions
from mergekit_ace.merging.worker import Event, ShardFailed, ShardWorker, TensorMerged


@dataclass
class _Running:
    """A shard that is being computed: by which actor, and the stream of its events."""

    actor: Any
    shard: int
    stream: Any


class RayPool:
    """Actors in a Ray cluster that is there already.

    Each has as many CPUs to itself as torch has threads, or GPUs, and the memory of the estimate.

    Args:
        job: the merge; its paths are the same on all nodes.
        memory: bytes that a worker takes.
        logs: show here what workers, and Ray, print.

    Raises:
        MergeError: Ray is not installed, no cluster is there, or none of its nodes has room.
    """

    def __init__(self, job: MergeJob, workers: WorkerOptions, *, memory: int, logs: bool):
        self._ray = ray = _import_ray()
        self._ours = not ray.is_initialized()
        _connect(ray, str(workers.ray), logs=logs)
        on_gpu = job.merge_options.device.startswith("cuda")
        gpus = float(on_gpu) if workers.gpus is None else workers.gpus
        needed = {"CPU": 1 if on_gpu else job.threads, "GPU": gpus, "memory": memory}
        check_room(ray.nodes(), needed)
        self._actors = ray.remote(ShardWorker).options(
            num_cpus=needed["CPU"], num_gpus=gpus, memory=memory, max_restarts=0
        )
        self._job = job
        self._count = workers.workers
        self._idle: list[Any] = []
        self._running: list[_Running] = []

    def free(self) -> int:
        return self._count - len(self._running)

    def submit(self, shard: Shard) -> None:
        actor = self._idle.pop() if self._idle else self._actors.remote(self._job)
        stream = actor.run.options(num_returns="streaming").remote(shard.index, shard.tensors)
        self._running.append(_Running(actor, shard.index, stream))

    def events(self) -> Iterator[Event]:
        ready, _ = self._ray.wait([one.stream for one in self._running], num_returns=1)
        for running in [one for one in self._running if one.stream in ready]:
            yield self._receive(running)

    def close(self) -> None:
        farewell = [actor.close.remote() for actor in self._idle]
        if farewell:
            self._ray.wait(farewell, num_returns=len(farewell), timeout=PATIENCE)
        for actor in [*self._idle, *(running.actor for running in self._running)]:
            self._ray.kill(actor)
        self._idle.clear()
        self._running.clear()
        if self._ours:
            self._ray.shutdown()

    def _receive(self, running: _Running) -> Event:
        """Return what an actor says; its death, or that of its node, is its shard's failure."""
        try:
            event: Event = self._ray.get(next(running.stream))
        except (self._ray.exceptions.RayError, StopIteration) as error:
            self._running.remove(running)
            self._ray.kill(running.actor)
            first = str(error).strip().splitlines() or [type(error).__name__]
            return ShardFailed(running.shard, f"the worker that computed it died: {first[0]}")
        if not isinstance(event, TensorMerged):
            self._running.remove(running)
            self._idle.append(running.actor)
        return event


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


def _import_ray() -> Any:
    try:
        import ray
    except ImportError as error:
        raise MergeError("--ray needs: pip install ray") from error
    return ray
