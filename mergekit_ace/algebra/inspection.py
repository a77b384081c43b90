# SPDX-License-Identifier: Apache-2.0
"""What `inspect` measures of the task vectors of one tensor, and of what a merge makes of them.

Task vectors of low rank are measured in the cores of `low_rank.py`, without full matrices; only
single entries are formed, for the histogram.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from mergekit_ace.algebra.linalg import Directions, full_precision, leading_directions, squared_norm
from mergekit_ace.algebra.low_rank import CoreSpace, LowRank, rows_in_common
from mergekit_ace.algebra.measured import MeasuredCovariance
from mergekit_ace.algebra.task_vectors import (
    FixedLayout,
    MatrixRecord,
    TensorRecord,
    as_matrices,
    task_vector,
)

# A histogram reaches from −REACH to REACH root mean squares of all task vectors of the tensor.
REACH = 5.0
BINS = 50
# Entries that a histogram counts; of a larger tensor that many, evenly spaced.
SAMPLE = 2**18
# Entries compared at once, which stay in a cache.
CHUNK = 2**18
# Leading directions that span the subspaces compared.
SUBSPACE = 16
# The leading part of a spectrum whose share of the energy is reported (Fig. 2 of ACE-Merging).
LEADING = 0.05
# Of a stack of matrices, the directions of so many are looked at, evenly spaced.
STACK_SAMPLE = 4
# Rules that are no formula for a matrix: the mean, and what fewer than two experts changed.
TRIVIAL_RULES = ("mean", "single", "base")

PairTable = tuple[tuple[float | None, ...], ...]
# Called with the versions of a tensor (or their cores), a layout, and `refine=False` for the merge
# before its spectral refinement; for cores also with `space`, see `CoreSpace`.
Merge = Callable[..., tuple[Tensor, TensorRecord]]


@dataclass(frozen=True)
class Comparison:
    """The task vectors Δ_t = W_t − W0 of one tensor; lists in the order of the experts.

    Attributes:
        base_norm: ‖W0‖_F; None where only the Δ_t are known.
        norm: ‖Δ_t‖_F.
        unchanged: share of entries with W_t = W0, 0 to 1; 1 for a tensor without entries.
        cosine: ⟨Δ_s, Δ_t⟩ / (‖Δ_s‖ ‖Δ_t‖), T × T; None where one of them is zero.
        unit: root mean square of the entries of all task vectors, the unit of the histogram.
        histogram: T × (`BINS` + 2), counts of entries of Δ_t: below −`REACH` units, in `BINS`
            intervals of equal width, above. Of large tensors `SAMPLE` entries count, or up to
            twice as many.
    """

    base_norm: float | None
    norm: tuple[float, ...]
    unchanged: tuple[float, ...]
    cosine: PairTable
    unit: float
    histogram: tuple[tuple[int, ...], ...]


@dataclass(frozen=True)
class Subspaces:
    """Leading singular directions of the task vectors of one matrix, (o, i).

    Attributes:
        size: k, how many span a subspace: `SUBSPACE`, the shorter side, or the least rank of a
            task vector that is not zero.
        stable_rank: ‖Δ_t‖_F² / σ_1², between 1 and the rank; None for Δ_t = 0.
        inputs: ‖V_sᵀ V_t‖_F² / k for the first k right singular vectors, T × T: 1 where both
            subspaces of the input space are the same, 0 where they are orthogonal, k/i in the mean
            over random ones. None where a task vector is zero.
        outputs: the same of the left singular vectors, k/o for random ones.
    """

    size: int
    stable_rank: tuple[float | None, ...]
    inputs: PairTable
    outputs: PairTable


@dataclass(frozen=True)
class MergedSpectrum:
    """The spectrum of the merged task vector X, before and after the refinement.

    Attributes:
        leading: k, how many singular values are the top 5 %, at least one.
        before, after: σ_1 … σ_k without and with the refinement; equal without one.
        share_before, share_after: Σ_{j≤k} σ_j² / ‖X‖_F², 0 to 1.
        alignment: |⟨u_j, u'_j⟩| of the k leading singular vectors of the shorter side before and
            after, 0 to 1; None without refinement.
    """

    leading: int
    before: tuple[float, ...]
    after: tuple[float, ...]
    share_before: float
    share_after: float
    alignment: tuple[float, ...] | None


@dataclass(frozen=True)
class CovarianceAgreement:
    """Estimates G_t = Δ_tᵀΔ_t beside measured covariances M_t (ACE-Merging, Theorem 1).

    By the theorem G_t is proportional to the covariance of the inputs of task t. A merge turns on
    whether G_t is nearer to its own task's M_t than to those of the others.

    Attributes:
        cosine: ⟨G_t, M_s⟩ / (‖G_t‖ ‖M_s‖), T × T, row t, 0 to 1; None where one of them is zero or
            was not measured.
        size: k, how many directions span a subspace: `SUBSPACE`, or the shorter side.
        angles: the k principal angles between the leading subspaces of G_t and M_t in degrees,
            ascending, 0 to 90; None likewise.
    """

    cosine: PairTable
    size: int
    angles: tuple[tuple[float, ...] | None, ...]


@dataclass(frozen=True)
class MatrixInspection(MatrixRecord):
    """The record of a matrix's merge, and what only `inspect` measures of it.

    Attributes:
        subspaces: of the task vectors; None where nobody looked.
        spectrum: of the merge; None where it is the mean or one expert, or nobody looked.
        agreement: with measured covariances, where there are some.
    """

    subspaces: Subspaces | None = None
    spectrum: MergedSpectrum | None = None
    agreement: CovarianceAgreement | None = None


@dataclass(frozen=True)
class TensorInspection:
    """One stored tensor.

    Attributes:
        shape: as stored.
        layout: how it is read.
        comparison: of all its entries.
        matrices: one, or one per stacked matrix in row-major order.
    """

    shape: tuple[int, ...]
    layout: FixedLayout
    comparison: Comparison
    matrices: tuple[MatrixInspection, ...]


@full_precision()
def inspect_tensor(
    base: Tensor,
    experts: Sequence[Tensor],
    layout: FixedLayout,
    merge: Merge,
    dtype: torch.dtype = torch.float32,
) -> TensorInspection:
    """Look at the versions of a tensor, and at what a merge makes of them.

    Args:
        base: W0.
        experts: W_t, at least one, each shaped as `base`.
        layout: how the tensor is read.
        merge: of a tensor, or of one matrix of it at a time.
        dtype: in which task vectors are formed, unless the tensors are wider.

    Raises:
        IllConditionedError, OverflowError: whatever the merge does.
    """
    shape, comparison = tuple(base.shape), compare_entries(base, experts)
    if layout == "mean" or base.numel() == 0:
        matrices = (_glance((base, *experts), "mean", merge),)
        return TensorInspection(shape, "mean", comparison, matrices)
    stacks = list(zip(*(as_matrices(tensor, layout) for tensor in (base, *experts)), strict=True))
    close = evenly_spaced(len(stacks), STACK_SAMPLE)
    kind = "table" if layout == "table" else "matrix"
    matrices = tuple(
        inspect_matrix(stack, kind, merge, dtype) if n in close else _glance(stack, kind, merge)
        for n, stack in enumerate(stacks)
    )
    return TensorInspection(shape, layout, comparison, matrices)


def inspect_products(
    deltas: Sequence[LowRank], layout: FixedLayout, merge: Merge
) -> TensorInspection:
    """Do what `inspect_tensor` does for task vectors of low rank, without W0.

    Args:
        deltas: Δ_t of the experts in float64, at least one; of rank 1 and zero where an expert
            left the tensor as it was.
        layout: how the tensor is read; by it they are of low rank.
        merge: of cores, or of thin tables, one matrix at a time; W0 is zero.
    """
    shape, comparison = deltas[0].shape, compare_products(deltas)
    views = [delta.read_as(layout) for delta in deltas]
    if layout == "mean":
        tensors, space = _in_coordinates(views, layout)
        matrices = (_glance(tensors, "mean", partial(merge, space=space)),)
        return TensorInspection(shape, layout, comparison, matrices)
    stacked = views[0].left.ndim == 3
    count = len(views[0].left) if stacked else 1
    stacks = ([view.matrix(n) for view in views] if stacked else views for n in range(count))
    close, kind = evenly_spaced(count, STACK_SAMPLE), "table" if layout == "table" else "matrix"
    matrices = []
    for number, stack in enumerate(stacks):
        tensors, space = _in_coordinates(stack, layout)
        own = partial(merge, space=space)
        if number in close:
            found = inspect_matrix(tensors, kind, own, torch.float64, stack[0].shape)
        else:
            found = _glance(tensors, kind, own)
        matrices.append(found)
    return TensorInspection(shape, layout, comparison, tuple(matrices))


def _in_coordinates(
    deltas: Sequence[LowRank], layout: FixedLayout
) -> tuple[list[Tensor], CoreSpace | None]:
    """Return 0 and the Δ_t in coordinates of their span; of tables in those of the rows' span."""
    if layout == "table":
        thin, _ = rows_in_common(deltas)
        return [torch.zeros_like(thin[0]), *thin], None
    space = CoreSpace.of(deltas)
    return [space.zeros(), *(space.core(delta) for delta in deltas)], space


def _glance(tensors: Sequence[Tensor], layout: FixedLayout, merge: Merge) -> MatrixInspection:
    return MatrixInspection(**vars(merge(tensors, layout)[1].matrices[0]))


def inspect_matrix(
    tensors: Sequence[Tensor],
    layout: FixedLayout,
    merge: Merge,
    dtype: torch.dtype,
    shape: Sequence[int] | None = None,
) -> MatrixInspection:
    """Look closely at one matrix.

    Args:
        tensors: W0 and the W_t, or cores of them.
        layout: ``matrix`` or ``table``.
        merge: of the matrix.
        dtype: in which task vectors are formed.
        shape: (o, i), of the matrix that cores stand for.
    """
    base, *experts = tensors
    shape = base.shape if shape is None else shape
    leading = math.ceil(LEADING * min(shape))
    merged, whole = merge(tensors, layout)
    (record,) = whole.matrices
    spectrum = None
    if record.rule not in TRIVIAL_RULES:
        after = _directions(merged, base, dtype, leading)
        before = after
        if record.refined:
            before = _directions(merge(tensors, layout, refine=False)[0], base, dtype, leading)
        spectrum = _spectrum(before, after, wide=shape[0] <= shape[1])
    del merged  # not kept while the subspaces are looked at
    subspaces = compare_subspaces(base, experts, dtype, min(SUBSPACE, *shape))
    return MatrixInspection(**vars(record), subspaces=subspaces, spectrum=spectrum)


def _directions(
    merged: Tensor, base: Tensor, dtype: torch.dtype, count: int
) -> tuple[Directions, float]:
    """Return the leading directions of what a merge added to the base, and its energy."""
    added = task_vector(merged, base, torch.promote_types(dtype, merged.dtype))
    return leading_directions(added, count), squared_norm(added)


def _spectrum(
    before: tuple[Directions, float], after: tuple[Directions, float], *, wide: bool
) -> MergedSpectrum:
    (one, energy_before), (other, energy_after) = before, after
    alignment = None
    if one is not other:
        sides = (one.left, other.left) if wide else (one.right, other.right)
        k = min(len(one.values), len(other.values))
        cosines = (sides[0][:, :k] * sides[1][:, :k]).sum(dim=0)
        alignment = tuple(cosines.abs().clamp(max=1).tolist())
    return MergedSpectrum(
        leading=len(other.values),
        before=tuple(one.values.tolist()),
        after=tuple(other.values.tolist()),
        share_before=_share(one, energy_before),
        share_after=_share(other, energy_after),
        alignment=alignment,
    )


def _share(directions: Directions, energy: float) -> float:
    """Return the share of the energy in the leading values, 0 to 1."""
    return min(1.0, float(directions.values.square().sum()) / energy) if energy else 0.0


def evenly_spaced(count: int, wanted: int) -> list[int]:
    """Return at most `wanted` of 0 … count − 1, the first and the last among them."""
    if wanted >= count:
        return list(range(count))
    if wanted == 1:
        return [count // 2]
    return [round(n * (count - 1) / (wanted - 1)) for n in range(wanted)]


def compare_entries(base: Tensor, experts: Sequence[Tensor]) -> Comparison:
    """Compare task vectors by all that one sweep over the entries can tell.

    Args:
        base: W0, any shape, finite.
        experts: W_t, shaped as `base`.
    """
    flat = [tensor.reshape(-1) for tensor in (base, *experts)]
    count = base.numel()
    products = torch.zeros(len(experts), len(experts), dtype=torch.float64, device=base.device)
    changed = torch.zeros(len(experts), dtype=torch.int64, device=base.device)
    base_square = 0.0
    for start in range(0, count, CHUNK):
        origin, *versions = (tensor[start : start + CHUNK].double() for tensor in flat)
        deltas = torch.stack(versions).sub_(origin)
        base_square += squared_norm(origin)
        products += deltas @ deltas.mT
        changed += torch.count_nonzero(deltas, dim=1)
    unit = _root_mean_square(products, count)
    step = _sample_step(count)
    samples = (e[::step].to(torch.float64, copy=True).sub_(flat[0][::step]) for e in flat[1:])
    return Comparison(
        base_norm=math.sqrt(base_square),
        norm=tuple(products.diagonal().sqrt().tolist()),
        unchanged=tuple(1 - n / count if count else 1.0 for n in changed.tolist()),
        cosine=_cosines(products),
        unit=unit,
        histogram=tuple(_histogram(sample, unit) for sample in samples),
    )


def compare_products(deltas: Sequence[LowRank]) -> Comparison:
    """Compare task vectors of one tensor by their factors, and by entries for the histogram."""
    inner = [
        [float(((a.left.mT @ b.left) * (a.right @ b.right.mT)).sum()) for b in deltas]
        for a in deltas
    ]
    products = torch.tensor(inner, dtype=torch.float64)
    products.diagonal().clamp_(min=0)  # rounding may leave a little below it
    count = math.prod(deltas[0].shape)
    unit = _root_mean_square(products, count)
    return Comparison(
        base_norm=None,
        norm=tuple(products.diagonal().sqrt().tolist()),
        unchanged=tuple(1 - _changed(delta) / count if count else 1.0 for delta in deltas),
        cosine=_cosines(products),
        unit=unit,
        histogram=tuple(_histogram(_sampled_entries(delta), unit) for delta in deltas),
    )


def _root_mean_square(products: Tensor, count: int) -> float:
    """Return that of the entries of all task vectors, from their inner products, T × T."""
    return math.sqrt(float(products.trace()) / max(1, count * len(products)))


def _cosines(products: Tensor) -> PairTable:
    """Return cosines from inner products, T × T; None where one of two vectors is zero."""
    norms = products.diagonal().sqrt()
    return _pairs(products / torch.outer(norms, norms), norms.tolist())


def _pairs(table: Tensor, sizes: Sequence[float]) -> PairTable:
    """Return a T × T table with None wherever a size is zero."""
    rows = table.tolist()
    return tuple(
        tuple(value if sizes[s] and sizes[t] else None for t, value in enumerate(row))
        for s, row in enumerate(rows)
    )


def _sample_step(count: int) -> int:
    """Return every how many entries one is counted in a histogram."""
    return max(1, count // SAMPLE)


def _histogram(entries: Tensor, unit: float) -> tuple[int, ...]:
    """Return the histogram of entries of a task vector; see `Comparison`. They are overwritten."""
    if unit:
        entries /= unit
    # Index 0 is below −REACH, BINS + 1 is at or above REACH.
    index = ((entries + REACH) * (BINS / (2 * REACH))).floor().clamp_(-1, BINS).long() + 1
    return tuple(torch.bincount(index, minlength=BINS + 2).tolist())


def _changed(delta: LowRank) -> int:
    """Return how many entries are not zero, but for single ones in which a sum of products is."""
    rows, columns = delta.left.any(dim=-1).sum(dim=-1), delta.right.any(dim=-2).sum(dim=-1)
    return int((rows * columns).sum())


def _sampled_entries(delta: LowRank) -> Tensor:
    """Return the entries of Δ that a histogram of the full tensor counts."""
    left, right = delta.left.flatten(0, -2), delta.right.mT.contiguous()
    rows, columns = delta.left.shape[-2], right.shape[-2]
    right, count = right.flatten(0, -2), math.prod(delta.shape)
    places = torch.arange(0, count, _sample_step(count), device=left.device)
    parts = []
    for part in places.split(max(1, CHUNK // max(1, delta.rank))):
        row, column = part // columns, part % columns
        number = row // rows  # of the matrix in a stack
        parts.append((left[row] * right[number * columns + column]).sum(dim=-1))
    return torch.cat(parts)


def compare_subspaces(
    base: Tensor, experts: Sequence[Tensor], dtype: torch.dtype, most: int = SUBSPACE
) -> Subspaces:
    """Compare the leading subspaces of task vectors, and measure their stable ranks.

    Args:
        base: W0, (o, i), finite, with at least one entry.
        experts: W_t, (o, i).
        dtype: in which W_t − W0 is formed; one of them exists at a time.
        most: directions that span a subspace, if the task vectors have as many.
    """
    dtype = torch.promote_types(dtype, base.dtype)
    directions, ranks = [], []
    for expert in experts:
        delta = task_vector(expert, base, dtype)
        found = leading_directions(delta, most)
        directions.append(found)
        strongest = float(found.values[0]) if len(found.values) else 0.0
        ranks.append(squared_norm(delta) / strongest**2 if strongest else None)
    counts = [len(found.values) for found in directions]
    size = min(filter(None, counts), default=most)

    def overlaps(side: str) -> PairTable:
        leading = [getattr(found, side)[:, :size] for found in directions]
        products = (
            [float((one.mT @ other).square().sum()) for other in leading] for one in leading
        )
        shares = torch.tensor(list(products), dtype=torch.float64) / size
        return _pairs(shares.clamp(max=1), counts)

    return Subspaces(size, tuple(ranks), inputs=overlaps("right"), outputs=overlaps("left"))


@torch.no_grad()
@full_precision()
def compare_covariances(
    base: Tensor, experts: Sequence[Tensor], measured: Sequence[MeasuredCovariance | None]
) -> CovarianceAgreement:
    """Compare G_t = Δ_tᵀΔ_t with what was measured, of one matrix.

    Args:
        base: W0, (o, i), finite.
        experts: W_t, (o, i).
        measured: M_t, (i, i); None where there is none.

    Working memory is one (i, i) matrix and the task vectors.
    """
    dtype = torch.promote_types(torch.float32, base.dtype)
    size = min(SUBSPACE, *base.shape)
    deltas = [task_vector(expert, base, dtype) for expert in experts]
    norms = [_gram_norm(delta) for delta in deltas]
    columns: list[list[float | None]] = []
    angles: list[tuple[float, ...] | None] = []
    for own, (delta, known) in enumerate(zip(deltas, measured, strict=True)):
        if known is None or known.trace == 0:
            columns.append([None] * len(deltas))
            angles.append(None)
            continue
        matrix = known.matrix(delta)
        length = squared_norm(matrix) ** 0.5
        columns.append(
            [
                _inner(other, matrix) / (norm * length) if norm else None
                for other, norm in zip(deltas, norms, strict=True)
            ]
        )
        angles.append(_principal_angles(delta, matrix, size) if norms[own] else None)
    cosine = tuple(tuple(row) for row in zip(*columns, strict=True))
    return CovarianceAgreement(cosine, size, tuple(angles))


def _gram_norm(delta: Tensor) -> float:
    """Return ‖ΔᵀΔ‖_F through the smaller square."""
    small = delta if len(delta) <= delta.shape[1] else delta.mT
    return squared_norm(small @ small.mT) ** 0.5


def _inner(delta: Tensor, matrix: Tensor) -> float:
    """Return ⟨ΔᵀΔ, M⟩ = tr(Δ M Δᵀ)."""
    return float((delta @ matrix).mul_(delta).sum(dtype=torch.float64))


def _principal_angles(delta: Tensor, matrix: Tensor, size: int) -> tuple[float, ...]:
    one = leading_directions(delta, size).right.to(torch.float64)
    other = leading_directions(matrix, size).right.to(torch.float64)
    cosines = torch.linalg.svdvals(one.mT @ other).clamp(max=1)
    return tuple(torch.rad2deg(torch.acos(cosines)).tolist())
