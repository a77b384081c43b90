# SPDX-License-Identifier: Apache-2.0
"""The record of one tensor as `inspect` measures it: of models, or of the factors of adapters."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from mergekit.common import ModelReference
from mergekit.merge_methods.base import ParameterScope, TensorEntry, TensorGroup, TensorMetadata
from mergekit.merge_methods.task_adapter import ExecuteMergeMethodTask
from torch import Tensor

from mergekit_ace.adapters.command import AdapterPlan, ChangedTensor
from mergekit_ace.adapters.merge import read_products
from mergekit_ace.algebra.inspection import (
    Comparison,
    add_subspaces,
    compare_covariances,
    compare_entries,
    compare_products,
)
from mergekit_ace.algebra.low_rank import CoreSpace, LowRank
from mergekit_ace.algebra.task_vectors import TensorRecord, as_matrices, task_vector
from mergekit_ace.files.checkpoints import FLOATING
from mergekit_ace.files.models import headers_only
from mergekit_ace.methods.ace import AceMerge
from mergekit_ace.methods.base import (
    MERGE_ERRORS,
    TaskVectorMethod,
    TensorSettings,
    check_finite,
    first_that_fits,
)
from mergekit_ace.methods.lookup import MeasuredLookup
from mergekit_ace.methods.low_rank_merge import merge_low_rank
from mergekit_ace.methods.report_lines import Record, tensor_record
from mergekit_ace.naming import ConfigError
from mergekit_ace.planning import PlannedTensor

Found = tuple[TensorRecord, Comparison]
# Whose decisions are shown for methods that are not ours.
STAND_IN = AceMerge()
IN_FULL = "with --lora-merge-cache DIR, adapters are merged into full models, which are looked at"


class InspectTensor(ExecuteMergeMethodTask):
    """In the place of mergekit's merge of one tensor: the same inputs, the record of a report."""

    covariances: str | None = None

    @torch.no_grad()
    def execute(self, tensors: dict[ModelReference, Tensor], **_: Any) -> Any:
        """Return the record; a short one of a tensor without experts, or without numbers."""
        start, planned = time.perf_counter(), PlannedTensor(self)
        present = [model for model in self.model_order if tensors.get(model) is not None]
        if planned.base not in present or len(present) < 2:
            return _skipped(planned, "the base model or all experts lack it")
        base = tensors[planned.base]
        if not base.is_floating_point():
            return _skipped(planned, "it holds no floating-point numbers")
        entries = [TensorEntry(m, tensors[m], is_base=m == planned.base) for m in present]
        metadata = TensorMetadata.from_weight_info(self.output_weight)
        group = TensorGroup(tuple(entries), metadata)
        group.validate_tensors()
        check_finite("inspect", group)
        method, parameters = _deciding_method(planned)
        settings = method.complete(TensorSettings.of(group, parameters), base.ndim, group)
        settings = replace(settings, layout=planned.layout(base.ndim))
        versions = [base, *(entry.tensor for entry in group.non_base)]
        measure = partial(_measure, versions, method, settings, self.covariances)
        with _explained(method, settings):
            found = first_that_fits(base.device, measure, "inspect", planned.name)
        return _record(planned, method, settings, found, start)


def _measure(
    versions: Sequence[Tensor],
    method: TaskVectorMethod,
    settings: TensorSettings,
    statistics: str | None,
    device: torch.device,
) -> Found:
    """Look at the versions of a tensor, and at what their merge decides."""
    base, *experts = tensors = [tensor.to(device) for tensor in versions]
    comparison = compare_entries(base, experts)
    record = method.merge(tensors, settings)[1]
    if settings.layout == "mean" or base.numel() == 0:
        return record, comparison
    name = settings.parameters.get("compute_dtype", "float32")
    dtype = torch.promote_types(getattr(torch, name), base.dtype)
    origins, *others = (as_matrices(tensor, settings.layout) for tensor in tensors)
    stacks = [
        partial(map, partial(task_vector, base=origin, dtype=dtype), [own[n] for own in others])
        for n, origin in enumerate(origins)
    ]
    record = add_subspaces(record, stacks)
    if statistics is not None:
        lookup = MeasuredLookup("inspect", settings, statistics, "covariances")
        covariances = lookup.inputs(base.shape).covariances
        if any(covariances):  # of a tensor that is one matrix
            agreement = compare_covariances(list(stacks[0]()), covariances)
            record = replace(record, matrices=(replace(record.matrices[0], agreement=agreement),))
    return record, comparison


def adapter_records(plan: AdapterPlan, selected: Sequence[PlannedTensor]) -> Iterator[Record]:
    """Yield the records of tensors from what adapters change of them; W0 is not read."""
    changes = {tensor.planned.name: tensor for tensor in plan.tensors}
    with headers_only(plan.checkpoints):
        for planned in selected:
            header = plan.checkpoints[0].source(planned.task.output_weight)
            changed = changes.get(planned.name)
            if header is None or header.dtype not in FLOATING:
                yield _skipped(planned, "it holds no floating-point numbers")
            elif changed and any(change.whole for change in changed.changes.values()):
                yield _skipped(planned, "an adapter holds it whole, and the base is not read")
            else:
                yield _adapter_record(plan, planned, header.shape, changed)


def _adapter_record(
    plan: AdapterPlan,
    planned: PlannedTensor,
    shape: tuple[int, ...],
    changed: ChangedTensor | None,
) -> Record:
    start = time.perf_counter()
    method, parameters = _deciding_method(planned)
    reason = method.leaves_span(parameters)
    if reason:
        raise ConfigError(f"{method.spec.name}: {reason}; {IN_FULL}")
    experts = tuple(model for model in planned.experts if model.lora)
    settings = TensorSettings(planned.name, plan.base, experts, parameters)
    settings = method.complete(settings, len(shape))
    settings = replace(settings, layout=method.layout(settings, len(shape)))
    deltas = read_products(experts, changed.changes if changed else {})
    with _explained(method, settings):
        if any(deltas):
            found = _measure_factors(deltas, method, settings)
        else:  # as of zeros of any size
            zero = torch.zeros(*shape[:-2], *(1,) * len(shape[-2:]))
            versions = [zero] * (len(deltas) + 1)
            record, comparison = _measure(versions, method, settings, None, zero.device)
            found = replace(record, shape=shape), replace(comparison, base_norm=None)
    return _record(planned, method, settings, found, start)


def _measure_factors(
    given: Sequence[LowRank | None], method: TaskVectorMethod, settings: TensorSettings
) -> Found:
    """Do what `_measure` does by task vectors of low rank; None is one that is zero."""
    record = merge_low_rank(method, given, settings).record
    some = next(filter(None, given))
    nothing = LowRank(0 * some.left[..., :1], 0 * some.right[..., :1, :], some.shape)
    deltas = [delta or nothing for delta in given]
    if settings.layout != "mean":
        views = [delta.read_as(settings.layout) for delta in deltas]
        space = CoreSpace.of(views)  # its cores keep singular values, and angles between directions
        cores = [space.core(view) for view in views]
        stacks = zip(*(core if core.ndim == 3 else [core] for core in cores), strict=True)
        record = add_subspaces(record, [partial(iter, stack) for stack in stacks])
    return record, compare_products(deltas)


@contextmanager
def _explained(method: TaskVectorMethod, settings: TensorSettings) -> Iterator[None]:
    """Say of a tensor that cannot be merged what would help."""
    try:
        yield
    except MERGE_ERRORS as error:
        raise ConfigError(method.explain(error, settings)) from error


def _deciding_method(planned: PlannedTensor) -> tuple[TaskVectorMethod, Mapping[str, Any]]:
    """Return the merge's own method, or `STAND_IN`, with its parameters for a tensor."""
    if isinstance(planned.method, TaskVectorMethod):
        return planned.method, planned.settings.parameters
    return STAND_IN, {
        p.name: dict.fromkeys(planned.experts, p.default)
        if p.scope == ParameterScope.NON_BASE
        else p.default
        for p in STAND_IN.spec.parameters
    }


def _record(
    planned: PlannedTensor,
    method: TaskVectorMethod,
    settings: TensorSettings,
    found: Found,
    start: float,
) -> Record:
    record, comparison = found
    measured = {**vars(comparison), "decisions_of": None}
    if method is not planned.method:
        measured["decisions_of"] = method.spec.name
    seconds = time.perf_counter() - start
    return tensor_record(planned.task.method_name, settings, record, seconds, **measured)


def _skipped(planned: PlannedTensor, why: str) -> Record:
    models, method = tuple(map(str, planned.experts)), planned.task.method_name
    known = {"tensor": planned.name, "method": method, "models": models, "skipped": why}
    return Record.model_validate({"shape": (), "layout": "", **known})
