# SPDX-License-Identifier: Apache-2.0
"""Dtypes of checkpoints: what cannot be merged, and what is rounded before it is subtracted."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence

import torch
from mergekit.common import ModelReference
from mergekit.config import MergeConfiguration

from mergekit_ace.check.checkpoint_rules import dtype_name, sources
from mergekit_ace.check.checkpoints import Checkpoint, Checkpoints
from mergekit_ace.check.findings import Finding, listed
from mergekit_ace.files.headers import DTYPES, FLOATING
from mergekit_ace.planning import PlannedTensor

# Share of whole numbers in the entries of a model that masks and counters stay below, and a
# quantised model does not.
WHOLE_NUMBERS = 0.001
DEQUANTISE = (
    "dequantise it first: load it with transformers, call model.dequantize(), and save it in "
    "bfloat16; or take the checkpoint that it was made from"
)
AS_NUMBERS = f"save it in bfloat16, float16 or float32; if it is quantised, {DEQUANTISE}"


def check_dtypes(checkpoints: Checkpoints, config: MergeConfiguration) -> Iterator[Finding]:
    """Find dtypes that differ, cannot be merged, or are rounded too early."""
    main = {model: _main_dtype(checkpoint) for model, checkpoint in checkpoints.items()}
    wanted = dtype_name(config.dtype)
    for model, dtype in main.items():
        checkpoint = checkpoints[model]
        precision = checkpoint.precision or dtype
        yield from _check_quantised(model, checkpoint)
        if dtype not in FLOATING or not wanted:
            continue
        if torch.promote_types(DTYPES[wanted], DTYPES[precision]) != DTYPES[wanted]:
            yield Finding.warning(
                "dtypes",
                f"`dtype: {config.dtype}` rounds {model}, stored as {precision}, before its task "
                "vector is formed",
                "write `dtype: float32` and `out_dtype: bfloat16`: rounded once, at the end",
            )
    if not config.dtype and len(set(main.values())) > 1:
        text = ", ".join(f"{model}: {dtype}" for model, dtype in main.items())
        yield Finding.warning(
            "dtypes",
            f"the checkpoints have different dtypes ({text}), and the result has the widest of "
            "each tensor's",
            "add a line `dtype: float32`, and `out_dtype: bfloat16` for a small result",
        )


def _main_dtype(checkpoint: Checkpoint) -> str:
    """Return the dtype of most entries; empty where headers tell nothing."""
    return next((name for name, _ in _entries_by_dtype(checkpoint).most_common(1)), "")


def _entries_by_dtype(checkpoint: Checkpoint) -> Counter[str]:
    counts: Counter[str] = Counter()
    for header in checkpoint.headers.values():
        counts[header.dtype] += header.entries
    return counts


def _check_quantised(model: ModelReference, checkpoint: Checkpoint) -> Iterator[Finding]:
    """Find a model whose tensors are not its weights, but codes of them."""
    settings, dtype = checkpoint.config.get("quantization_config"), _main_dtype(checkpoint)
    method = settings.get("quant_method", "unknown") if isinstance(settings, dict) else ""
    if not method and (dtype in FLOATING or not dtype):
        return
    counts = _entries_by_dtype(checkpoint)
    codes = {name: count for name, count in counts.items() if name not in FLOATING}
    if sum(codes.values()) > WHOLE_NUMBERS * sum(counts.values()):
        by = f" (quantised: {method})" if method else ""
        stored = max(codes, key=lambda name: codes[name])
        message = f"{model} is stored as {stored}{by}, which cannot be merged"
        yield Finding.error("dtypes", message, DEQUANTISE)
    else:
        yield Finding.error(
            "dtypes",
            f"config.json of {model} says that it is quantised ({method}), but its tensors are "
            f"{dtype}",
            "remove quantization_config from config.json if they are its weights; otherwise "
            + DEQUANTISE,
        )


def check_tensor_dtypes(
    tensors: Sequence[PlannedTensor], checkpoints: Checkpoints
) -> Iterator[Finding]:
    """Find single tensors that would be merged as if they were weights, or not at all.

    Whole numbers that are the same in all models are copied (counters, masks); with a `dtype:` they
    are made floating first.
    """
    odd: dict[ModelReference, dict[str, list[str]]] = defaultdict(lambda: defaultdict(list))
    for tensor in tensors:
        found = sources(tensor, checkpoints)
        weights = dict(tensor.gather.weight_info.items())
        dtypes = {model: header.dtype for model, header in found.items()}
        whole = {dtype for dtype in dtypes.values() if dtype not in FLOATING}
        copied = len(set(dtypes.values())) == 1 and whole <= {"I64", "I32", "BOOL"}
        for model, dtype in dtypes.items() if not copied else ():
            if dtype in whole:
                odd[model][dtype].append(weights[model].name)
    for model, by_dtype in odd.items():
        if any(_check_quantised(model, checkpoints[model])):
            continue  # said of the whole model
        for dtype, names in by_dtype.items():
            yield Finding.error(
                "dtypes",
                f"{model} has {len(names)} tensors in {dtype}, which cannot be merged: "
                f"{listed(names)}",
                AS_NUMBERS,
            )
