# SPDX-License-Identifier: Apache-2.0
"""Workers in a Ray cluster, as actors; one that dies is replaced, wherever there is room."""

from __future__ import annotations

import logging
import os
import socket
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from mergekit_ace.merging.errors import MergeError
from mergekit_ace.merging.events import Event, ShardFailed, TensorMerged
from mergekit_ace.merging.job import MergeJob
from mergekit_ace.merging.made_of import versions
from mergekit_ace.merging.shard import ShardWorker
from mergekit_ace.merging.shards import Shard
from mergekit_ace.merging.workers import failure, run_shard


class Actor:
    """A worker in the cluster.

    Args:
        job: the merge.
        expected: versions of the packages that the driver has.
    """

    def __init__(self, job: MergeJob, expected: dict[str, str]):
        self._job, self._expected = job, expected
        self._worker: ShardWorker | None = None

    def merge(self, index: int, tensors: Sequence[str]) -> Iterator[Event]:
        """Compute a shard, telling of every tensor."""
        try:
            self._worker = self._worker or self._begin()
        except Exception as error:
            yield failure(index, error)
            return
        yield from run_shard(self._worker, index, tensors)

    def _begin(self) -> ShardWorker:
        here = versions()
        if here != self._expected:
            raise MergeError(
                f"a node of the cluster has other packages ({here}) than the driver "
                f"({self._expected}); install the same on all"
            )
        os.chdir(self._job.folder)  # a worker of Ray starts elsewhere
        return ShardWorker(self._job)


@dataclass
class _Busy:
    """A shard that is being computed: whose it is, and the stream of its events."""

    actor: Any
    shard: int
    stream: Any


class RayWorkers:
    """Actors in a Ray cluster that is there already.

    Each has as many CPUs to itself as torch has threads, or GPUs, and the memory of the estimate.

    Args:
        job: the merge; its paths are the same on all nodes.
        count: of workers.
        address: of the cluster; `auto` for the one at hand.
        gpus: per worker; None for one where the merge works on GPUs.
        memory: bytes that a worker takes.
        logs: show here what workers, and Ray, print.
    """

    def __init__(
        self,
        job: MergeJob,
        count: int,
        address: str,
        *,
        gpus: float | None,
        memory: int,
        logs: bool,
    ):
        self._ray = ray = _import_ray()
        self._ours = not ray.is_initialized()
        check_address(address)
        try:
            ray.init(
                address=address,
                ignore_reinit_error=True,
                log_to_driver=logs,
                logging_level=logging.WARNING,
            )
        except ConnectionError as error:
            raise MergeError(f"there is no Ray cluster at {address}: {error}") from error
        on_gpu = job.merge_options.device.startswith("cuda")
        gpus = float(on_gpu) if gpus is None else gpus
        needed = {"CPU": 1 if on_gpu else job.threads, "GPU": gpus, "memory": memory}
        check_room(ray.nodes(), needed)
        self._class = ray.remote(Actor).options(
            num_cpus=needed["CPU"], num_gpus=gpus, memory=memory, max_restarts=0
        )
        self._arguments = (job, versions())
        self._count = count
        self._idle: list[Any] = []
        self._busy: list[_Busy] = []

    def free(self) -> int:
        return self._count - len(self._busy)

    def give(self, shard: Shard) -> None:
        actor = self._idle.pop() if self._idle else self._class.remote(*self._arguments)
        stream = actor.merge.options(num_returns="streaming").remote(shard.index, shard.tensors)
        self._busy.append(_Busy(actor, shard.index, stream))

    def events(self) -> Iterator[Event]:
        streams = [busy.stream for busy in self._busy]
        ready, _ = self._ray.wait(streams, num_returns=1)
        for busy in [busy for busy in self._busy if busy.stream in ready]:
            yield self._receive(busy)

    def close(self) -> None:
        for actor in [*self._idle, *(busy.actor for busy in self._busy)]:
            self._ray.kill(actor)
        self._idle.clear()
        self._busy.clear()
        if self._ours:
            self._ray.shutdown()

    def _receive(self, busy: _Busy) -> Event:
        """What an actor says; its death, or that of its node, is the failure of its shard."""
        try:
            event: Event = self._ray.get(next(busy.stream))
        except (self._ray.exceptions.RayError, StopIteration) as error:
            self._busy.remove(busy)
            self._ray.kill(busy.actor)
            first = str(error).strip().splitlines() or [type(error).__name__]
            return ShardFailed(busy.shard, f"the worker that computed it died: {first[0]}")
        if not isinstance(event, TensorMerged):
            self._busy.remove(busy)
            self._idle.append(busy.actor)
        return event


def check_address(address: str) -> None:
    """Whether anybody listens at HOST:PORT; Ray itself would try for minutes.

    Raises:
        MergeError: nobody does.
    """
    host, _, port = address.rpartition(":")
    if "//" in address or not port.isdigit():
        return
    try:
        socket.create_connection((host, int(port)), timeout=10).close()
    except OSError as error:
        raise MergeError(f"there is no Ray cluster at {address}: {error}") from error


def check_room(nodes: Sequence[dict[str, Any]], needed: dict[str, float]) -> None:
    """Whether some node can hold a worker at all; otherwise the merge would wait for ever.

    Args:
        nodes: as `ray.nodes` lists them.
        needed: by a worker.

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


def _import_ray() -> Any:
    try:
        import ray
    except ImportError as error:
        raise MergeError("--ray needs: pip install 'mergekit-ace[ray]'") from error
    return ray
