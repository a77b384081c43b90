# SPDX-License-Identifier: Apache-2.0
"""How the task vectors of one tensor look, alone and beside each other, and what is decided."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from mergekit_ace.algebra.directions import Directions, leading_directions
from mergekit_ace.algebra.linalg import full_precision, squared_norm
from mergekit_ace.algebra.records import (
    FixedLayout,
    MatrixRecord,
    Observer,
    Stage,
    TensorRecord,
)
from mergekit_ace.algebra.task_vectors import as_matrices, task_vector

# A histogram reaches from −REACH to REACH root mean squares of all task vectors of the tensor.
REACH = 5.0
BINS = 50
# Entries that it counts; of a larger tensor that many, evenly spaced.
SAMPLE = 2**18
# Entries that are compared at once: their task vectors stay in a cache, and their products are sums
# short enough for float32.
CHUNK = 2**18
# Leading directions that span the subspaces compared.
SUBSPACE = 16

PairTable = tuple[tuple[float | None, ...], ...]


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
        size: k, how many span a subspace: `SUBSPACE`, or the shorter side; of task vectors of low
            rank no more than the least rank of one.
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


def compare_entries(base: Tensor, experts: Sequence[Tensor]) -> Comparison:
    """Compare task vectors by all that one sweep over the entries can tell.

    Args:
        base: W0, any shape, finite.
        experts: W_t, shaped as `base`.
    """
    flat = [tensor.reshape(-1) for tensor in (base, *experts)]
    count, dtype = base.numel(), torch.promote_types(torch.float32, base.dtype)
    products = torch.zeros(len(experts), len(experts), dtype=torch.float64, device=base.device)
    changed = torch.zeros(len(experts), dtype=torch.int64, device=base.device)
    base_square = 0.0
    for start in range(0, count, CHUNK):
        block = slice(start, min(start + CHUNK, count))
        origin = flat[0][block].to(dtype)
        deltas = torch.stack([expert[block].to(dtype) for expert in flat[1:]]).sub_(origin)
        base_square += squared_norm(origin)
        products += _products(deltas)
        changed += torch.count_nonzero(deltas, dim=1)
    squares = products.diagonal().tolist()
    unit = math.sqrt(math.fsum(squares) / max(1, count * len(experts)))
    norm = tuple(math.sqrt(square) for square in squares)
    return Comparison(
        base_norm=math.sqrt(base_square),
        norm=norm,
        unchanged=tuple(1 - n / count if count else 1.0 for n in changed.tolist()),
        cosine=cosines(products, norm),
        unit=unit,
        histogram=tuple(count_entries(_sample(flat[0], expert), unit) for expert in flat[1:]),
    )


def compare_subspaces(
    base: Tensor, experts: Sequence[Tensor], dtype: torch.dtype, size: int | None = None
) -> Subspaces:
    """Compare the leading subspaces of task vectors, and measure their stable ranks.

    Args:
        base: W0, (o, i), finite, with at least one entry.
        experts: W_t, (o, i).
        dtype: in which W_t − W0 is formed; one of them exists at a time.
        size: directions that span a subspace, at most the shorter side; see `Subspaces`.
    """
    size = min(SUBSPACE, *base.shape) if size is None else size
    dtype = torch.promote_types(dtype, base.dtype)
    left, right, ranks, largest = [], [], [], []
    for expert in experts:
        delta = task_vector(expert, base, dtype)
        found = leading_directions(delta, size)
        largest.append(float(found.values[0]))
        ranks.append(squared_norm(delta) / largest[-1] ** 2 if largest[-1] else None)
        left.append(found.left.to(torch.float32))
        right.append(found.right.to(torch.float32))

    def overlap(bases: list[Tensor]) -> PairTable:
        def of(s: int, t: int) -> float:
            return min(1.0, float((bases[s].mT @ bases[t]).square().sum()) / size)

        return _symmetric(len(experts), of, largest)

    return Subspaces(size, tuple(ranks), inputs=overlap(right), outputs=overlap(left))


def cosines(products: Tensor, norm: Sequence[float]) -> PairTable:
    """Return cosines from inner products, T × T, and norms; None where one of two is zero."""
    return _symmetric(len(norm), lambda s, t: float(products[s, t]) / (norm[s] * norm[t]), norm)


def _products(rows: Tensor) -> Tensor:
    """Return inner products of rows, (T, n), in float64, and by it where float32 lacks range."""
    products = (rows @ rows.mT).double()
    diagonal = products.diagonal()
    if rows.dtype == torch.float32 and not bool(((diagonal > 1e-20) & (diagonal < 1e30)).all()):
        rows = rows.double()
        products = rows @ rows.mT
    return products


def _symmetric(count: int, entry: Callable[[int, int], float], size: Sequence[float]) -> PairTable:
    """Return a T × T matrix from its entries; None wherever a size is zero."""
    return tuple(
        tuple(entry(s, t) if size[s] and size[t] else None for t in range(count))
        for s in range(count)
    )


def sample_step(count: int) -> int:
    """Return every how many entries one is counted in a histogram."""
    return max(1, count // SAMPLE)


def _sample(base: Tensor, expert: Tensor) -> Tensor:
    step = sample_step(len(base))
    return expert[::step].to(torch.float64, copy=True).sub_(base[::step])


def count_entries(entries: Tensor, unit: float) -> tuple[int, ...]:
    """Return the histogram of entries of a task vector; see `Comparison`. They are overwritten."""
    if unit:
        entries /= unit
    # Index 0 is below −REACH, BINS + 1 is at or above REACH.
    index = ((entries + REACH) * (BINS / (2 * REACH))).floor().clamp_(-1, BINS).long() + 1
    return tuple(torch.bincount(index, minlength=BINS + 2).tolist())


# The leading part of a spectrum whose share of the energy is reported (Fig. 2 of the paper).
LEADING = 0.05
# Of a stack of matrices, the directions of so many are looked at, evenly spaced.
STACK_SAMPLE = 4
# Rules that are no formula for a matrix: the mean, and what fewer than two experts changed.
TRIVIAL_RULES = ("mean", "single", "base")


@dataclass(frozen=True)
class Span:
    """What matrices stand for that are task vectors in other coordinates.

    Attributes:
        shape: (o, i), of the task vectors.
        rank: which no merge exceeds.
        least_rank: the smallest rank of a task vector.
    """

    shape: tuple[int, ...]
    rank: int
    least_rank: int


# From the base's and the experts' versions of a tensor, a layout and an observer.
ObservedMerge = Callable[
    [Sequence[Tensor], FixedLayout, Observer | None], tuple[Tensor, TensorRecord]
]


@dataclass(frozen=True)
class MergedSpectrum:
    """The spectrum of the merged task vector X, before and after the refinement.

    Attributes:
        leading: k, how many singular values are the top 5 %, at least one, and no more than the
            rank that X can have.
        before, after: σ_1…σ_k of X by the method's formula, and of the refined X; equal without
            refinement.
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
class MatrixInspection:
    """One matrix.

    Attributes:
        record: what the merge does with it.
        subspaces: of the task vectors; None where nobody looked.
        spectrum: of the merge; None where it is the mean or one expert, or nobody looked.
    """

    record: MatrixRecord
    subspaces: Subspaces | None = None
    spectrum: MergedSpectrum | None = None


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
    merge: ObservedMerge,
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
    comparison = compare_entries(base, experts)
    if layout == "mean" or base.numel() == 0:
        record = merge((base, *experts), "mean", None)[1].matrices[0]
        matrices = (MatrixInspection(record),)
        return TensorInspection(tuple(base.shape), "mean", comparison, matrices)
    stacks = list(zip(*(as_matrices(tensor, layout) for tensor in (base, *experts)), strict=True))
    looked_at = set(evenly_spaced(len(stacks), STACK_SAMPLE))
    matrices = tuple(
        inspect_matrix(
            stack,
            "table" if layout == "table" else "matrix",
            merge,
            dtype if number in looked_at else None,
        )
        for number, stack in enumerate(stacks)
    )
    return TensorInspection(tuple(base.shape), layout, comparison, matrices)


def evenly_spaced(count: int, wanted: int) -> list[int]:
    """Return at most `wanted` of 0 … count − 1, the first and the last among them."""
    if wanted >= count:
        return list(range(count))
    if wanted == 1:
        return [count // 2]
    return [round(n * (count - 1) / (wanted - 1)) for n in range(wanted)]


def inspect_matrix(
    tensors: Sequence[Tensor],
    layout: FixedLayout,
    merge: ObservedMerge,
    dtype: torch.dtype | None,
    span: Span | None = None,
) -> MatrixInspection:
    """Look at one matrix; closely, if there is a dtype for it.

    Args:
        tensors: W0 and the W_t, or cores of them.
        layout: ``matrix`` or ``table``.
        merge: of the matrix.
        dtype: in which task vectors are formed; None for a glance.
        span: what cores stand for; None for full tensors.
    """
    if dtype is None:
        return MatrixInspection(merge(tensors, layout, None)[1].matrices[0])
    spectra: dict[Stage, tuple[Directions, float]] = {}
    base, *experts = tensors
    span = span or Span(tuple(base.shape), min(base.shape), min(base.shape))
    leading = min(math.ceil(LEADING * min(span.shape)), span.rank)

    def observe(stage: Stage, merged: Tensor) -> None:
        spectra[stage] = leading_directions(merged, leading), squared_norm(merged)

    merged, whole = merge(tensors, layout, observe)
    (record,) = whole.matrices
    if not spectra and record.rule not in TRIVIAL_RULES:  # a merge that shows nothing of itself
        observe("closed form", task_vector(merged, base, dtype))
    del merged  # not kept while the next things are looked at
    subspaces = compare_subspaces(base, experts, dtype, min(SUBSPACE, span.least_rank))
    spectrum = _spectrum(spectra, leading, span.shape) if spectra else None
    return MatrixInspection(record, subspaces, spectrum)


def _spectrum(
    spectra: dict[Stage, tuple[Directions, float]], leading: int, shape: tuple[int, ...]
) -> MergedSpectrum:
    before, energy_before = spectra["closed form"]
    after, energy_after = spectra.get("refined", spectra["closed form"])
    alignment = None
    if after is not before:
        wide = shape[0] <= shape[1]
        pair = (before.left, after.left) if wide else (before.right, after.right)
        alignment = tuple((pair[0] * pair[1]).sum(dim=0).abs().clamp(max=1).tolist())
    return MergedSpectrum(
        leading=leading,
        before=tuple(before.values.tolist()),
        after=tuple(after.values.tolist()),
        share_before=_share(before, energy_before),
        share_after=_share(after, energy_after),
        alignment=alignment,
    )


def _share(directions: Directions, energy: float) -> float:
    """Share of the energy in the leading values, 0 to 1."""
    return min(1.0, float(directions.values.square().sum()) / energy) if energy else 0.0
