# SPDX-License-Identifier: Apache-2.0
"""Who computes the shards of a merge."""

from __future__ import annotations

from dataclasses import dataclass

from mergekit_ace.merging.job import MergeJob, MergePlan
from mergekit_ace.merging.shard import ShardWorker
from mergekit_ace.merging.workers import OwnProcess, Workers


@dataclass(frozen=True)
class Crew:
    """Who computes the shards.

    Attributes:
        workers: processes; 1 without a cluster: this one.
        ray: address of a Ray cluster, `auto` for the one at hand; None without.
        gpus: per worker; None for one where the merge works on GPUs.
        start: how processes are started, see `LocalProcesses`.
    """

    workers: int = 1
    ray: str | None = None
    gpus: float | None = None
    start: str | None = None


ALONE = Crew()


def make_workers(
    crew: Crew, job: MergeJob, plan: MergePlan, memory: int, *, logs: bool = True
) -> Workers:
    """Those whom the command line asks for.

    Args:
        crew: who computes.
        job, plan: of the merge.
        memory: bytes that a worker takes.
        logs: show what workers elsewhere print.
    """
    if crew.ray is not None:
        from mergekit_ace.merging.cluster import RayWorkers

        return RayWorkers(job, crew.workers, crew.ray, gpus=crew.gpus, memory=memory, logs=logs)
    if crew.workers > 1:
        from mergekit_ace.merging.processes import LocalProcesses

        return LocalProcesses(job, crew.workers, gpus=crew.gpus, start=crew.start)
    return OwnProcess(ShardWorker(job, plan))
