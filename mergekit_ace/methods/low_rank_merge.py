# SPDX-License-Identifier: Apache-2.0
"""The merge of task vectors of low rank by a method, within the span of their factors.

See `algebra/low_rank.py`: the method merges small cores, or thin tables, as it would full tensors.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from mergekit_ace.algebra.low_rank import CoreSpace, LowRank, compress, rows_in_common
from mergekit_ace.algebra.task_vectors import FixedLayout, TensorRecord
from mergekit_ace.methods.base import TaskVectorMethod, describe
from mergekit_ace.methods.parameters import TensorSettings

Deltas = Sequence[LowRank | None]  # of every expert; None of one that left the tensor as it was


@dataclass(frozen=True)
class LowRankMerge:
    """The merge of one tensor.

    Attributes:
        delta: λ X; None where nothing has changed.
        lost: what of ‖X‖² was cut off.
        record: what was done.
    """

    delta: LowRank | None
    lost: float
    record: TensorRecord


def merge_low_rank(
    method: TaskVectorMethod, deltas: Deltas, settings: TensorSettings, rank: int | None = None
) -> LowRankMerge:
    """Merge the task vectors of one tensor; W0 is not needed.

    Args:
        method: one whose merge stays in the span, see `TaskVectorMethod.leaves_span`.
        deltas: Δ_t in float64; at least one is there.
        settings: of the tensor, with its layout.
        rank: of the result, at most; the sum of the ranks of the Δ_t by default, which no merge
            exceeds.

    Raises:
        ValueError: read by that layout, the task vectors are not of low rank.
        IllConditionedError, OverflowError: see `merge_matrix`.
    """
    given = [delta for delta in deltas if delta is not None]
    shape = given[0].shape
    views = [delta and _by_layout(delta, settings) for delta in deltas]
    if settings.layout == "table":
        merged, lost, record = _merge_table(method, views, settings, rank)
    elif settings.layout == "mean" or given[0].left.ndim == 2:
        merged, lost, record = _merge_cores(method, views, settings, rank)
    else:
        merged, lost, record = _merge_stack(method, views, settings, rank)
    record = replace(record, shape=shape, layout=settings.layout)
    if all(matrix.rule == "base" for matrix in record.matrices):
        return LowRankMerge(None, 0.0, record)
    single = _single(deltas, record, settings)
    if single is not None and (rank is None or single.rank <= rank):
        return LowRankMerge(single, 0.0, record)
    if settings.layout == "transposed":
        merged = merged.transposed
    return LowRankMerge(replace(merged, shape=shape), lost, record)


def _by_layout(delta: LowRank, settings: TensorSettings) -> LowRank:
    """Return a task vector as the matrices, or the stack of them, that a layout reads."""
    layout, ndim = settings.layout, len(delta.shape)
    if not has_low_rank(layout, ndim, stack=delta.left.ndim == 3):
        raise ValueError(
            f"{describe(settings.name)} of shape {delta.shape} is not of low rank where `layout` "
            f"is {layout}; leave `layout` out, or merge full models by mergekit-yaml"
        )
    return delta.read_as(layout)


def has_low_rank(layout: FixedLayout, ndim: int, *, stack: bool) -> bool:
    """Tell whether what a layout makes of a product is of low rank.

    Args:
        layout: how the tensor is read.
        ndim: its axes.
        stack: whether it is a product for each of its matrices, and not one, maybe with a kernel.
    """
    plain = stack or ndim == 2
    fits: dict[FixedLayout, bool] = {
        "mean": True,
        "flattened": not stack,
        "stacked": plain,
        "transposed": plain,
        "matrix": plain and not stack,
        "table": plain and not stack,
    }
    return fits[layout]


def _merge_cores(
    method: TaskVectorMethod, deltas: Deltas, settings: TensorSettings, rank: int | None
) -> tuple[LowRank, float, TensorRecord]:
    """Merge the cores of one matrix, or of a stack entry by entry."""
    given = [delta for delta in deltas if delta is not None]
    space = CoreSpace.of(given)
    zero = space.zeros()
    cores = [space.core(delta) if delta else zero.clone() for delta in deltas]
    layout = "mean" if settings.layout == "mean" else "matrix"
    core, record = method.merge([zero, *cores], replace(settings, layout=layout, space=space))
    most = sum(delta.rank for delta in given)
    merged, lost = space.expand(core, given[0].shape, min(rank or most, most))
    return merged, lost, record


def _merge_stack(
    method: TaskVectorMethod, deltas: Deltas, settings: TensorSettings, rank: int | None
) -> tuple[LowRank, float, TensorRecord]:
    """Merge a stack matrix by matrix; all get as many columns as the one of the largest rank."""
    given = [delta for delta in deltas if delta is not None]
    parts, lost, records = [], 0.0, []
    for number in range(given[0].left.shape[0]):
        own = [delta and delta.matrix(number) for delta in deltas]
        part, more, record = _merge_cores(method, own, settings, rank)
        lost += more
        parts.append(part)
        records += record.matrices
    widest = max(part.rank for part in parts)
    parts = [part.padded(widest) for part in parts]
    left, right = (torch.stack([getattr(p, side) for p in parts]) for side in ("left", "right"))
    merged = LowRank(left, right, given[0].shape)
    return merged, lost, TensorRecord(merged.shape, "stacked", tuple(records))


def _merge_table(
    method: TaskVectorMethod, deltas: Deltas, settings: TensorSettings, rank: int | None
) -> tuple[LowRank, float, TensorRecord]:
    """Merge tables row by row, in coordinates of the rows' span."""
    given = [delta for delta in deltas if delta is not None]
    thin, basis = rows_in_common(given)
    zero, rest = torch.zeros_like(thin[0]), iter(thin)
    tables = [next(rest) if delta else zero for delta in deltas]
    table, record = method.merge([zero, *tables], settings)
    merged = LowRank(table, basis.mT, given[0].shape)
    if table is zero:  # nobody has changed it
        return merged, 0.0, record
    return *compress(merged, min(rank or merged.rank, merged.rank)), record


def _single(deltas: Deltas, record: TensorRecord, settings: TensorSettings) -> LowRank | None:
    """Return the task vector of the only expert that changed a tensor, if it comes out as it is."""
    scale = settings.parameters.get("lambda", 1.0)
    if scale != 1 or any(matrix.rule not in ("single", "base") for matrix in record.matrices):
        return None
    users = {t for matrix in record.matrices for t, w in enumerate(matrix.weight) if w > 0}
    if len(users) != 1:
        return None
    (user,) = users
    if settings.coefficients is not None and settings.coefficients[user] != 1:
        return None
    return deltas[user]
