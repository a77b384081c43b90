# SPDX-License-Identifier: Apache-2.0
"""The merge of what adapters change of one tensor, and adapters in merges of full models.

Where a method stays in the span of the factors, the products of all experts are merged within it.
A merge of full models adds the result to the base's tensor. Where a method leaves the span, it
gets the experts' versions, those of one tensor at a time.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any

import torch
from mergekit.architecture import WeightInfo
from mergekit.common import ModelReference
from mergekit.graph import Task
from mergekit.io.tasks import GatherTensors, LoaderCache, LoadTensor
from mergekit.merge_methods import MergeMethod
from mergekit.merge_methods.base import TensorEntry, TensorGroup, TensorMetadata
from mergekit.merge_methods.generalized_task_arithmetic import GeneralizedTaskArithmeticMerge
from mergekit.merge_methods.task_adapter import ExecuteMergeMethodTask
from pydantic import InstanceOf
from torch import Tensor

from mergekit_ace.adapters.plan import AdaptedTensor, base_of, find_change, read_adapters
from mergekit_ace.adapters.read import Adapter
from mergekit_ace.algebra.low_rank import LowRank, compress
from mergekit_ace.algebra.task_vectors import TensorRecord
from mergekit_ace.methods.base import (
    MERGE_ERRORS,
    TaskVectorMethod,
    check_finite,
    first_that_fits,
)
from mergekit_ace.methods.low_rank_merge import has_low_rank, merge_low_rank
from mergekit_ace.methods.parameters import TensorSettings
from mergekit_ace.methods.report_lines import append_report
from mergekit_ace.planning import ConfigError, PlannedTensor

# mergekit's methods that add task vectors with a coefficient each.
LINEAR_METHODS = ("linear", "task_arithmetic")
# How far the coefficient of W0 may be from 1: float32's digits.
WHOLE = 1e-5


@dataclass(frozen=True)
class MergedProduct:
    """The merge of what experts add to one tensor.

    Attributes:
        delta: what is added to it; None where that is nothing.
        lost: what of ‖X‖² was cut off.
        settings, record: of a method of ours; None of one of mergekit's.
    """

    delta: LowRank | None = None
    lost: float = 0.0
    settings: TensorSettings | None = None
    record: TensorRecord | None = None


def merge_products(
    planned: PlannedTensor, deltas: Sequence[LowRank | None], rank: int | None = None
) -> MergedProduct:
    """Merge changes of low rank within their span.

    Args:
        planned: a tensor whose merge does not leave the span, see `leaves_span`.
        deltas: Δ_t of every expert in float64; None of one that left the tensor as it was. At least
            one is there.
        rank: of the result, at most; None for all that there is.

    Raises:
        ConfigError: W0 itself would be scaled.
        ValueError: the tensor cannot be merged; the message names it, and says what to do.
    """
    method = planned.method
    if not isinstance(method, TaskVectorMethod):
        return _merge_linearly(planned, deltas, rank)
    recorded = planned.settings.parameters.get("report") is not None
    ndim = len(next(filter(None, deltas)).shape)
    settings = method.complete(replace(planned.settings, recorded=recorded), ndim)
    try:
        merged = merge_low_rank(method, deltas, settings, rank)
    except MERGE_ERRORS as error:
        raise ValueError(method.explain(error, settings)) from error
    method.mention(settings, merged.record)
    return MergedProduct(merged.delta, merged.lost, settings, merged.record)


def _merge_linearly(
    planned: PlannedTensor, deltas: Sequence[LowRank | None], rank: int | None
) -> MergedProduct:
    pairs = zip(linear_coefficients(planned), deltas, strict=True)
    kept = [
        replace(delta, left=coefficient * delta.left)
        for coefficient, delta in pairs
        if delta is not None and coefficient != 0 and delta.energy > 0
    ]
    if not kept:
        return MergedProduct()
    most = sum(delta.rank for delta in kept)
    if len(kept) == 1 and (rank or most) >= most:
        return MergedProduct(kept[0])
    left = torch.cat([delta.left for delta in kept], dim=-1)
    right = torch.cat([delta.right for delta in kept], dim=-2)
    return MergedProduct(*compress(LowRank(left, right, kept[0].shape), min(rank or most, most)))


def leaves_span(planned: PlannedTensor) -> str:
    """Return why the merge of a tensor's low-rank changes is not of low rank; empty if it is."""
    method = planned.method
    if isinstance(method, TaskVectorMethod):
        return method.leaves_span(planned.settings.parameters)
    if method.spec.name in LINEAR_METHODS:
        return ""
    if merges_task_vectors(method):
        return "it works on single entries"
    return "its result depends on the weights themselves, not on changes alone"


def merges_task_vectors(method: MergeMethod) -> bool:
    """Tell whether a method's result is W0 plus something that depends on task vectors alone."""
    return isinstance(method, TaskVectorMethod | GeneralizedTaskArithmeticMerge)


def linear_coefficients(planned: PlannedTensor) -> list[float]:
    """Return the coefficients of the experts' task vectors by one of `LINEAR_METHODS`.

    The method itself says them: it merges the base, the first unit vector, with the sums of that
    and another unit vector for each expert.

    Raises:
        ConfigError: W0 has another coefficient than 1.
    """
    count = len(planned.experts)
    units = torch.eye(1 + count, dtype=torch.float64)
    base = units[0]
    others = [
        base + units[1 + t] if model.lora else base for t, model in enumerate(planned.experts)
    ]
    whole, *coefficients = execute(planned, base, others).tolist()
    if abs(whole - 1) > WHOLE:
        raise ConfigError(
            f"the weights of {planned.name} sum to {whole:.4g}, so that the base itself would be "
            "scaled, which no adapter can do; let them sum to 1, or leave out normalize: false"
        )
    return coefficients


def execute(planned: PlannedTensor, base: Tensor, experts: Sequence[Tensor]) -> Tensor:
    """Merge tensors as mergekit's task would that it has planned."""
    tensors = dict(zip(planned.experts, experts, strict=True))
    if planned.base is not None:
        tensors[planned.base] = base
    merged = ExecuteMergeMethodTask.execute(planned.task, tensors)  # it may be a kind of its own
    assert merged is not None  # only optional weights that inputs lack are skipped
    return merged


def show_bases(models: Iterable[ModelReference]) -> None:
    """Let mergekit plan with the files of the base in the place of an adapter's merged model."""
    cache = LoaderCache()
    for model in models:
        cache.loaders[model] = cache.get(base_of(model))


def use_adapters(
    task: ExecuteMergeMethodTask, adapters: Mapping[ModelReference, Adapter]
) -> ExecuteMergeMethodTask:
    """Return the task of a tensor that takes adapters as they are."""
    planned = PlannedTensor(task)
    weights: dict[ModelReference, WeightInfo] = dict(planned.gather.weight_info.items())
    changes = {
        model: (adapters[model], find_change(adapters[model], weight))
        for model, weight in weights.items()
        if model in adapters
    }
    if not changes:
        return task
    fields = {name: getattr(planned.gather, name) for name in GatherTensors.model_fields}
    gather: Task = GatherAdapted(**fields, adapted=AdaptedTensor(changes))
    aligned = task.gather_tensors is not planned.gather  # of rows, once they are formed
    if aligned:
        gather = task.gather_tensors.model_copy(update={"gather_tensors": gather})
    task = task.model_copy(update={"gather_tensors": gather})
    if aligned or not _merges_products(PlannedTensor(task)):
        return task
    return MergeProducts(**{name: getattr(task, name) for name in type(task).model_fields})


def _merges_products(planned: PlannedTensor) -> bool:
    """Tell whether all experts change a tensor of one base by products that merge in their span."""
    bases = {base_of(model) for model in planned.task.model_order}
    assert isinstance(planned.gather, GatherAdapted)
    known = planned.gather.adapted.known
    if len(bases) > 1 or not known or any(change.kind == "saved" for change in known):
        return False
    if planned.base is not None and planned.base.lora is not None:
        return False
    if leaves_span(planned):
        return False
    if isinstance(planned.method, TaskVectorMethod):
        ndim = len(known[0].shape)
        return has_low_rank(planned.layout(ndim), ndim, stack=known[0].is_stack)
    try:
        linear_coefficients(planned)
    except ConfigError:  # it scales W0
        return False
    return True


class GatherAdapted(GatherTensors):
    """Gather the versions of a tensor, those of adapters from the base's."""

    adapted: InstanceOf[AdaptedTensor]

    def arguments(self) -> dict[str, Task]:
        """Return what is read: the base's tensor in the place of every adapter's."""
        tasks = super().arguments()
        for key, task in tasks.items():
            if isinstance(task, LoadTensor) and task.model in self.adapted.changes:
                tasks[key] = task.model_copy(update={"model": base_of(task.model)})
        return tasks

    def execute(self, **tensors: Tensor) -> dict[ModelReference, Tensor]:
        """Return the versions by model."""
        versions = super().execute(**tensors)
        return {model: self.adapted.version(model, tensor) for model, tensor in versions.items()}


class MergeProducts(ExecuteMergeMethodTask):
    """Merge the changes of a tensor within their span, and add the result to the base's.

    Only the base's tensor is read.
    """

    def arguments(self) -> dict[str, Task]:
        """Return the task that reads the base's tensor."""
        return {"base": next(iter(self.gather_tensors.arguments().values()))}

    @torch.no_grad()
    def execute(self, base: Tensor, **_: Any) -> Tensor:
        """Return the merged tensor, in the dtype of the base's.

        Raises:
            DamagedFileError: a factor holds NaN or infinite numbers.
            ValueError: the tensor cannot be merged; the message names it, and says what to do.
        """
        start, planned = time.perf_counter(), PlannedTensor(self)
        method = planned.method
        if isinstance(method, TaskVectorMethod):
            entries = (TensorEntry(planned.base, base, is_base=True),)
            metadata = TensorMetadata.from_weight_info(self.output_weight)
            check_finite(method.spec.name, TensorGroup(entries=entries, metadata=metadata))
        work = partial(_add_products, planned, base)
        result, merged = first_that_fits(base.device, work, method.spec.name, planned.name)
        if isinstance(method, TaskVectorMethod) and merged.settings and merged.record:
            method.check_size(result, merged.settings)
            if merged.settings.recorded:
                seconds = time.perf_counter() - start
                append_report(method.spec.name, merged.settings, merged.record, seconds)
        return result


def _add_products(
    planned: PlannedTensor, base: Tensor, device: torch.device
) -> tuple[Tensor, MergedProduct]:
    """Merge what adapters change of a tensor, and add it to the base's; both on a device."""
    assert isinstance(planned.gather, GatherAdapted)
    base = base.to(device)
    products = map(planned.gather.adapted.product, planned.experts)
    merged = merge_products(planned, [product and product.to(device) for product in products])
    return merged.delta.added_to(base) if merged.delta is not None else base, merged


@dataclass(frozen=True, eq=False)
class AdaptedWeights(Mapping[str, Tensor]):
    """The tensors of a base with an adapter, each formed in float32 when it is read.

    Attributes:
        base: tensors of the base, by the names in its files.
    """

    model: ModelReference
    base: Mapping[str, Tensor]

    def __getitem__(self, name: str) -> Tensor:
        tensor = self.base[name]
        change = find_change(self.adapter, WeightInfo(name=name))
        adapted = AdaptedTensor({self.model: (self.adapter, change)})
        return adapted.version(self.model, tensor.float()) if change else tensor

    def __iter__(self) -> Iterator[str]:
        return iter(self.base)

    def __len__(self) -> int:
        return len(self.base)

    @cached_property
    def adapter(self) -> Adapter:
        """The adapter, whose own tensors are read as they are needed."""
        adapter = read_adapters([self.model])[self.model]
        adapter.check_ties()
        return adapter
