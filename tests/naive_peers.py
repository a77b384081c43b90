# SPDX-License-Identifier: Apache-2.0
"""The peers line by line in float64, by full decompositions: what judges `methods.peers`.

Every function takes task vectors, (o, i), and returns the merged one. It shares no code with
`mergekit_ace`. Directions below 1e-9 of the largest are rounding errors, not directions.
"""

from __future__ import annotations

import torch
from torch import Tensor


def svd(matrix: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    u, s, vh = torch.linalg.svd(matrix.double(), full_matrices=False)
    kept = s > 1e-9 * s.max()
    return u[:, kept], s[kept], vh[kept]


def polar(columns: Tensor) -> Tensor:
    u, _, vh = svd(columns)
    return u @ vh


def naive_tsv_m(deltas: list[Tensor], own: list[float] | None = None) -> Tensor:
    rank = max(1, min(deltas[0].shape) // len(deltas))
    us, ss, vs = [], [], []
    for delta, coefficient in zip(deltas, own or [1.0] * len(deltas), strict=True):
        u, s, vh = svd(delta)
        us.append(u[:, :rank])
        ss.append(coefficient * s[:rank])
        vs.append(vh[:rank].T)
    u, s, v = polar(torch.cat(us, dim=1)), torch.cat(ss), polar(torch.cat(vs, dim=1))
    return u @ torch.diag(s) @ v.T


def naive_iso_c(deltas: list[Tensor]) -> Tensor:
    u, s, vh = svd(sum(d.double() for d in deltas))
    return s.sum() / min(deltas[0].shape) * (u @ vh)


def naive_iso_cts(deltas: list[Tensor], common: float = 0.8) -> Tensor:
    full, count = min(deltas[0].shape), len(deltas)
    common_size = int(full * common)
    each = round((full - common_size) / count)
    each = min(each, full // count)
    common_size = full - each * count
    u, s, vh = svd(sum(d.double() for d in deltas))
    u, s, vh = u[:, :common_size], s[:common_size], vh[:common_size]
    us, ss, vs = [u], [s], [vh.T]
    for delta in deltas if each else []:
        own = delta.double() - u @ u.T @ delta.double()
        if own.norm() <= 1e-9 * delta.norm():
            continue
        ut, st, vt = svd(own)
        us.append(ut[:, :each])
        ss.append(st[:each])
        vs.append(vt[:each].T)
    mean = torch.cat(ss).sum() / full
    return mean * (polar(torch.cat(us, dim=1)) @ polar(torch.cat(vs, dim=1)).T)


def wudi_loss(x: Tensor, deltas: list[Tensor]) -> Tensor:
    return sum(((x - d) @ d.T).square().sum() / d.square().sum() for d in deltas)


def naive_wudi_exact(deltas: list[Tensor]) -> Tensor:
    """By least squares: rows of X solve X Δ_tᵀ/‖Δ_t‖ = Δ_tΔ_tᵀ/‖Δ_t‖ for all t at once."""
    return least_squares([d.double() for d in deltas], [d.double().norm() for d in deltas])


def naive_actmat(deltas: list[Tensor]) -> Tensor:
    """By least squares, like WUDI with no ‖Δ_t‖."""
    return least_squares([d.double() for d in deltas], [1.0] * len(deltas))


def least_squares(deltas: list[Tensor], units: list) -> Tensor:
    left = torch.cat([d / unit for d, unit in zip(deltas, units, strict=True)])
    right = torch.cat([d @ d.T / unit for d, unit in zip(deltas, units, strict=True)])
    return torch.linalg.lstsq(left, right, driver="gelsd").solution.T


def naive_wudi_adam(deltas: list[Tensor], steps: int, learning_rate: float) -> Tensor:
    deltas = [d.double() for d in deltas]
    x = sum(deltas).clone().requires_grad_()
    optimizer = torch.optim.Adam([x], lr=learning_rate)
    for _ in range(steps):
        optimizer.zero_grad()
        wudi_loss(x, deltas).backward()
        optimizer.step()
    return x.detach()


def naive_cart(deltas: list[Tensor], fraction: float = 0.08) -> Tensor:
    deltas = [d.double() for d in deltas]
    mean = sum(deltas) / len(deltas)
    rank = max(1, int(fraction * min(mean.shape)))
    rest = torch.zeros_like(mean)
    for delta in deltas:
        u, s, vh = svd(delta - mean)
        rest += u[:, :rank] @ torch.diag(s[:rank]) @ vh[:rank]
    return mean + rest


def naive_regmean(
    deltas: list[Tensor],
    covariances: list[Tensor],
    weights: list[float],
    off_diagonal: float = 0.9,
    epsilon: float = 1e-6,
) -> Tensor:
    size = deltas[0].shape[1]
    numerator = torch.zeros_like(deltas[0], dtype=torch.float64)
    system = torch.zeros(size, size, dtype=torch.float64)
    for delta, covariance, weight in zip(deltas, covariances, weights, strict=True):
        c = covariance.double()
        c = off_diagonal * c + (1 - off_diagonal) * torch.diag(torch.diag(c))
        c = weight * (c + epsilon * c.trace() / size * torch.eye(size, dtype=torch.float64))
        numerator += delta.double() @ c
        system += c
    return numerator @ torch.linalg.inv(system)


def naive_fisher(
    deltas: list[Tensor], fisher: list[Tensor], weights: list[float], floor: float = 1e-6
) -> Tensor:
    level = floor * torch.stack(fisher).double().mean()
    shares = [w * (f.double() + level) for f, w in zip(fisher, weights, strict=True)]
    return sum(s * d.double() for s, d in zip(shares, deltas, strict=True)) / sum(shares)


def naive_consensus(deltas: list[Tensor], mask_threshold: float = 0.4, least: int = 2) -> Tensor:
    deltas = [d.double() for d in deltas]
    total = sum(deltas)
    votes = sum((d.abs() > mask_threshold * (total - d).abs()).int() for d in deltas)
    return total * (votes >= least)
