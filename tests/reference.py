# SPDX-License-Identifier: Apache-2.0
"""ACE-Merging line by line in float64, as slow and as plain as it gets: the judge of the package.

Explicit inverse, full SVD, one Gram matrix per expert. It shares no code with `mergekit_ace`.
By default it departs from the paper where the package does: γ counts only where log τ spreads, and
the refinement has the plain mean of the estimates. `heterogeneity="gamma"` and
`refinement_mean="ridged"` are the paper's. The ridge is raised with `floor` alone.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor


def naive_ace(
    base: Tensor,
    experts: list[Tensor],
    weight: list[float] | None = None,
    *,
    lambda_: float = 1.0,
    epsilon: float = 1e-5,
    epsilon_scale: str = "absolute",
    heterogeneity: str = "auto",
    heterogeneity_threshold: float = 0.3,
    adaptive_normalization: str = "auto",
    structural_prior: bool = True,
    spectral_refinement: str = "auto",
    rank_fraction: float = 0.3,
    refinement_mean: str = "plain",
    centred: bool = True,
    coefficients: list[float] | None = None,
    measured: list[Tensor] | None = None,
    mix: float = 0.0,
    floor: bool = False,
) -> Tensor:
    """The merged matrix, (o, i), in float64; every input (o, i), what was measured (i, i)."""
    *own, refinement = [1.0] * (len(experts) + 1) if coefficients is None else coefficients
    weight = [1.0] * len(experts) if weight is None else weight
    base = base.double()
    deltas = [expert.double() - base for expert in experts]
    kept = [t for t in range(len(experts)) if weight[t] > 0 and deltas[t].abs().max() > 0]
    if not kept:
        return base
    if len(kept) == 1:
        return base + lambda_ * own[kept[0]] * deltas[kept[0]]
    deltas, own = [deltas[t] for t in kept], [own[t] for t in kept]
    mean_weight = sum(weight[t] for t in kept) / len(kept)
    w = [weight[t] / mean_weight for t in kept]
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
        heterogeneous = heterogeneous and log_variance > 1
    normalize = {"auto": heterogeneous, "always": True, "never": False}[adaptive_normalization]
    refine = {"auto": heterogeneous, "always": True, "never": False}[spectral_refinement]

    used = [d - d.mean(dim=0, keepdim=True) if centred else d for d in deltas]
    gram = [c.T @ c for c in used]
    trace = [float(g.trace()) for g in gram]
    gram = with_measured(gram, measured and [measured[t] for t in kept], mix)
    s = [g / tr if normalize else g for g, tr in zip(gram, trace, strict=True)]
    if epsilon_scale == "relative":
        eps = [epsilon * float(x.trace()) / i for x in s]
    else:
        eps = [epsilon / tr if normalize else epsilon for tr in trace]
    s = [w_t * x for w_t, x in zip(w, s, strict=True)]
    eps = [w_t * e for w_t, e in zip(w, eps, strict=True)]
    if floor:
        raised = max(1.0, naive_spectral_ridge(sum(s)) / sum(eps))
        eps = [raised * e for e in eps]

    c = (ones.T @ sum(s)) / i
    if normalize:
        c = c / (sum(tau) / len(tau))
    ridged = [x + e * identity for x, e in zip(s, eps, strict=True)]
    inverse = torch.linalg.inv(sum(ridged) + (ones @ c if structural_prior else 0))
    x = sum(ct @ r for ct, r in zip(used, ridged, strict=True)) @ inverse
    literal = refinement_mean == "ridged"
    if structural_prior and not literal and (x * sum(deltas)).sum() < 0:  # departure: no prior
        inverse = torch.linalg.inv(sum(ridged))
        x = sum(ct @ r for ct, r in zip(used, ridged, strict=True)) @ inverse
    chosen = sum(a * ct @ r @ inverse for a, ct, r in zip(own, used, ridged, strict=True))
    k = int(rank_fraction * min(o, i))
    if refine and k > 0:
        mean_s = sum(ridged if literal else s) / len(s)
        residual = sum(delta @ (st - mean_s) for delta, st in zip(deltas, s, strict=True))
        u, sigma, vh = torch.linalg.svd(residual + x, full_matrices=False)
        component = sigma[:k].mean() * (u[:, :k] @ vh[:k])
        # departure, unless the paper's formula is asked for
        if literal or (component * sum(deltas)).sum() >= 0:
            chosen = chosen + refinement * component
    return base + lambda_ * chosen


def naive_relative(
    base: Tensor,
    experts: list[Tensor],
    weight: list[float] | None = None,
    *,
    lambda_: float = 1.0,
    epsilon: float = 0.03,
    centred: bool = False,
    structural_prior: bool = False,
    diagonal: bool = False,
    coefficients: list[float] | None = None,
    measured: list[Tensor] | None = None,
    mix: float = 0.0,
    floor: bool = False,
) -> Tensor:
    """`ace_relative` of one matrix, (o, i), in float64; `diagonal`: inputs are unit vectors."""
    weight = [1.0] * len(experts) if weight is None else weight
    own = [1.0] * len(experts) if coefficients is None else coefficients
    base = base.double()
    deltas = [expert.double() - base for expert in experts]
    given = zip(deltas, weight, own, measured or [None] * len(experts), strict=True)
    members = [each for each in given if each[1] > 0 and each[0].abs().max() > 0]
    if not members:
        return base
    if len(members) == 1:
        return base + lambda_ * members[0][2] * members[0][0]
    i = base.shape[1]
    identity = torch.eye(i, dtype=torch.float64)
    terms = []
    for delta, w, a, m in members:
        if centred:
            delta = delta - delta.mean(dim=0, keepdim=True)
        gram = delta.T @ delta
        if diagonal:
            gram = gram.diagonal().diag()
        (gram,) = with_measured([gram], None if m is None else [m], mix)
        gram = gram / gram.trace()
        error = delta @ (gram + epsilon / i * identity) @ delta.T
        terms.append((delta, w / float(error.trace()), a, gram))
    total = sum(w * gram for _, w, _, gram in terms)
    ridge = epsilon / i
    if floor:
        ridge = max(ridge, naive_spectral_ridge(total) / sum(w for _, w, _, _ in terms))
    numerator = sum(a * w * delta @ (gram + ridge * identity) for delta, w, a, gram in terms)
    system = sum(w * (gram + ridge * identity) for _, w, _, gram in terms)
    if structural_prior:
        ones = torch.ones(i, 1, dtype=torch.float64)
        system = system + ones @ (ones.T @ total) / i
    return base + lambda_ * numerator @ torch.linalg.inv(system)


def naive_spectral_ridge(total: Tensor) -> float:
    """Return the ridge in all that `ridge_floor` does not go below: 0.005 ‖S‖² / tr(S)."""
    values = torch.linalg.eigvalsh(total).clamp(min=0)
    return 0.005 * float(values.square().sum() / values.sum())


def with_measured(gram: list[Tensor], measured: list[Tensor] | None, mix: float) -> list[Tensor]:
    """(1 − mix) G + mix tr(G)/tr(M) M."""
    if measured is None:
        return gram
    pairs = zip(gram, (m.double() for m in measured), strict=True)
    return [(1 - mix) * g + mix * g.trace() / m.trace() * m for g, m in pairs]


def naive_relative_errors(merged: Tensor, deltas: list[Tensor], epsilon: float) -> list[float]:
    """‖(X − Δ_t) K_t^½‖² / ‖Δ_t K_t^½‖² per expert: 0 where it lost nothing, 1 where all."""
    errors = []
    for delta in deltas:
        gram = delta.T @ delta
        sigma = gram / gram.trace() + epsilon / len(gram) * torch.eye(len(gram), dtype=gram.dtype)
        missing = merged - delta
        lost, whole = (float((m @ sigma @ m.T).trace()) for m in (missing, delta))
        errors.append(lost / whole)
    return errors


def naive_table(base: Tensor, experts: list[Tensor], *arguments, **parameters) -> Tensor:
    """`ace_relative` of a table of rows, (n, d): a matrix (d, n) that multiplies unit vectors."""
    turned = [expert.T for expert in experts]
    return naive_relative(base.T, turned, *arguments, diagonal=True, **parameters).T


def naive_mean(
    base: Tensor, experts: list[Tensor], weight: list[float] | None = None, lambda_: float = 1.0
) -> Tensor:
    """The rule for everything that is not a matrix."""
    weight = [1.0] * len(experts) if weight is None else weight
    base = base.double()
    deltas = [expert.double() - base for expert in experts]
    kept = [t for t in range(len(experts)) if weight[t] > 0 and deltas[t].any()]
    if not kept:
        return base
    total = sum(weight[t] for t in kept)
    return base + lambda_ * sum(weight[t] * deltas[t] for t in kept) / total


def naive_tensor(
    base: Tensor, experts: list[Tensor], layout: str = "matrix", **parameters
) -> Tensor:
    """A whole stored tensor in float64, by its layout."""
    if layout == "mean":
        weight, scale = parameters.get("weight"), parameters.get("lambda_", 1.0)
        return naive_mean(base, experts, weight, scale)
    if layout == "transposed" and base.ndim == 2:
        return naive_ace(base.T, [e.T for e in experts], **parameters).T
    if layout == "flattened":
        flat = [t.reshape(t.shape[0], -1) for t in (base, *experts)]
        return naive_ace(flat[0], flat[1:], **parameters).reshape(base.shape)
    if layout in ("stacked", "transposed"):
        slices = [
            naive_tensor(
                base[n],
                [e[n] for e in experts],
                layout if layout == "transposed" or base.ndim > 3 else "matrix",
                **parameters,
            )
            for n in range(base.shape[0])
        ]
        return torch.stack(slices)
    return naive_ace(base, experts, **parameters)


def task_vector_error(merged: Tensor, expected: Tensor, base: Tensor) -> float:
    """Relative Frobenius error of the merged task vector."""
    reference = expected.double() - base.double()
    return float((merged.double() - expected.double()).norm() / reference.norm())
