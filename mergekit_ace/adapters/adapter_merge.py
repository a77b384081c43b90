# SPDX-License-Identifier: Apache-2.0
"""The merge of the adapters' changes of one tensor, by any method that allows it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial

import torch
from mergekit.io import LazyTensorLoader
from mergekit.merge_methods import MergeMethod
from mergekit.merge_methods.generalized_task_arithmetic import GeneralizedTaskArithmeticMerge
from mergekit.merge_methods.task_adapter import ExecuteMergeMethodTask
from torch import Tensor

from mergekit_ace.adapters.adapter_plan import AdapterPlan, ChangedTensor, names_in_memory
from mergekit_ace.adapters.peft_adapter import Change
from mergekit_ace.algebra.directions import leading_directions
from mergekit_ace.algebra.low_rank import LowRank, compress
from mergekit_ace.algebra.records import TensorRecord
from mergekit_ace.methods.base import MERGE_ERRORS, TaskVectorMethod, first_that_fits
from mergekit_ace.methods.low_rank_merge import merge_low_rank
from mergekit_ace.methods.parameters import TensorSettings
from mergekit_ace.planning import ConfigError, PlannedTensor

# mergekit's methods that add task vectors with a coefficient each.
LINEAR_METHODS = ("linear", "task_arithmetic")
# How far the coefficient of W0 may be from 1: float32's digits.
WHOLE = 1e-5


@dataclass(frozen=True)
class MergedChange:
    """What becomes of one tensor.

    Attributes:
        change: which tensor it is; its rank is that of an input.
        delta: what is added to it as a product; None for a tensor that is held whole, or where
            nothing is added.
        full: the tensor; None where there is a product.
        lost: what of ‖X‖² was cut off.
        tau: ‖Δ_t‖² of every expert of the plan; of tensors held whole 0.
        settings, record: of a method of ours; None of one of mergekit's.
    """

    change: Change
    delta: LowRank | None = None
    full: Tensor | None = None
    lost: float = 0.0
    tau: tuple[float, ...] = ()
    settings: TensorSettings | None = None
    record: TensorRecord | None = None

    @property
    def energy(self) -> float:
        """‖X‖² of what is kept."""
        return self.delta.energy if self.delta is not None else 0.0

    @property
    def lost_share(self) -> float:
        """The share of ‖X‖² that was cut off, 0 to 1."""
        return self.lost / (self.energy + self.lost) if self.lost else 0.0


class AdapterMerge:
    """The merge of single tensors of a plan, while mergekit sees its checkpoints (`headers_only`).

    Args:
        rank: of every product, at most; None for all that there is.
    """

    def __init__(self, plan: AdapterPlan, rank: int | None = None, device: str = "cpu"):
        self.plan, self.rank, self.device = plan, rank, device
        self._tables: dict[str | None, Tensor] = {}  # of which tied heads are copies

    def check(self) -> None:
        """Raise a `ConfigError` where the merge is no adapter, before anything is merged."""
        for tensor in self.plan.tensors:
            if tensor.known[0].kind == "saved":
                continue
            reason = leaves_span(tensor.planned)
            if reason and not (self.rank and _merges_task_vectors(tensor.planned.method)):
                method = self.plan.merge.config.merge_method
                remedy = "merge full models by mergekit-yaml"
                if _merges_task_vectors(tensor.planned.method):
                    remedy += ", or give --rank to cut the full change of every tensor to a rank"
                raise ConfigError(f"merge_method: {method} makes no adapter: {reason}; {remedy}")

    def merge(self, tensor: ChangedTensor) -> MergedChange:
        """Merge the changes of one tensor.

        Raises:
            DamagedFileError: a factor holds NaN.
            ConfigError: the base's own weight is needed, and not there.
            ValueError: the tensor cannot be merged; the message names it, and says what to do.
        """
        if tensor.known[0].kind == "saved":
            return self._merge_saved(tensor)
        deltas = [tensor.product(model) for model in tensor.planned.experts]
        work = partial(self._merge_on, tensor, deltas)
        name = tensor.planned.method.spec.name
        merged = first_that_fits(torch.device(self.device), work, name, tensor.planned.name)
        if merged.delta is not None and tensor.known[0].kind == "parameter":
            # PEFT warns of ranks that differ between parameters, though it follows them
            most = sum(delta.rank for delta in deltas if delta)
            merged = replace(merged, delta=merged.delta.padded(min(self.rank or most, most)))
        found = dict(zip(tensor.planned.experts, deltas, strict=True))
        own = (found.get(model) for model in self.plan.adapters_of)
        return replace(merged, tau=tuple(delta.energy if delta else 0.0 for delta in own))

    def _merge_on(
        self,
        tensor: ChangedTensor,
        factors: Sequence[LowRank | None],
        device: torch.device,
    ) -> MergedChange:
        deltas = [delta and delta.to(device) for delta in factors]
        if leaves_span(tensor.planned):
            return self._merge_dense(tensor, deltas, device)
        return merge_products(tensor.planned, tensor.known[0], deltas, self.rank)

    def _merge_dense(
        self, tensor: ChangedTensor, deltas: Sequence[LowRank | None], device: torch.device
    ) -> MergedChange:
        """Merge full task vectors, one tensor's at a time, and cut the result to the rank."""
        assert self.rank is not None  # see `check`
        shape = tensor.known[0].shape
        zero = torch.zeros(shape, device=device)
        full = [delta.dense().float() if delta else zero for delta in deltas]
        merged = _execute(tensor.planned, zero, full)
        stacked = tensor.known[0].is_stack
        matrices = merged if stacked else merged.flatten(1)[None]
        found = [leading_directions(m, min(self.rank, *m.shape)) for m in matrices]
        left = torch.stack([one.left * one.values for one in found])
        right = torch.stack([one.right.mT for one in found]).double()
        kept = sum(float(one.values.square().sum()) for one in found)
        lost = max(0.0, float(matrices.double().square().sum()) - kept)
        delta = LowRank(left, right, shape) if stacked else LowRank(left[0], right[0], shape)
        return MergedChange(tensor.known[0], delta if kept else None, lost=lost)

    def _merge_saved(self, tensor: ChangedTensor) -> MergedChange:
        """Merge tensors that adapters hold whole, as the full merge does: that takes the base's."""
        change = tensor.known[0]
        table = self.plan.tied.get(change.name)
        if table in self._tables:
            return MergedChange(change, full=self._tables[table])
        base = self._base_tensor(tensor)
        versions = [tensor.version(model, base) for model in tensor.planned.experts]
        merged = _execute(tensor.planned, base, versions)
        if change.name in self.plan.tied.values():
            self._tables[change.name] = merged
        return MergedChange(change, full=merged)

    def _base_tensor(self, tensor: ChangedTensor) -> Tensor:
        weight = tensor.planned.task.output_weight
        names = (tensor.known[0].name, *names_in_memory(weight), *(weight.tied_names or ()))
        for name in names:
            found = self._base_weights.get_tensor(name, raise_on_missing=False)
            if found is not None:
                return found.to(torch.promote_types(found.dtype, torch.float32))
        raise ConfigError(
            f"the adapters hold {names[0]} whole, and the base model {self.plan.base} has no such "
            "tensor to compare it with; merge full models by mergekit-yaml"
        )

    @cached_property
    def _base_weights(self) -> LazyTensorLoader:
        try:
            return self.plan.base.lazy_loader()
        except Exception as error:  # of mergekit and the Hub: no such files
            whole = next(t.planned.name for t in self.plan.tensors if t.known[0].kind == "saved")
            raise ConfigError(
                f"the adapters hold {whole} whole, which is merged as a difference from the base's "
                f"own, and the weights of {self.plan.base} are not there; put them beside its "
                "config.json"
            ) from error


def merge_products(
    planned: PlannedTensor,
    change: Change,
    deltas: Sequence[LowRank | None],
    rank: int | None = None,
) -> MergedChange:
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
    if isinstance(planned.method, TaskVectorMethod):
        return _merge_by_ours(planned, change, deltas, planned.method, rank)
    return _merge_linearly(planned, change, deltas, rank)


def _merge_by_ours(
    planned: PlannedTensor,
    change: Change,
    deltas: Sequence[LowRank | None],
    method: TaskVectorMethod,
    rank: int | None,
) -> MergedChange:
    recorded = planned.settings.parameters.get("report") is not None
    settings = method.complete(replace(planned.settings, recorded=recorded), len(change.shape))
    try:
        found = merge_low_rank(method, deltas, settings, rank)
    except MERGE_ERRORS as error:
        raise ValueError(method.explain(error, settings)) from error
    method.mention(settings, found.record)
    return MergedChange(
        change, found.delta, lost=found.lost, settings=settings, record=found.record
    )


def _merge_linearly(
    planned: PlannedTensor,
    change: Change,
    deltas: Sequence[LowRank | None],
    rank: int | None,
) -> MergedChange:
    pairs = zip(linear_coefficients(planned), deltas, strict=True)
    kept = [
        replace(delta, left=coefficient * delta.left)
        for coefficient, delta in pairs
        if delta is not None and coefficient != 0 and delta.energy > 0
    ]
    if not kept:
        return MergedChange(change)
    most = sum(delta.rank for delta in kept)
    if len(kept) == 1 and (rank or most) >= most:
        return MergedChange(change, kept[0])
    stacked = LowRank(
        torch.cat([delta.left for delta in kept], dim=-1),
        torch.cat([delta.right for delta in kept], dim=-2),
        kept[0].shape,
    )
    merged, lost = compress(stacked, min(rank or most, most))
    return MergedChange(change, merged, lost=lost)


def leaves_span(planned: PlannedTensor) -> str:
    """Return why the merge of a tensor's low-rank changes is not of low rank; empty if it is."""
    method = planned.method
    if isinstance(method, TaskVectorMethod):
        return method.leaves_span(planned.settings.parameters)
    if method.spec.name in LINEAR_METHODS:
        return ""
    if _merges_task_vectors(method):
        return "it works on single entries"
    return "its result depends on the weights themselves, not on changes alone"


def _merges_task_vectors(method: MergeMethod) -> bool:
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
    whole, *coefficients = _execute(planned, base, others).tolist()
    if abs(whole - 1) > WHOLE:
        raise ConfigError(
            f"the weights of {planned.name} sum to {whole:.4g}, so that the base itself would be "
            "scaled, which no adapter can do; let them sum to 1, or leave out normalize: false"
        )
    return coefficients


def _execute(planned: PlannedTensor, base: Tensor, experts: Sequence[Tensor]) -> Tensor:
    """Merge tensors as mergekit's task would that it has planned."""
    tensors = dict(zip(planned.experts, experts, strict=True))
    if planned.base is not None:
        tensors[planned.base] = base
    merged = ExecuteMergeMethodTask.execute(planned.task, tensors)  # it may be a kind of its own
    assert merged is not None  # only optional weights that inputs lack are skipped
    return merged
