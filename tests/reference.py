# SPDX-License-Identifier: Apache-2.0
"""ACE-Merging line by line in float64, as slow and as plain as it gets: the judge of the package.

Explicit inverse, full SVD, one Gram matrix per expert. It shares no code with `mergekit_ace`.
By default it departs from the paper where the package does: γ counts only where log τ spreads, and
the refinement has the plain mean of the estimates. `heterogeneity="gamma"` and
`refinement_mean="ridged"` are the paper's.
"""

from __future__ import annotations

import math

import torch
from naive_peers import naive_tsv_m
from torch import Tensor


def in_use(
    base: Tensor, experts: list[Tensor], weight: list[float] | None
) -> tuple[list[int], list[Tensor], list[float]]:
    """Numbers of the experts that count, their task vectors, and their weights, of mean 1."""
    weight = [1.0] * len(experts) if weight is None else weight
    deltas = [expert.double() - base.double() for expert in experts]
    kept = [t for t in range(len(experts)) if weight[t] > 0 and deltas[t].any()]
    mean = sum(weight[t] for t in kept) / max(1, len(kept))
    return kept, [deltas[t] for t in kept], [weight[t] / mean for t in kept]


def naive_ace(
    base: Tensor,
    experts: list[Tensor],
    weight: list[float] | None = None,
    *,
    lambda_: float = 1.0,
    epsilon: float | None = None,
    epsilon_scale: str = "spectrum",
    heterogeneity: str = "auto",
    heterogeneity_threshold: float = 0.3,
    adaptive_normalization: str = "auto",
    structural_prior: bool = True,
    spectral_refinement: str = "auto",
    rank_fraction: float = 0.3,
    refinement_mean: str = "plain",
    centred: bool = True,  # False only of `ace_plus`
    coefficients: list[float] | None = None,
    measured: list[Tensor] | None = None,
    mix: float = 0.0,
) -> Tensor:
    """The merged matrix, (o, i), in float64; every input (o, i), what was measured (i, i)."""
    *own, refinement = [1.0] * (len(experts) + 1) if coefficients is None else coefficients
    kept, deltas, w = in_use(base, experts, weight)
    base, own = base.double(), [own[t] for t in kept]
    if len(kept) < 2:
        return base + lambda_ * sum(a * delta for a, delta in zip(own, deltas, strict=True))
    o, i = base.shape
    identity = torch.eye(i, dtype=torch.float64)
    ones = torch.ones(i, 1, dtype=torch.float64)

    tau = [float((delta**2).sum()) for delta in deltas]
    logs = [math.log(value) for value in tau]
    mean_log = sum(logs) / len(logs)
    log_variance = sum((v - mean_log) ** 2 for v in logs) / (len(logs) - 1)
    gamma = log_variance / mean_log**2
    statistic = log_variance if heterogeneity == "log_variance" else gamma
    heterogeneous = statistic > heterogeneity_threshold
    if heterogeneity == "auto":
        heterogeneous = log_variance > 1
    normalize = {"auto": heterogeneous, "always": True, "never": False}[adaptive_normalization]
    refine = {"auto": heterogeneous, "always": True, "never": False}[spectral_refinement]

    used = [d - d.mean(dim=0, keepdim=True) if centred else d for d in deltas]
    gram = [c.T @ c for c in used]
    trace = [float(g.trace()) for g in gram]
    gram = with_measured(gram, measured and [measured[t] for t in kept], mix)
    s = [g / tr if normalize else g for g, tr in zip(gram, trace, strict=True)]
    s = [w_t * x for w_t, x in zip(w, s, strict=True)]
    eps = naive_ridges(s, w, trace if normalize else [1.0] * len(s), epsilon, epsilon_scale)

    c = (ones.T @ sum(s)) / i
    if normalize:
        c = c / (sum(tau) / len(tau))
    for _ in range(2):
        ridged = [x + e * identity for x, e in zip(s, eps, strict=True)]
        inverse = torch.linalg.inv(sum(ridged) + (ones @ c if structural_prior else 0))
        x = sum(ct @ r for ct, r in zip(used, ridged, strict=True)) @ inverse
        total = sum(w_t / max(w) * t for w_t, t in zip(w, tau, strict=True))
        excess = float(x.square().sum()) / total / 0.95
        if epsilon_scale != "spectrum" or excess <= 1:
            break
        numbers = torch.tensor([logs, w], dtype=torch.float64)
        spread = float(torch.cov(numbers[0], aweights=numbers[1]))
        eps = [e * excess ** (2 * min(1, max(0, 2 * spread - 1))) for e in eps]
    chosen = sum(a * ct @ r @ inverse for a, ct, r in zip(own, used, ridged, strict=True))
    k = int(rank_fraction * min(o, i))
    if refine and k > 0:
        mean_s = sum(ridged if refinement_mean == "ridged" else s) / len(s)
        residual = sum(delta @ (st - mean_s) for delta, st in zip(deltas, s, strict=True))
        u, sigma, vh = torch.linalg.svd(residual + x, full_matrices=False)
        component = sigma[:k].mean() * (u[:, :k] @ vh[:k])
        refined = x + component
        if refinement_mean == "plain":
            refined = refined * x.norm() / refined.norm()
        if refinement_mean == "ridged" or (component * sum(deltas)).sum() >= 0:
            chosen = chosen + refinement * (refined - x)
    return base + lambda_ * chosen


PLUS = {"adaptive_normalization": "always", "spectral_refinement": "never"}
PLUS |= {"centred": False, "structural_prior": False}


def naive_ridges(
    s: list[Tensor], w: list[float], trace: list[float], epsilon: float | None, scale: str
) -> list[float]:
    """ε_t of every expert: w_t shares of 0.01 ‖S‖² / tr(S), or as the paper has them."""
    if scale == "spectrum":
        values = torch.linalg.eigvalsh(sum(s)).clamp(min=0)
        whole = (0.01 if epsilon is None else epsilon) * values.square().sum() / values.sum()
        return [float(whole) * w_t / sum(w) for w_t in w]
    epsilon = 1e-5 if epsilon is None else epsilon
    if scale == "relative":
        return [epsilon * float(x.trace()) / len(x) for x in s]
    return [w_t * epsilon / tr for w_t, tr in zip(w, trace, strict=True)]


def with_measured(gram: list[Tensor], measured: list[Tensor] | None, mix: float) -> list[Tensor]:
    """(1 − mix) G + mix tr(G)/tr(M) M."""
    if measured is None:
        return gram
    pairs = zip(gram, (m.double() for m in measured), strict=True)
    return [(1 - mix) * g + mix * g.trace() / m.trace() * m for g, m in pairs]


def naive_table(
    base: Tensor, experts: list[Tensor], weight: list[float] | None, own: list[float]
) -> Tensor:
    """The mean of each row of the task vectors of a table, (n, d), by who has moved it."""
    kept, deltas, w = in_use(base, experts, weight)
    merged = torch.zeros_like(base, dtype=torch.float64)
    for v in range(len(base)):
        asked = []
        for delta, weight_of in zip(deltas, w, strict=True):
            share = delta[v].square().sum() / delta.square().sum()
            asked.append(weight_of * (share + 0.01 / len(base)))
        parts = zip(kept, deltas, asked, strict=True)
        merged[v] += sum(own[t] * a * delta[v] for t, delta, a in parts) / sum(asked)
    return merged


def naive_plus(
    base: Tensor,
    experts: list[Tensor],
    weight: list[float] | None = None,
    *,
    lambda_: float = 1.0,
    coefficients: list[float] | None = None,
    table: bool = False,
    flattening: tuple[float, float] = (0.7, 0.005),
    **known,
) -> Tensor:
    """`ace_plus` of one matrix, (o, i): a regression with a flatter spectrum; or of embeddings."""
    kept, deltas, w = in_use(base, experts, weight)
    base, own = base.double(), [1.0] * len(experts) if coefficients is None else coefficients
    whole = naive_ace(base, experts, weight, **PLUS, **known) - base
    part = naive_ace(base, experts, weight, coefficients=[*own, 1.0], **PLUS, **known) - base
    if table or max(base.shape) > 8 * min(base.shape):
        part = naive_table(base, experts, weight, own) if table else part
        strengths = [own[t] * one / max(w) for t, one in zip(kept, w, strict=True)]
        total = 0.72 * part + 0.28 * naive_tsv_m(deltas, strengths)
        return base + lambda_ * total
    pairs = [(s, t) for s in range(len(kept)) for t in range(s)]
    units = [delta / delta.norm() for delta in deltas]
    cosines = [w[s] * w[t] * float((units[s] * units[t]).sum()) for s, t in pairs]
    unlike = 1 - min(1, max(0, sum(cosines) / sum(w[s] * w[t] for s, t in pairs)))
    strength = flattening[0] * min(1, sum(w) / max(w) - 1)
    return base + lambda_ * naive_flattened(whole, part, unlike, strength, flattening[1])


def naive_flattened(
    whole: Tensor, part: Tensor, unlike: float = 1.0, strength: float = 0.7, ridge: float = 0.005
) -> Tensor:
    """X / ‖X‖ + f α F / ‖F‖ in the size of X, and what is as linear in a part of it."""
    turned = whole.shape[0] >= whole.shape[1]
    whole, part = (whole.T, part.T) if turned else (whole, part)
    left, values, _ = torch.linalg.svd(whole, full_matrices=False)
    factors = 1 / (values**2 + ridge * (values**4).sum() / (values**2).sum())
    share = strength * unlike * whole.norm() / (values * factors).norm()
    found = part + share * (left * factors) @ left.T @ part
    flat = values + share * values * factors
    found = found * whole.norm() / flat.norm()
    return found.T if turned else found


def naive_mean(
    base: Tensor, experts: list[Tensor], weight: list[float] | None = None, lambda_: float = 1.0
) -> Tensor:
    """The rule for everything that is not a matrix."""
    _, deltas, w = in_use(base, experts, weight)
    parts = sum(a * delta for a, delta in zip(w, deltas, strict=True))
    return base.double() + lambda_ * parts / max(1, len(deltas))


def naive_tensor(
    base: Tensor, experts: list[Tensor], layout: str = "matrix", naive=naive_ace, **parameters
) -> Tensor:
    """A whole stored tensor in float64, by its layout."""
    if layout == "mean":
        weight, scale = parameters.get("weight"), parameters.get("lambda_", 1.0)
        return naive_mean(base, experts, weight, scale)
    turned = [t.mT if layout == "transposed" else t for t in (base, *experts)]
    if layout == "flattened":
        turned = [t.flatten(start_dim=1) for t in turned]
    stacks = [t.reshape(-1, *t.shape[-2:]) for t in turned]
    parts = [naive(own[0], list(own[1:]), **parameters) for own in zip(*stacks, strict=True)]
    merged = torch.stack(parts).reshape(turned[0].shape)
    return (merged.mT if layout == "transposed" else merged).reshape(base.shape)


def task_vector_error(merged: Tensor, expected: Tensor, base: Tensor) -> float:
    """Relative Frobenius error of the merged task vector."""
    reference = expected.double() - base.double()
    return float((merged.double() - expected.double()).norm() / reference.norm())
