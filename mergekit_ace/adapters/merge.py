# SPDX-License-Identifier: Apache-2.0
"""What adapters change of a tensor, merged within the span of their factors where a method can."""

from __future__ import annotations

import time
from collections.abc import Collection, Iterable, Mapping
from typing import Any, cast

import torch
from mergekit.common import ModelReference
from mergekit.graph import Task
from mergekit.io.tasks import GatherTensors, LoadTensor
from mergekit.merge_methods.base import TensorEntry, TensorGroup, TensorMetadata
from mergekit.merge_methods.task_adapter import ExecuteMergeMethodTask
from pydantic import InstanceOf
from torch import Tensor

from mergekit_ace.adapters.read import Adapter, Change, base_of, find_changes
from mergekit_ace.algebra.low_rank import CoreSpace, LowRank
from mergekit_ace.merge_config import identity_of
from mergekit_ace.methods.base import MERGE_ERRORS, TaskVectorMethod, check_finite, first_that_fits
from mergekit_ace.methods.report_lines import append_report
from mergekit_ace.planning import PlannedTensor

LINEAR_METHODS = ("linear", "task_arithmetic")  # of mergekit, in the task vectors


def merge_changes(
    planned: PlannedTensor,
    changes: Mapping[ModelReference, Change],
    device: torch.device,
    rank: int | None = None,
) -> tuple[LowRank | None, float]:
    """Merge what adapters change of a tensor within their span; write the line of the report.

    Returns what is added to the base, of a rank at most, or None where that is nothing; and what of
    ‖X‖² was cut off.
    """
    start, method = time.perf_counter(), planned.method
    deltas = [
        changes[model].factors().to(device) if model in changes else None
        for model in planned.experts
    ]
    given = [delta for delta in deltas if delta is not None]
    shape = given[0].shape
    if not isinstance(method, TaskVectorMethod):  # linear, so that it merges cores
        space, most = CoreSpace.of(given), sum(delta.rank for delta in given)
        zero = torch.zeros_like(space.core(given[0]))
        cores = [zero if delta is None else space.core(delta) for delta in deltas]
        return space.expand(_execute(planned, zero, cores), shape, rank or most)
    settings = method.complete(planned.settings, len(shape))
    try:
        delta, lost, record = method.merge_low_rank(deltas, settings, rank)
    except MERGE_ERRORS as error:
        raise ValueError(method.explain(error, settings)) from error
    method.mention(settings, record)
    if settings.parameters["report"] is not None:
        append_report(method.spec.name, settings, record, time.perf_counter() - start)
    return delta, lost


def _execute(planned: PlannedTensor, base: Tensor, experts: Iterable[Tensor]) -> Tensor:
    """Merge tensors by a method of mergekit."""
    tensors = dict(zip(planned.experts, experts, strict=True))
    if planned.base is not None:
        tensors[planned.base] = base
    merged = ExecuteMergeMethodTask.execute(planned.task, tensors)  # it may be a kind of its own
    assert merged is not None  # only optional weights that inputs lack are skipped
    return merged


def leaves_span(planned: PlannedTensor, changes: Collection[Change]) -> str:
    """Return why the merge of a tensor's changes is not of low rank; empty if it is."""
    if any(change.whole for change in changes):
        return f"an adapter holds {planned.name} whole (`modules_to_save`)"
    method, change = planned.method, next(iter(changes))
    if isinstance(method, TaskVectorMethod):
        layout = method.layout(planned.settings, len(change.shape))
        flat = change.is_stack and layout == "flattened"  # which reads all its matrices as one
        high = f"{planned.name} is not of low rank where `layout` is {layout}" if flat else ""
        return method.leaves_span(planned.settings.parameters) or high
    if method.spec.name not in LINEAR_METHODS:
        return "its result is no sum of what the adapters change"
    one = torch.ones(1, dtype=torch.float64)
    whole = float(_execute(planned, one, [one] * len(planned.experts)))
    if abs(whole - 1) <= 1e-5:  # float32's digits
        return ""
    scaled = f"the weights of {planned.name} sum to {whole:.4g}, which would scale the base itself"
    return f"{scaled}; let them sum to 1, or leave out normalize: false"


def use_adapters(
    task: ExecuteMergeMethodTask, adapters: Mapping[ModelReference, Adapter]
) -> ExecuteMergeMethodTask:
    """Return the task of a tensor that takes adapters as they are."""
    planned = PlannedTensor(task)
    if not planned.weights.keys() & adapters.keys():
        return task
    changes = find_changes(planned.weights, adapters)
    gather: Task = GatherAdapted(**dict(planned.gather), changes=tuple(changes.items()))
    if task.gather_tensors is not planned.gather:  # rows are aligned, once they are formed
        gather = task.gather_tensors.model_copy(update={"gather_tensors": gather})
        return task.model_copy(update={"gather_tensors": gather})
    task = task.model_copy(update={"gather_tensors": gather})
    # layers of slices may be others of the same base
    weights = planned.weights.items()
    bases = {(identity_of(base_of(model)), weight.name) for model, weight in weights}
    on_adapter = planned.base is not None and planned.base.lora is not None
    if not changes or len(bases) > 1 or on_adapter or leaves_span(planned, changes.values()):
        return task
    return MergeProducts(**dict(task))


class GatherAdapted(GatherTensors):
    """Gather the versions of a tensor, those of adapters from the base's."""

    changes: tuple[tuple[ModelReference, InstanceOf[Change]], ...]

    def arguments(self) -> dict[str, Task]:
        """Return what is read: the base's tensor in the place of every adapter's."""
        tasks = super().arguments()
        for key, task in tasks.items():
            if isinstance(task, LoadTensor) and task.model.lora is not None:
                tasks[key] = task.model_copy(update={"model": base_of(task.model)})
        return tasks

    def execute(self, **tensors: Tensor) -> dict[ModelReference, Tensor]:
        """Return the versions by model."""
        versions = super().execute(**tensors)
        for model, change in self.changes:
            if model in versions:
                versions[model] = change.apply(versions[model])
        return versions


class MergeProducts(ExecuteMergeMethodTask):
    """Merge the changes of a tensor within their span, and add the result to the base's."""

    def arguments(self) -> dict[str, Task]:
        """Return the task that reads the base's tensor."""
        return {"base": next(iter(self.gather_tensors.arguments().values()))}

    @torch.no_grad()
    def execute(self, base: Tensor, **_: Any) -> Tensor:
        """Return the merged tensor, in the dtype of the base's."""
        planned, changes = PlannedTensor(self), dict(cast(Any, self.gather_tensors).changes)
        method, name = planned.method, planned.name
        if isinstance(method, TaskVectorMethod):
            entry = TensorEntry(planned.base, base, is_base=True)
            check_finite(method.spec.name, TensorGroup((entry,), TensorMetadata(name)))

        def merged_on(device: torch.device) -> Tensor:
            delta, _ = merge_changes(planned, changes, device)
            return base.to(device) if delta is None else delta.added_to(base.to(device))

        result = first_that_fits(base.device, merged_on, method.spec.name, name)
        if isinstance(method, TaskVectorMethod):
            method.check_size(result, planned.settings)
        return result
