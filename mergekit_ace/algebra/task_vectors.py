# SPDX-License-Identifier: Apache-2.0
"""Task vectors Δ_t = W_t − W0: which of them take part in a merge, and what every method shares.

A stored tensor is merged matrix by matrix (`by_layout`), by the formula of a method where at least
two experts changed a matrix; by the mean of the task vectors otherwise.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import reduce
from typing import Any, TypeVar

import torch
from torch import Tensor

from mergekit_ace.algebra.linalg import as_rows, blocks
from mergekit_ace.algebra.low_rank import CoreSpace
from mergekit_ace.algebra.records import FixedLayout, MatrixRecord, RelativeLayout, TensorRecord

T = TypeVar("T")
# Precisions that checkpoints are saved in, maybe one after the other, the last one first.
GRIDS = (
    (torch.bfloat16,),
    (torch.float16,),
    (torch.float32,),
    (torch.bfloat16, torch.float16),
    (torch.float16, torch.bfloat16),
)


def task_vector(expert: Tensor, base: Tensor, dtype: torch.dtype) -> Tensor:
    """Form Δ = W − W0 in `dtype`.

    Two bfloat16 tensors are first widened: their difference rarely fits bfloat16's eight bits.

    Args:
        expert: W, any shape.
        base: W0, the shape of `expert`.
        dtype: at least as wide as the tensors' own.
    """
    return expert.to(dtype, copy=True).sub_(base)  # base is widened entry by entry


class NonFiniteError(ValueError):
    """A version of a tensor contains NaN or Inf.

    Attributes:
        position: of the expert; None for the base.
    """

    def __init__(self, position: int | None):
        name = "the base" if position is None else f"expert {position}"
        super().__init__(f"{name} contains NaN or Inf")
        self.position = position


@dataclass(frozen=True)
class Moments:
    """What is measured of the task vectors of one tensor before anything is decided.

    Attributes:
        tau: τ_t = ‖Δ_t‖_F² (Eq. 43) of every expert.
        shift: o ‖μ_t‖², with μ_t the means over Δ_t's first axis: of it tr(G_t) is τ_t less.
        size: ‖W0‖_F².
        stack: the Δ_t themselves, (T, o, i), where all of them were formed at once.
    """

    tau: tuple[float, ...]
    shift: tuple[float, ...]
    size: float
    stack: Tensor | None = None


def form_stack(base: Tensor, experts: Sequence[Tensor], dtype: torch.dtype) -> Tensor:
    """Form all Δ_t of matrices, (T, o, i), or of blocks of their rows."""
    stack = base.new_empty((len(experts), *base.shape), dtype=dtype)
    for delta, expert in zip(stack, experts, strict=True):
        delta.copy_(expert)
    return stack.sub_(base)  # widened entry by entry


def measure(base: Tensor, experts: Sequence[Tensor], dtype: torch.dtype) -> Moments:
    """Measure all task vectors; one transfer from a GPU.

    Args:
        base, experts: W0 and the W_t, of one shape.
        dtype: in which W − W0 is formed.
    """
    origin, *versions = (as_rows(tensor) for tensor in (base, *experts))
    squares = torch.zeros(len(experts) + 1, dtype=torch.float64, device=base.device)
    sums = squares.new_zeros(len(experts), origin.shape[1])
    width, stack = len(experts) * origin.shape[1], None
    for rows in blocks(len(origin), width, base.device):
        stack = form_stack(origin[rows], [version[rows] for version in versions], dtype)
        norms = torch.linalg.vector_norm(stack, dim=2)
        own = torch.linalg.vector_norm(origin[rows], dim=1, dtype=dtype)
        squares += torch.cat([own[None], norms]).double().square_().sum(dim=1)
        sums += stack.sum(dim=1)
    shifts = sums.square_().sum(dim=1) / max(1, len(origin))
    size, *found = torch.cat([squares, shifts]).tolist()
    tau, shift = found[: len(experts)], found[len(experts) :]
    # Squares of the tiniest and the largest entries leave the range of float32.
    odd = [e for e, t in zip(experts, tau, strict=True) if not 1e-25 < t < 1e35]
    if dtype == torch.float32 and any(bool((expert != base).any()) for expert in odd):
        return measure(base, experts, torch.float64)
    whole = stack if stack is not None and stack[0].numel() == base.numel() else None
    return Moments(tuple(tau), tuple(shift), size, whole)


def is_base_rounded(expert: Tensor, base: Tensor, tau: float, size: float) -> bool:
    """Tell whether an expert is the base, saved through a coarser precision, and nothing else.

    Such an expert differs from the base in nearly every entry, and would decide a merge whose
    experts count by what they changed.

    Args:
        expert, base: W and W0, of one shape.
        tau: ‖W − W0‖².
        size: ‖W0‖².
    """
    if not base.is_floating_point():
        return False
    for grids in GRIDS:
        coarsest = max(torch.finfo(grid).eps for grid in grids)
        lossless = coarsest <= torch.finfo(base.dtype).eps
        tiny = max(torch.finfo(grid).tiny * torch.finfo(grid).eps for grid in grids)
        most = (0.0 if lossless else size * coarsest**2) + base.numel() * tiny**2
        if tau > most:
            continue
        saved = base
        for grid in reversed(grids):
            saved = saved.to(grid)
        if torch.equal(saved.to(torch.float64), expert.to(torch.float64)):
            return True
    return False


@dataclass(frozen=True)
class ActiveExperts:
    """The experts that take part in one matrix: those with positive weight that changed it.

    An expert that left a tensor as it was, or is the base in another precision, says nothing about
    it. Kept in, it would make log τ_t meaningless.

    Attributes:
        experts: weights W_t of the active experts, each shaped as the base.
        weights: w_t, rescaled to mean 1 over the active experts.
        coefficients: λ_t of the active experts, by which their components of a merge are
            multiplied; 1 unless learned.
        all_tau: τ_t of *all* experts given, in their order; 0 where unchanged.
        traces: tr(G_t) of the active experts, of centred task vectors; to about 1e-6 τ_t.
        changed: of all experts given: 0 for one that is the base, maybe rounded, else 1.
        size: ‖W0‖_F².
        positions: where the active ones stand among those given.
        dtype: in which task vectors are formed.
        space: of which the matrices are cores; None for matrices that stand for themselves.
        stack: the Δ_t, (T, o, i), where they were kept; to be overwritten.
    """

    experts: tuple[Tensor, ...]
    weights: tuple[float, ...]
    coefficients: tuple[float, ...]
    all_tau: tuple[float, ...]
    traces: tuple[float, ...]
    changed: tuple[int, ...]
    size: float
    positions: tuple[int, ...]
    dtype: torch.dtype
    space: CoreSpace | None = None
    stack: Tensor | None = None

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of a task vector; of the matrix that it stands for, if it is a core."""
        return self.space.shape if self.space else tuple(self.experts[0].shape)

    @property
    def tau(self) -> tuple[float, ...]:
        """τ_t of the active experts."""
        return tuple(self.all_tau[position] for position in self.positions)

    def record(self, rule: str, **fields: Any) -> MatrixRecord:
        """Return the record of a merge of these experts by a rule."""
        weight = self.spread(self.weights, 0.0)
        return MatrixRecord(rule, weight, self.all_tau, self.changed, **fields)

    def spread(self, values: Sequence[T], absent: T) -> tuple[T, ...]:
        """Return values of the active experts at their places among all experts given."""
        spread = [absent] * len(self.all_tau)
        for position, value in zip(self.positions, values, strict=True):
            spread[position] = value
        return tuple(spread)


def check_versions(
    base: Tensor,
    experts: Sequence[Tensor],
    weights: Sequence[float],
    coefficients: Sequence[float] | None = None,
    components: int = 0,
) -> None:
    """Refuse what is no set of versions of one tensor.

    Args:
        base, experts, weights, coefficients: see `merge_tensor`.
        components: how many coefficients there have to be.

    Raises:
        TypeError: something is no tensor.
        ValueError: there is no expert, a shape or the number of weights or coefficients differs,
            a weight is negative, or one of them is not finite.
    """
    if len(experts) == 0:
        raise ValueError("there is no expert; give at least one")
    named = {"the base": base} | {f"expert {t}": expert for t, expert in enumerate(experts)}
    for name, version in named.items():
        if not isinstance(version, Tensor):
            raise TypeError(f"{name} is a {type(version).__name__}; give a torch.Tensor")
        if version.shape != base.shape:
            shapes = f"{tuple(version.shape)}, but the base {tuple(base.shape)}"
            raise ValueError(f"{name} has the shape {shapes}; merge versions of one tensor")
    if len(weights) != len(experts):
        raise ValueError(f"there are {len(weights)} weights for {len(experts)} experts")
    if not all(0 <= weight < math.inf for weight in weights):
        raise ValueError(f"weights are finite, 0 or greater, but these are {list(weights)}")
    if coefficients is None:
        return
    if len(coefficients) != components:
        raise ValueError(
            f"there are {len(coefficients)} coefficients for {components} components: one for "
            "every expert, and with `ace` a last one for the refinement"
        )
    if not all(map(math.isfinite, coefficients)):
        raise ValueError(f"coefficients are finite, but these are {list(coefficients)}")


def select_active(
    base: Tensor,
    experts: Sequence[Tensor],
    weights: Sequence[float],
    dtype: torch.dtype,
    coefficients: Sequence[float] | None = None,
    space: CoreSpace | None = None,
    *,
    keep: bool = False,
) -> ActiveExperts:
    """Measure τ_t and keep the experts that have something to say.

    Args:
        base: W0, finite, any shape.
        experts: W_t, finite, shaped as `base`.
        weights: w_t ≥ 0, one per expert.
        dtype: where the task vectors are formed, unless the tensors are wider themselves.
        coefficients: λ_t, one per expert; 1 by default.
        space: of which the tensors are cores, if they are.
        keep: whether the task vectors of a matrix are kept, if all are formed at once.

    Raises:
        NonFiniteError: an expert or the base contains NaN or Inf.
        OverflowError: a task vector does not fit `dtype`, or its squared norm float64.
    """
    dtype = torch.promote_types(dtype, base.dtype)
    moments = measure(base, experts, dtype)
    tau = moments.tau
    for position, (expert, value) in enumerate(zip(experts, tau, strict=True)):
        if value < 1e76:  # no entry can be too large for float32
            continue
        for place, version in ((None, base), (position, expert)):
            if not version.isfinite().all():
                raise NonFiniteError(place)
        if value == math.inf or not task_vector(expert, base, dtype).isfinite().all():
            raise OverflowError(
                f"the task vector of expert {position} overflows {dtype}"
                + ("; compute_dtype: float64 has room for it" if dtype == torch.float32 else "")
            )
    changed = tuple(
        int(value > 0 and not is_base_rounded(expert, base, value, moments.size))
        for expert, value in zip(experts, tau, strict=True)
    )
    positions = tuple(t for t, weight in enumerate(weights) if weight > 0 and changed[t])
    # Dividing by the largest first keeps the sum of very large or very small weights in range.
    top = max((weights[p] for p in positions), default=1.0)
    share = [weights[p] / top for p in positions]
    mean = sum(share) / len(share) if share else 1.0
    return ActiveExperts(
        experts=tuple(experts[p] for p in positions),
        weights=tuple(s / mean for s in share),
        coefficients=tuple(coefficients[p] if coefficients else 1.0 for p in positions),
        all_tau=tau,
        traces=tuple(tau[p] - moments.shift[p] for p in positions),
        changed=changed,
        size=moments.size,
        positions=positions,
        dtype=dtype,
        space=space,
        stack=_chosen(moments.stack, positions) if keep and base.ndim == 2 else None,
    )


def _chosen(stack: Tensor | None, positions: Sequence[int]) -> Tensor | None:
    if stack is None or not positions:
        return None
    every = len(positions) == len(stack)
    return stack if every else torch.stack([stack[position] for position in positions])


@dataclass(frozen=True)
class Heterogeneity:
    """Statistics of log τ_t over the active experts.

    Attributes:
        gamma: Var_t[log τ_t] / (mean_t log τ_t)², Eq. 7. It depends on the unit of the weights and
            diverges where the τ_t lie around 1; infinite where their mean log is exactly 0.
        log_variance: Var_t[log τ_t] alone, the same in every unit.

    Both use the sample variance (divisor T − 1); the paper does not say which, its authors'
    implementation does.
    """

    gamma: float
    log_variance: float


def measure_heterogeneity(tau: Sequence[float]) -> Heterogeneity:
    """Return both statistics for τ_t > 0 of at least two experts."""
    logs = [math.log(value) for value in tau]
    mean = math.fsum(logs) / len(logs)
    variance = math.fsum((value - mean) ** 2 for value in logs) / (len(logs) - 1)
    if variance == 0:
        return Heterogeneity(gamma=0.0, log_variance=0.0)
    square = mean * mean
    return Heterogeneity(gamma=variance / square if square > 0 else math.inf, log_variance=variance)


def clamp_to_versions(merged: Tensor, versions: Sequence[Tensor]) -> Tensor:
    """Return a merge whose entries lie between the smallest and the largest of all models.

    Args:
        merged: of any rule.
        versions: what it was merged from, the base's among them.
    """
    low, high = (reduce(f, versions) for f in (torch.minimum, torch.maximum))
    return torch.clamp(merged, low.to(merged.dtype), high.to(merged.dtype))


def merge_mean(base: Tensor, active: ActiveExperts, scale: float) -> tuple[Tensor, MatrixRecord]:
    """Return W0 + λ · Σ_t λ_t w_t Δ_t / Σ_t w_t, the rule for all that is not a matrix.

    Where nobody changed the tensor it is `base` itself, uncast. Where one expert did, it is
    W0 + λ λ_t Δ: with one task the minimiser of Eq. 2 is that expert, whatever its covariance.

    Args:
        base: W0, any shape.
        active: the experts.
        scale: λ.
    """
    if not active.experts:
        return base, active.record("base")
    rule = "single" if len(active.experts) == 1 else "mean"
    shares = [
        scale * coefficient * weight / len(active.weights)
        for weight, coefficient in zip(active.weights, active.coefficients, strict=True)
    ]
    if shares == [1]:  # W0 + (W − W0) may round; W itself is exact
        return active.experts[0].to(active.dtype), active.record(rule)
    merged = base.to(active.dtype, copy=True)
    for expert, share in zip(active.experts, shares, strict=True):
        merged.add_(task_vector(expert, base, active.dtype), alpha=share)
    return merged, active.record(rule)


def resolve_layout(
    layout: RelativeLayout,
    name: str | None,
    ndim: int,
    *,
    transposed: bool = False,
    table: bool = False,
    kernel: bool = False,
) -> FixedLayout:
    """Return the layout that a tensor of `ndim` axes gets.

    Args:
        layout: as configured. What does not fit the tensor's axes falls back to ``mean``, so that
            one setting can stand for a whole model: a bias under ``layout: matrix`` is a vector.
        name: of the tensor; ``auto`` looks for a component called ``experts``, and for their packed
            biases, (E, n), which are vectors.
        transposed: whether the architecture stores this weight as (…, in, out).
        table: whether the architecture looks up its rows, and the method has a rule for that.
        kernel: whether the architecture is a network of convolutions.
    """
    if layout == "auto":
        components = (name or "").split(".")
        packed = "experts" in components
        if ndim == 3 and packed:
            return "transposed" if transposed else "stacked"
        if ndim == 2 and table:
            return "table"
        if ndim == 2 and not (packed and components[-1].endswith("bias")):
            return "transposed" if transposed else "matrix"
        return "flattened" if ndim > 3 and kernel else "mean"
    fits = {"matrix": ndim == 2, "table": ndim == 2, "mean": True}.get(layout, ndim >= 2)
    return layout if fits else "mean"


def other_side(layout: FixedLayout, ndim: int) -> FixedLayout:
    """Return the layout that reads the transposes of the matrices that a layout reads.

    Tables, means and kernels, of which there is no other reading, keep theirs.

    Args:
        layout: of a tensor.
        ndim: its axes.
    """
    if layout in ("matrix", "stacked"):
        return "transposed"
    if layout == "transposed":
        return "matrix" if ndim == 2 else "stacked"
    return layout


def as_matrices(tensor: Tensor, layout: FixedLayout) -> tuple[Tensor, ...]:
    """Return the matrices (o, i) of a tensor, as views where strides allow."""
    if layout == "flattened":
        return (tensor.flatten(start_dim=1),)
    if layout == "transposed":
        tensor = tensor.mT
    return tensor.reshape(-1, *tensor.shape[-2:]).unbind(0)


def from_matrices(parts: Sequence[Tensor], shape: torch.Size, layout: FixedLayout) -> Tensor:
    """Invert `as_matrices`; the parts may differ in dtype, the widest one wins."""
    widest = parts[0].dtype
    for part in parts[1:]:
        widest = torch.promote_types(widest, part.dtype)
    if len(parts) == 1:
        stacked = parts[0].unsqueeze(0)
    else:
        stacked = torch.stack([part.to(widest) for part in parts])
    if layout == "transposed":
        stacked = stacked.mT
    return stacked.reshape(shape)


Formula = Callable[[Tensor, ActiveExperts], tuple[Tensor, MatrixRecord]]
Selection = Callable[[Tensor, Sequence[Tensor]], ActiveExperts]


def by_layout(
    base: Tensor,
    experts: Sequence[Tensor],
    layout: FixedLayout,
    select: Selection,
    scale: float,
    formula: Formula,
    *,
    entrywise: bool = False,
) -> tuple[Tensor, TensorRecord]:
    """Merge the versions of one stored tensor, each of its matrices by a formula.

    Args:
        base, experts: W0 and the W_t, of one shape.
        layout: one that fits the tensor, see `resolve_layout`.
        select: from versions to the experts that take part.
        scale: λ, where no formula is needed: one expert, one row, or no matrix at all.
        formula: for a matrix, (o, i), that at least two experts changed.
        entrywise: whether the formula is for what is no matrix, too.
    """
    has_matrices = layout != "mean" and base.numel() > 0

    def merge(base: Tensor, experts: Sequence[Tensor]) -> tuple[Tensor, MatrixRecord]:
        active = select(base, experts)
        # One row is its own column mean: a vector in the shape of a matrix.
        if len(active.experts) < 2 or not (entrywise or (has_matrices and active.shape[0] > 1)):
            return merge_mean(base, active, scale)
        return formula(base, active)

    if not has_matrices:
        merged, record = merge(base, experts)
        return merged, TensorRecord(tuple(base.shape), "mean", (record,))
    views = [as_matrices(tensor, layout) for tensor in (base, *experts)]
    parts, records = zip(*(merge(own[0], own[1:]) for own in zip(*views, strict=True)), strict=True)
    merged = base
    if any(record.rule != "base" for record in records):
        merged = from_matrices(parts, base.shape, layout)
    return merged, TensorRecord(tuple(base.shape), layout, tuple(records))
