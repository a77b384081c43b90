# SPDX-License-Identifier: Apache-2.0
"""How far estimates ΔᵀΔ agree with covariances that were measured (ACE-Merging, Theorem 1).

The theorem says that G_t = Δ_tᵀΔ_t is proportional to the covariance of the inputs of task t. How
near that comes is told by the cosine of both matrices, and by the angles between the subspaces that
their leading directions span. What a merge turns on is whether the estimates tell tasks apart: a
G_t should be nearer to its own task's M_t than to the M_s of all others.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from mergekit_ace.algebra.directions import leading_directions
from mergekit_ace.algebra.inspection import SUBSPACE, PairTable
from mergekit_ace.algebra.linalg import full_precision, squared_norm
from mergekit_ace.algebra.measured import MeasuredCovariance
from mergekit_ace.algebra.task_vectors import task_vector

AngleTable = tuple[tuple[float, ...] | None, ...]


@dataclass(frozen=True)
class CovarianceAgreement:
    """Estimates of one matrix beside what was measured; lists in the order of the experts.

    Attributes:
        cosine: ⟨G_t, M_s⟩ / (‖G_t‖ ‖M_s‖), T × T, row t, 0 to 1; None where one of them is zero or
            was not measured.
        size: k, how many directions span a subspace: `SUBSPACE`, or the shorter side.
        angles: the k principal angles between the leading subspaces of G_t and M_t in degrees,
            ascending, 0 to 90; None likewise.
    """

    cosine: PairTable
    size: int
    angles: AngleTable


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

    Working memory is one (i, i) matrix and two task vectors.
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
    return tuple(math.degrees(math.acos(value)) for value in cosines.tolist())
