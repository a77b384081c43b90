# SPDX-License-Identifier: Apache-2.0
"""ACE-Merging as its formulas are written down: what a fast merge is compared with.

One Gram matrix per task, an explicit inverse, a full singular value decomposition, every matrix
kept in the dtype of the weights. It shares no code with the package.
"""

from __future__ import annotations

import torch
from torch import Tensor


def plain_ace(
    base: Tensor,  # (o, i)
    experts: list[Tensor],  # each (o, i)
    *,
    heterogeneous: bool,
    epsilon: float = 1e-5,
    rank_fraction: float = 0.3,
) -> Tensor:
    """Return the merged matrix, (o, i), by Eqs. 5-19 with the branch given.

    The mean of the refinement is the plain one, without ridges, as by default of the package.
    """
    deltas = [expert - base for expert in experts]
    centred = [delta - delta.mean(dim=0) for delta in deltas]
    identity = torch.eye(base.shape[1], dtype=base.dtype, device=base.device)
    covariances, ridged = [], []
    for matrix in centred:
        gram = matrix.T @ matrix
        trace = gram.trace() if heterogeneous else 1.0
        covariances.append(gram / trace if heterogeneous else gram)
        ridged.append(covariances[-1] + epsilon / trace * identity)
    prior = sum(covariances).mean(dim=0)
    if heterogeneous:
        prior = prior / torch.stack([delta.square().sum() for delta in deltas]).mean()
    numerator = sum(c @ s for c, s in zip(centred, ridged, strict=True))
    merged = numerator @ torch.linalg.inv(sum(ridged) + prior)
    if heterogeneous:
        mean = sum(covariances) / len(covariances)
        residual = sum(d @ (s - mean) for d, s in zip(deltas, covariances, strict=True))
        left, sigma, right = torch.linalg.svd(residual + merged, full_matrices=False)
        rank = int(rank_fraction * min(base.shape))
        merged = merged + sigma[:rank].mean() * (left[:, :rank] @ right[:rank])
    return base + merged
