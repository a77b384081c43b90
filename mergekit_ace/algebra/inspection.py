# SPDX-License-Identifier: Apache-2.0
"""Everything that a report says of one tensor: what `ace` decides, and what it decides on."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from mergekit_ace.algebra.ace import Stage, merge_matrix
from mergekit_ace.algebra.comparison import (
    Comparison,
    Subspaces,
    compare,
    compare_subspaces,
)
from mergekit_ace.algebra.directions import Spectrum, leading_spectrum
from mergekit_ace.algebra.layouts import as_matrices
from mergekit_ace.algebra.mean import merge_mean
from mergekit_ace.algebra.options import AceOptions, FixedLayout
from mergekit_ace.algebra.precision import full_precision
from mergekit_ace.algebra.records import MatrixRecord
from mergekit_ace.algebra.task_vectors import select_active

# The leading part of a spectrum whose share of the energy is reported (Fig. 2 of the paper).
LEADING = 0.05
# Of a stack of matrices, the directions of so many are looked at, evenly spaced.
STACK_SAMPLE = 4


@dataclass(frozen=True)
class MergedSpectrum:
    """The spectrum of the merged task vector X, before and after the refinement.

    Attributes:
        leading: k, how many singular values are the top 5 %, at least one.
        before, after: σ_1…σ_k of X by the closed form, and of the refined X; equal without
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
        record: what `ace` does with it.
        subspaces: of the task vectors; None where nobody looked.
        spectrum: of the merge; None where it is not a sum over covariances, or nobody looked.
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
    weights: Sequence[float],
    options: AceOptions,
    layout: FixedLayout,
) -> TensorInspection:
    """Look at a tensor as `merge_tensor` merges it.

    Args:
        base, experts, weights, options, layout: see `merge_tensor`; at least one expert.

    Raises:
        IllConditionedError, OverflowError: see `merge_matrix`.
    """
    comparison = compare(base, experts)
    if layout == "mean" or base.numel() == 0:
        active = select_active(base, experts, weights, options.dtype)
        record = merge_mean(base, active, options.scale)[1]
        matrices = (MatrixInspection(record),)
        return TensorInspection(tuple(base.shape), "mean", comparison, matrices)
    stacks = list(zip(*(as_matrices(tensor, layout) for tensor in (base, *experts)), strict=True))
    looked_at = set(evenly_spaced(len(stacks), STACK_SAMPLE))
    matrices = tuple(
        _inspect_matrix(stack[0], stack[1:], weights, options, closely=n in looked_at)
        for n, stack in enumerate(stacks)
    )
    return TensorInspection(tuple(base.shape), layout, comparison, matrices)


def evenly_spaced(count: int, wanted: int) -> list[int]:
    """At most `wanted` of 0 … count − 1, the first and the last among them."""
    if wanted >= count:
        return list(range(count))
    if wanted == 1:
        return [count // 2]
    return [round(n * (count - 1) / (wanted - 1)) for n in range(wanted)]


def _inspect_matrix(
    base: Tensor,
    experts: Sequence[Tensor],
    weights: Sequence[float],
    options: AceOptions,
    *,
    closely: bool,
) -> MatrixInspection:
    spectra: dict[Stage, Spectrum] = {}
    leading = math.ceil(LEADING * min(base.shape))

    def observe(stage: Stage, merged: Tensor) -> None:
        spectra[stage] = leading_spectrum(merged, leading)

    # Only the record: the merged matrix is not kept while the next things are looked at.
    record = merge_matrix(base, experts, weights, options, observe if closely else None)[1]
    if not closely:
        return MatrixInspection(record)
    subspaces = compare_subspaces(base, experts, options.dtype)
    if record.rule != "ace":
        return MatrixInspection(record, subspaces)
    return MatrixInspection(record, subspaces, _spectrum(spectra, leading))


def _spectrum(spectra: dict[Stage, Spectrum], leading: int) -> MergedSpectrum:
    before = spectra["closed form"]
    after = spectra.get("refined", before)
    alignment = None
    if after is not before:
        cosines = (before.vectors * after.vectors).sum(dim=0).abs().clamp(max=1)
        alignment = tuple(cosines.tolist())
    return MergedSpectrum(
        leading=leading,
        before=tuple(before.values.tolist()),
        after=tuple(after.values.tolist()),
        share_before=before.share,
        share_after=after.share,
        alignment=alignment,
    )
