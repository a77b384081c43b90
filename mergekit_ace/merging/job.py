# SPDX-License-Identifier: Apache-2.0
"""What the workers of a merge are told; the files of the result, and its tokenizer.

Nothing of the tokenizer is kept for a resumed run, which builds it again from the models: a file in
the directory of the result is never taken for a tokenizer.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

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

from mergekit_ace.adapters.adapter_tasks import read_adapters, use_adapters
from mergekit_ace.check.estimate import DISK, estimate_merge
from mergekit_ace.files.headers import DTYPES
from mergekit_ace.files.models import Checkpoint, checkpoint_of
from mergekit_ace.planning import PlannedMerge, PlannedTensor, UnplannedTensor, plan_merge

# On whose versions a result depends.
MERGE_PACKAGES = ("mergekit", "mergekit-ace", "torch", "transformers", "tokenizers", "safetensors")


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
    def in_order(cls, source: str, order: Sequence[str]) -> OrderedConfiguration:
        """Build one from its YAML.

        Args:
            order: names of all models; in that of this process where these are not they.
        """
        config = cls.model_validate(yaml.safe_load(source))
        names = [str(model) for model in MergeConfiguration.referenced_models(config)]
        config._order = tuple(order if sorted(order) == sorted(names) else names)
        return config

    def referenced_models(self) -> list[ModelReference]:
        """Return all models, in their order; last those that were not there when it was built."""
        ranks = {name: rank for rank, name in enumerate(self._order)}
        models = super().referenced_models()
        return sorted(models, key=lambda model: ranks.get(str(model), len(ranks)))


@dataclass(frozen=True)
class MergeJob:
    """A planned merge as its workers know it; it is sent to each of them.

    Attributes:
        saves: mergekit's tasks by tensor name.
        builder: mergekit's task that builds the tokenizer of the result; None where none is built.
        tokenizer: what it has built.
        scratch: folder of unfinished files, below that of the result.
        folder: where relative paths of the configuration start.
        threads: of torch, in every process: sums of other numbers of threads differ in their last
            bits.
        versions: of the packages that the result depends on, in every process.
    """

    saves: Mapping[str, SaveTensor]
    options: MergeOptions
    builder: BuildTokenizer | None
    tokenizer: TokenizerInfo | None
    scratch: str
    folder: str
    threads: int
    versions: Mapping[str, str]


def plan_run(
    config: MergeConfiguration,
    source: str,
    options: MergeOptions,
    adapters: Sequence[ModelReference],
    unplanned: Sequence[UnplannedTensor] = (),
) -> PlannedMerge:
    """Plan as `mergekit-yaml` does; reads configs, indices and headers.

    Args:
        config, source: of the merge.
        adapters: models whose adapters are not merged into their bases first, see `show_bases`.
        unplanned: tensors that are merged or copied beside what mergekit plans.

    Raises:
        DamagedFileError: an adapter is damaged.
        RuntimeError, ValueError, OSError: whatever mergekit, or a merge method, says to the plan.
    """
    found = read_adapters(adapters)
    plan = plan_merge(config, source, options, unplanned, as_run=True)
    saves = {
        name: save.model_copy(update={"tensor_task": use_adapters(save.tensor_task, found)})
        for name, save in plan.saves.items()
    }
    return replace(plan, saves=saves, adapters=tuple(adapters))


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
    plan: PlannedMerge,
    checkpoints: Mapping[ModelReference, Checkpoint],
    tokenizer: TokenizerInfo | None,
) -> tuple[list[Shard], int]:
    """Divide a merge into files.

    Args:
        checkpoints: headers of all models.
        tokenizer: of the result; None where none is built.

    Returns:
        The shards in the order of their files, and the bytes of memory that a worker takes.
    """
    vocabulary = None
    if tokenizer is not None:
        size, multiple = len(tokenizer.tokenizer.get_vocab()), plan.vocabulary_multiple
        vocabulary = size + -size % multiple if multiple else size
    sizes = {name: _output_size(save, checkpoints, vocabulary) for name, save in plan.saves.items()}
    estimate = estimate_merge(plan, checkpoints)
    work = {name: size / DISK for name, size in sizes.items()}
    work |= {part.name: part.seconds for part in estimate.tensors}
    groups = group_tensors(sizes, plan.options.out_shard_size)
    shards = [
        Shard(
            index,
            shard_file(index, len(groups), safetensors=plan.options.safe_serialization),
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


def read_checkpoints(config: MergeConfiguration) -> dict[ModelReference, Checkpoint]:
    """Read the headers of all models.

    Raises:
        DamagedFileError: a file of a model is missing or damaged.
    """
    models = config.referenced_models()
    return {model: checkpoint_of(model, LoaderCache().get(model).index) for model in models}


def _output_size(
    save: SaveTensor, checkpoints: Mapping[ModelReference, Checkpoint], vocabulary: int | None
) -> int:
    """Return the bytes of a tensor of the result; 0 where no header tells."""
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


def build_in_order(task: BuildTokenizer | None) -> TokenizerInfo | None:
    """Build the tokenizer that mergekit has planned; None where it has planned none.

    mergekit numbers the new tokens of a union in the order in which the models' vocabularies list
    them, and those of Rust list them in another order each time. Here they are listed by number, so
    that a resumed merge has the same numbers.
    """
    if task is None:
        return None
    with _listed_by_number():
        return task.execute()


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
