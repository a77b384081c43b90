# SPDX-License-Identifier: Apache-2.0
"""What every process of a merge is told, its plan made from it, files and tokenizer of the result.

Nothing of the tokenizer is kept for a resumed run, which builds it again from the models and
compares the numbers: a file in the directory of the result is never taken for a tokenizer.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
import yaml
from mergekit.common import ModelReference, dtype_from_name
from mergekit.config import MergeConfiguration
from mergekit.io.tasks import LoaderCache, SaveTensor
from mergekit.options import MergeOptions
from mergekit.tokenizer import BuildTokenizer, PermutedVocabulary, TokenizerInfo
from mergekit.tokenizer.truncate import TruncatedVocabulary
from pydantic import PrivateAttr
from transformers import PreTrainedTokenizerFast

from mergekit_ace.adapters.adapter_tasks import read_adapters, show_bases, use_adapters
from mergekit_ace.headers import DTYPES
from mergekit_ace.planning import PlannedMerge, PlannedTensor, plan_tensors
from mergekit_ace.preflight.checkpoints import Checkpoint, checkpoint_of
from mergekit_ace.preflight.estimate import NOMINAL, estimate_merge
from mergekit_ace.unplanned import UnplannedTensor

# On whose versions a result depends.
MERGE_PACKAGES = ("mergekit", "mergekit-ace", "torch", "transformers", "safetensors")


class MergeError(RuntimeError):
    """The merge cannot start, or cannot go on; the message names the remedy."""


class OutputError(MergeError):
    """The result cannot be written; trying again at once would be of no use."""


class OrderedConfiguration(MergeConfiguration):
    """A configuration that lists its models in one order.

    mergekit's own takes them from a set, so that their order changes from process to process. The
    numbers of a joint tokenizer's tokens depend on it, and, where there is no base, which model is
    asked for its config.
    """

    _order: tuple[str, ...] = PrivateAttr(())

    @classmethod
    def in_order(cls, content: Mapping[str, Any], order: tuple[str, ...]) -> OrderedConfiguration:
        """Build one from what its YAML says, and the names of all models."""
        config = cls.model_validate(dict(content))
        config._order = order
        return config

    def referenced_models(self) -> list[ModelReference]:
        """Return all models, in their order."""
        return sorted(super().referenced_models(), key=lambda model: self._order.index(str(model)))


@dataclass(frozen=True)
class MergeJob:
    """A merge as all its processes know it; it is sent to each of them.

    Attributes:
        options: fields of mergekit's `MergeOptions`.
        models: names of all models, in one order.
        tokenizer: of the result, and where its tokens come from; None where none is built.
        scratch: folder of unfinished files, below that of the result.
        folder: where relative paths of the configuration start.
        threads: of torch, in every process: sums of other numbers of threads differ in their last
            bits.
        versions: of the packages that the result depends on, in every process.
        unplanned: tensors that are merged or copied beside what mergekit plans.
        adapters: models whose adapters are not merged into their bases first.
    """

    source: str
    options: dict[str, Any]
    models: tuple[str, ...]
    tokenizer: TokenizerInfo | None
    scratch: str
    folder: str
    threads: int
    versions: dict[str, str]
    unplanned: tuple[UnplannedTensor, ...] = ()
    adapters: tuple[ModelReference, ...] = ()

    @cached_property
    def merge_options(self) -> MergeOptions:
        """mergekit's flags."""
        return MergeOptions(**self.options)

    def config(self) -> OrderedConfiguration:
        """Return the configuration; a new one, as planning rewrites it."""
        return OrderedConfiguration.in_order(yaml.safe_load(self.source), self.models)

    @property
    def vocabulary_multiple(self) -> int | None:
        """What the rows of the result's embeddings are padded to a multiple of."""
        settings = self.config().tokenizer
        return settings.pad_to_multiple_of if settings else None


def plan_job(job: MergeJob) -> PlannedMerge:
    """Plan as `mergekit-yaml` does; reads configs, indices and headers.

    Raises:
        DamagedFileError: an adapter is damaged.
        RuntimeError, ValueError, OSError: whatever mergekit, or a merge method, says to the plan.
    """
    options = job.merge_options
    LoaderCache().setup(options)
    show_bases(job.adapters)
    adapters = read_adapters(job.adapters)
    plan = plan_tensors(job.config(), job.source, options, job.unplanned, as_run=True)
    saves = {
        name: save.model_copy(update={"tensor_task": use_adapters(save.tensor_task, adapters)})
        for name, save in plan.saves.items()
    }
    return replace(plan, saves=saves) if adapters else plan


@dataclass(frozen=True)
class Shard:
    """One file of the result: the unit of work.

    Attributes:
        sizes: bytes by tensor name, in mergekit's order; 0 where no header tells.
        work: estimated seconds by tensor name, on a nominal machine.
    """

    index: int
    file: str
    sizes: Mapping[str, int]
    work: Mapping[str, float]

    @property
    def tensors(self) -> tuple[str, ...]:
        """Names, in mergekit's order."""
        return tuple(self.sizes)

    @property
    def bytes(self) -> int:
        """Bytes of all tensors."""
        return sum(self.sizes.values())


def plan_shards(
    job: MergeJob, plan: PlannedMerge, groups: Sequence[Sequence[str]] = ()
) -> tuple[list[Shard], int]:
    """Divide a merge into files; reads the headers of all models.

    Args:
        groups: tensor names by file, where an earlier run has divided them; by the rule of
            mergekit's writer without.

    Returns:
        The shards in the order of their files, and the bytes of memory that a worker takes.

    Raises:
        DamagedFileError: a file of a model is missing or damaged.
    """
    options = job.merge_options
    checkpoints = read_checkpoints(job)
    sizes = _output_sizes(job, plan, checkpoints)
    estimate = estimate_merge(plan, checkpoints, NOMINAL)
    work = {name: size / NOMINAL.read for name, size in sizes.items()}
    work |= {part.name: part.seconds(NOMINAL, refined=False) for part in estimate.tensors}
    groups = groups or group_tensors(sizes, options.out_shard_size)
    shards = [
        Shard(
            index,
            shard_file(index, len(groups), safetensors=options.safe_serialization),
            {name: sizes[name] for name in group},
            {name: work[name] for name in group},
        )
        for index, group in enumerate(groups)
    ]
    return shards, estimate.memory


def group_tensors(sizes: Mapping[str, int], limit: int) -> list[list[str]]:
    """Group tensors by file, by the rule of mergekit's writer.

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


def index_file(*, safetensors: bool) -> str:
    """Return the name of the index of several files, as mergekit gives it."""
    return f"{shard_file(0, 1, safetensors=safetensors)}.index.json"


def read_checkpoints(job: MergeJob) -> dict[ModelReference, Checkpoint]:
    """Read the headers of all models.

    Raises:
        DamagedFileError: a file of a model is missing or damaged.
    """
    models = job.config().referenced_models()
    return {model: checkpoint_of(model, LoaderCache().get(model).index) for model in models}


def _output_sizes(
    job: MergeJob, plan: PlannedMerge, checkpoints: Mapping[ModelReference, Checkpoint]
) -> dict[str, int]:
    """Return the bytes of every tensor of the result; 0 where no header tells."""
    vocabulary = None
    if job.tokenizer is not None:
        size, multiple = len(job.tokenizer.tokenizer.get_vocab()), job.vocabulary_multiple
        vocabulary = size + -size % multiple if multiple else size
    return {name: _output_size(save, checkpoints, vocabulary) for name, save in plan.saves.items()}


def _output_size(
    save: SaveTensor, checkpoints: Mapping[ModelReference, Checkpoint], vocabulary: int | None
) -> int:
    tensor = PlannedTensor(save.tensor_task)
    weights = dict(tensor.gather.weight_info.items())
    found = {m: header for m, w in weights.items() if (header := checkpoints[m].source(w))}
    if not found:
        return 0
    model = tensor.base if tensor.base in found else next(iter(found))
    shape, axis = list(found[model].shape), tensor.task.output_weight.vocabulary_axis
    if isinstance(save.tensor_task.gather_tensors, PermutedVocabulary) and vocabulary is not None:
        shape[axis] = vocabulary
    elif isinstance(save.tensor_task.gather_tensors, TruncatedVocabulary):
        shape[axis] = min(header.shape[axis] for header in found.values())
    named = save.dtype or weights[model].force_dtype or tensor.gather.dtype
    dtype = dtype_from_name(named) or DTYPES.get(found[model].dtype)
    return torch.empty(shape, dtype=dtype, device="meta").nbytes


def build_in_order(task: BuildTokenizer) -> TokenizerInfo:
    """Build the tokenizer that mergekit has planned.

    mergekit numbers the new tokens of a union in the order in which the models' vocabularies list
    them, and those of Rust list them in another order each time. Here they are listed by number.
    """
    with _listed_by_number():
        return task.execute()


def numbering(info: TokenizerInfo) -> str:
    """Return a hash of which token has which number in the result."""
    tokens = sorted(info.tokenizer.get_vocab().items())
    return hashlib.sha256(json.dumps(tokens).encode("utf-8")).hexdigest()


@contextmanager
def _listed_by_number() -> Iterator[None]:
    original = PreTrainedTokenizerFast.get_vocab

    def get_vocab(self: PreTrainedTokenizerFast) -> dict[str, int]:
        return dict(sorted(original(self).items(), key=lambda item: item[1]))

    PreTrainedTokenizerFast.get_vocab = get_vocab
    try:
        yield
    finally:
        PreTrainedTokenizerFast.get_vocab = original
