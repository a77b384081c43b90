# SPDX-License-Identifier: Apache-2.0
"""The line of one tensor: from the models' versions of it, or from the factors of adapters."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from functools import partial
from typing import Any

import torch
from mergekit.common import ModelReference
from mergekit.graph import Task
from mergekit.merge_methods.base import ParameterScope, TensorEntry, TensorGroup, TensorMetadata
from mergekit.merge_methods.task_adapter import ExecuteMergeMethodTask
from torch import Tensor

from mergekit_ace.adapters.adapter_plan import AdapterPlan, ChangedTensor
from mergekit_ace.algebra.covariance_agreement import compare_covariances
from mergekit_ace.algebra.inspection import TensorInspection, inspect_tensor
from mergekit_ace.algebra.low_rank import CoreSpace, LowRank
from mergekit_ace.algebra.low_rank_inspection import inspect_products
from mergekit_ace.algebra.records import FixedLayout, Observer
from mergekit_ace.algebra.task_vectors import as_matrices
from mergekit_ace.files.headers import FLOATING, TensorHeader
from mergekit_ace.methods.ace import AceMerge
from mergekit_ace.methods.base import (
    MERGE_ERRORS,
    Merged,
    TaskVectorMethod,
    check_finite,
    first_that_fits,
)
from mergekit_ace.methods.low_rank_merge import has_low_rank
from mergekit_ace.methods.measured_lookup import MeasuredLookup
from mergekit_ace.methods.parameters import TensorSettings
from mergekit_ace.planning import PlannedTensor
from mergekit_ace.report.jsonl import ReportError, inspection_line

# The JSON of a line; `jsonl.Line` says what is in it.
LineJson = dict[str, Any]
# Whose decisions are shown for methods that are not ours.
STAND_IN = AceMerge()


class InspectTensor(Task[LineJson]):
    """In the place of mergekit's merge of one tensor: the same inputs, a line of a report."""

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
    def execute(self, tensors: dict[ModelReference, Tensor], **_: Any) -> LineJson:
        """Return the line; a short one of a tensor without experts, or without numbers."""
        start = time.perf_counter()
        planned = PlannedTensor(self.merge)
        present = [m for m in self.merge.model_order if tensors.get(m) is not None]
        experts = [m for m in planned.experts if m in present]
        if planned.base not in present or not experts:
            return _short_line(planned, "the base model or all experts lack it")
        base = tensors[planned.base]
        if not base.is_floating_point():
            return _short_line(planned, "it holds no floating-point numbers")
        group = _group(planned, tensors, present)
        method, parameters = deciding_method(planned)
        settings = replace(method.settings(group, parameters), recorded=True)
        given = [base, *(tensors[model] for model in experts)]
        work = partial(_inspect, given, method, settings, planned.layout(base.ndim))
        inspect = partial(first_that_fits, base.device, work, "inspect", planned.name)
        line = _line(planned, method, settings, inspect, start)
        if self.covariances is not None:
            settings = replace(settings, layout=planned.layout(base.ndim))
            line |= _agreement(settings, given, self.covariances)
        return line


def _line(
    planned: PlannedTensor,
    method: TaskVectorMethod,
    settings: TensorSettings,
    inspect: Callable[[], TensorInspection],
    start: float,
) -> LineJson:
    """Return the line of what `inspect` measures, and how long that took.

    Raises:
        ReportError: the tensor cannot be merged.
    """
    try:
        inspection = inspect()
    except MERGE_ERRORS as error:
        raise ReportError(method.explain(error, settings)) from error
    seconds = time.perf_counter() - start
    line = inspection_line(planned.task.method_name, settings, inspection, seconds)
    if method is not planned.method:
        line["decisions_of"] = method.spec.name
    return line


def _agreement(settings: TensorSettings, tensors: Sequence[Tensor], path: str) -> LineJson:
    """Return how far estimates agree with what was measured; empty of what is no single matrix."""
    shape = tensors[0].shape
    inputs = MeasuredLookup("inspect", settings, path, "covariances").inputs(shape)
    if not any(inputs.covariances):
        return {}
    base, *experts = (as_matrices(tensor, settings.layout)[0] for tensor in tensors)
    return {"agreement": asdict(compare_covariances(base, experts, inputs.covariances))}


def deciding_method(planned: PlannedTensor) -> tuple[TaskVectorMethod, Mapping[str, Any]]:
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


def _inspect(
    tensors: Sequence[Tensor],
    method: TaskVectorMethod,
    settings: TensorSettings,
    layout: FixedLayout,
    device: torch.device,
) -> TensorInspection:
    merge = partial(_merge, method, settings)
    dtype = getattr(torch, settings.parameters.get("compute_dtype", "float32"))
    base, *experts = (tensor.to(device) for tensor in tensors)
    return inspect_tensor(base, experts, layout, merge, dtype)


def _merge(
    method: TaskVectorMethod,
    settings: TensorSettings,
    tensors: Sequence[Tensor],
    layout: FixedLayout,
    observe: Observer | None,
) -> Merged:
    settings = replace(settings, layout=layout, observe=observe)
    return method.merge(tensors, settings)


def _short_line(planned: PlannedTensor, reason: str) -> LineJson:
    models = [str(model) for model in planned.experts]
    return {"tensor": planned.name, "models": models, "skipped": reason}


def _group(
    planned: PlannedTensor, tensors: dict[ModelReference, Tensor], present: list[ModelReference]
) -> TensorGroup:
    """Return what a merge method gets, once it is known to be finite and of one shape."""
    entries = tuple(TensorEntry(m, tensors[m], is_base=m == planned.base) for m in present)
    metadata = TensorMetadata.from_weight_info(planned.task.output_weight)
    group = TensorGroup(entries=entries, metadata=metadata)
    shapes = {model: tuple(tensors[model].shape) for model in present}
    if len(set(shapes.values())) > 1:
        listed = ", ".join(f"{model}: {shape}" for model, shape in shapes.items())
        raise ReportError(f"tensor {planned.name} has different shapes ({listed})")
    check_finite("inspect", group)
    return group


def adapter_line(
    plan: AdapterPlan,
    planned: PlannedTensor,
    header: TensorHeader | None,
    changed: ChangedTensor | None,
) -> LineJson:
    """Return the line of a tensor from what adapters change of it; W0 is not read.

    It is a short one of a tensor that an adapter holds whole, which only W0 turns into a change.

    Args:
        planned: the tensor, while mergekit sees headers of the adapters' base (`headers_only`).

    Raises:
        DamagedFileError: a factor holds NaN or infinite numbers.
        ReportError: the tensor cannot be merged.
    """
    start = time.perf_counter()
    if header is None or header.dtype not in FLOATING:
        return _short_line(planned, "it holds no floating-point numbers")
    if changed is not None and any(change.kind == "saved" for change in changed.known):
        return _short_line(planned, "an adapter holds it whole, and the base is not read")
    method, parameters = deciding_method(planned)
    experts = tuple(model for model in planned.experts if plan.adapters_of.get(model))
    settings = TensorSettings(planned.name, plan.base, experts, parameters, recorded=True)
    settings = method.complete(settings, len(header.shape))
    layout = method.layout(settings, len(header.shape))
    deltas = [changed.product(model) if changed else None for model in experts]
    inspect = partial(_inspect_products, deltas, header.shape, layout, method, settings)
    return _line(planned, method, settings, inspect, start)


def _inspect_products(
    deltas: Sequence[LowRank | None],
    shape: tuple[int, ...],
    layout: FixedLayout,
    method: TaskVectorMethod,
    settings: TensorSettings,
) -> TensorInspection:
    def merge(
        tensors: Sequence[Tensor],
        layout: FixedLayout,
        space: CoreSpace | None,
        observe: Observer | None,
    ) -> Merged:
        own = replace(settings, layout=layout, space=space, observe=observe)
        return method.merge(tensors, own)

    if len(shape) < 2:  # adapters change matrices
        zero = torch.zeros(shape, dtype=torch.float64)
        found = inspect_tensor(
            zero, [zero] * len(deltas), layout, lambda w, how, see: merge(w, how, None, see),
            torch.float64,
        )  # fmt: skip
        return replace(found, comparison=replace(found.comparison, base_norm=None))
    known = next(filter(None, deltas), None)
    stack = shape[:1] if len(shape) == 3 and layout in ("stacked", "transposed") else ()
    rows, *rest = shape[len(stack) :]
    left = known.left if known else torch.zeros(*stack, rows, 1, dtype=torch.float64)
    right = known.right if known else left.new_zeros(*stack, 1, math.prod(rest))
    nothing = LowRank(torch.zeros_like(left[..., :1]), torch.zeros_like(right[..., :1, :]), shape)
    return inspect_products([delta or nothing for delta in deltas], layout, merge)


def why_in_full(plan: AdapterPlan) -> str:
    """Return why adapters cannot be looked at through their factors alone; empty if they can."""
    for tensor in plan.tensors:
        method, parameters = deciding_method(tensor.planned)
        change = tensor.known[0]
        ndim = len(change.shape)
        if change.kind == "saved":
            continue
        name = tensor.planned.name
        reason = method.leaves_span(parameters)
        if reason:
            return f"{method.spec.name}: {reason}"
        settings = replace(tensor.planned.settings, base=plan.base, parameters=parameters)
        layout = method.layout(settings, ndim)
        if not has_low_rank(layout, ndim, stack=change.is_stack):
            return f"{name} is not of low rank where `layout` is {layout}"
    return ""
