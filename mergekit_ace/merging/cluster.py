# SPDX-License-Identifier: Apache-2.0
"""Workers in a Ray cluster; one that dies is replaced, wherever there is room.

They are actors, not tasks: Ray starts a new process for every task that has a GPU.
"""

from __future__ import annotations

import logging
import socket
from collections.abc import Sequence
from typing import Any

from mergekit_ace.merging.job import MergeError, MergeJob, Shard
from mergekit_ace.merging.pool import WorkerDiedError, WorkerOptions, WorkerPool
from mergekit_ace.merging.worker import Event, ShardWorker


class RayPool(WorkerPool):
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
        try:
            import ray
        except ImportError as error:
            raise MergeError("--ray needs: pip install ray") from error
        self._ray = ray
        self._ours = not ray.is_initialized()
        _connect(ray, str(workers.ray), logs=logs)
        on_gpu = job.options.device.startswith("cuda")
        gpus = float(on_gpu) if workers.gpus is None else workers.gpus
        needed = {"CPU": 1 if on_gpu else job.threads, "GPU": gpus, "memory": memory}
        check_room(ray.nodes(), needed)
        actors = ray.remote(ShardWorker).options(
            num_cpus=needed["CPU"], num_gpus=gpus, memory=memory, max_restarts=0
        )
        told = ray.put(job)
        super().__init__(lambda: RayWorker(ray, actors.remote(told)), self._ready, workers.workers)

    def _ready(self, busy: Sequence[RayWorker]) -> list[RayWorker]:
        streams, _ = self._ray.wait([worker.stream for worker in busy], num_returns=1)
        return [worker for worker in busy if worker.stream in streams]

    def close(self) -> None:
        super().close()
        if self._ours:
            self._ray.shutdown()


class RayWorker:
    """An actor; its death, or that of its node, ends the stream of its events."""

    def __init__(self, ray: Any, actor: Any):
        self._ray, self._actor = ray, actor
        self._farewell: list[Any] = []
        self.stream = actor.start.options(num_returns="streaming").remote()

    def submit(self, shard: Shard) -> None:
        run = self._actor.run.options(num_returns="streaming")
        self.stream = run.remote(shard.index, shard.tensors)

    def receive(self) -> Event | None:
        try:
            return self._ray.get(next(self.stream))
        except (self._ray.exceptions.RayError, StopIteration) as error:
            first = str(error).strip().splitlines() or [type(error).__name__]
            raise WorkerDiedError(f"died: {first[0]}") from error

    def end(self) -> None:
        self._farewell = [self._actor.close.remote()]

    def close(self, patience: float) -> None:
        if self._farewell:
            self._ray.wait(self._farewell, timeout=patience)
        self._ray.kill(self._actor)


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
