# SPDX-License-Identifier: Apache-2.0
"""What a merge will take: operations, memory and disk, from the shapes of its tensors alone."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from mergekit.common import ModelReference

from mergekit_ace.adapters.merge import MergeProducts
from mergekit_ace.check.models import planned_headers, safetensors_dtype
from mergekit_ace.files.headers import TensorHeader, item_size
from mergekit_ace.files.models import Checkpoints
from mergekit_ace.methods.base import TaskVectorMethod, sweep
from mergekit_ace.planning import PlannedMerge, PlannedTensor

PROCESS = 700_000_000  # bytes: python with torch, transformers and mergekit


@dataclass(frozen=True)
class TensorEstimate:
    """What one tensor takes, if all experts have changed it and all of it is refined.

    Attributes:
        rule: `matrix`, `stacked`, … as it is read; the method's name if it reads entries.
        operations: floating-point operations.
        inputs: bytes of all versions in the dtype of the merge.
        working: bytes beside inputs and result.
    """

    name: str
    shape: tuple[int, ...]
    rule: str
    operations: float
    read: int
    written: int
    inputs: int
    working: int


@dataclass(frozen=True)
class MergeEstimate:
    """What a whole merge takes.

    Attributes:
        rules: tensors by rule.
        memory: bytes of the process at its largest, about; without what the system caches of files.
        device_memory: bytes on the accelerator; None without one.
    """

    rules: dict[str, int]
    operations: float
    memory: int
    device_memory: int | None
    read: int
    written: int
    tensors: tuple[TensorEstimate, ...]


def estimate_merge(plan: PlannedMerge, checkpoints: Checkpoints) -> MergeEstimate:
    """Return what all tensors take that some model has."""
    parts = tuple(
        _estimate_tensor(tensor, headers, plan)
        for tensor, headers in planned_headers(plan.tensors, checkpoints)
        if (tensor.base or next(iter(headers), None)) in headers
    )
    on_device = plan.options.device not in (None, "cpu")
    return MergeEstimate(
        rules=dict(Counter(part.rule for part in parts)),
        operations=sum(part.operations for part in parts),
        memory=_peak(parts, plan.options.out_shard_size, on_device),
        device_memory=max((p.inputs + p.working for p in parts), default=0) if on_device else None,
        read=sum(part.read for part in parts),
        written=sum(part.written for part in parts),
        tensors=parts,
    )


def _estimate_tensor(
    tensor: PlannedTensor, headers: Mapping[ModelReference, TensorHeader], plan: PlannedMerge
) -> TensorEstimate:
    header = headers[tensor.base] if tensor.base else next(iter(headers.values()))
    merged_in = safetensors_dtype(plan.config.dtype) or header.dtype
    written_in = safetensors_dtype(plan.config.out_dtype) or merged_in
    method = tensor.method
    rule, work = method.spec.name, sweep(header.shape, max(1, len(headers) - 1))
    if tensor.base and isinstance(tensor.task, MergeProducts):  # only the base's is read
        headers, work = {tensor.base: header}, sweep(header.shape, 1)
    elif isinstance(method, TaskVectorMethod):
        settings = tensor.settings
        if method.layouts:
            rule = method.layout(settings, len(header.shape))
            settings = replace(settings, layout=rule)
        weights = zip(settings.experts, settings.weights, strict=True)
        experts = sum(weight != 0 for model, weight in weights if model in headers)
        work = method.work(settings, header.shape, experts)
    return TensorEstimate(
        name=tensor.name,
        shape=header.shape,
        rule=rule,
        operations=work.operations,
        read=sum(h.bytes for h in headers.values()),
        written=header.entries * item_size(written_in),
        inputs=len(headers) * header.entries * item_size(merged_in),
        working=work.working + 4 * header.entries,  # and the result in float32
    )


def _peak(parts: Sequence[TensorEstimate], shard: int, on_device: bool) -> int:
    """Return the largest sum of a tensor's needs and what its output shard holds by then."""
    peak = held = 0
    for part in sorted(parts, key=lambda part: part.name):  # as mergekit's executor sorts them
        here = part.inputs + part.written + (0 if on_device else part.working)
        if held + part.written > shard:
            held = 0
        peak = max(peak, held + here)
        held += part.written
    return PROCESS + peak
