# SPDX-License-Identifier: Apache-2.0
"""Task vectors of low rank, as adapters hold them, merged without ever forming a full matrix.

With bases U of all columns and V of all rows of the Δ_t = L_t R_t, Δ_t is U M_t Vᵀ with a *core*
M_t = (UᵀL_t)(R_tV), which has the Δ_t's products and singular values (arXiv 2509.17786). For mean
rows, and ACE's prior, both bases are turned until Uᵀ1 and Vᵀ1 are multiples of all-ones vectors.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from mergekit_ace.algebra.linalg import full_precision
from mergekit_ace.algebra.task_vectors import FixedLayout, TensorRecord

# Singular values of a merged core below this share of the largest are what rounding leaves of 0.
NOTHING = 1e-13


@dataclass(frozen=True)
class LowRank:
    """A task vector as a product of (o, r) and (r, i), or (E, o, r) and (E, r, i) of a stack.

    `shape` is that of the stored tensor: (o, i), (E, o, i), or (o, …) with i entries in the rest.
    """

    left: Tensor
    right: Tensor
    shape: tuple[int, ...]

    @property
    def rank(self) -> int:
        """r, which the rank of Δ does not exceed."""
        return self.left.shape[-1]

    @property
    def energy(self) -> float:
        """‖Δ‖², of all matrices of a stack together."""
        grams = (self.left.mT @ self.left) * (self.right @ self.right.mT)
        return max(0.0, float(grams.sum()))

    def to(self, device: torch.device | str) -> LowRank:
        """Return it on a device."""
        return LowRank(self.left.to(device), self.right.to(device), self.shape)

    @full_precision()
    def added_to(self, base: Tensor) -> Tensor:
        """Return W0 + Δ in the dtype and on the device of W0; summed in float32, or wider."""
        dtype = torch.promote_types(base.dtype, torch.float32)
        left, right = (factor.to(base.device, dtype) for factor in (self.left, self.right))
        return (left @ right).reshape(self.shape).add_(base).to(base.dtype)

    def read_as(self, layout: FixedLayout) -> LowRank:
        """Return the matrix, or stack, that a layout by which it is of low rank makes of it."""
        left, right = self.left, self.right
        if layout == "transposed":
            left, right = right.mT, left.mT
        return LowRank(left, right, (*left.shape[:-1], right.shape[-1]))

    def padded(self, rank: int) -> LowRank:
        """Return the same with columns of zeros, if it has fewer than `rank`."""
        more = max(0, rank - self.rank)
        left = torch.nn.functional.pad(self.left, (0, more))
        return LowRank(left, torch.nn.functional.pad(self.right, (0, 0, 0, more)), self.shape)


@dataclass(frozen=True)
class CoreSpace:
    """The span of some task vectors: U, (o, p), and V, (i, q), orthonormal, or a stack of each."""

    left: Tensor
    right: Tensor

    @classmethod
    def of(cls, deltas: Sequence[LowRank]) -> CoreSpace:
        """Return the span of the task vectors of one tensor, at least one."""
        left = torch.cat([delta.left for delta in deltas], dim=-1)
        right = torch.cat([delta.right for delta in deltas], dim=-2)
        return cls(_basis(left), _basis(right.mT))

    def core(self, delta: LowRank) -> Tensor:
        """Return M = UᵀΔV, (p, q), or (E, p, q), of a task vector of the span."""
        return (self.left.mT @ delta.left) @ (delta.right @ self.right)

    def expand(self, core: Tensor, shape: tuple[int, ...], rank: int) -> tuple[LowRank, float]:
        """Return U M Vᵀ as a product of factors of the rank of M, and what of ‖M‖² was dropped."""
        left, values, right = torch.linalg.svd(core, full_matrices=False)
        least = NOTHING * values[..., :1]
        kept = max(1, min(rank, int((values > least).sum(dim=-1).max())))
        roots = values[..., :kept].sqrt()
        outputs = (self.left @ left[..., :kept]) * roots[..., None, :]
        inputs = roots[..., :, None] * (right[..., :kept, :] @ self.right.mT)
        return LowRank(outputs, inputs, shape), float(values[..., kept:].square().sum())


def _basis(columns: Tensor) -> Tensor:
    """Return an orthonormal basis, (n, p), of columns, (n, r), and 1, which is all ones in it."""
    ones = torch.ones_like(columns[..., :1])
    basis = torch.linalg.qr(torch.cat([ones, columns], dim=-1)).Q
    first = ones / math.sqrt(columns.shape[-2])  # QR leaves the sign open
    basis = torch.cat([first, basis[..., 1:]], dim=-1)
    count = basis.shape[-1]
    if count == 1:
        return basis
    # A reflection turns the first direction. Columns that depend on others add arbitrary ones.
    mirror = basis.new_full((count,), -1 / math.sqrt(count))
    mirror[0] += 1
    return basis - (basis @ mirror)[..., None] * (2 / mirror.dot(mirror) * mirror)


def merge_in_span(
    deltas: Sequence[LowRank | None],
    layout: FixedLayout,
    merge: Callable[[list[Tensor], FixedLayout, Sequence[int]], tuple[Tensor, TensorRecord]],
    rank: int | None,
) -> tuple[LowRank | None, float, TensorRecord]:
    """Merge the task vectors of one tensor, in float64, at least one; W0 is not needed.

    Returns λ X, or None where nothing has changed, what of ‖X‖² was cut off, and what was done.
    `deltas` has None for an expert that left the tensor as it was. `merge` is a method's merge of
    full tensors, the base's first, by a layout, or of cores of matrices of a shape; it stays in
    their span. `rank` is the most that the result may have.
    """
    views = [delta and delta.read_as(layout) for delta in deltas]
    given = [delta for delta in views if delta is not None]
    first, most = given[0], sum(delta.rank for delta in given)
    shape = next(delta.shape for delta in deltas if delta is not None)
    if layout == "table":  # row by row, in coordinates of the rows' span
        basis = torch.linalg.qr(torch.cat([delta.right for delta in given], dim=-2).mT).Q
        zero = first.left.new_zeros(first.shape[0], basis.shape[1])
        tables = [delta.left @ (delta.right @ basis) if delta else zero for delta in views]
        table, record = merge([zero, *tables], layout, first.shape)
        left, core = torch.linalg.qr(table)
        space = CoreSpace(left, basis)
    else:
        space = CoreSpace.of(given)
        zero = torch.zeros_like(space.core(first))
        cores = [space.core(delta) if delta else zero.clone() for delta in views]
        solved = "mean" if layout == "mean" else "stacked" if zero.ndim == 3 else "matrix"
        core, record = merge([zero, *cores], solved, first.shape[-2:])
    merged, lost = space.expand(core, first.shape, min(rank or most, most))
    record = replace(record, shape=shape, layout=layout)
    if all(matrix.rule == "base" for matrix in record.matrices):
        return None, 0.0, record
    return replace(merged.read_as(layout), shape=shape), lost, record
