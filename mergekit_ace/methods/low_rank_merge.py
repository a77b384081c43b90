# SPDX-License-Identifier: Apache-2.0
"""The merge of task vectors of low rank by a method, within the span of their factors.

See `algebra/low_rank.py`: the method merges small cores, or thin tables, as it would full tensors.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from mergekit_ace.algebra.low_rank import CoreSpace, LowRank, compress
from mergekit_ace.algebra.task_vectors import FixedLayout, TensorRecord
from mergekit_ace.methods.base import TaskVectorMethod, describe
from mergekit_ace.methods.parameters import TensorSettings

Deltas = Sequence[LowRank | None]  # of every expert; None of one that left the tensor as it was


@dataclass(frozen=True)
class LowRankMerge:
    """The merge of one tensor: λ X, or None where nothing has changed, and what was done.

    `lost` is what of ‖X‖² was cut off.
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
        rank: of the result, at most; all that there is by default.

    Raises:
        ValueError: read by that layout, the task vectors are not of low rank.
        IllConditionedError, OverflowError: see `merge_tensor`.
    """
    first, layout = next(filter(None, deltas)), settings.layout
    stacked = first.left.ndim == 3
    if not has_low_rank(layout, len(first.shape), stack=stacked):
        raise ValueError(
            f"{describe(settings.name)} of shape {first.shape} is not of low rank where `layout` "
            f"is {layout}; leave `layout` out, or merge full models by mergekit-yaml"
        )
    views = [delta and delta.read_as(layout) for delta in deltas]
    if layout == "table":
        merged, lost, record = _merge_table(method, views, settings, rank)
    elif layout == "mean" or not stacked:
        merged, lost, record = _merge_cores(method, views, settings, rank)
    else:
        matrices = [[d and d.matrix(n) for d in views] for n in range(len(first.left))]
        parts, losses, records = zip(
            *(_merge_cores(method, own, settings, rank) for own in matrices), strict=True
        )
        widest = max(part.rank for part in parts)
        left = torch.stack([part.padded(widest).left for part in parts])
        right = torch.stack([part.padded(widest).right for part in parts])
        merged, lost = LowRank(left, right, (len(parts), *parts[0].shape)), sum(losses)
        record = replace(records[0], matrices=tuple(one.matrices[0] for one in records))
    record = replace(record, shape=first.shape, layout=layout)
    if all(matrix.rule == "base" for matrix in record.matrices):
        return LowRankMerge(None, 0.0, record)
    single = _single(deltas, record, settings)
    if single is not None and (rank is None or single.rank <= rank):
        return LowRankMerge(single, 0.0, record)
    merged = merged.transposed if layout == "transposed" else merged
    return LowRankMerge(replace(merged, shape=first.shape), lost, record)


def has_low_rank(layout: FixedLayout, ndim: int, *, stack: bool) -> bool:
    """Tell whether what a layout makes of a product is of low rank.

    `stack` tells a product for each matrix of a tensor from one alone, maybe with a kernel.
    """
    if layout in ("mean", "flattened"):
        return layout == "mean" or not stack
    return ndim == 2 or (stack and layout in ("stacked", "transposed"))


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
    return *space.expand(core, given[0].shape, min(rank or most, most)), record


def _merge_table(
    method: TaskVectorMethod, deltas: Deltas, settings: TensorSettings, rank: int | None
) -> tuple[LowRank, float, TensorRecord]:
    """Merge tables row by row, in coordinates of the rows' span, which keep norms and angles."""
    given = [delta for delta in deltas if delta is not None]
    basis = torch.linalg.qr(torch.cat([delta.right for delta in given], dim=-2).mT).Q
    zero = given[0].left.new_zeros(given[0].shape[0], basis.shape[1])
    tables = [delta.left @ (delta.right @ basis) if delta else zero for delta in deltas]
    table, record = method.merge([zero, *tables], settings)
    merged = LowRank(table, basis.mT, given[0].shape)
    return *compress(merged, min(rank or merged.rank, merged.rank)), record


def _single(deltas: Deltas, record: TensorRecord, settings: TensorSettings) -> LowRank | None:
    """Return the task vector of the only expert that changed a tensor, if it comes out as it is."""
    if any(matrix.rule not in ("single", "base") for matrix in record.matrices):
        return None
    users = {t for matrix in record.matrices for t, w in enumerate(matrix.weight) if w > 0}
    if len(users) != 1:
        return None
    (user,) = users
    learned = settings.coefficients[user] if settings.coefficients is not None else 1
    return deltas[user] if settings.parameters.get("lambda", 1.0) * learned == 1 else None
