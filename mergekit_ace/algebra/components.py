# SPDX-License-Identifier: Apache-2.0
"""A merge as a sum of components, one per expert and one for the refinement.

Step 4 of ACE-Merging is linear in what stands outside of the covariances: X = Σ_t X_t with the
components X_t = C_t (S_t + ε_t I)(A + 1 cᵀ)⁻¹. The refinement of step 5 is one more. So
coefficients can be learned over components as over task vectors. All of them come out of one
factorisation, in float64: of A, or, where all task vectors together have fewer rows than columns,
of K = M Mᵀ + ε̄ I with M = [√s_t C_t]_t.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor

from mergekit_ace.algebra.adaptive import decide_branch, merge_tensor
from mergekit_ace.algebra.conditioning import factorize, factorize_within, largest_eigenvalue
from mergekit_ace.algebra.covariance import Covariances, Task, estimate_covariances
from mergekit_ace.algebra.layouts import as_matrices, from_matrices
from mergekit_ace.algebra.linalg import (
    add_gram,
    full_precision,
    mirror,
    product,
    solve_,
)
from mergekit_ace.algebra.primal import through_gram
from mergekit_ace.algebra.records import AceOptions, FixedLayout, IllConditionedError
from mergekit_ace.algebra.refinement import isotropic_component
from mergekit_ace.algebra.relative import (
    RelativeOptions,
    estimate_relative,
    genuine_weights,
    merge_tensor_relative,
)
from mergekit_ace.algebra.ridge_floor import raise_ridge, solve_within_bound
from mergekit_ace.algebra.task_vectors import ActiveExperts, nested_sets, select_active, task_vector

CONDITION_LIMIT = 1e13  # beyond it, even a factor in float64 is noise
Options = AceOptions | RelativeOptions


def split_tensor(
    base: Tensor,
    experts: Sequence[Tensor],
    options: Options,
    layout: FixedLayout,
    weights: Sequence[float] | None = None,
) -> list[Tensor]:
    """Return the components of the merge of one stored tensor.

    Their sum times λ is what is added to W0.

    Args:
        base, experts, weights: see `merge_tensor`.
        options: of `ace` or `ace_relative`; λ is taken for 1.
        layout: one that fits the tensor, see `resolve_layout`.

    Returns:
        T components shaped as `base`, in the compute dtype or wider, and with options of `ace` the
        refinement as the last one: zeros where nothing is refined.

    Raises:
        IllConditionedError, OverflowError: see `merge_matrix`.
    """
    options = options.model_copy(update={"scale": 1.0})
    weights = [1.0] * len(experts) if weights is None else weights
    if layout in ("mean", "table") or base.numel() == 0:
        return _split_by_change(base, experts, options, layout, weights)
    views = [as_matrices(tensor, layout) for tensor in (base, *experts)]
    split = [
        _split_by_change(matrices[0], matrices[1:], options, "matrix", weights)
        for matrices in zip(*views, strict=True)
    ]
    return [from_matrices(parts, base.shape, layout) for parts in zip(*split, strict=True)]


def _split_by_change(
    base: Tensor,
    experts: Sequence[Tensor],
    options: Options,
    layout: FixedLayout,
    weights: Sequence[float],
) -> list[Tensor]:
    """Mix the components of the merges that `merge_by_change` mixes, with the same shares."""
    split = _split_matrix if layout == "matrix" else partial(_split_sum, layout=layout)
    changed = select_active(base, experts, weights, options.dtype).changed
    sets = nested_sets(changed, weights) or [(1.0, (False,) * len(experts))]
    found = []
    for share, kept in sets:
        chosen = [expert if k else base for expert, k in zip(experts, kept, strict=True)]
        parts = split(base, chosen, options, weights)
        found.append(parts if share == 1 else [part * share for part in parts])
    return found[0] if len(found) == 1 else [sum(parts) for parts in zip(*found, strict=True)]


def _split_sum(
    base: Tensor,
    experts: Sequence[Tensor],
    options: Options,
    weights: Sequence[float],
    layout: FixedLayout = "matrix",
) -> list[Tensor]:
    """Split a merge that takes no factorisation: once per component, with all others left out."""
    dtype = torch.promote_types(options.dtype, base.dtype)
    origin = torch.zeros_like(base, dtype=dtype)
    deltas = [task_vector(expert, base, dtype) for expert in experts]
    if layout == "table":  # whose merge asks for the rounding, which task vectors do not show
        active = select_active(base, experts, weights, options.dtype)
        weights = active.spread(genuine_weights(base, active), 0.0)
    ace = isinstance(options, AceOptions)
    merge = merge_tensor if ace else merge_tensor_relative
    count = len(experts) + ace
    return [
        merge(origin, deltas, weights, options, layout, [float(s == t) for s in range(count)])[0]
        for t in range(count)
    ]


@full_precision()
def _split_matrix(
    base: Tensor, experts: Sequence[Tensor], options: Options, weights: Sequence[float]
) -> list[Tensor]:
    active = select_active(base, experts, weights, options.dtype)
    if len(active.experts) < 2 or len(base) == 1:
        return _split_sum(base, experts, options, weights)
    prior, rank = options.structural_prior, 0
    if isinstance(options, AceOptions):
        branch = decide_branch(base, active, options)
        rank = branch.rank
        covariances = estimate_covariances(
            base,
            active,
            options,
            normalized=branch.normalized,
            refined=rank > 0,
            dtype=torch.float64,
        )
    else:
        covariances, _ = estimate_relative(base, active, options, dtype=torch.float64)
    if not covariances.tasks:  # every expert moved all its rows alike
        return _split_sum(base, experts, options, weights)
    split_up = partial(_components, covariances, floor=options.ridge_floor, dtype=active.dtype)
    raised, parts = split_up(prior=prior)
    guarded = not covariances.ridged_mean
    if prior and guarded and covariances.points_against(sum(parts[1:], parts[0])):
        raised, parts = split_up(prior=False)
    covariances = raised
    found = dict(zip(_positions(covariances, active), parts, strict=True))
    split = [found.get(t, torch.zeros_like(parts[0])) for t in range(len(experts))]
    if isinstance(options, AceOptions):
        refinement = torch.zeros_like(parts[0])
        if rank > 0:
            target = _residual(covariances)
            for part in parts:
                target.add_(part)
            matrix = isotropic_component(target, rank).matrix
            if not guarded or not covariances.points_against(matrix):
                refinement.copy_(matrix)
        split.append(refinement)
    return [part.mul_(covariances.unit) for part in split]


def _positions(covariances: Covariances, active: ActiveExperts) -> list[int]:
    """Return where the tasks stand among all experts; not every active one has an estimate."""
    places = {id(expert): p for expert, p in zip(active.experts, active.positions, strict=True)}
    return [places[id(task.expert)] for task in covariances.tasks]


def _components(
    covariances: Covariances, *, prior: bool, floor: bool, dtype: torch.dtype
) -> tuple[Covariances, list[Tensor]]:
    """Return the estimates with the ridge used, and X_t of every task, (o, i), in their unit."""
    rows, columns = covariances.shape
    wide = rows * len(covariances.tasks) < columns
    split = partial(_through_rows if wide else _through_columns, covariances, prior, dtype=dtype)
    if not floor:
        return split(floor=False)
    return solve_within_bound(
        covariances,
        lambda bound: split(floor=bound),
        lambda found: sum(found[1][1:], found[1][0]),
    )


def _through_columns(
    covariances: Covariances, prior: bool, floor: bool, dtype: torch.dtype
) -> tuple[Covariances, list[Tensor]]:
    """Return the components by a factor of A, (i, i)."""
    rows, columns = covariances.shape
    system = covariances.new(columns, columns)
    for task in covariances.tasks:
        covariances.add_estimate(system, task)
    common = mirror(system).mean(dim=0) / covariances.mean_tau
    covariances = raise_ridge(covariances, system, bound=floor)
    system.diagonal().add_(covariances.ridge)
    lower, _ = factorize_within(system, CONDITION_LIMIT)
    inverse = solve_(common[None].clone(), lower).squeeze(0)  # A⁻¹c
    parts = []
    for task in covariances.tasks:
        part, estimate = covariances.new(rows, columns, dtype=dtype), _Estimate(covariances, task)
        for block in covariances.row_blocks():
            centred = task.centred(block)
            found = solve_(estimate.times(centred).add_(centred, alpha=task.ridge), lower)
            part[block] = _with_prior(found, inverse) if prior else found
        parts.append(part)
    return covariances, parts


def _through_rows(
    covariances: Covariances, prior: bool, floor: bool, dtype: torch.dtype
) -> tuple[Covariances, list[Tensor]]:
    """Return the components by a factor of K, (N, N): X_t = P_t K⁻¹ M as in `dual`."""
    rows, columns = covariances.shape
    if covariances.ridge == 0:
        raise IllConditionedError(math.inf)
    stack = torch.cat([task.centred() for task in covariances.tasks])
    size = len(stack)
    system = mirror(add_gram(covariances.new(size, size), stack))
    covariances = raise_ridge(covariances, system, bound=floor, dual=True)
    roots = stack.new_tensor([task.scale**0.5 for task in covariances.tasks])
    roots = roots.repeat_interleave(rows)[:, None]
    stack.mul_(roots)
    system.mul_(roots).mul_(roots.mT)
    squares = [slice(start, start + rows) for start in range(0, size, rows)]
    level = float(system.trace()) / size
    numerators = []
    for task, own in zip(covariances.tasks, squares, strict=True):
        numerator = covariances.new(rows, size)
        numerator[:, own] = mirror(system[own, own].clone())
        numerator[:, own].diagonal().add_(task.ridge)
        numerators.append(numerator.div_(task.scale**0.5))
        if covariances.centred:  # M is zero along the indicator of a task: see `dual`
            system[own, own] += level / rows
    system.diagonal().add_(covariances.ridge)
    condition = largest_eigenvalue(mirror(system)) / covariances.ridge
    if not condition <= CONDITION_LIMIT:
        raise IllConditionedError(condition)
    lower = factorize(system)
    common = stack.sum(dim=1)[None] / (columns * covariances.mean_tau)
    inverse = (solve_(common, lower) @ stack).squeeze(0)  # A⁻¹c
    parts = []
    for numerator in numerators:
        found = product(solve_(numerator, lower), stack)
        parts.append((_with_prior(found, inverse) if prior else found).to(dtype))
    return covariances, parts


def _with_prior(rows: Tensor, inverse: Tensor) -> Tensor:
    """Turn rows of B A⁻¹ into those of B (A + 1 cᵀ)⁻¹, in place, with A⁻¹c (`prior_row`)."""
    return rows.addr_(rows.sum(dim=1), inverse / (1 + inverse.sum()), alpha=-1)


class _Estimate:
    """Products with S_t, (i, i), through whichever square is the smaller one."""

    def __init__(self, covariances: Covariances, task: Task):
        self._scale, self._matrix, self._rows = task.scale, None, None
        if through_gram(*covariances.shape):
            empty = covariances.new(covariances.shape[1], covariances.shape[1])
            self._matrix = mirror(covariances.add_estimate(empty, task))
        else:
            self._rows = task.centred()

    def times(self, left: Tensor) -> Tensor:
        """Return L S_t, (m, i), for L, (m, i)."""
        if self._matrix is not None:
            return product(left, self._matrix)
        assert self._rows is not None
        return product(product(left, self._rows.mT).mul_(self._scale), self._rows)


def _residual(covariances: Covariances) -> Tensor:
    """Return R = Σ_t (Δ_t − D/T) S_t − ρ D/T with D = Σ_t Δ_t, (o, i), in the unit of F."""
    mean = covariances.new(*covariances.shape)  # D/T
    for task in covariances.tasks:
        for block in covariances.row_blocks():
            mean[block].add_(task.centred(block).add_(task.mean))
    mean.div_(len(covariances.tasks))
    total = mean * -covariances.mean_ridge  # ρ
    for task in covariances.tasks:
        estimate = _Estimate(covariances, task)
        for block in covariances.row_blocks():
            beyond = task.centred(block).add_(task.mean).sub_(mean[block])
            total[block].add_(estimate.times(beyond))
    return total.mul_(covariances.covariance_unit)
