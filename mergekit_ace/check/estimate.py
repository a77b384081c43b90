# SPDX-License-Identifier: Apache-2.0
"""What a merge will take: work, time, memory and disk, from shapes and a fraction of a second."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

import torch
from mergekit.common import ModelReference
from torch import Tensor

from mergekit_ace.adapters.adapter_tasks import MergeProducts
from mergekit_ace.algebra.linalg import product
from mergekit_ace.check.checkpoint_rules import dtype_name, sources
from mergekit_ace.check.checkpoints import Checkpoint
from mergekit_ace.files.headers import TensorHeader, item_size
from mergekit_ace.methods.base import TaskVectorMethod, sweep
from mergekit_ace.planning import PlannedMerge, PlannedTensor

PROCESS = 700_000_000  # bytes: python with torch, transformers and mergekit
SIDE = 1536  # of the products: a few milliseconds on anything
SWEEP = 2**23  # entries of the sum, too many for a cache
# Merges reach this part of the rate of a single product: factors and solves, blocks, float64.
EFFICIENCY = 0.6


@dataclass(frozen=True)
class TensorEstimate:
    """One tensor.

    Attributes:
        rule: `matrix`, `stacked`, … as it is read; the method's name if it reads entries.
        form: of the closed form; None for what needs none.
        operations: of the merge, without the refinement and with it.
        moved: bytes to and from memory, likewise.
        inputs: bytes of all versions in the dtype of the merge.
        working: bytes beside inputs and result, the larger of both branches.
    """

    name: str
    shape: tuple[int, ...]
    rule: str
    form: str | None
    operations: tuple[float, float]
    moved: tuple[float, float]
    read: int
    written: int
    inputs: int
    working: int

    def seconds(self, rates: Rates, refined: bool) -> float:
        """Return how long it takes on a machine."""
        work = self.operations[refined] / rates.operations + self.moved[refined] / rates.memory
        return work + (self.read + self.written) / rates.read


@dataclass(frozen=True)
class MergeEstimate:
    """A whole merge; pairs are of the homogeneous and the heterogeneous branch everywhere.

    Attributes:
        rules: tensors by rule.
        forms: matrices by form.
        seconds: from the rates of this machine; None for a method whose time they do not tell.
        memory: bytes of the process at its largest, about; without what the system caches of files.
        device_memory: bytes on the accelerator; None without one.
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


@dataclass(frozen=True)
class Rates:
    """Rates of a machine.

    Attributes:
        operations: of a merge in float32, per second.
        memory: bytes per second of a sweep.
        read: bytes per second from disk.
    """

    operations: float
    memory: float
    read: float


# Only ratios count: a CPU of a tenth of a teraflop, its memory, a disk.
NOMINAL = Rates(operations=1e11, memory=1e10, read=1e9)


@lru_cache
def calibrate(device: str) -> Rates:
    """Measure the rates of a device, once; the disk is taken for one of 1 GB/s."""
    matrix = torch.ones(SIDE, SIDE, device=device)
    seconds = _best(lambda: product(matrix, matrix))
    vector = torch.ones(SWEEP, device=device)
    sweep = _best(lambda: vector.add_(1.0))
    return Rates(EFFICIENCY * 2 * SIDE**3 / seconds, 2 * 4 * SWEEP / sweep, NOMINAL.read)


def _best(work: Callable[[], Tensor], rounds: int = 4) -> float:
    """Return the seconds of the fastest of a few rounds; a first one warms up."""
    times = []
    for _ in range(rounds):
        start = time.perf_counter()
        work()[..., 0].sum().item()  # waits for the device, whichever it is
        times.append(time.perf_counter() - start)
    return max(min(times[1:]), 1e-9)


def estimate_tensor(
    tensor: PlannedTensor, found: Mapping[ModelReference, TensorHeader], plan: PlannedMerge
) -> TensorEstimate | None:
    """Return what one tensor takes, if all experts have changed it; None if nobody has it."""
    header = found.get(tensor.base) if tensor.base else next(iter(found.values()), None)
    if header is None:
        return None
    merged_in = dtype_name(plan.config.dtype) or header.dtype
    written_in = dtype_name(plan.config.out_dtype) or merged_in
    entries, experts = header.entries, max(1, len(found) - 1)
    method = tensor.method
    rule, work, measured = method.spec.name, sweep(header.shape, experts), 0
    if isinstance(tensor.task, MergeProducts):  # only the base's tensor is read
        found, work = {tensor.base: header}, sweep(header.shape, 1)
    elif isinstance(method, TaskVectorMethod):
        settings = tensor.settings
        if method.layouts:
            rule = method.layout(settings, len(header.shape))
            settings = replace(settings, layout=rule)
        weights = zip(settings.experts, settings.weights, strict=True)
        experts = sum(weight != 0 for model, weight in weights if model in found)
        work = method.work(settings, header.shape, experts)
        if rule == "matrix" and settings.parameters.get("covariances"):
            columns = header.shape[-1]
            measured = experts * 4 * columns * (columns + 1) // 2  # triangles in float32
    return TensorEstimate(
        name=tensor.name,
        shape=header.shape,
        rule=rule,
        form=work.form,
        operations=work.operations,
        moved=work.moved,
        read=sum(h.bytes for h in found.values()) + measured,
        written=entries * item_size(written_in),
        inputs=len(found) * entries * item_size(merged_in),
        working=work.working + 4 * entries,  # and the result in float32
    )


def estimate_merge(
    plan: PlannedMerge, checkpoints: Mapping[ModelReference, Checkpoint], rates: Rates
) -> MergeEstimate:
    """Return what all tensors take that can be estimated."""
    parts = [estimate_tensor(t, sources(t, checkpoints), plan) for t in plan.tensors]
    known = [part for part in parts if part is not None]
    operations = tuple(sum(part.operations[n] for part in known) for n in range(2))
    seconds = tuple(sum(part.seconds(rates, bool(n)) for part in known) for n in range(2))
    timed = isinstance(plan.method, TaskVectorMethod) and plan.method.timed
    on_device = plan.options.device not in (None, "cpu")
    return MergeEstimate(
        rules=dict(Counter(part.rule for part in known)),
        forms=dict(Counter(part.form for part in known if part.form)),
        operations=(operations[0], operations[1]),
        seconds=(seconds[0], seconds[1]) if timed else None,
        memory=_peak(known, plan.options.out_shard_size, on_device),
        device_memory=max((p.inputs + p.working for p in known), default=0) if on_device else None,
        read=sum(part.read for part in known),
        written=sum(part.written for part in known),
        tensors=tuple(known),
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


def in_bytes(count: float) -> str:
    """Return a number of bytes in words."""
    for unit in ("B", "kB", "MB", "GB"):
        if count < 1000:
            return f"{count:.3g} {unit}"
        count /= 1000
    return f"{count:.3g} TB"


def in_time(seconds: float) -> str:
    """Return seconds in words."""
    if seconds < 100:
        return f"{max(1, round(seconds))} s"
    if seconds < 6000:
        return f"{round(seconds / 60)} min"
    return f"{seconds / 3600:.1f} h"
