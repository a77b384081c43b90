# SPDX-License-Identifier: Apache-2.0
"""Adapters in a merge of full models: mergekit's tasks, but no adapter is merged into a base first.

mergekit plans the merge with the headers of the base in the place of every adapter's. Then each
task gets what the adapters change of its tensor. Where all experts change it by products, and the
method stays in their span, the products are merged, and added to the base's tensor. Else the
versions of the experts are formed, those of one tensor at a time.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property, lru_cache, partial
from typing import Any

import torch
from mergekit.architecture import WeightInfo
from mergekit.common import ModelReference
from mergekit.graph import Task
from mergekit.io.tasks import GatherTensors, LoaderCache
from mergekit.merge_methods.base import TensorEntry, TensorGroup, TensorMetadata
from mergekit.merge_methods.task_adapter import ExecuteMergeMethodTask
from pydantic import InstanceOf
from torch import Tensor, nn

from mergekit_ace.adapters.adapter_merge import (
    MergedChange,
    leaves_span,
    linear_coefficients,
    merge_products,
)
from mergekit_ace.adapters.adapter_plan import (
    AdaptedTensor,
    base_network,
    base_of,
    find_change,
    names_in_memory,
)
from mergekit_ace.adapters.peft_adapter import Adapter, Change, read_adapter
from mergekit_ace.methods.base import TaskVectorMethod, check_finite, first_that_fits
from mergekit_ace.methods.low_rank_merge import has_low_rank
from mergekit_ace.methods.report_lines import append_report
from mergekit_ace.planning import ConfigError, PlannedTensor


def read_adapters(models: Iterable[ModelReference]) -> dict[ModelReference, Adapter]:
    """Read the adapters of models, by configs and headers.

    Raises:
        DamagedFileError: what is wrong with an adapter.
        ConfigError: transformers does not know the architecture of a base.
    """
    return {model: read_adapter(model.lora, _known_network(base_of(model))) for model in models}


@lru_cache(maxsize=4)  # it takes a second, and is asked for again and again
def _known_network(base: ModelReference) -> nn.Module:
    return base_network(base)


def show_bases(models: Iterable[ModelReference]) -> None:
    """Let mergekit plan with the files of the base in the place of an adapter's merged model.

    `own_loaders` takes that back.
    """
    cache = LoaderCache()
    for model in models:
        cache.loaders[model] = cache.get(base_of(model))


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
        change = find_stored_change(self.adapter, WeightInfo(name=name))
        adapted = AdaptedTensor({self.model: (self.adapter, change)})
        return adapted.version(self.model, tensor.float()) if change else tensor

    def __iter__(self) -> Iterator[str]:
        return iter(self.base)

    def __len__(self) -> int:
        return len(self.base)

    @cached_property
    def adapter(self) -> Adapter:
        """The adapter, whose own tensors are read as they are needed."""
        return read_adapters([self.model])[self.model]


class GatherAdapted(GatherTensors):
    """Gather the versions of a tensor, those of adapters from the base's."""

    adapted: InstanceOf[AdaptedTensor]

    def arguments(self) -> dict[str, Task]:
        """Return what is read: the base's tensor in the place of every adapter's."""
        return {
            key: task.model_copy(update={"model": base_of(task.model)})
            if task.model in self.adapted.changes
            else task
            for key, task in super().arguments().items()
        }

    def execute(self, **tensors: Tensor) -> dict[ModelReference, Tensor]:
        """Return the versions by model."""
        found = super().execute(**tensors)
        return {model: self.adapted.version(model, tensor) for model, tensor in found.items()}


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
        name = planned.method.spec.name
        result, merged = first_that_fits(base.device, work, name, planned.name)
        if isinstance(method, TaskVectorMethod):
            settings, record = merged.settings, merged.record
            assert settings is not None
            assert record is not None
            method.check_size(result, settings)
            if settings.recorded:
                seconds = time.perf_counter() - start
                append_report(method.spec.name, settings, record, seconds)
        return result


def _add_products(
    planned: PlannedTensor, base: Tensor, device: torch.device
) -> tuple[Tensor, MergedChange]:
    """Merge what adapters change of a tensor, and add it to the base's; both on a device."""
    adapted, base = planned.gather.adapted, base.to(device)
    products = [adapted.product(model) for model in planned.experts]
    deltas = [product and product.to(device) for product in products]
    merged = merge_products(planned, adapted.known[0], deltas)
    return merged.delta.added_to(base) if merged.delta is not None else base, merged


def find_stored_change(adapter: Adapter, weight: WeightInfo) -> Change | None:
    """Return what an adapter changes of a stored tensor, which may be a table and a head in memory.

    A head that an adapter holds whole is a tensor of its own afterwards, whatever it was before.
    """
    direct = find_change(adapter, weight)
    if direct is not None:
        return direct
    names = names_in_memory(weight)
    ties = getattr(adapter.network, "all_tied_weights_keys", {})
    by_table = (adapter.changes.get(ties[name]) for name in names if name in ties)
    by_head = (adapter.changes.get(head) for head, table in ties.items() if table in names)
    heads = (change for change in by_head if change is None or change.kind != "saved")
    return next((change for change in (*by_table, *heads) if change is not None), None)


def use_adapters(
    task: ExecuteMergeMethodTask, adapters: Mapping[ModelReference, Adapter]
) -> ExecuteMergeMethodTask:
    """Return the task of a tensor that takes adapters as they are."""
    planned = PlannedTensor(task)
    weights: dict[ModelReference, WeightInfo] = dict(planned.gather.weight_info.items())
    changes = {
        model: (adapters[model], find_stored_change(adapters[model], weight))
        for model, weight in weights.items()
        if model in adapters
    }
    if not changes:
        return task
    fields = {name: getattr(planned.gather, name) for name in GatherTensors.model_fields}
    gather: Task = GatherAdapted(**fields, adapted=AdaptedTensor(changes))
    if task.gather_tensors is not planned.gather:  # rows are aligned, once they are formed
        return task.model_copy(
            update={
                "gather_tensors": task.gather_tensors.model_copy(update={"gather_tensors": gather})
            }
        )
    task = task.model_copy(update={"gather_tensors": gather})
    if not _merges_products(PlannedTensor(task)):
        return task
    return MergeProducts(**{name: getattr(task, name) for name in type(task).model_fields})


def _merges_products(planned: PlannedTensor) -> bool:
    """Tell whether all experts change a tensor of one base by products that merge in their span."""
    bases = {base_of(model) for model in planned.task.model_order}
    found = planned.gather.adapted.known
    if len(bases) > 1 or not found or any(change.kind == "saved" for change in found):
        return False
    if planned.base is not None and planned.base.lora is not None:
        return False
    if leaves_span(planned):
        return False
    if not isinstance(planned.method, TaskVectorMethod):
        return _keeps_base(planned)
    ndim = len(found[0].shape)
    return has_low_rank(planned.layout(ndim), ndim, stack=found[0].is_stack)


def _keeps_base(planned: PlannedTensor) -> bool:
    """Tell whether one of mergekit's linear methods leaves W0 as it is."""
    try:
        linear_coefficients(planned)
    except ConfigError:
        return False
    return True
