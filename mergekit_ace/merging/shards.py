# SPDX-License-Identifier: Apache-2.0
"""Shards: a merge divided into the files of its result, each of them computed by itself."""

from __future__ import annotations

import os
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import click
import torch
import transformers
from mergekit.common import ImmutableMap, ModelReference, dtype_from_name
from mergekit.graph import Executor, TaskUniverse
from mergekit.io.tasks import LoaderCache, SaveTensor
from mergekit.io.tensor_writer import TensorWriter
from mergekit.options import MergeOptions
from mergekit.tokenizer import BuildTokenizer, PermutedVocabulary, TokenizerInfo
from mergekit.tokenizer.truncate import TruncatedVocabulary
from safetensors import SafetensorError

from mergekit_ace.adapters.read import base_of
from mergekit_ace.files.headers import DTYPES
from mergekit_ace.files.models import Checkpoint
from mergekit_ace.files.quantised import open_quantised
from mergekit_ace.files.saving import flush_to_disk, package_versions, sha256
from mergekit_ace.methods.base import is_finite, take_notices
from mergekit_ace.planning import PlannedMerge, PlannedTensor

# A result depends on the versions of these.
MERGE_PACKAGES = ("mergekit", "mergekit-ace", "torch", "transformers", "tokenizers", "safetensors")
ATTEMPTS = 3  # to compute one shard
SLOWEST = 5  # tensors that are named at the end
_LARGEST_SEED = 2**32  # of numpy


class MergeError(RuntimeError):
    """The merge cannot start, or cannot go on; the message names the remedy."""


@dataclass(frozen=True)
class Shard:
    """One file of the result: the unit of work.

    Attributes:
        saves: mergekit's tasks, in its order.
        sizes: bytes of their tensors; 0 where no header tells.
    """

    index: int
    file: str
    saves: tuple[SaveTensor, ...]
    sizes: tuple[int, ...]

    @property
    def tensors(self) -> tuple[str, ...]:
        """Names, in mergekit's order."""
        return tuple(save.tensor_name for save in self.saves)

    @property
    def bytes(self) -> int:
        """Bytes of all tensors."""
        return sum(self.sizes)


@dataclass(frozen=True)
class MergeJob:
    """What all shards of a merge share; it is sent to every worker.

    Attributes:
        builder: mergekit's task that builds the tokenizer of the result; None where none is built.
        tokenizer: what it has built.
        scratch: folder of unfinished files, below that of the result.
        folder: where relative paths of the configuration start.
        threads: of torch: sums of other numbers of threads differ in their last bits.
        versions: of the packages on which the result depends.
    """

    options: MergeOptions
    builder: BuildTokenizer | None
    tokenizer: TokenizerInfo | None
    scratch: str
    folder: str = field(default_factory=os.getcwd)
    threads: int = field(default_factory=torch.get_num_threads)
    versions: Mapping[str, str] = field(default_factory=lambda: package_versions(*MERGE_PACKAGES))


@dataclass(frozen=True)
class ShardResult:
    """A shard that is on the disk, but not yet under its name; or the reason why it is not.

    Attributes:
        path: of its file, in a folder of its own; empty where all of its tensors are absent.
        sha256: of that file; empty without one.
        reports: files of lines to append, by the path of the report.
        slowest: some tensors, with their seconds.
        notices: warnings for the end of the merge, with their numbers of tensors.
        error: empty for a shard that was computed.
    """

    path: str = ""
    sha256: str = ""
    reports: Mapping[str, str] = field(default_factory=dict)
    slowest: Mapping[str, float] = field(default_factory=dict)
    notices: Mapping[str, int] = field(default_factory=dict)
    error: str = ""


def divide_into_shards(
    plan: PlannedMerge,
    checkpoints: Mapping[ModelReference, Checkpoint],
    tokenizer: TokenizerInfo | None,
) -> list[Shard]:
    """Divide a merge into files by the rule of mergekit's writer.

    Args:
        checkpoints: headers of all models.
        tokenizer: of the result; None where none is built.
    """
    vocabulary = None
    if tokenizer is not None:
        size, multiple = len(tokenizer.tokenizer.get_vocab()), plan.vocabulary_multiple
        vocabulary = size + -size % multiple if multiple else size
    sizes = {name: _output_size(save, checkpoints, vocabulary) for name, save in plan.saves.items()}
    groups = group_tensors(sizes, plan.options.out_shard_size)
    safe = plan.options.safe_serialization
    return [
        Shard(
            index,
            shard_file(index, len(groups), safetensors=safe),
            tuple(plan.saves[name] for name in group),
            tuple(sizes[name] for name in group),
        )
        for index, group in enumerate(groups)
    ]


def group_tensors(sizes: Mapping[str, int], limit: int) -> list[list[str]]:
    """Group tensors by file.

    Args:
        sizes: bytes by tensor name, in the order of writing.
        limit: bytes of a file; a single tensor may have more. 0 or less for one file.
    """
    groups: list[list[str]] = []
    held = 0
    for name, size in sizes.items():
        if not groups or (limit > 0 and held + size > limit):
            groups.append([])
            held = 0
        groups[-1].append(name)
        held += size
    return groups


def shard_file(index: int, count: int, *, safetensors: bool) -> str:
    """Return the name of a file of the result, as mergekit gives it."""
    stem, suffix = ("model", "safetensors") if safetensors else ("pytorch_model", "bin")
    return f"{stem}.{suffix}" if count == 1 else f"{stem}-{index + 1:05d}-of-{count:05d}.{suffix}"


def _output_size(
    save: SaveTensor, checkpoints: Mapping[ModelReference, Checkpoint], vocabulary: int | None
) -> int:
    """Return the bytes of a tensor of the result; 0 where no header tells."""
    tensor = PlannedTensor(save.tensor_task)
    weights = tensor.weights
    headers = {m: header for m, w in weights.items() if (header := checkpoints[m].source(w))}
    if not headers:
        return 0
    model = tensor.base if tensor.base in headers else next(iter(headers))
    shape, axis = list(headers[model].shape), tensor.task.output_weight.vocabulary_axis
    if isinstance(save.tensor_task.gather_tensors, PermutedVocabulary) and vocabulary is not None:
        shape[axis] = vocabulary
    elif isinstance(save.tensor_task.gather_tensors, TruncatedVocabulary):
        shape[axis] = min(header.shape[axis] for header in headers.values())
    named = save.dtype or weights[model].force_dtype or tensor.gather.dtype
    dtype = dtype_from_name(named) or DTYPES.get(headers[model].dtype)
    return torch.empty(shape, dtype=dtype, device="meta").nbytes


def compute_shard(
    job: MergeJob, shard: Shard, progress: Callable[[str], None] | None = None
) -> ShardResult:
    """Compute a shard and flush it to the disk, below `job.scratch`.

    Args:
        progress: called with the name of every tensor that was computed.

    Returns:
        The shard, or the error that kept it from being computed.
    """
    for attempt in range(1, ATTEMPTS + 1):
        folder = Path(job.scratch, f"shard-{shard.index + 1:05d}-{uuid.uuid4().hex}")
        try:
            return merge_shard(job, shard, folder, progress)
        # A method that refuses its inputs refuses them again; memory or a GPU may be there later.
        except (MergeError, ValueError, OverflowError) as error:
            message = str(error)
            break
        except Exception as error:
            failure = f"{type(error).__name__}: {error}"
            message = f"failed {attempt} times, the last time with: {failure}"
            if attempt < ATTEMPTS:
                click.echo(f"{shard.file} is tried again: {failure}", err=True)
    return ShardResult(error=message)


def merge_shard(
    job: MergeJob, shard: Shard, folder: Path, progress: Callable[[str], None] | None
) -> ShardResult:
    """Do what `compute_shard` does, once.

    Args:
        folder: for the shard alone.

    Raises:
        MergeError: it cannot be written, or other packages are installed here than where the merge
            was planned.
        Exception: whatever mergekit, or the merge method, says.
    """
    if (here := package_versions(*MERGE_PACKAGES)) != job.versions:
        raise MergeError(
            f"a worker has other packages ({here}) than the driver ({job.versions}); "
            "install the same on all nodes of the cluster"
        )
    os.chdir(job.folder)  # a worker of a cluster is elsewhere
    torch.set_num_threads(job.threads)
    LoaderCache().setup(job.options)
    tensors = [PlannedTensor(save.tensor_task) for save in shard.saves]
    open_quantised(base_of(model) for tensor in tensors for model in tensor.weights)
    # Random methods: the same draws whoever computes the shard, and whenever.
    transformers.set_seed(((job.options.random_seed or 0) + shard.index) % _LARGEST_SEED)
    with _disk_errors(job):
        folder.mkdir(parents=True)
    reports: dict[str, Path] = {}
    saves = [_checked(_redirect_report(save, folder, reports)) for save in shard.saves]
    writer, seconds = TensorWriter(str(folder), -1, job.options.safe_serialization), {}
    for name, duration in _execute(job, saves, writer):
        seconds[name] = duration
        if progress is not None:
            progress(name)
    with _disk_errors(job):
        writer.finalize()
        path = next((p for p in folder.iterdir() if p.suffix in (".safetensors", ".bin")), None)
        if path is not None:
            flush_to_disk(path)
        digest = sha256(path) if path else ""
    lines = {to: str(own) for to, own in reports.items() if own.exists()}
    slowest = dict(sorted(seconds.items(), key=lambda item: -item[1])[:SLOWEST])
    return ShardResult(str(path or ""), digest, lines, slowest, take_notices())


def _execute(
    job: MergeJob, saves: list[SaveTensor], writer: TensorWriter
) -> Iterator[tuple[str, float]]:
    """Run mergekit's tasks by its own executor, which is given the writer and the tokenizer.

    Yields:
        The name of every tensor, and its seconds.
    """
    options, universe = job.options, TaskUniverse(saves)
    values = {universe.get_handle(saves[0].writer_task): writer}
    if job.builder is not None:
        values[universe.get_handle(job.builder)] = job.tokenizer
    executor = Executor(
        [universe.get_handle(save) for save in saves],
        math_device=options.device,
        storage_device=options.device if options.low_cpu_memory else "cpu",
        cached_values=values,
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
    """mergekit's task that writes a tensor, for finite entries alone."""

    def execute(self, writer: TensorWriter, tensor: torch.Tensor | None) -> None:
        """Write a tensor.

        Raises:
            MergeError: it holds NaN or Inf, or does in the dtype in which it is written.
        """
        if tensor is not None and tensor.is_floating_point():
            dtype = dtype_from_name(self.dtype) or tensor.dtype
            if dtype == torch.float16 and not is_finite(tensor.to(dtype)):
                raise MergeError(
                    f"tensor {self.tensor_name} came out too large for float16; write "
                    "`out_dtype: bfloat16`, and no `dtype: float16`"
                )
            if not is_finite(tensor):  # our methods have named the model before
                raise MergeError(
                    f"tensor {self.tensor_name} came out with NaN or Inf; a model holds them in "
                    "it, or a parameter is out of range. `mergekit-ace inspect` names the model"
                )
        super().execute(writer=writer, tensor=tensor)


def _checked(save: SaveTensor) -> CheckedSave:
    return CheckedSave(**{name: getattr(save, name) for name in SaveTensor.model_fields})


@contextmanager
def _disk_errors(job: MergeJob) -> Iterator[None]:
    try:
        yield
    except (OSError, SafetensorError) as error:
        raise MergeError(f"cannot write to {Path(job.scratch).parent}: {error}") from error
