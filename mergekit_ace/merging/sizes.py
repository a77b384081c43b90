# SPDX-License-Identifier: Apache-2.0
"""What a merge will write and how long each tensor takes, from headers alone."""

from __future__ import annotations

import pickle
from collections.abc import Mapping
from pathlib import Path

import torch
from mergekit.common import ModelReference, dtype_from_name
from mergekit.io.tasks import LoaderCache, SaveTensor
from mergekit.tokenizer import PermutedVocabulary
from mergekit.tokenizer.truncate import TruncatedVocabulary

from mergekit_ace.headers import TensorHeader, read_headers
from mergekit_ace.merging.errors import MergeError
from mergekit_ace.merging.job import MergeJob, MergePlan
from mergekit_ace.merging.output_config import padded_vocabulary
from mergekit_ace.planning import PlannedMerge, PlannedTensor
from mergekit_ace.preflight.checkpoints import DTYPE_NAMES, DTYPES, Checkpoint
from mergekit_ace.preflight.estimate import Estimate, Rates, estimate_merge

# Only ratios count: a CPU of a tenth of a teraflop, its memory, a disk.
NOMINAL = Rates(operations=1e11, memory=1e10, read=1e9)


def read_all(job: MergeJob) -> dict[ModelReference, Checkpoint]:
    """The headers of all models; those of pickles too, which mergekit's checks leave out.

    Raises:
        DamagedFileError: a file is missing or damaged.
    """
    return {model: _checkpoint(model) for model in job.config().referenced_models()}


def _checkpoint(model: ModelReference) -> Checkpoint:
    index = LoaderCache().get(model).index
    headers = read_headers(index.tensor_paths, index.base_path)
    for name in sorted(set(index.tensor_paths.values())):
        if not name.endswith(".safetensors"):
            stored = _pickled(Path(index.base_path, name))
            headers |= {t: h for t, h in stored.items() if index.tensor_paths.get(t) == name}
    return Checkpoint(model, Path(index.base_path), index, headers)


def _pickled(path: Path) -> dict[str, TensorHeader]:
    try:
        content = torch.load(path, map_location="meta", weights_only=True)
    except (RuntimeError, EOFError, pickle.UnpicklingError) as error:
        raise MergeError(f"{path} is damaged ({error}); download or save it again") from error
    content = content.get("state_dict", content)
    return {
        name: TensorHeader(DTYPE_NAMES.get(tensor.dtype, "F32"), tuple(tensor.shape), str(path))
        for name, tensor in content.items()
    }


def output_sizes(
    plan: MergePlan, job: MergeJob, checkpoints: Mapping[ModelReference, Checkpoint]
) -> dict[str, int]:
    """Bytes of every tensor of the result; 0 where no header tells."""
    info = job.tokenizer_info
    vocabulary = info and padded_vocabulary(info.tokenizer, job.vocabulary_multiple)
    return {name: _output_size(save, checkpoints, vocabulary) for name, save in plan.saves.items()}


def _output_size(
    save: SaveTensor, checkpoints: Mapping[ModelReference, Checkpoint], vocabulary: int | None
) -> int:
    """Bytes of a tensor of the result."""
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


def estimate(
    plan: MergePlan, job: MergeJob, checkpoints: Mapping[ModelReference, Checkpoint]
) -> Estimate:
    """Work and memory of the whole, as `mergekit-ace check` estimates them."""
    tensors = tuple(PlannedTensor(save.tensor_task) for save in plan.saves.values())
    merge = PlannedMerge(job.config(), job.source, job.merge_options, tensors)
    return estimate_merge(merge, checkpoints, NOMINAL)


def work_by_tensor(sizes: Mapping[str, int], whole: Estimate) -> dict[str, float]:
    """Estimated seconds of every tensor on a nominal machine."""
    work = {name: size / NOMINAL.read for name, size in sizes.items()}
    for part in whole.tensors:
        work[part.name] = (
            part.operations[0] / NOMINAL.operations
            + part.moved[0] / NOMINAL.memory
            + (part.read + part.written) / NOMINAL.read
        )
    return work
