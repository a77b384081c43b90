# SPDX-License-Identifier: Apache-2.0
"""From the closed form without its prior to the merge X and the target F of its refinement.

What the (i, i) forms solve for is Y − C_r with Y = Σ_t C_t (S_t + ε_t I) A⁻¹. All else follows:

    X = Y − (Y 1) qᵀ,        qᵀ = cᵀA⁻¹ / (1 + cᵀA⁻¹1)        (see `prior_row`)
    R = Σ_t Δ_t (S_t − S̄) = (Y − C̄) A − Σ_t ε_t C_t + 1 aᵀ,   F = R + X
    a = Σ_t S_t μ_t − A μ̄ = Σ_{t≠r} S_t (μ_t − μ_r) + S (μ_r − μ̄) − ε̄ μ̄

with C̄ and μ̄ the means over the T tasks. Since Y A is the numerator of Eq. 14, the residual takes
one product whatever T is, and what a weak direction of A magnified in Y, A makes small again.
"""

from __future__ import annotations

import torch
from torch import Tensor

from mergekit_ace.algebra.blocks import blocks
from mergekit_ace.algebra.covariance import Covariances
from mergekit_ace.algebra.products import add_product_


def complete_(
    covariances: Covariances,
    merged: Tensor,
    prior: Tensor | None,
    residual: tuple[Tensor, Tensor] | None,
) -> Tensor | None:
    """X in the place of Y − C_r, in blocks of rows, and F.

    Args:
        covariances: the estimates.
        merged: Y − C_r, (o, i); overwritten by X.
        prior: q, (i,); None without a structural prior.
        residual: A, (i, i), and a, (i,); None where F is not wanted.

    Returns:
        F, (o, i), where it is wanted.
    """
    count = len(covariances.tasks)
    target = None if residual is None else torch.empty_like(merged)
    for block in blocks(*merged.shape):
        part = merged[block]
        first = covariances.reference_block(block)
        if target is not None and residual is not None:
            system, row = residual
            beyond = covariances.buffer("beyond", *part.shape).copy_(part)  # Y − C̄
            rest = torch.sub(row, first, alpha=covariances.ridge, out=target[block])
            for task in covariances.others:
                moved = covariances.difference(task, block, first)
                beyond.sub_(moved, alpha=1 / count)
                rest.sub_(moved, alpha=task.ridge)
            add_product_(rest, beyond, system.mT)  # the same; oneDNN needs fewer copies so
        part.add_(first)
        if prior is not None:
            part.addr_(part.sum(dim=1), prior, alpha=-1)
        if target is not None:
            target[block].mul_(covariances.covariance_unit).add_(part)
    return target


def residual_row(covariances: Covariances, system: Tensor, turned: Tensor) -> Tensor:
    """a, (i,), from A and Σ_{t≠r} S_t (μ_t − μ_r).

    A (μ_r − μ̄) has ε̄ μ_r where S (μ_r − μ̄) − ε̄ μ̄ has none.
    """
    mean, reference = covariances.mean, covariances.reference_task.mean
    return turned + system @ (reference - mean) - covariances.ridge * reference
