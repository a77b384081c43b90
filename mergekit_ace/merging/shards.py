# SPDX-License-Identifier: Apache-2.0
"""Shards: a merge divided into the files of its result, each of them computed by itself."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
import transformers
from mergekit.common import ImmutableMap, ModelReference, dtype_from_name
from mergekit.graph import Executor, TaskHandle, TaskUniverse
from mergekit.io.tasks import LoaderCache, SaveTensor
from mergekit.io.tensor_writer import TensorWriter
from mergekit.options import MergeOptions
from mergekit.tokenizer import BuildTokenizer, PermutedVocabulary, TokenizerInfo
from mergekit.tokenizer.truncate import TruncatedVocabulary
from tqdm import tqdm

from mergekit_ace.files.checkpoints import DTYPES, Checkpoints, open_models
from mergekit_ace.files.saving import flush_to_disk, package_versions, sha256
from mergekit_ace.methods.base import is_finite, take_notices
from mergekit_ace.naming import ConfigError, FileError
from mergekit_ace.planning import PlannedMerge, PlannedTensor

# A result depends on the versions of these.
MERGE_PACKAGES = ("mergekit", "mergekit-ace", "torch", "transformers", "tokenizers", "safetensors")


@dataclass(frozen=True)
class Shard:
    """One file of the result: the unit of work."""

    index: int
    file: str
    saves: tuple[SaveTensor, ...]  # mergekit's tasks, in its order
    sizes: Mapping[str, int]  # bytes of their tensors by name; 0 where no header tells

    @property
    def bytes(self) -> int:
        return sum(self.sizes.values())


@dataclass(frozen=True)
class MergeJob:
    """What all shards of a merge share; it is sent to every worker."""

    options: MergeOptions
    builder: BuildTokenizer | None  # mergekit's task that builds the tokenizer of the result
    tokenizer: TokenizerInfo | None  # what it has built
    scratch: str  # folder of unfinished files, below that of the result
    models: Mapping[ModelReference, str]  # folders of models
    folder: str = field(default_factory=os.getcwd)  # where relative paths of the config start
    threads: int = field(default_factory=torch.get_num_threads)  # they change last bits of sums
    versions: Mapping[str, str] = field(default_factory=lambda: package_versions(*MERGE_PACKAGES))


@dataclass(frozen=True)
class ShardResult:
    """A shard that is on the disk, but not yet under its name; or the reason why it is not."""

    path: str = ""  # of its file in `MergeJob.scratch`; empty where all of its tensors are absent
    sha256: str = ""  # of that file; empty without one
    reports: Mapping[str, str] = field(default_factory=dict)  # files of lines, by the report's path
    notices: Mapping[str, int] = field(default_factory=dict)  # numbers of tensors by warning
    error: str = ""


def divide_into_shards(
    plan: PlannedMerge, checkpoints: Checkpoints, tokenizer: TokenizerInfo | None
) -> list[Shard]:
    """Divide a merge into files by the rule of mergekit's writer."""
    rows = None
    if tokenizer is not None:
        rows = len(tokenizer.tokenizer.get_vocab())
        rows += -rows % (plan.vocabulary_multiple or 1)
    groups: list[dict[str, int]] = []  # bytes of tensors by name
    held = 0
    for name, save in plan.saves.items():
        size = _output_size(save, checkpoints, rows)
        if not groups or 0 < plan.options.out_shard_size < held + size:
            groups.append({})
            held = 0
        groups[-1][name] = size
        held += size
    shards = []
    for n, sizes in enumerate(groups):
        part = f"-{n + 1:05d}-of-{len(groups):05d}" if len(groups) > 1 else ""
        saves = tuple(plan.saves[name] for name in sizes)
        shards.append(Shard(n, f"model{part}.safetensors", saves, sizes))
    return shards


def _output_size(save: SaveTensor, checkpoints: Checkpoints, rows: int | None) -> int:
    """Return the bytes of a tensor of the result; 0 where no header tells."""
    tensor = PlannedTensor(save.tensor_task)
    weights, gather = tensor.weights, tensor.task.gather_tensors
    headers = {m: header for m, w in weights.items() if (header := checkpoints[m].source(w))}
    if not headers:
        return 0
    model = tensor.base if tensor.base in headers else next(iter(headers))
    shape, axis = list(headers[model].shape), tensor.task.output_weight.vocabulary_axis
    if isinstance(gather, PermutedVocabulary) and rows is not None:
        shape[axis] = rows
    elif isinstance(gather, TruncatedVocabulary):
        shape[axis] = min(header.shape[axis] for header in headers.values())
    named = save.dtype or weights[model].force_dtype or tensor.gather.dtype
    dtype = dtype_from_name(named) or DTYPES.get(headers[model].dtype)
    return torch.empty(shape, dtype=dtype, device="meta").nbytes


def compute_shard(job: MergeJob, shard: Shard, bar: tqdm | None = None) -> ShardResult:
    """Compute a shard and flush it to the disk, below `job.scratch`; an error is in the result."""
    try:
        return _merge_shard(job, shard, bar)
    except Exception as error:  # whatever mergekit, or a merge method, says
        plain = isinstance(error, FileError | ValueError | OverflowError)
        return ShardResult(error=str(error) if plain else f"{type(error).__name__}: {error}")


def _merge_shard(job: MergeJob, shard: Shard, bar: tqdm | None) -> ShardResult:
    if (here := package_versions(*MERGE_PACKAGES)) != job.versions:
        said = f"a worker has other packages ({here}) than the driver ({job.versions})"
        raise ConfigError(f"{said}; install the same on all nodes")
    os.chdir(job.folder)  # a worker of a cluster is elsewhere
    torch.set_num_threads(job.threads)
    LoaderCache().setup(job.options)
    open_models(job.models)
    # Random methods: the same draws whoever computes the shard, and whenever.
    transformers.set_seed(((job.options.random_seed or 0) + shard.index) % 2**32)
    folder = Path(tempfile.mkdtemp(prefix=f"{shard.file}-", dir=job.scratch))
    reports: dict[str, str] = {}
    saves = [_report_into(folder, save, reports) for save in shard.saves]
    writer, universe = CheckedWriter(str(folder), max_shard_size=-1), TaskUniverse(saves)
    values: dict[TaskHandle, Any] = {universe.add_task(saves[0].writer_task): writer}
    if job.builder is not None:
        values[universe.add_task(job.builder)] = job.tokenizer
    device = torch.device(job.options.device or "cpu")
    executor = Executor(
        [universe.add_task(save) for save in saves],
        math_device=device,
        storage_device=device if job.options.low_cpu_memory else torch.device("cpu"),
        cached_values=values,
    )
    for save, _ in executor.run(quiet=True):
        if bar is not None and isinstance(save, SaveTensor):
            bar.update(shard.sizes[save.tensor_name])
    writer.finalize()
    lines = {path: own for path, own in reports.items() if os.path.exists(own)}
    result = ShardResult(reports=lines, notices=take_notices())
    for path in folder.glob("*.safetensors"):  # one, or none
        flush_to_disk(path)
        result = replace(result, path=str(path), sha256=sha256(path))
    return result


def _report_into(folder: Path, save: SaveTensor, reports: dict[str, str]) -> SaveTensor:
    """Return the task with a file in `folder` for `report:`, which is entered into `reports`.

    The driver, which alone writes to the report, appends that once the shard is finished.
    """
    task: Any = save.tensor_task
    parameters = dict(task.parameters.items())
    path = parameters.get("report")
    if not isinstance(path, str):
        return save
    parameters["report"] = reports.setdefault(path, str(folder / f"report-{len(reports)}.jsonl"))
    task = task.model_copy(update={"parameters": ImmutableMap(data=parameters)})
    return save.model_copy(update={"tensor_task": task})


class CheckedWriter(TensorWriter):
    """mergekit's writer; a `ConfigError` where NaN or Inf would be written."""

    def save_tensor(self, name: str, tensor: torch.Tensor, clone: bool = False) -> None:
        """Take a tensor in the dtype of the result."""
        if tensor.is_floating_point() and not is_finite(tensor):
            raise ConfigError(
                f"tensor {name} came out with NaN or Inf in {tensor.dtype}: a model holds them "
                "(`mergekit-ace inspect` names it), a parameter is out of range, or float16 is too "
                "narrow (write `out_dtype: bfloat16`, and no `dtype: float16`)"
            )
        super().save_tensor(name, tensor, clone)
