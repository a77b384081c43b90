# SPDX-License-Identifier: Apache-2.0
"""Compute one shard and write it, under a temporary name."""

from __future__ import annotations

import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch
import transformers
from mergekit.common import ImmutableMap
from mergekit.graph import Executor, TaskUniverse
from mergekit.io.tasks import SaveTensor
from mergekit.io.tensor_writer import TensorWriter
from safetensors import SafetensorError

from mergekit_ace.files import flush_to_disk, sha256
from mergekit_ace.merging.errors import OutputError
from mergekit_ace.merging.events import Event, ShardDone, TensorMerged, WrittenShard
from mergekit_ace.merging.job import MergeJob, MergePlan, plan_job

LARGEST_SEED = 2**32  # that of numpy


class ShardWorker:
    """Merges shards in this process; plans once.

    Args:
        job: the merge.
        plan: where this process has made it already.
    """

    def __init__(self, job: MergeJob, plan: MergePlan | None = None):
        torch.set_num_threads(job.threads)
        self.job = job
        self.plan = plan_job(job) if plan is None else plan

    def merge(self, index: int, tensors: Sequence[str]) -> Iterator[Event]:
        """Compute a shard and flush it to the disk; tells of every tensor, and of the end.

        Args:
            index: of the shard.
            tensors: what is in it.

        Raises:
            OutputError: it cannot be written.
            Exception: whatever mergekit, or the merge method, says.
        """
        folder = Path(self.job.scratch, f"shard-{index + 1:05d}-{uuid.uuid4().hex}")
        options = self.job.merge_options
        # Random methods: the same draws whoever computes the shard, and whenever.
        transformers.set_seed(((options.random_seed or 0) + index) % LARGEST_SEED)
        with _writing(folder):
            folder.mkdir(parents=True)
        reports: dict[str, Path] = {}
        saves = [_redirect(self.plan.saves[name], folder, reports) for name in tensors]
        writer = TensorWriter(str(folder), -1, options.safe_serialization)
        for name, seconds in self._execute(saves, writer):
            yield TensorMerged(index, name, seconds)
        yield ShardDone(index, _written(folder, writer, reports))

    def _execute(
        self, saves: Sequence[SaveTensor], writer: TensorWriter
    ) -> Iterator[tuple[str, float]]:
        """Run mergekit's tasks with its own executor; the writer and the tokenizer are given."""
        options = self.job.merge_options
        universe = TaskUniverse(saves)
        known = {universe.get_handle(saves[0].writer_task): writer}
        builder = self.plan.tokenizer_task and universe.get_handle(self.plan.tokenizer_task)
        if builder is not None:
            known[builder] = self.job.tokenizer_info
        executor = Executor(
            [universe.get_handle(save) for save in saves],
            math_device=options.device,
            storage_device=options.device if options.low_cpu_memory else "cpu",
            cached_values=known,
        )
        start = time.perf_counter()
        for task, _ in executor.run(quiet=True):
            now = time.perf_counter()
            yield task.tensor_name, now - start
            start = time.perf_counter()


def _redirect(save: SaveTensor, folder: Path, reports: dict[str, Path]) -> SaveTensor:
    """Let `report:` of our methods go to a file of the shard's own.

    The driver appends it to the file that is named, once the shard is finished: so a tensor that is
    computed again is not in it twice, and only one process writes to it.
    """
    parameters = dict(save.tensor_task.parameters.items())
    path = parameters.get("report")
    if not isinstance(path, str):
        return save
    own = reports.setdefault(path, folder / f"report-{len(reports)}.jsonl")
    changed = ImmutableMap(data={**parameters, "report": str(own)})
    task = save.tensor_task.model_copy(update={"parameters": changed})
    return save.model_copy(update={"tensor_task": task})


def _written(folder: Path, writer: TensorWriter, reports: Mapping[str, Path]) -> WrittenShard:
    """Write what was computed, and flush it."""
    tensors = {name: tensor.nbytes for name, tensor in writer.current_shard.items()}
    with _writing(folder):
        writer.finalize()
        path = next((p for p in folder.iterdir() if p.suffix in (".safetensors", ".bin")), None)
        if path is not None:
            flush_to_disk(path)
        lines = {to: own.read_text(encoding="utf-8") for to, own in reports.items() if own.exists()}
        size, digest = (path.stat().st_size, sha256(path)) if path else (0, "")
    return WrittenShard(str(folder), str(path) if path else None, size, digest, tensors, lines)


@contextmanager
def _writing(folder: Path) -> Iterator[None]:
    """Errors of the disk as an `OutputError`."""
    try:
        yield
    except (OSError, SafetensorError) as error:
        raise OutputError(f"cannot write to {folder.parent.parent}: {error}") from error
