# SPDX-License-Identifier: Apache-2.0
"""ACE's ridge regression with the sum of *relative* errors as its objective; ours, not the paper's.

The merge minimises Σ_t ‖(X − Δ_t) K_t^½‖² / ‖Δ_t K_t^½‖² with K_t = G_t / tr(G_t) + (ε/i) I,
G_t = Δ_tᵀΔ_t: what it costs every task, as a share of what its fine-tuning had changed. In closed
form

    X = (Σ_t w_t Δ_t K_t)(Σ_t w_t K_t)⁻¹,   w_t = 1 / tr(Δ_t K_t Δ_tᵀ) = 1 / (‖G_t‖²/τ_t + ε τ_t/i),

which is Eq. 14 of ACE-Merging with s_t = w_t / τ_t and ε_t = w_t ε / i: every form of its solve
serves. It has no γ and no branch, ε has no unit, and scaling all weights scales X.

A table whose rows are looked up, such as token embeddings, is a special case. Looking up row v
multiplies the table, read as (d, n), by the v-th unit vector. So the covariance of its inputs is
diagonal, whatever the task: how often each row is asked for. Of ACE's estimate, here Δ_tΔ_tᵀ with
Δ_t stored (n, d), only the diagonal is left, c_tv = ‖Δ_t[v]‖² / τ_t + ε/n, and the merge that
minimises Σ_t Σ_v c_tv ‖X[v] − Δ_t[v]‖² / Σ_v c_tv ‖Δ_t[v]‖² is a mean row by row:

    X[v] = Σ_t w_t c_tv Δ_t[v] / Σ_t w_t c_tv,   w_t = 1 / Σ_v c_tv ‖Δ_t[v]‖².

A token that one expert alone has moved comes out as that expert has it. Ours, not the paper's,
which reads embeddings as any other matrix.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Literal

import torch
from pydantic import BaseModel, ConfigDict, Field
from torch import Tensor

from mergekit_ace.algebra.closed_form import merge_by_ridge
from mergekit_ace.algebra.covariance import (
    LEAST_RIDGE,
    Covariances,
    Task,
    centred_trace,
    choose_reference,
    choose_unit,
)
from mergekit_ace.algebra.forms import Attempt
from mergekit_ace.algebra.layouts import resolve_layout
from mergekit_ace.algebra.linalg import add_gram, blocks, full_precision
from mergekit_ace.algebra.low_rank import CoreSpace
from mergekit_ace.algebra.measured import MeasuredCovariance, MeasuredInputs
from mergekit_ace.algebra.records import (
    RIDGE_FLOOR,
    Factor,
    MatrixRecord,
    Observer,
    RelativeLayout,
    Ridge,
    TensorRecord,
)
from mergekit_ace.algebra.rounding_noise import genuine_share
from mergekit_ace.algebra.task_vectors import (
    ActiveExperts,
    by_layout,
    check_versions,
    select_active,
    squared_norm,
)


class RelativeOptions(BaseModel):
    """What may be chosen per tensor; see `AceOptions`."""

    model_config = ConfigDict(frozen=True, extra="forbid", populate_by_name=True)

    scale: Factor = Field(1.0, alias="lambda", description="Scale λ; the result is W0 + λ X.")
    epsilon: Ridge = Field(
        0.03,
        description="Least ridge ε, in mean eigenvalues of a task's covariance estimate G_t; "
        "`ridge_floor` raises it.",
    )
    ridge_floor: bool = RIDGE_FLOOR
    centred: bool = Field(
        False,
        description="Whether column means are taken out of Δ_t and G_t, as ACE does; not of "
        "tables.",
    )
    structural_prior: bool = Field(
        False, description="Whether ACE's rank-one prior enters (Eqs. 11-13); not for tables."
    )
    compute_dtype: Literal["float32", "float64"] = Field(
        "float32", description="The dtype of task vectors, unless the tensors are wider."
    )

    @property
    def dtype(self) -> torch.dtype:
        """``compute_dtype`` as torch's."""
        return torch.float64 if self.compute_dtype == "float64" else torch.float32


def merge_tensor_relative(
    base: Tensor,
    experts: Sequence[Tensor],
    weights: Sequence[float] | None = None,
    options: RelativeOptions | None = None,
    layout: RelativeLayout = "auto",
    coefficients: Sequence[float] | None = None,
    *,
    least_memory: bool = False,
    observe: Observer | None = None,
    attempts: Sequence[Attempt] | None = None,
    space: CoreSpace | None = None,
    measured: MeasuredInputs | None = None,
) -> tuple[Tensor, TensorRecord]:
    """Merge the versions of one stored tensor; arguments and result as of `merge_tensor`.

    There is no refinement, and so there are T coefficients. With layout ``table`` it is one whose
    rows are looked up, as embeddings are: see `merge_table`.
    """
    options = options or RelativeOptions()
    weights = weights if weights is not None else [1.0] * len(experts)
    check_versions(base, experts, weights, coefficients, len(experts))
    select = partial(
        select_active, weights=weights, dtype=options.dtype, coefficients=coefficients, space=space
    )
    matrix = partial(
        merge_relative,
        options=options,
        least_memory=least_memory,
        observe=observe,
        attempts=attempts,
        measured=measured,
    )
    table = partial(merge_table, epsilon=options.epsilon, scale=options.scale, measured=measured)
    fixed = resolve_layout(layout, None, base.ndim)
    formula = table if fixed == "table" else matrix
    return by_layout(base, experts, fixed, select, options.scale, formula)


@full_precision()
def merge_relative(
    base: Tensor,
    active: ActiveExperts,
    options: RelativeOptions,
    *,
    least_memory: bool = False,
    observe: Observer | None = None,
    attempts: Sequence[Attempt] | None = None,
    measured: MeasuredInputs | None = None,
) -> tuple[Tensor, MatrixRecord]:
    """Merge one matrix that at least two experts changed; arguments as of `merge_tensor`.

    Working memory is that of `merge_tensor`, and for matrices of at least T·i rows T squares of
    (i, i) more, which together are smaller than a task vector.
    """
    measured = measured and measured.of(active.positions)

    def estimate(attempt: Attempt) -> tuple[Covariances, dict[str, Any]]:
        covariances, shares = estimate_relative(
            base, active, options, dtype=attempt.dtype, noise=attempt.noise, measured=measured
        )
        known = {"rule": "ace_relative", "share": active.spread(shares, None)}
        return covariances, known | {"mix": measured and measured.mix}

    return merge_by_ridge(
        base,
        active,
        estimate,
        options.scale,
        measured=measured is not None,
        prior=options.structural_prior,
        floor=options.ridge_floor,
        least_memory=least_memory,
        observe=observe,
        attempts=attempts,
    )


def estimate_relative(
    base: Tensor,
    active: ActiveExperts,
    options: RelativeOptions,
    *,
    dtype: torch.dtype,
    noise: float = 0.0,
    measured: MeasuredInputs | None = None,
) -> tuple[Covariances, tuple[float, ...]]:
    """Estimate the covariances of one matrix, and w_t per expert, of sum 1.

    Args:
        base: W0, (o, i).
        active: the experts W_t, each (o, i), with their weights, τ_t and μ_t.
        options: ε and its floor, and what Δ_t and G_t are.
        dtype: of the products to come; at least as wide as ``active.dtype``.
        noise: see `rounding_in_merge`.
        measured: what takes the place of a share of the estimates.

    A common factor of all w_t cancels in X. An expert whose rows all moved alike has no estimate
    where it is centred.
    """
    unit = choose_unit(active, base.numel())
    least = (8 * torch.finfo(active.dtype).eps) ** 2
    columns = active.shape[1]
    epsilon = max(options.epsilon, LEAST_RIDGE if options.ridge_floor else 0)
    # all G_t together take less memory than a Δ_t then
    remembered = len(base) >= len(active.experts) * base.shape[1]
    measured, members = measured or MeasuredInputs(), []
    weights = genuine_weights(base, active)
    given = zip(
        active.experts, weights, active.coefficients, active.moments, active.positions, strict=True
    )
    for expert, weight, coefficient, moments, position in given:
        mean = (moments.mean / unit).to(dtype)
        tau = moments.tau / unit**2
        trace = centred_trace(expert, base, moments, unit, active.dtype) if options.centred else tau
        mean = mean if options.centred else torch.zeros_like(mean)
        task = Task(expert, base, mean, 1, 0, unit, coefficient)
        if trace <= least * tau:
            members.append((task, None, trace, 0.0))
            continue
        norm, gram = gram_norm(task)
        own = measured.covariance(position)
        if own is not None:
            energy = measured_energy(task, own) * trace / own.trace
            norm = (1 - measured.mix) * norm + measured.mix * energy
        error = norm / trace + epsilon * trace / columns
        task = replace(task, gram=gram if remembered else None)
        members.append((task, own, trace, weight / error))
    total = math.fsum(share for *_, share in members) or 1.0
    shares = tuple(share / total for *_, share in members)
    tasks, order = [], []
    for member, share, moments in zip(members, shares, active.moments, strict=True):
        if share > 0:
            task, own, trace, _ = member
            scaled = replace(task, scale=share / trace, ridge=share * epsilon / columns)
            tasks.append(scaled.mixed_with(own, measured.mix, trace))
            order.append((share, moments.tau))
    covariances = Covariances(
        tasks=tuple(tasks),
        reference=choose_reference(order),
        unit=unit,
        covariance_unit=1.0,
        epsilon=(),
        mean_tau=1.0,
        centred=options.centred,
        taus=tuple(tau / unit**2 for tau in active.tau),
        trace=math.fsum(shares),
        floored=options.ridge_floor,
        raised=epsilon > options.epsilon,
        noise=noise,
        space=active.space,
    )
    return covariances, shares


def genuine_weights(base: Tensor, active: ActiveExperts) -> list[float]:
    """Return w_t (1 − r_t²/τ_t) of the active experts, see `genuine_share`.

    1/‖Δ_t K_t^½‖² gives a weak expert a large weight, and the weaker what it has learned, the more
    of Δ_t is the rounding of its checkpoint. With the factor the weights come close to what they
    would be without rounding, and vanish where nothing else is left.
    """
    given = zip(active.experts, active.weights, active.tau, strict=True)
    return [weight * genuine_share(expert, base, tau) for expert, weight, tau in given]


def gram_norm(task: Task) -> tuple[float, Tensor | None]:
    """Return ‖C_tᵀC_t‖_F² through the smaller of the squares, and that matrix if it is (i, i)."""
    rows, columns = task.base.shape
    holder = Covariances((task,), 0, task.unit, 1.0, (), 1.0)
    through_columns = columns <= rows
    if through_columns:
        gram = holder.add_estimate(holder.new(columns, columns), task)
    else:
        gram = holder.new(rows, rows)
        for block in holder.column_blocks():
            room = holder.buffer("task", rows, block.stop - block.start)
            add_gram(gram, task.centred(columns=block, out=room))
    diagonal = float(gram.tril_().diagonal().double().square().sum())
    return 2 * squared_norm(gram) - diagonal, gram if through_columns else None


def measured_energy(task: Task, measured: MeasuredCovariance) -> float:
    """Return tr(C_t M_t C_tᵀ), what the task vector makes of the inputs that were measured."""
    matrix, energy = measured.matrix(task.mean), 0.0
    for block in blocks(*task.base.shape, task.base.device):
        centred = task.centred(block)
        energy += float((centred @ matrix).mul_(centred).sum(dtype=torch.float64))
    return energy


def merge_table(
    base: Tensor,
    active: ActiveExperts,
    epsilon: float,
    scale: float,
    measured: MeasuredInputs | None = None,
) -> tuple[Tensor, MatrixRecord]:
    """Merge the versions of one table.

    Args:
        base: W0, (n, d), a row per thing that is looked up, n > 1.
        active: at least two experts W_t, each (n, d), that changed it.
        epsilon: ε ≥ 0, in mean squared norms of a row of Δ_t.
        scale: λ.
        measured: how often each row was looked up, whose shares take the place of a share of the
            c_tv.

    Working memory is one block of rows, and a number per row and expert.

    Returns:
        W0 + λ X, (n, d), in the compute dtype or wider, and the record of what was done.
    """
    rows, width = base.shape
    unit = choose_unit(active, base.numel())

    def moved(expert: Tensor, block: slice) -> Tensor:
        return expert[block].to(active.dtype, copy=True).sub_(base[block]).div_(unit)

    counts = base.new_empty((len(active.experts), rows), dtype=torch.float64)  # c_tv, then w_t c_tv
    shares = []
    weights = genuine_weights(base, active)
    measured, mixed = measured or MeasuredInputs(), False
    given = zip(counts, active.experts, weights, active.positions, strict=True)
    for count, expert, weight, position in given:
        for block in blocks(rows, width, base.device):
            # in float64: squares of a far weaker expert's entries leave the range of float32
            norms = torch.linalg.vector_norm(moved(expert, block), dim=1, dtype=torch.float64)
            count[block] = norms.square()
        squares = count.clone()
        total = squares.sum()
        count.div_(total)
        asked = measured.count(position)
        if asked is not None:
            mixed = True
            count.lerp_(asked.to(count), measured.mix)
        count.add_(epsilon / rows)
        shares.append(weight / float(count @ squares))
    for count, share in zip(counts, shares, strict=True):
        count.mul_(share / sum(shares))
    total = counts.sum(dim=0)
    counts.div_(torch.where(total > 0, total, 1.0))  # with ε = 0, rows that nobody has moved
    merged = base.to(active.dtype, copy=True)
    counts.mul_(counts.new_tensor(active.coefficients)[:, None])
    for block in blocks(rows, width, base.device):
        sum_ = torch.zeros_like(merged[block])
        for count, expert in zip(counts, active.experts, strict=True):
            sum_ += moved(expert, block) * count[block, None].to(active.dtype)
        merged[block].add_(sum_, alpha=scale * unit)
    record = active.record(
        "ace_relative",
        share=active.spread([share / sum(shares) for share in shares], None),
        precision=str(active.dtype).removeprefix("torch."),
        mix=measured.mix if mixed else None,
    )
    return merged, record
