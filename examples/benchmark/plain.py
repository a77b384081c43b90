# SPDX-License-Identifier: Apache-2.0
"""Merge methods as their formulas are written down: what a fast merge is compared with.

ACE-Merging by one Gram matrix per task, an explicit inverse, a full singular value decomposition,
every matrix kept in the dtype of the weights; the methods that it is compared with by full
decompositions in float64. It shares no code with the package.
"""

from __future__ import annotations

from collections.abc import Callable

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


def plain_tsv_m(deltas: list[Tensor]) -> Tensor:
    """Return TSV-Merge of task vectors, (o, i) each: two whitened concatenations."""
    rank = max(1, min(deltas[0].shape) // len(deltas))
    left, sigma, right = _joined([_decompose(delta, rank) for delta in deltas])
    return _polar(left) @ sigma.diag() @ _polar(right)


def plain_iso_c(deltas: list[Tensor]) -> Tensor:
    """Return Iso-C: the sum with equal singular values."""
    left, sigma, right = _decompose(sum(deltas))
    return sigma.mean() * (left @ right)


def plain_iso_cts(deltas: list[Tensor], common_fraction: float = 0.8) -> Tensor:
    """Return Iso-CTS: common directions and some of each task, with equal singular values."""
    full = min(deltas[0].shape)
    each = round((full - int(common_fraction * full)) / len(deltas))
    common = _decompose(sum(deltas), full - each * len(deltas))
    outside = [delta - common[0] @ (common[0].T @ delta) for delta in deltas]
    left, sigma, right = _joined([common, *(_decompose(part, each) for part in outside)])
    return sigma.mean() * (_polar(left) @ _polar(right))


def plain_cart(deltas: list[Tensor], rank_fraction: float = 0.08) -> Tensor:
    """Return CART: the average, and what is left of each task at low rank."""
    mean = sum(deltas) / len(deltas)
    parts = [_decompose(d - mean, int(rank_fraction * min(mean.shape))) for d in deltas]
    return mean + sum(left @ sigma.diag() @ right for left, sigma, right in parts)


def plain_wudi(deltas: list[Tensor]) -> Tensor:
    """Return the minimiser of WUDI-Merging's loss, by a pseudo-inverse."""
    estimates = [delta.T @ delta / delta.square().sum() for delta in deltas]
    numerator = sum(delta @ s for delta, s in zip(deltas, estimates, strict=True))
    return numerator @ torch.linalg.pinv(sum(estimates))


# Of task vectors in float64.
PLAIN_PEERS: dict[str, Callable[[list[Tensor]], Tensor]] = {
    "tsv_m": plain_tsv_m,
    "iso_c": plain_iso_c,
    "iso_cts": plain_iso_cts,
    "cart": plain_cart,
    "wudi (exact)": plain_wudi,
}

Triplets = tuple[Tensor, Tensor, Tensor]


def _decompose(matrix: Tensor, rank: int | None = None) -> Triplets:
    left, sigma, right = torch.linalg.svd(matrix, full_matrices=False)
    return left[:, :rank], sigma[:rank], right[:rank]


def _joined(parts: list[Triplets]) -> Triplets:
    left, sigma, right = zip(*parts, strict=True)
    return torch.cat(left, dim=1), torch.cat(sigma), torch.cat(right)


def _polar(matrix: Tensor) -> Tensor:
    left, _, right = torch.linalg.svd(matrix, full_matrices=False)
    return left @ right
