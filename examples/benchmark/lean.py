# SPDX-License-Identifier: Apache-2.0
"""ACE-Merging of one matrix as lean as it can be written: no checks, no reports, no blocks.

All experts are in one tensor, Cholesky factors stand for inverses, and eigenvectors for singular
vectors. It shares no code with the package.
"""

from __future__ import annotations

import torch
from torch import Tensor


def lean_ace(
    base: Tensor,  # (o, i)
    experts: list[Tensor],  # each (o, i)
    *,
    heterogeneous: bool,
    epsilon: float = 1e-5,
    rank_fraction: float = 0.3,
) -> Tensor:
    """Return the merged matrix, (o, i), by Eqs. 5-19 with the branch given.

    Where all experts together have fewer rows than columns, the dual system is solved.
    """
    deltas = torch.stack(experts) - base
    means = deltas.mean(dim=1)
    centred = deltas - means[:, None]
    (count, rows, columns), traces = centred.shape, centred.square().sum(dim=(1, 2))
    scales = 1 / traces if heterogeneous else torch.ones_like(traces)
    ridges, ridge = epsilon * scales, epsilon * scales.sum()
    stack = (centred * scales.sqrt()[:, None, None]).reshape(-1, columns)
    if len(stack) < columns:
        gram = stack @ stack.T
        bands = gram.view(count, rows, -1) / scales.sqrt()[:, None, None]
        own = torch.cat([bands[t, :, t * rows : (t + 1) * rows] for t in range(count)], dim=1)
        shares = ridges / ridge
        gram.diagonal().add_(ridge)
        lower = torch.linalg.cholesky(gram)
        mixed = own - torch.einsum("t,tij->ij", shares, bands)
        merged = torch.cholesky_solve(mixed.T, lower).T @ stack
        merged = merged + torch.einsum("t,tij->ij", shares, centred)
        prior = torch.cholesky_solve(stack.sum(dim=1, keepdim=True), lower).T @ stack / columns
        residual = (own - bands.mean(dim=0)) @ stack
    else:
        covariances = centred.mT @ centred * scales[:, None, None]
        system, numerator = covariances.sum(dim=0), (centred @ covariances).sum(dim=0)
        residual = numerator - centred.mean(dim=0) @ system
        numerator = numerator + torch.einsum("t,tij->ij", ridges, centred)
        prior = system.mean(dim=0, keepdim=True)
        system.diagonal().add_(ridge)
        lower = torch.linalg.cholesky(system)
        merged = torch.cholesky_solve(numerator.T, lower).T
        prior = torch.cholesky_solve(prior.T, lower).T
    if heterogeneous:
        prior = prior / deltas.square().sum(dim=(1, 2)).mean()
    merged = merged - merged.sum(dim=1, keepdim=True) * prior / (1 + prior.sum())
    if heterogeneous:
        residual = residual - ridge * deltas.mean(dim=0)
        moved = (centred @ (means - means.mean(dim=0))[:, :, None]) * scales[:, None, None]
        target = residual + (moved.mT @ centred).sum(dim=0) + merged
        wide = target if rows <= columns else target.T
        values, vectors = torch.linalg.eigh((wide @ wide.T).double())
        rank = int(rank_fraction * len(wide))
        sigma, vectors = values[-rank:].clamp(min=1e-30).sqrt(), vectors[:, -rank:]
        turned = (vectors * (sigma.mean() / sigma)).to(wide.dtype)
        component = turned @ (vectors.to(wide.dtype).T @ wide)
        merged = merged + (component if rows <= columns else component.T)
    return base + merged
