# SPDX-License-Identifier: Apache-2.0
"""Tensors that are missing, superfluous, or of another shape or dtype."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence

from mergekit.architecture.conversion import can_convert_checkpoint_keys
from mergekit.common import ModelReference
from mergekit.config import MergeConfiguration

from mergekit_ace.headers import TensorHeader
from mergekit_ace.planning import PlannedTensor
from mergekit_ace.preflight.checkpoints import Checkpoint
from mergekit_ace.preflight.findings import Finding, listed

# Share of a model's entries that may be left out of a merge before that is an error: more than
# position tables and other buffers, less than any layer.
LEFT_OUT = 0.001
WIDTHS = {"F64": 8, "F32": 4, "BF16": 2, "F16": 2}
NAMES = {"float64": "F64", "float32": "F32", "bfloat16": "BF16", "float16": "F16"}


def sources(
    tensor: PlannedTensor, checkpoints: Mapping[ModelReference, Checkpoint]
) -> dict[ModelReference, TensorHeader]:
    """The headers of a planned tensor, of all models that have it."""
    weights = dict(tensor.gather.weight_info.items())
    found = {m: checkpoints[m].source(weights[m]) for m in tensor.task.model_order}
    return {model: header for model, header in found.items() if header is not None}


def check_tensors(
    tensors: Sequence[PlannedTensor], checkpoints: Mapping[ModelReference, Checkpoint]
) -> Iterator[Finding]:
    """Whether every model has every tensor, and every tensor is merged."""
    missing: dict[ModelReference, list[str]] = {}
    read: dict[ModelReference, set[str]] = {model: set() for model in checkpoints}
    for tensor in tensors:
        for model, weight in tensor.gather.weight_info.items():
            checkpoint = checkpoints[model]
            names = {weight.name, *(weight.aliases or ()), *(weight.tied_names or ())}
            read[model] |= names
            if weight.optional or names & checkpoint.index.tensor_paths.keys():
                continue
            kind = checkpoint.config.get("model_type")
            known = set(checkpoint.index.tensor_paths)
            if any(can_convert_checkpoint_keys(kind, known, name) for name in names):
                read[model] |= known  # put together from several: which ones is mergekit's business
            else:
                missing.setdefault(model, []).append(weight.name)
    for model, names in missing.items():
        yield Finding(
            "error",
            "tensors",
            f"{model} lacks {len(names)} of {len(tensors)} tensors: {listed(names)}",
            "replace the model by one of the same architecture, or save it again",
        )
    for model, checkpoint in checkpoints.items():
        if model not in missing:
            yield from _left_out(model, checkpoint, read[model])


def _left_out(model: ModelReference, checkpoint: Checkpoint, read: set[str]) -> Iterator[Finding]:
    left = [name for name in checkpoint.headers if name not in read]
    entries = sum(checkpoint.headers[name].entries for name in left)
    total = sum(header.entries for header in checkpoint.headers.values())
    if not entries or not total:
        return
    share = entries / total
    yield Finding(
        "error" if share > LEFT_OUT else "warning",
        "tensors",
        f"mergekit plans no merge of {len(left)} tensors of {model} ({share:.1%} of its entries): "
        f"{listed(sorted(left))}",
        "the result will lack them. If they are needed, save the model under the names that it has "
        "in memory (save_pretrained(…, save_original_format=False)) or merge with mergekit-pytorch",
    )


def check_shapes(
    tensors: Sequence[PlannedTensor],
    checkpoints: Mapping[ModelReference, Checkpoint],
    config: MergeConfiguration,
) -> Iterator[Finding]:
    """Shapes of every tensor against the base model's, or the first model's."""
    aligned = bool(config.tokenizer or config.tokenizer_source)
    odd: dict[ModelReference, list[str]] = {}
    vocabularies: dict[ModelReference, str] = {}
    for tensor in tensors:
        found = sources(tensor, checkpoints)
        first = tensor.base if tensor.base in found else next(iter(found), None)
        for model, header in found.items():
            expected = found[first].shape
            if header.shape == expected:
                continue
            text = f"{tensor.name} {header.shape} instead of {expected}"
            if tensor.task.output_weight.vocabulary_axis is not None:
                vocabularies.setdefault(model, text)
            else:
                odd.setdefault(model, []).append(text)
    for model, texts in odd.items():
        yield Finding(
            "error",
            "shapes",
            f"{model} has {len(texts)} tensors of another shape: {listed(texts, 3)}",
            f"remove {model}, or set base_model to the model that it was fine-tuned from",
        )
    for model, text in vocabularies.items():
        if not aligned:
            yield Finding(
                "error",
                "vocabularies",
                f"{model} has another vocabulary: {text}",
                "align them: add the line `tokenizer: {source: base}` (or union)",
            )


def check_dtypes(
    checkpoints: Mapping[ModelReference, Checkpoint], config: MergeConfiguration
) -> Iterator[Finding]:
    """What is rounded, and when."""
    main = {model: _main_dtype(checkpoint) for model, checkpoint in checkpoints.items()}
    wanted = NAMES.get(config.dtype or "")
    for model, dtype in main.items():
        if dtype not in WIDTHS:
            if dtype:
                yield Finding(
                    "error",
                    "dtypes",
                    f"{model} is stored as {dtype}, which cannot be merged",
                    "merge the unquantised checkpoints",
                )
        elif wanted and WIDTHS[wanted] < WIDTHS[dtype]:
            yield Finding(
                "warning",
                "dtypes",
                f"dtype: {config.dtype} rounds {model}, stored as {dtype}, before its task vector "
                "is formed",
                "write `dtype: float32` and `out_dtype: bfloat16`: rounded once, at the end",
            )
    if not config.dtype and len(set(main.values())) > 1:
        text = ", ".join(f"{model}: {dtype}" for model, dtype in main.items())
        yield Finding(
            "error",
            "dtypes",
            f"the checkpoints have different dtypes ({text})",
            "add a line `dtype: float32`, and `out_dtype: bfloat16` for a small result",
        )


def _main_dtype(checkpoint: Checkpoint) -> str:
    """The dtype of most entries; empty where headers tell nothing."""
    counts: Counter[str] = Counter()
    for header in checkpoint.headers.values():
        counts[header.dtype] += header.entries
    return counts.most_common(1)[0][0] if counts else ""
