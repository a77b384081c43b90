# SPDX-License-Identifier: Apache-2.0
"""Compute one shard and write it under a temporary name; what happens is told as events."""

from __future__ import annotations

import os
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
import transformers
from mergekit.common import ImmutableMap, dtype_from_name
from mergekit.graph import Executor, TaskUniverse
from mergekit.io.tasks import LoaderCache, SaveTensor
from mergekit.io.tensor_writer import TensorWriter
from mergekit.options import MergeOptions
from safetensors import SafetensorError

from mergekit_ace.files.saving import flush_to_disk, package_versions, sha256
from mergekit_ace.merging.job import MERGE_PACKAGES, MergeError, MergeJob, OutputError
from mergekit_ace.methods.base import flush_notices, is_finite

_LARGEST_SEED = 2**32  # that of numpy


@dataclass(frozen=True)
class TensorMerged:
    """A tensor of a shard was computed."""

    shard: int
    name: str
    seconds: float


@dataclass(frozen=True)
class ShardDone:
    """A shard was computed; it is on the disk, but not yet under its name.

    Attributes:
        path: of its file, in a folder of its own; None where all of its tensors are absent.
        sha256: of that file; empty without one.
        reports: lines to append, by path.
    """

    shard: int
    path: str | None
    sha256: str
    reports: dict[str, str]


@dataclass(frozen=True)
class ShardFailed:
    """A shard was not computed.

    Attributes:
        final: to try again would be of no use.
    """

    shard: int
    message: str
    final: bool = False


Event = TensorMerged | ShardDone | ShardFailed


class ShardWorker:
    """Computes shards in this process."""

    def __init__(self, job: MergeJob):
        torch.set_num_threads(job.threads)
        self.job = job

    def start(self) -> Iterator[None]:
        """Tell a cluster's driver that it has started."""
        yield None

    def run(self, index: int, tensors: Sequence[str]) -> Iterator[Event]:
        """Compute a shard as `merge` does; an error is the last event."""
        try:
            yield from self.merge(index, tensors)
        # A method that refuses its inputs refuses them again; memory or a GPU may be there later.
        except (OutputError, ValueError, OverflowError) as error:
            yield ShardFailed(index, str(error), final=True)
        except Exception as error:
            yield ShardFailed(index, f"{type(error).__name__}: {error}")

    def close(self) -> None:
        """Log what is to be said of all tensors that this process has merged.

        A worker process ends without running its exit handlers, which would do that.
        """
        flush_notices()

    def merge(self, index: int, tensors: Sequence[str]) -> Iterator[Event]:
        """Compute a shard and flush it to the disk.

        Yields:
            An event for every tensor, and one for the end.

        Raises:
            OutputError: it cannot be written.
            MergeError: other packages are installed here than where the driver is.
            Exception: whatever mergekit, or the merge method, says.
        """
        options = self._prepare()
        folder = Path(self.job.scratch, f"shard-{index + 1:05d}-{uuid.uuid4().hex}")
        # Random methods: the same draws whoever computes the shard, and whenever.
        transformers.set_seed(((options.random_seed or 0) + index) % _LARGEST_SEED)
        with _disk_errors(folder):
            folder.mkdir(parents=True)
        reports: dict[str, Path] = {}
        saves = [_checked(_redirect_report(self.job.saves[n], folder, reports)) for n in tensors]
        writer = TensorWriter(str(folder), -1, options.safe_serialization)
        for name, seconds in self._execute(saves, writer):
            yield TensorMerged(index, name, seconds)
        yield _write(index, folder, writer, reports)

    def _prepare(self) -> MergeOptions:
        """Work where the driver does, with the same packages, and return mergekit's flags."""
        here = package_versions(*MERGE_PACKAGES)
        if here != self.job.versions:
            raise MergeError(
                f"a worker has other packages ({here}) than the driver ({self.job.versions}); "
                "install the same on all nodes of the cluster"
            )
        os.chdir(self.job.folder)  # workers of a cluster, or of a process that moved, are elsewhere
        LoaderCache().setup(self.job.options)
        return self.job.options

    def _execute(
        self, saves: Sequence[SaveTensor], writer: TensorWriter
    ) -> Iterator[tuple[str, float]]:
        """Run mergekit's tasks by its own executor, which is given the writer and the tokenizer."""
        options, builder = self.job.options, self.job.builder
        universe = TaskUniverse(saves)
        known = {universe.get_handle(saves[0].writer_task): writer}
        if builder is not None:
            known[universe.get_handle(builder)] = self.job.tokenizer
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


def _redirect_report(save: SaveTensor, folder: Path, reports: dict[str, Path]) -> SaveTensor:
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


class CheckedSave(SaveTensor):
    """mergekit's task that writes a tensor, for what fits the dtype in which it is written."""

    def execute(self, writer: TensorWriter, tensor: torch.Tensor | None) -> None:
        """Write a tensor.

        Raises:
            OutputError: it holds NaN or Inf, or does in the dtype in which it is written.
        """
        if tensor is not None and tensor.is_floating_point():
            dtype = dtype_from_name(self.dtype) or tensor.dtype
            if dtype == torch.float16 and not is_finite(tensor.to(dtype)):
                raise OutputError(
                    f"tensor {self.tensor_name} came out too large for float16; write "
                    "`out_dtype: bfloat16`, and no `dtype: float16`"
                )
            if not is_finite(tensor):  # our methods have named the model before
                raise OutputError(
                    f"tensor {self.tensor_name} came out with NaN or Inf; a model holds them in "
                    "it, or a parameter is out of range. `mergekit-ace inspect` names the model"
                )
        super().execute(writer=writer, tensor=tensor)


def _checked(save: SaveTensor) -> CheckedSave:
    return CheckedSave(**{name: getattr(save, name) for name in SaveTensor.model_fields})


def _write(
    index: int, folder: Path, writer: TensorWriter, reports: Mapping[str, Path]
) -> ShardDone:
    with _disk_errors(folder):
        writer.finalize()
        path = next((p for p in folder.iterdir() if p.suffix in (".safetensors", ".bin")), None)
        if path is not None:
            flush_to_disk(path)
        lines = {to: own.read_text(encoding="utf-8") for to, own in reports.items() if own.exists()}
        digest = sha256(path) if path else ""
    return ShardDone(index, str(path) if path else None, digest, lines)


@contextmanager
def _disk_errors(folder: Path) -> Iterator[None]:
    try:
        yield
    except (OSError, SafetensorError) as error:
        raise OutputError(f"cannot write to {folder.parent.parent}: {error}") from error
