# SPDX-License-Identifier: Apache-2.0
"""How the task vectors of one tensor look, and how they look beside each other."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from mergekit_ace.algebra.directions import leading_directions
from mergekit_ace.algebra.task_vectors import squared_norm, task_vector

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

Matrix = tuple[tuple[float | None, ...], ...]


@dataclass(frozen=True)
class Comparison:
    """The task vectors Δ_t = W_t − W0 of one tensor; lists in the order of the experts.

    Attributes:
        base_norm: ‖W0‖_F.
        norm: ‖Δ_t‖_F.
        unchanged: share of entries with W_t = W0, 0 to 1; 1 for a tensor without entries.
        cosine: ⟨Δ_s, Δ_t⟩ / (‖Δ_s‖ ‖Δ_t‖), T × T; None where one of them is zero.
        unit: root mean square of the entries of all task vectors, the unit of the histogram.
        histogram: T × (`BINS` + 2), counts of entries of Δ_t: below −`REACH` units, in `BINS`
            intervals of equal width, above. Of large tensors `SAMPLE` entries count, or up to
            twice as many.
    """

    base_norm: float
    norm: tuple[float, ...]
    unchanged: tuple[float, ...]
    cosine: Matrix
    unit: float
    histogram: tuple[tuple[int, ...], ...]


@dataclass(frozen=True)
class Subspaces:
    """Leading singular directions of the task vectors of one matrix, (o, i).

    Attributes:
        size: k, how many span a subspace: `SUBSPACE`, or the shorter side.
        stable_rank: ‖Δ_t‖_F² / σ_1², between 1 and the rank; None for Δ_t = 0.
        inputs: ‖V_sᵀ V_t‖_F² / k for the first k right singular vectors, T × T: 1 where both
            subspaces of the input space are the same, 0 where they are orthogonal, k/i in the mean
            over random ones. None where a task vector is zero.
        outputs: the same of the left singular vectors, k/o for random ones.
    """

    size: int
    stable_rank: tuple[float | None, ...]
    inputs: Matrix
    outputs: Matrix


def compare(base: Tensor, experts: Sequence[Tensor]) -> Comparison:
    """Everything that one sweep over the entries can tell.

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
        cosine=_symmetric(
            len(experts), lambda s, t: float(products[s, t]) / (norm[s] * norm[t]), norm
        ),
        unit=unit,
        histogram=tuple(_histogram(flat[0], expert, unit) for expert in flat[1:]),
    )


def compare_subspaces(base: Tensor, experts: Sequence[Tensor], dtype: torch.dtype) -> Subspaces:
    """Stable ranks and overlaps.

    Args:
        base: W0, (o, i), finite, with at least one entry.
        experts: W_t, (o, i).
        dtype: in which W_t − W0 is formed; one of them exists at a time.
    """
    size = min(SUBSPACE, *base.shape)
    dtype = torch.promote_types(dtype, base.dtype)
    left, right, ranks, largest = [], [], [], []
    for expert in experts:
        delta = task_vector(expert, base, dtype)
        outputs, values, inputs = leading_directions(delta, size)
        largest.append(float(values[0]))
        ranks.append(squared_norm(delta) / largest[-1] ** 2 if largest[-1] else None)
        left.append(outputs.to(torch.float32))
        right.append(inputs.to(torch.float32))

    def overlap(bases: list[Tensor]) -> Matrix:
        def of(s: int, t: int) -> float:
            return min(1.0, float((bases[s].mT @ bases[t]).square().sum()) / size)

        return _symmetric(len(experts), of, largest)

    return Subspaces(size, tuple(ranks), inputs=overlap(right), outputs=overlap(left))


def _products(rows: Tensor) -> Tensor:
    """Inner products of rows, (T, n), in float64; formed in it where float32 lacks the range."""
    products = (rows @ rows.mT).double()
    diagonal = products.diagonal()
    if rows.dtype == torch.float32 and not bool(((diagonal > 1e-20) & (diagonal < 1e30)).all()):
        rows = rows.double()
        products = rows @ rows.mT
    return products


def _symmetric(count: int, entry: Callable[[int, int], float], size: Sequence[float]) -> Matrix:
    """A T × T matrix from its entries; None wherever a size is zero."""
    return tuple(
        tuple(entry(s, t) if size[s] and size[t] else None for t in range(count))
        for s in range(count)
    )


def _histogram(base: Tensor, expert: Tensor, unit: float) -> tuple[int, ...]:
    step = max(1, len(base) // SAMPLE)
    entries = expert[::step].double().sub_(base[::step])
    if unit:
        entries /= unit
    # Index 0 is below −REACH, BINS + 1 is at or above REACH.
    index = ((entries + REACH) * (BINS / (2 * REACH))).floor().clamp_(-1, BINS).long() + 1
    return tuple(torch.bincount(index, minlength=BINS + 2).tolist())
