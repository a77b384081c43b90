# SPDX-License-Identifier: Apache-2.0
"""The record of one tensor as `inspect` measures it: of models, or of the factors of adapters."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from mergekit.common import ModelReference
from mergekit.graph import Task
from mergekit.merge_methods.base import ParameterScope, TensorEntry, TensorGroup, TensorMetadata
from mergekit.merge_methods.task_adapter import ExecuteMergeMethodTask
from torch import Tensor

from mergekit_ace.adapters.plan import AdapterPlan, ChangedTensor
from mergekit_ace.algebra.inspection import (
    TensorInspection,
    compare_covariances,
    inspect_products,
    inspect_tensor,
)
from mergekit_ace.algebra.low_rank import CoreSpace, LowRank
from mergekit_ace.algebra.task_vectors import FixedLayout, as_matrices
from mergekit_ace.files.headers import FLOATING, TensorHeader
from mergekit_ace.methods.ace import AceMerge
from mergekit_ace.methods.base import (
    MERGE_ERRORS,
    Merged,
    TaskVectorMethod,
    check_finite,
    check_shapes_in_memory,
    first_that_fits,
)
from mergekit_ace.methods.low_rank_merge import has_low_rank
from mergekit_ace.methods.measured_lookup import MeasuredLookup
from mergekit_ace.methods.parameters import TensorSettings
from mergekit_ace.methods.report_lines import Record, tensor_record
from mergekit_ace.planning import PlannedTensor
from mergekit_ace.report.record import ReportError

# Whose decisions are shown for methods that are not ours.
STAND_IN = AceMerge()


class InspectTensor(Task[Record]):
    """In the place of mergekit's merge of one tensor: the same inputs, the record of a report."""

    merge: ExecuteMergeMethodTask
    covariances: str | None = None

    def arguments(self) -> dict[str, Task]:
        """Return the tensors that the merge would get."""
        return {"tensors": self.merge.gather_tensors}

    def group_label(self) -> str | None:
        """Return the merge's label: tensors that lie together are read together."""
        return self.merge.group_label()

    def uses_accelerator(self) -> bool:
        """Return True, as of a merge."""
        return True

    @torch.no_grad()
    def execute(self, tensors: dict[ModelReference, Tensor], **_: Any) -> Record:
        """Return the record; a short one of a tensor without experts, or without numbers."""
        start, planned = time.perf_counter(), PlannedTensor(self.merge)
        present = [m for m in self.merge.model_order if tensors.get(m) is not None]
        if planned.base not in present or len(present) < 2:
            return _short_record(planned, "the base model or all experts lack it")
        base = tensors[planned.base]
        if not base.is_floating_point():
            return _short_record(planned, "it holds no floating-point numbers")
        group = TensorGroup(
            tuple(TensorEntry(m, tensors[m], is_base=m == planned.base) for m in present),
            TensorMetadata.from_weight_info(planned.task.output_weight),
        )
        check_shapes_in_memory("inspect", group)
        check_finite("inspect", group)
        method, parameters = _deciding_method(planned)
        settings = replace(method.settings(group, parameters), recorded=True)
        versions = [base, *(entry.tensor for entry in group.non_base)]
        layout = planned.layout(base.ndim)
        work = partial(_inspect_versions, versions, method, settings, layout)
        inspect = partial(first_that_fits, base.device, work, "inspect", planned.name)
        found = _explained(inspect, method, settings)
        if self.covariances is not None:
            settings = replace(settings, layout=layout)
            found = _with_agreement(found, settings, versions, self.covariances)
        return _record(planned, method, settings, found, start)


def _inspect_versions(
    tensors: Sequence[Tensor],
    method: TaskVectorMethod,
    settings: TensorSettings,
    layout: FixedLayout,
    device: torch.device,
) -> TensorInspection:
    dtype = getattr(torch, settings.parameters.get("compute_dtype", "float32"))
    base, *experts = (tensor.to(device) for tensor in tensors)
    return inspect_tensor(base, experts, layout, partial(_merge, method, settings), dtype)


def _merge(
    method: TaskVectorMethod,
    settings: TensorSettings,
    tensors: Sequence[Tensor],
    layout: FixedLayout,
    *,
    space: CoreSpace | None = None,
    refine: bool = True,
) -> Merged:
    """Merge a tensor as `algebra.inspection.Merge` has it."""
    parameters = settings.parameters
    if not refine:
        parameters = {**parameters, "spectral_refinement": "never"}
    own = replace(settings, parameters=parameters, layout=layout, space=space)
    return method.merge(tensors, own)


def _explained(
    inspect: Callable[[], TensorInspection], method: TaskVectorMethod, settings: TensorSettings
) -> TensorInspection:
    """Inspect a tensor; one that cannot be merged raises a `ReportError`."""
    try:
        return inspect()
    except MERGE_ERRORS as error:
        raise ReportError(method.explain(error, settings)) from error


def _with_agreement(
    found: TensorInspection, settings: TensorSettings, tensors: Sequence[Tensor], path: str
) -> TensorInspection:
    """Add how far estimates agree with what was measured, if the tensor is one matrix."""
    inputs = MeasuredLookup("inspect", settings, path, "covariances").inputs(tensors[0].shape)
    if not any(inputs.covariances):
        return found
    base, *experts = (as_matrices(tensor, settings.layout)[0] for tensor in tensors)
    agreement = compare_covariances(base, experts, inputs.covariances)
    return replace(found, matrices=(replace(found.matrices[0], agreement=agreement),))


def _record(
    planned: PlannedTensor,
    method: TaskVectorMethod,
    settings: TensorSettings,
    found: TensorInspection,
    start: float,
) -> Record:
    base = found.comparison.base_norm
    return tensor_record(
        planned.task.method_name,
        settings,
        found,
        time.perf_counter() - start,
        relative_size=[norm / base if base else None for norm in found.comparison.norm],
        decisions_of=None if method is planned.method else method.spec.name,
        **vars(found.comparison),
    )


def _short_record(planned: PlannedTensor, reason: str) -> Record:
    models = tuple(map(str, planned.experts))
    method = planned.task.method_name
    return Record(
        tensor=planned.name, method=method, shape=(), layout="", models=models, skipped=reason
    )


def _deciding_method(planned: PlannedTensor) -> tuple[TaskVectorMethod, Mapping[str, Any]]:
    """Return the method whose decisions are shown, with its parameters for a tensor.

    That is the merge's own. mergekit's methods decide nothing that they could show: in their place
    stands ACE-Merging with its defaults.
    """
    if isinstance(planned.method, TaskVectorMethod):
        return planned.method, planned.settings.parameters
    parameters: dict[str, Any] = {}
    for parameter in STAND_IN.spec.parameters:
        own = parameter.scope == ParameterScope.NON_BASE
        default = parameter.default
        parameters[parameter.name] = dict.fromkeys(planned.experts, default) if own else default
    return STAND_IN, parameters


def adapter_record(
    plan: AdapterPlan,
    planned: PlannedTensor,
    header: TensorHeader | None,
    changed: ChangedTensor | None,
) -> Record:
    """Return the record of a tensor from what adapters change of it; W0 is not read.

    It is a short one of a tensor that an adapter holds whole, which only W0 turns into a change.

    Raises:
        DamagedFileError: a factor holds NaN or infinite numbers.
        ReportError: the tensor cannot be merged.
    """
    start = time.perf_counter()
    if header is None or header.dtype not in FLOATING:
        return _short_record(planned, "it holds no floating-point numbers")
    if changed is not None and any(change.kind == "saved" for change in changed.known):
        return _short_record(planned, "an adapter holds it whole, and the base is not read")
    method, parameters = _deciding_method(planned)
    experts = tuple(model for model in planned.experts if model.lora)
    settings = TensorSettings(planned.name, plan.base, experts, parameters, recorded=True)
    settings = method.complete(settings, len(header.shape))
    layout = method.layout(settings, len(header.shape))
    deltas = [changed.product(model) if changed else None for model in experts]
    inspect = partial(_inspect_factors, deltas, header.shape, layout, method, settings)
    return _record(planned, method, settings, _explained(inspect, method, settings), start)


def _inspect_factors(
    deltas: Sequence[LowRank | None],
    shape: tuple[int, ...],
    layout: FixedLayout,
    method: TaskVectorMethod,
    settings: TensorSettings,
) -> TensorInspection:
    merge = partial(_merge, method, settings)
    if len(shape) < 2:  # adapters change matrices
        zero = torch.zeros(shape, dtype=torch.float64)
        found = inspect_tensor(zero, [zero] * len(deltas), layout, merge, torch.float64)
        return replace(found, comparison=replace(found.comparison, base_norm=None))
    known = next(filter(None, deltas), None)
    stack = shape[:1] if len(shape) == 3 and layout in ("stacked", "transposed") else ()
    rows, *columns = shape[len(stack) :]
    left = known.left[..., :1] if known else torch.zeros(*stack, rows, 1, dtype=torch.float64)
    right = known.right[..., :1, :] if known else left.new_zeros(*stack, 1, math.prod(columns))
    nothing = LowRank(torch.zeros_like(left), torch.zeros_like(right), shape)
    return inspect_products([delta or nothing for delta in deltas], layout, merge)


def why_in_full(plan: AdapterPlan) -> str:
    """Return why adapters cannot be looked at through their factors alone; empty if they can."""
    for tensor in plan.tensors:
        method, parameters = _deciding_method(tensor.planned)
        change = tensor.known[0]
        if change.kind == "saved":
            continue
        reason = method.leaves_span(parameters)
        if reason:
            return f"{method.spec.name}: {reason}"
        settings = replace(tensor.planned.settings, base=plan.base, parameters=parameters)
        layout = method.layout(settings, len(change.shape))
        if not has_low_rank(layout, len(change.shape), stack=change.is_stack):
            return f"{tensor.planned.name} is not of low rank where `layout` is {layout}"
    return ""
