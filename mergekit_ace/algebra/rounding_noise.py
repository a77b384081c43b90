# SPDX-License-Identifier: Apache-2.0
"""How much of a task vector is the rounding of the checkpoints, and whether anything else is in it.

A checkpoint holds the numbers of a *grid*: those of bfloat16, float16, float32 or float64. Next to
an entry w they lie ulp(w) = 2^(⌊log₂|w|⌋ − bits + 1) apart, so that storing a weight adds an error
with a variance of ulp(w)²/12. A tensor that was widened after it was stored still lies on the
narrower grid, and it is its values that tell, not its dtype.

Three energies, sums of squares over the entries of a tensor, follow from the values alone:

* ν², the rounding noise in a task vector: Σ (ulp_t(w)² + ulp_0(w0)²)/12 over the entries that
  differ. It is what is expected of two tensors that were rounded independently.
* r² = ‖round(W0) − W0‖², by how much the base itself moves when it is rounded to the expert's grid.
  An expert that is the base, saved through its precision, has τ = r² to the last digit, however
  small the tensor is. That is a sharper test than τ ≤ c ν²: where the base's grid is only a little
  finer (float16 beside bfloat16), the errors are no longer spread evenly over an interval but take
  a few discrete values, and τ/ν² reaches 1.2.
* g² = Σ ulp_t(w)²/12 over all entries, what rounding the whole expert once more would add.

A base on a narrower grid than the expert's is no reason to doubt a change: what a float32 expert
has learned from a bfloat16 base may well be smaller than the spacing of the base's numbers.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from itertools import permutations

import torch
from torch import Tensor

from mergekit_ace.algebra.linalg import as_rows, blocks, squared_norm

# Precisions in which checkpoints are stored, the coarsest first.
STORED = (torch.bfloat16, torch.float16, torch.float32, torch.float64)
# τ up to so many times r² is rounding: sums in float32, and a precision on the way that the values
# no longer show, change r² by less than this.
SAME = 1.05
# What exceeds that counts in full from this share of g² on. A change of a tenth of an ulp in every
# entry has 12 % of g², and on a common grid one ulp in 0.8 % of all entries has 10 %; a single
# entry that was rounded otherwise in a large tensor has next to nothing.
FULL_CHANGE = 0.1
# Entries that a CPU looks at at once: they stay in a cache.
CHUNK = 2**18
# Entries that an estimate looks at.
SAMPLE = 2**16
# The bits of the exponent; without the others a number is the power of two below it.
EXPONENTS = {
    torch.float32: (torch.int32, 0x7F800000),
    torch.float64: (torch.int64, 0x7FF0000000000000),
}


def grids_of(tensor: Tensor) -> tuple[torch.dtype, ...]:
    """Return the precisions that hold every value of a tensor, the coarsest first.

    Its own dtype is among them. Another one is out as soon as a block of the tensor has a value
    that it lacks, so that this costs next to nothing where there is none.

    Args:
        tensor: of any shape, finite.
    """
    return tuple(grid for grid in STORED if grid == tensor.dtype or _keeps(grid, tensor))


def storage_grid(tensor: Tensor) -> torch.dtype:
    """Return the precision that a tensor was stored in, as far as its values tell.

    That is the coarsest one that holds all of them, if at least one entry needs all of its bits:
    ones and zeros lie on every grid, and are no evidence of having been rounded to one.

    Args:
        tensor: of any shape, finite.
    """
    coarsest = grids_of(tensor)[0]
    if coarsest == tensor.dtype or any(_needs(coarsest, part) for (part,) in _parts(tensor)):
        return coarsest
    return tensor.dtype


def noise_energy(expert: Tensor, base: Tensor) -> float:
    """Return ν², the energy of the rounding noise in W − W0.

    Args:
        expert, base: W and W0, of one shape, finite.

    Entries that are equal carry none: they were not rounded apart.
    """
    if not expert.is_floating_point():
        return 0.0
    total = []
    grids = storage_grid(expert), storage_grid(base)
    for parts in _parts(expert, base):
        differs = parts[0] != parts[1]
        for part, grid in zip(parts, grids, strict=True):
            total.append(squared_norm(_spacing(part, grid).mul_(differs)))
    return math.fsum(total) / 12


def estimate_rounding(expert: Tensor, base: Tensor) -> float:
    """Estimate the part of ν² that the expert's own rounding has, from a sample of its rows.

    The base's is left out: an expert that was trained from the rounded base inherits it.

    Args:
        expert, base: W and W0, of one shape, finite.
    """
    if not expert.is_floating_point() or expert.numel() == 0:
        return 0.0
    rows, origin = as_rows(expert), as_rows(base)
    step = max(1, expert.numel() // SAMPLE)
    some, same = rows[::step], origin[::step]
    grid = storage_grid(some)
    parts = _parts(some, same)
    total = math.fsum(squared_norm(_spacing(w, grid).mul_(w != w0)) for w, w0 in parts) / 12
    return total * len(rows) / len(some)


def rounding_energy(tensor: Tensor, grid: torch.dtype) -> float:
    """Return g² = Σ ulp(w)²/12, the energy of the rounding of a whole tensor on a grid."""
    return math.fsum(squared_norm(_spacing(part, grid)) for (part,) in _parts(tensor)) / 12


def rounding_of_base(base: Tensor, *grids: torch.dtype) -> float:
    """Return r² = ‖round(W0) − W0‖² where W0 is saved on one grid after the other.

    Entries beyond the range of a grid are left out: no rounding leads from there to a number.
    """
    total = []
    for (part,) in _parts(base):
        saved = part
        for grid in grids:
            saved = saved.to(grid)
        error = saved.to(part.dtype).sub_(part)
        total.append(squared_norm(error.nan_to_num_(0.0, 0.0, 0.0)))
    return math.fsum(total)


def changed_share(expert: Tensor, base: Tensor, tau: float, size: float | None = None) -> float:
    """Return s, how far an expert counts as having changed a tensor, 0 to 1.

        s = clip((τ − 1.05 r²) / (0.1 g²), 0, 1)

    with the largest r² of all grids that the expert lies on, in any order (a base saved as float16
    and as bfloat16 later lies on both, and has both errors), and g² on the coarsest of them. It is
    0 for an expert that is the base, saved through any precision; nearly always 1 otherwise.

    Args:
        expert, base: W and W0, of one shape, finite.
        tau: τ = ‖W − W0‖².
        size: ‖W‖², if that is known.
    """
    if tau == 0 or not expert.is_floating_point():
        return float(tau > 0)
    size = squared_norm(as_rows(expert)) if size is None else size
    possible = [g for g in STORED if g == expert.dtype or _loses(expert.dtype, g)]
    moving = [grid for grid in possible if _loses(base.dtype, grid)]
    if tau > _largest_doubt(possible, moving, tau, size, expert.numel()):
        return 1.0
    grids = grids_of(expert)
    narrow = _coarser(grids, base)
    if tau > _largest_doubt(grids, narrow, tau, size, expert.numel()):
        return 1.0
    excess = tau - SAME * _largest_rounding(base, narrow)
    if excess <= 0:
        return 0.0
    full = FULL_CHANGE * rounding_energy(expert, grids[0])
    return excess / full if excess < full else 1.0


def _largest_doubt(
    grids: Sequence[torch.dtype],
    narrow: Sequence[torch.dtype],
    tau: float,
    size: float,
    entries: int,
) -> float:
    """Bound 1.05 r² + 0.1 g² by norms: no τ above it needs a look at the entries.

    2^⌊log₂|w|⌋ ≤ |w|; an error is at most half an ulp, and 3 ulp²/12 its square.

    Args:
        grids, narrow: those of the expert, and those of them that may move the base.
        tau, size: τ and ‖W‖².
        entries: of the tensor.
    """
    origin = (size**0.5 + tau**0.5) ** 2
    moved = sum(_most(grid, origin, entries) ** 0.5 for grid in narrow)
    return FULL_CHANGE * _most(grids[0], size, entries) + SAME * 3 * moved**2


def genuine_share(expert: Tensor, base: Tensor, tau: float) -> float:
    """Return 1 − r²/τ, the share of a change that is not the rounding of the expert, 0 to 1.

    It is exactly 1 where the base lies on the expert's grid.

    Args:
        expert, base, tau: see `changed_share`; τ > 0.
    """
    if not expert.is_floating_point():
        return 1.0
    return max(0.0, 1 - _largest_rounding(base, _coarser(grids_of(expert), base)) / tau)


def _coarser(grids: Sequence[torch.dtype], base: Tensor) -> list[torch.dtype]:
    """Return the grids that the base does not lie on."""
    return [grid for grid in grids if _loses(base.dtype, grid) and not _keeps(grid, base)]


def _largest_rounding(base: Tensor, grids: Sequence[torch.dtype]) -> float:
    """Return the largest r² that saving the base on some of the grids in any order leads to."""
    orders = (order for n in range(len(grids)) for order in permutations(grids, n + 1))
    return max((rounding_of_base(base, *order) for order in orders), default=0.0)


def _parts(*tensors: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """Iterate over blocks of rows of tensors of one shape, in float32, or float64 where they are.

    Blocks are copies: the caller may write to them.
    """
    rows = [as_rows(tensor) for tensor in tensors]
    types = [torch.promote_types(torch.float32, tensor.dtype) for tensor in tensors]
    for block in blocks(*rows[0].shape, tensors[0].device, entries=CHUNK):
        yield tuple(r[block].to(d, copy=True) for r, d in zip(rows, types, strict=True))


def _lower_halves(tensor: Tensor) -> Iterator[Tensor]:
    """Iterate over the lower 16 bits of the entries of a float32 tensor, in blocks."""
    rows = as_rows(tensor)
    for block in blocks(*rows.shape, tensor.device, entries=CHUNK):
        entries = rows[block].reshape(-1)
        if entries.stride(0) != 1:  # which contiguous() leaves to a single entry
            entries = entries.new_empty(len(entries)).copy_(entries)
        yield entries.view(torch.int16).view(-1, 2)[:, 0]


def _spacing(part: Tensor, grid: torch.dtype) -> Tensor:
    """Return ulp(w) of all entries on a grid, in their dtype; 0 or the smallest where w is 0."""
    integers, mask = EXPONENTS[part.dtype]
    limits = torch.finfo(grid)
    powers = part.view(integers).bitwise_and(mask).view(part.dtype)
    if limits.tiny > torch.finfo(part.dtype).tiny:  # below it numbers are evenly spaced
        powers.clamp_(min=limits.tiny)
    return powers.mul_(limits.eps)


def _keeps(grid: torch.dtype, tensor: Tensor) -> bool:
    if not _loses(tensor.dtype, grid):
        return False  # every number is on it, which says nothing of this tensor
    if (tensor.dtype, grid) == (torch.float32, torch.bfloat16):  # the lower halves are zero
        return not any(bool(halves.any()) for halves in _lower_halves(tensor))
    return all(torch.equal(part.to(grid).to(part.dtype), part) for (part,) in _parts(tensor))


def _needs(grid: torch.dtype, part: Tensor) -> bool:
    """Return whether an entry is an odd multiple of its ulp."""
    multiples = part.div(_spacing(part, grid)).nan_to_num_(0.0, 0.0, 0.0)
    return bool(multiples.remainder_(2).any())


def _loses(dtype: torch.dtype, grid: torch.dtype) -> bool:
    """Return whether a dtype has numbers that are not on a grid."""
    return torch.promote_types(dtype, grid) != grid


def _most(grid: torch.dtype, size: float, entries: int) -> float:
    """Bound Σ ulp(w)²/12 on a grid for so many entries with Σ w² = `size`."""
    limits = torch.finfo(grid)
    return (size * limits.eps**2 + entries * (limits.tiny * limits.eps) ** 2) / 12
