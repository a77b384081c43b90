# SPDX-License-Identifier: Apache-2.0
"""How task vectors of low rank look: what `inspection.py` measures, from their factors alone.

Norms, cosines, singular values and overlaps of subspaces are those of the cores, see `low_rank.py`.
Single entries are formed for the histogram only. What the base itself is needed for is left out.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from mergekit_ace.algebra.inspection import (
    CHUNK,
    STACK_SAMPLE,
    SUBSPACE,
    Comparison,
    MatrixInspection,
    Span,
    TensorInspection,
    cosines,
    count_entries,
    evenly_spaced,
    inspect_matrix,
    sample_step,
)
from mergekit_ace.algebra.low_rank import CoreSpace, LowRank, rows_in_common
from mergekit_ace.algebra.records import FixedLayout, Observer, TensorRecord

# Singular values below this share of the largest are what rounding leaves of 0.
NO_RANK = 1e-10

# From tensors, or cores, a layout, what the cores are of, and an observer.
SpanMerge = Callable[
    [Sequence[Tensor], FixedLayout, CoreSpace | None, Observer | None],
    tuple[Tensor, TensorRecord],
]


def inspect_products(
    deltas: Sequence[LowRank], layout: FixedLayout, merge: SpanMerge
) -> TensorInspection:
    """Look at the task vectors of a tensor, and at what a merge makes of them.

    Args:
        deltas: Δ_t of the experts in float64, at least one; of rank 1 and zero where an expert
            left the tensor as it was.
        layout: how the tensor is read; by it they are of low rank.
        merge: of cores, or of thin tables, one matrix at a time; W0 is zero.

    Raises:
        IllConditionedError, OverflowError: whatever the merge does.
    """
    shape, comparison = deltas[0].shape, compare_products(deltas)
    views = [delta.read_as(layout) for delta in deltas]
    if layout == "mean":
        tensors, space = _in_coordinates(views, layout)
        record = merge(tensors, "mean", space, None)[1].matrices[0]
        return TensorInspection(shape, layout, comparison, (MatrixInspection(record),))
    stacked = views[0].left.ndim == 3
    count = len(views[0].left) if stacked else 1
    looked_at = set(evenly_spaced(count, STACK_SAMPLE))
    matrices = tuple(
        _inspect_one(
            [view.matrix(number) for view in views] if stacked else views,
            "table" if layout == "table" else "matrix",
            merge,
            closely=number in looked_at,
        )
        for number in range(count)
    )
    return TensorInspection(shape, layout, comparison, matrices)


def _inspect_one(
    deltas: Sequence[LowRank], layout: FixedLayout, merge: SpanMerge, *, closely: bool
) -> MatrixInspection:
    tensors, space = _in_coordinates(deltas, layout)

    def of_span(
        given: Sequence[Tensor], layout: FixedLayout, observe: Observer | None
    ) -> tuple[Tensor, TensorRecord]:
        return merge(given, layout, space, observe)

    ranks = [int(torch.linalg.matrix_rank(core, rtol=NO_RANK)) for core in tensors[1:]]
    most = min(sum(delta.rank for delta in deltas), *tensors[0].shape)
    least = min((rank for rank in ranks if rank), default=0)
    span = Span(deltas[0].shape, most, max(1, least))
    dtype = torch.float64 if closely else None
    found = inspect_matrix(tensors, layout, of_span, dtype, span)
    if least or found.subspaces is None:
        return found
    whole = min(SUBSPACE, *span.shape)  # of full tensors; nobody changed this one
    return replace(found, subspaces=replace(found.subspaces, size=whole))


def _in_coordinates(
    deltas: Sequence[LowRank], layout: FixedLayout
) -> tuple[list[Tensor], CoreSpace | None]:
    """Return 0 and the Δ_t in coordinates of their span; of tables in those of the rows' span."""
    if layout == "table":
        thin, _ = rows_in_common(deltas)
        return [torch.zeros_like(thin[0]), *thin], None
    space = CoreSpace.of(deltas)
    return [space.zeros(), *(space.core(delta) for delta in deltas)], space


def compare_products(deltas: Sequence[LowRank]) -> Comparison:
    """Compare task vectors of one tensor by all that their entries tell."""
    products = torch.tensor(
        [[_inner(one, other) for other in deltas] for one in deltas],
        dtype=torch.float64,
    )
    norm = tuple(math.sqrt(max(0.0, square)) for square in products.diagonal().tolist())
    count = math.prod(deltas[0].shape)
    unit = math.sqrt(math.fsum(n**2 for n in norm) / max(1, count * len(deltas)))
    return Comparison(
        base_norm=None,
        norm=norm,
        unchanged=tuple(1 - _changed(delta) / count if count else 1.0 for delta in deltas),
        cosine=cosines(products, norm),
        unit=unit,
        histogram=tuple(_histogram(delta, unit) for delta in deltas),
    )


def _inner(one: LowRank, other: LowRank) -> float:
    """Return ⟨Δ_s, Δ_t⟩."""
    return float(((one.left.mT @ other.left) * (one.right @ other.right.mT)).sum())


def _changed(delta: LowRank) -> int:
    """Return how many entries are not zero, but for single ones in which a sum of products is."""
    rows, columns = delta.left.any(dim=-1).sum(dim=-1), delta.right.any(dim=-2).sum(dim=-1)
    return int((rows * columns).sum())


def _histogram(delta: LowRank, unit: float) -> tuple[int, ...]:
    counts = map(partial(count_entries, unit=unit), _sampled_entries(delta))
    return tuple(map(sum, zip(*counts, strict=True)))


def _sampled_entries(delta: LowRank) -> Iterator[Tensor]:
    """Yield the entries of Δ that a histogram of the full tensor counts, a part at a time."""
    left, right = delta.left.flatten(0, -2), delta.right.mT.contiguous()
    rows, columns = delta.left.shape[-2], right.shape[-2]
    right = right.flatten(0, -2)
    count = math.prod(delta.shape)
    places = torch.arange(0, count, sample_step(count), device=left.device)
    for part in places.split(max(1, CHUNK // max(1, delta.rank))):
        row, column = part // columns, part % columns
        number = row // rows  # of the matrix in a stack
        yield (left[row] * right[number * columns + column]).sum(dim=-1)
