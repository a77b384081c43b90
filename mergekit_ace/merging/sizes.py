# SPDX-License-Identifier: Apache-2.0
"""What a merge will write and how long each tensor takes, from headers alone."""

from __future__ import annotations

import pickle
from collections.abc import Mapping
from pathlib import Path

import torch
from mergekit.architecture.conversion import convert_checkpoint_tensors
from mergekit.common import ModelReference, dtype_from_name
from mergekit.io.tasks import LoaderCache, SaveTensor
from mergekit.tokenizer import PermutedVocabulary
from mergekit.tokenizer.truncate import TruncatedVocabulary
from torch import Tensor

from mergekit_ace.headers import TensorHeader, read_headers
from mergekit_ace.merging.errors import MergeError
from mergekit_ace.merging.job import MergeJob, MergePlan
from mergekit_ace.merging.output_config import padded_vocabulary
from mergekit_ace.planned import PlannedMerge, PlannedTensor
from mergekit_ace.preflight.calibration import Rates
from mergekit_ace.preflight.checkpoints import Checkpoint
from mergekit_ace.preflight.estimate import Estimate, estimate_merge

DTYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16,
    "I64": torch.int64, "I32": torch.int32, "I16": torch.int16, "I8": torch.int8,
    "U8": torch.uint8, "BOOL": torch.bool,
    "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2,
}  # fmt: skip
NAMES = {dtype: name for name, dtype in DTYPES.items()}
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
        name: TensorHeader(NAMES.get(tensor.dtype, "F32"), tuple(tensor.shape), str(path))
        for name, tensor in content.items()
    }


def output_sizes(
    plan: MergePlan, job: MergeJob, checkpoints: Mapping[ModelReference, Checkpoint]
) -> dict[str, int]:
    """Bytes of every tensor of the result; 0 where no header tells."""
    info = job.tokenizer_info
    vocabulary = info and padded_vocabulary(info.tokenizer, job.vocabulary_multiple)
    sources = {model: _meta(checkpoint) for model, checkpoint in checkpoints.items()}
    sizes = {}
    for name, save in plan.saves.items():
        tensor = _output(save, checkpoints, sources, vocabulary)
        sizes[name] = tensor.nbytes if tensor is not None else 0
    return sizes


def _meta(checkpoint: Checkpoint) -> dict[str, Tensor]:
    return {
        name: torch.empty(header.shape, dtype=DTYPES.get(header.dtype), device="meta")
        for name, header in checkpoint.headers.items()
    }


def _output(
    save: SaveTensor,
    checkpoints: Mapping[ModelReference, Checkpoint],
    sources: Mapping[ModelReference, Mapping[str, Tensor]],
    vocabulary: int | None,
) -> Tensor | None:
    """A tensor of the result without its entries."""
    tensor = PlannedTensor(save.tensor_task)
    found = {}
    for model, weight in tensor.gather.weight_info.items():
        names = [weight.name, *(weight.aliases or ())]
        known = [n for n in [*names, *(weight.tied_names or ())] if n in sources[model]]
        kind = checkpoints[model].config.get("model_type")
        parts = (convert_checkpoint_tensors(kind, sources[model], name) for name in names)
        one = sources[model][known[0]] if known else next((p for p in parts if p is not None), None)
        if one is not None:
            found[model] = one.to(dtype_from_name(weight.force_dtype or tensor.gather.dtype))
    if not found:
        return None
    result = found.get(tensor.base, next(iter(found.values())))
    shape, axis = list(result.shape), tensor.task.output_weight.vocabulary_axis
    if isinstance(save.tensor_task.gather_tensors, PermutedVocabulary) and vocabulary is not None:
        shape[axis] = vocabulary
    elif isinstance(save.tensor_task.gather_tensors, TruncatedVocabulary):
        shape[axis] = min(part.shape[axis] for part in found.values())
    dtype = dtype_from_name(save.dtype) or result.dtype
    return torch.empty(shape, dtype=dtype, device="meta")


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
