# SPDX-License-Identifier: Apache-2.0
"""What a merge will take: work, time, memory and disk, from shapes alone."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from mergekit.common import ModelReference

from mergekit_ace.algebra.choose import COSTS, choose_forms
from mergekit_ace.algebra.linalg import LARGEST_BLOCK
from mergekit_ace.headers import ITEM_SIZES, TensorHeader
from mergekit_ace.planning import RIDGE_METHODS, PlannedMerge, PlannedTensor
from mergekit_ace.preflight.calibration import Rates
from mergekit_ace.preflight.checkpoints import Checkpoint
from mergekit_ace.preflight.tensors import NAMES, sources

BLOCKS = 6 * LARGEST_BLOCK * 4  # bytes, beside what the forms count
PROCESS = 700_000_000  # python with torch, transformers and mergekit


@dataclass(frozen=True)
class TensorEstimate:
    """One tensor.

    Attributes:
        name: of it.
        shape: as stored.
        rule: `matrix`, `stacked`, … as `ace` reads it; another method's name.
        form: of the closed form, without and with the refinement; None for what needs none.
        operations: of the merge, without the refinement and with it.
        moved: bytes to and from memory, likewise.
        read: bytes from disk.
        written: bytes of the result.
        inputs: bytes of all versions in the dtype of the merge.
        working: bytes beside inputs and result, the larger of both branches.
    """

    name: str
    shape: tuple[int, ...]
    rule: str
    form: tuple[str, str] | None
    operations: tuple[float, float]
    moved: tuple[float, float]
    read: int
    written: int
    inputs: int
    working: int


@dataclass(frozen=True)
class Estimate:
    """A whole merge; pairs are of the homogeneous and the heterogeneous branch everywhere.

    Attributes:
        rules: tensors by rule.
        forms: matrices by form.
        operations: floating-point operations.
        seconds: from the rates of this machine; None for a method that is not ours.
        memory: bytes of the process at its largest, about; without what the system caches of files.
        device_memory: bytes on the accelerator; None without one.
        read, written: bytes of disk.
        tensors: one by one.
    """

    rules: dict[str, int]
    forms: dict[str, int]
    operations: tuple[float, float]
    seconds: tuple[float, float] | None
    memory: int
    device_memory: int | None
    read: int
    written: int
    tensors: tuple[TensorEstimate, ...]


def estimate_tensor(
    tensor: PlannedTensor, found: Mapping[ModelReference, TensorHeader], plan: PlannedMerge
) -> TensorEstimate | None:
    """What one tensor takes, if all experts have changed it; None if nobody has it."""
    header = found.get(tensor.base) if tensor.base else next(iter(found.values()), None)
    if header is None:
        return None
    merged_in = NAMES.get(plan.config.dtype or "", header.dtype)
    written_in = NAMES.get(plan.config.out_dtype or "", merged_in)
    itemsize = ITEM_SIZES.get(merged_in, 4)
    entries, experts = header.entries, max(1, len(found) - 1)
    rule, form = plan.config.merge_method, None
    operations = (2.0 * experts * entries,) * 2
    moved = (3.0 * 4 * experts * entries,) * 2
    working = 4 * entries
    if "layout" in tensor.parameters:
        rule = tensor.layout(len(header.shape))
    shape = matrix_shape(header.shape, rule)
    if plan.config.merge_method in RIDGE_METHODS and shape and shape[0] > 1 and experts > 1:
        stack = entries // max(1, shape[0] * shape[1])
        refined = (False, plan.config.merge_method == "ace")
        forms = [choose_forms(*shape, experts, refined=r)[0] for r in refined]
        costs = [COSTS[f](*shape, experts, r) for f, r in zip(forms, refined, strict=True)]
        form = (forms[0], forms[1])
        extra = _extra(plan.config.merge_method, shape, experts)
        operations = tuple(stack * (c.operations + e) for c, e in zip(costs, extra, strict=True))
        moved = tuple(stack * cost.bytes for cost in costs)
        working = int(max(cost.memory for cost in costs)) + BLOCKS
    return TensorEstimate(
        name=tensor.name,
        shape=header.shape,
        rule=rule,
        form=form,
        operations=(operations[0], operations[1]),
        moved=(moved[0], moved[1]),
        read=sum(h.bytes for h in found.values()),
        written=entries * ITEM_SIZES.get(written_in, 4),
        inputs=len(found) * entries * itemsize,
        working=working + 4 * entries,  # and the result in float32
    )


def matrix_shape(shape: Sequence[int], layout: str) -> tuple[int, int] | None:
    """(o, i) of a matrix in a tensor; None for what is none, or only a table of rows."""
    if layout in ("mean", "table") or len(shape) < 2 or not math.prod(shape):
        return None
    if layout == "flattened":
        return shape[0], math.prod(shape[1:])
    rows, columns = shape[-2:]
    return (columns, rows) if layout == "transposed" else (rows, columns)


def _extra(method: str, shape: tuple[int, int], experts: int) -> tuple[float, float]:
    """Operations beside the closed form, without and with a refinement.

    Of `ace` the Gram matrix of F and its decomposition, about 9 m³ in all; of `ace_relative` the
    ‖G_t‖ of all experts, in both cases.
    """
    small, large = min(shape), max(shape)
    if method == "ace":
        return 0.0, small**2 * large + 9.0 * small**3
    norms = float(experts * small**2 * large)
    return norms, norms


def estimate_merge(
    plan: PlannedMerge, checkpoints: Mapping[ModelReference, Checkpoint], rates: Rates
) -> Estimate:
    """Of all tensors that can be estimated.

    Args:
        plan: the merge.
        checkpoints: its models.
        rates: of this machine.
    """
    parts = [estimate_tensor(t, sources(t, checkpoints), plan) for t in plan.tensors]
    known = [part for part in parts if part is not None]
    operations = tuple(sum(part.operations[n] for part in known) for n in range(2))
    moved = tuple(sum(part.moved[n] for part in known) for n in range(2))
    read, written = sum(part.read for part in known), sum(part.written for part in known)
    disk = read / rates.read + written / rates.read
    ours = plan.config.merge_method in (*RIDGE_METHODS, "statsmerging")
    seconds = tuple(operations[n] / rates.operations + moved[n] / rates.memory for n in range(2))
    on_device = plan.options.device not in (None, "cpu")
    return Estimate(
        rules=dict(Counter(part.rule for part in known)),
        forms=dict(Counter(part.form[0] for part in known if part.form)),
        operations=(operations[0], operations[1]),
        seconds=(seconds[0] + disk, seconds[1] + disk) if ours else None,
        memory=_peak(known, plan.options.out_shard_size, on_device),
        device_memory=max((p.inputs + p.working for p in known), default=0) if on_device else None,
        read=read,
        written=written,
        tensors=tuple(known),
    )


def _peak(parts: Sequence[TensorEstimate], shard: int, on_device: bool) -> int:
    """Largest sum of a tensor's needs and what its output shard holds by then."""
    peak = held = 0
    for part in sorted(parts, key=lambda part: part.name):  # as mergekit's executor sorts them
        here = part.inputs + part.written + (0 if on_device else part.working)
        if held + part.written > shard:
            held = 0
        peak = max(peak, held + here)
        held += part.written
    return PROCESS + peak
