# SPDX-License-Identifier: Apache-2.0
"""The merge of task vectors of low rank by a method, within the span of their factors.

The method merges small cores, or thin tables, as it would full tensors: see `algebra/low_rank.py`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from mergekit_ace.algebra.low_rank import CoreSpace, LowRank, compress
from mergekit_ace.algebra.task_vectors import FixedLayout, TensorRecord
from mergekit_ace.methods.base import TaskVectorMethod, TensorSettings, describe

Deltas = Sequence[LowRank | None]  # of every expert; None of one that left the tensor as it was


@dataclass(frozen=True)
class LowRankMerge:
    """The merge of one tensor: λ X, what of ‖X‖² was cut off, and what was done."""

    delta: LowRank | None  # None where nothing has changed
    lost: float
    record: TensorRecord


def merge_low_rank(
    method: TaskVectorMethod, deltas: Deltas, settings: TensorSettings, rank: int | None = None
) -> LowRankMerge:
    """Merge the task vectors of one tensor, in float64, at least one; W0 is not needed.

    The method's merge stays in the span, see `TaskVectorMethod.leaves_span`. `rank` is the most
    that the result may have. A `ValueError` says if the layout reads nothing of low rank.
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
    merged = merged.transposed if layout == "transposed" else merged
    return LowRankMerge(replace(merged, shape=first.shape), lost, record)


def has_low_rank(layout: FixedLayout, ndim: int, *, stack: bool) -> bool:
    """Tell whether what a layout makes of a product, or of one per matrix, is of low rank."""
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
