# SPDX-License-Identifier: Apache-2.0
"""`ace_plus`: what is added to ACE's regression of matrices other than embeddings.

A compromise between experts leaves many directions of X = U diag(σ) Vᵀ weak. Where experts are
unlike, F = U diag(σ / (σ² + c)) Vᵀ strengthens these, and X keeps its size.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import reduce
from itertools import combinations

import torch
from torch import Tensor

from mergekit_ace.algebra.linalg import as_vector, factorize, product, solve

# ‖F‖ / ‖X‖ where experts have nothing in common, and c in units of ‖XXᵀ‖² / tr(XXᵀ), a mean of σ²
# that is weighted by σ².
FLATTENING = (0.7, 0.005)
# Of adapters, for each other expert. The strongest direction of an adapter answers to inputs of any
# task, so that the sum of these is what makes a merge forget.
FLATTENING_OF_ADAPTERS = (0.7, 0.05)


def flatten_spectrum(
    whole: Tensor,
    part: Tensor,
    unlikeness: Tensor,
    turned: bool,
    flattening: tuple[float, float],
) -> Tensor:
    """Return what takes the place of X, (o, i), or of a part of it: what parts give adds up.

    Of X it is X / ‖X‖ + f α F / ‖F‖ in the size of X, with F = X (XᵀX + c I)⁻¹ and α, how unlike
    experts are; `flattening` is f, and c as a share. `turned` puts (XXᵀ + c I)⁻¹ on the other side,
    which of a part is not the same.
    """
    strength, ridge = flattening
    size = _nonzero(torch.linalg.vector_norm(whole))
    unit = (whole.mT if turned else whole) / size
    square = product(unit.mT, unit)
    square.diagonal().add_(_nonzero(ridge * torch.linalg.vector_norm(square).square()))
    lower, _ = factorize(square)
    flat = solve(unit.clone(memory_format=torch.contiguous_format), lower)
    share = strength * unlikeness / _nonzero(torch.linalg.vector_norm(flat))
    scale = size / _nonzero(torch.linalg.vector_norm(flat.mul_(share).add_(unit)))
    if part is not whole:
        own = (part.mT if turned else part).div(size).contiguous()
        flat = solve(own.clone(), lower).mul_(share).add_(own)
    flat.mul_(scale)
    return flat.mT if turned else flat


def _nonzero(number: Tensor) -> Tensor:
    """Return a number, or 1 for 0: experts may cancel one another to the last bit."""
    return torch.where(number > 0, number, 1.0)


def measure_unlikeness(
    stacks: Iterable[Tensor], tau: Sequence[float], weights: Sequence[float]
) -> Tensor:
    """Return 1 minus the weighted mean cosine of pairs of experts, kept from 0 to 1.

    The task vectors, (T, m, i), are given by blocks of their rows.
    """
    flat = (stack.flatten(1) for stack in stacks)
    cosines = reduce(Tensor.add_, (product(rows, rows.mT) for rows in flat)).fill_diagonal_(0)
    shares = as_vector([w / t**0.5 for w, t in zip(weights, tau, strict=True)], cosines)
    cosines = cosines * shares * shares[:, None]  # one by one: their product may be out of range
    total = 2 * sum(a * b for a, b in combinations(weights, 2)) or 1.0
    return 1 - (cosines.sum() / total).clamp(0, 1)
