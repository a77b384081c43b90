# SPDX-License-Identifier: Apache-2.0
"""Task vectors Δ_t = W_t − W0: which take part in a merge, their matrices, sums and records."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal, TypeVar

import torch
from pydantic import BeforeValidator, Field
from torch import Tensor

from mergekit_ace.algebra.linalg import as_rows, as_vector, blocks

FixedLayout = Literal["matrix", "transposed", "stacked", "flattened", "mean", "table"]
Layout = Literal["auto", "matrix", "transposed", "stacked", "flattened", "mean"]
TableLayout = Literal["auto", "matrix", "transposed", "stacked", "flattened", "mean", "table"]
StoredKind = Literal["transposed", "table", "head", "kernel"]  # what architectures tell of weights
Side = Literal["inputs", "outputs"]  # of a weight
Statistic = Literal["auto", "gamma", "log_variance"]


def _number(value: Any) -> Any:
    """Pydantic reads a bool as 0 or 1; a YAML `yes` where a number belongs is a mistake."""
    if isinstance(value, bool):
        raise ValueError("expected a number, not a boolean")
    return value


Number = Annotated[
    float, BeforeValidator(_number), Field(allow_inf_nan=False, description="a finite number")
]
Integer = Annotated[int, BeforeValidator(_number)]
Count = Annotated[int, Field(ge=1, strict=True, description="a whole number, 1 or greater")]
Positive = Annotated[Number, Field(gt=0, le=1e15, description="a number above 0, at most 1e15")]
NonNegative = Annotated[Number, Field(ge=0, description="a number, 0 or greater")]
# Products of two factors, and a ridge, stay in the range of float32, in which they are applied.
Factor = Annotated[
    Number, Field(ge=-1e15, le=1e15, description="a finite number, at most 1e15 in size")
]
Ridge = Annotated[
    Number, Field(ge=0, le=1e30, description="a number, 0 or greater, and at most 1e30")
]
Fraction = Annotated[Number, Field(ge=0, le=1, description="a number from 0 to 1")]

T = TypeVar("T")
GRIDS = (torch.bfloat16, torch.float16, torch.float32)  # precisions that checkpoints are saved in
NO_WEIGHT = 1e-12  # a share of the largest weight that counts as 0

PairTable = tuple[tuple[float | None, ...], ...]  # of experts, T × T


@dataclass(frozen=True)
class MatrixRecord:
    """What was measured and decided for one matrix. Tuples have an entry per expert given."""

    rule: str  # the method whose formula was used; `single` (one expert changed it), `mean`, `base`
    weight: tuple[float, ...]  # w_t, rescaled to mean 1 over the experts in use; else 0
    tau: tuple[float, ...]  # τ_t, 0 where unchanged
    changed: tuple[int, ...]  # 0 for an expert that is the base, maybe rounded, else 1
    gamma: float | None = None  # the statistics of heterogeneity
    log_variance: float | None = None
    statistic: Statistic | None = None  # which of them tells heterogeneity, and above what
    threshold: float | None = None
    heterogeneous: bool | None = None
    normalized: bool | None = None  # which steps were taken
    refined: bool | None = None
    epsilon: tuple[float | None, ...] | None = None  # ε_t of Eqs. 9-10 times w_t
    ridge: float | None = None  # ε̄ = Σ ε_t in mean eigenvalues of Σ S_t
    amplification: float | None = None  # ‖X‖² / Σ_t ‖Δ_t‖² of the closed form
    rank: int | None = None  # k of the refinement
    sigma_iso: float | None = None  # its strength
    mix: float | None = None  # share of measured covariances
    side: Side | None = None  # of which covariances were estimated


@dataclass(frozen=True)
class TensorRecord:
    """What was done to a stored tensor, read by a layout: a record per matrix."""

    shape: tuple[int, ...]
    layout: FixedLayout
    matrices: tuple[MatrixRecord, ...]


class IllConditionedError(ValueError):
    """The digits at hand are not enough: Σ_t S_t is singular or nearly so, even in float64."""


def task_vector(expert: Tensor, base: Tensor, dtype: torch.dtype) -> Tensor:
    """Form Δ = W − W0 in `dtype`, at least as wide as the tensors' own, in which it rarely fits."""
    return expert.to(dtype, copy=True).sub_(base)  # base is widened entry by entry


def form_stack(base: Tensor, experts: Sequence[Tensor], dtype: torch.dtype) -> Tensor:
    """Form all Δ_t of matrices, (T, o, i), or of blocks of their rows; on a GPU by few commands."""
    if base.device.type != "cpu":
        return torch.stack(tuple(experts)).to(dtype).sub_(base)
    stack = base.new_empty((len(experts), *base.shape), dtype=dtype)
    for delta, expert in zip(stack, experts, strict=True):
        delta.copy_(expert)
    return stack.sub_(base)


def delta_blocks(
    base: Tensor, experts: Sequence[Tensor], dtype: torch.dtype
) -> Iterator[tuple[slice, Tensor]]:
    """Yield rows of a tensor `as_rows`, and the Δ_t of these, (T, m, n), a block at a time."""
    origin, *versions = (as_rows(tensor) for tensor in (base, *experts))
    for rows in blocks(len(origin), len(experts) * origin.shape[1], base.device):
        yield rows, form_stack(origin[rows], [version[rows] for version in versions], dtype)


@dataclass(frozen=True)
class ActiveExperts:
    """The experts that take part in one matrix: those with positive weight that changed it."""

    experts: tuple[Tensor, ...]  # their W_t, each shaped as the base
    weights: tuple[float, ...]  # their w_t, rescaled to mean 1
    coefficients: tuple[float, ...]  # λ_t of their components of a merge; 1 unless learned
    positions: tuple[int, ...]  # where they stand among those given
    all_tau: tuple[float, ...]  # τ_t = ‖Δ_t‖_F² (Eq. 43) of all experts given; 0 where unchanged
    traces: tuple[float, ...]  # tr(G_t) of centred task vectors
    changed: tuple[int, ...]  # of all experts given: 0 for one that is the base, maybe rounded
    size: float  # ‖W0‖_F²
    dtype: torch.dtype  # in which task vectors are formed
    shape: tuple[int, ...]  # of a task vector; of the matrix that it stands for, if it is a core

    @property
    def tau(self) -> tuple[float, ...]:
        """τ_t of the active experts."""
        return tuple(self.all_tau[position] for position in self.positions)

    @property
    def relative_weights(self) -> list[float]:
        """w_t of the active experts as shares of the largest one."""
        return [weight / max(self.weights) for weight in self.weights]

    def record(self, rule: str, **fields: Any) -> MatrixRecord:
        """Return the record of a merge of these experts by a rule."""
        weight = self.spread(self.weights, 0.0)
        return MatrixRecord(rule, weight, self.all_tau, self.changed, **fields)

    def spread(self, values: Sequence[T], absent: T) -> tuple[T, ...]:
        """Return values of the active experts at their places among all experts given."""
        found = dict(zip(self.positions, values, strict=True))
        return tuple(found.get(position, absent) for position in range(len(self.all_tau)))


def select_active(
    base: Tensor,
    experts: Sequence[Tensor],
    weights: Sequence[float],
    dtype: torch.dtype,
    coefficients: Sequence[float] | None = None,
    shape: Sequence[int] | None = None,
) -> ActiveExperts:
    """Measure τ_t of versions of one shape, and keep the experts that have something to say.

    `dtype` is that of task vectors, unless the tensors are wider; `shape` that of the matrix whose
    core they are. There is a `ValueError` for NaN or Inf, and an `OverflowError` for a task vector
    that does not fit.
    """
    dtype = torch.promote_types(dtype, base.dtype)
    tau, shift, size = _measure(base, experts, dtype)
    for t, expert in enumerate(experts):
        if math.isfinite(tau[t]):
            continue
        for name, version in (("the base", base), (f"expert {t}", expert)):
            if not version.isfinite().all():
                raise ValueError(f"{name} contains NaN or Inf")
        said = f"the task vector of expert {t} overflows {dtype}"
        raise OverflowError(f"{said}; write compute_dtype: float64, if the method has it")
    changed = tuple(
        int(value > 0 and not is_base_rounded(expert, base, value, size))
        for expert, value in zip(experts, tau, strict=True)
    )
    # Dividing by the largest first keeps the sum of very large or very small weights in range.
    top = max((w for w, moved in zip(weights, changed, strict=True) if moved), default=0.0) or 1.0
    positions = tuple(t for t, w in enumerate(weights) if changed[t] and w / top > NO_WEIGHT)
    shares = [weights[t] / top for t in positions]
    return ActiveExperts(
        experts=tuple(experts[t] for t in positions),
        weights=tuple(share * len(shares) / sum(shares) for share in shares),
        coefficients=tuple(coefficients[t] if coefficients else 1.0 for t in positions),
        positions=positions,
        all_tau=tuple(tau),
        traces=tuple(tau[t] - shift[t] for t in positions),
        changed=changed,
        size=size,
        dtype=dtype,
        shape=tuple(shape or base.shape),
    )


def _measure(
    base: Tensor, experts: Sequence[Tensor], dtype: torch.dtype
) -> tuple[list[float], list[float], float]:
    """Return τ_t, o ‖μ_t‖² (of means over the first axis), and ‖W0‖².

    Vectors count as matrices of one column here.
    """
    origin, wide = as_rows(base), torch.float64  # squares leave the range of float32
    sums = base.new_zeros(len(experts), origin.shape[1], dtype=wide)
    squares = sums.new_zeros(len(experts) + 1)
    for rows, stack in delta_blocks(base, experts, dtype):
        own = torch.linalg.vector_norm(origin[rows], dtype=wide)[None]
        norms = torch.linalg.vector_norm(stack.flatten(1), dim=1, dtype=wide)
        squares += torch.cat([own, norms]).square_()
        sums += stack.sum(dim=1, dtype=wide)
    shift = torch.linalg.vector_norm(sums, dim=1).square_().div_(max(1, len(origin)))
    numbers = torch.cat([squares, shift]).tolist()
    return numbers[1 : len(experts) + 1], numbers[len(experts) + 1 :], numbers[0]


def is_base_rounded(expert: Tensor, base: Tensor, tau: float, size: float) -> bool:
    """Tell whether an expert is the base, saved through another precision, and nothing else.

    It would decide a merge whose experts count by what they changed. τ = ‖W − W0‖² and the size
    ‖W0‖² tell most others without a look at the entries.
    """
    for grid in GRIDS if base.is_floating_point() else ():
        info = torch.finfo(grid)
        if tau > size * info.eps**2 + base.numel() * (info.tiny * info.eps) ** 2:
            continue
        origin, version = as_rows(base), as_rows(expert)
        parts = blocks(len(origin), origin.shape[1], base.device)  # the first tells most others
        if all(torch.equal(origin[p].to(grid).double(), version[p].double()) for p in parts):
            return True
    return False


def rounding_floors(active: ActiveExperts) -> tuple[float, ...]:
    """Return what singular values do not exceed that float32's rounding of weights alone has made.

    Independent entries of standard deviation s have none above s (√o + √i), but for chance. The
    rounding of bfloat16 is left in: the papers' methods work on the spectra that hold it. What is
    read as float64 has been float32, too.
    """
    rows, columns = active.shape
    unit = torch.finfo(torch.float32).eps * (rows**-0.5 + columns**-0.5)
    return tuple(unit * math.sqrt(active.size / 12 + tau) for tau in active.tau)


def measure_heterogeneity(tau: Sequence[float]) -> tuple[float, float]:
    """Return γ = Var_t[log τ_t] / (mean_t log τ_t)² (Eq. 7) and Var_t[log τ_t], of two τ_t or more.

    The variance is the sample variance (divisor T − 1), as in the published implementation.
    """
    logs = [math.log(value) for value in tau]
    square, variance = statistics.fmean(logs) ** 2, statistics.variance(logs)
    gamma = variance / square if square > 0 else math.inf
    return gamma if variance > 0 else 0.0, variance


def merge_mean(base: Tensor, active: ActiveExperts, scale: float) -> tuple[Tensor, MatrixRecord]:
    """Return W0 + λ · Σ_t λ_t w_t Δ_t / Σ_t w_t, the rule for all that is not a matrix.

    Of one expert that is W0 + λ λ_t Δ, as the minimiser of Eq. 2 for one task; of none the base.
    """
    rule = {0: "base", 1: "single"}.get(len(active.experts), "mean")
    pairs = zip(active.weights, active.coefficients, strict=True)
    shares = [scale * coefficient * weight / len(active.weights) for weight, coefficient in pairs]
    return add_task_vectors(base, active.experts, shares, active.dtype), active.record(rule)


def add_task_vectors(
    base: Tensor, experts: Sequence[Tensor], shares: Sequence[float], dtype: torch.dtype
) -> Tensor:
    """Return W0 + Σ_t a_t Δ_t in a dtype; an expert of share 1, or the base, alone as it is."""
    used = [(e, share) for e, share in zip(experts, shares, strict=True) if share != 0]
    if not used:
        return base
    if len(used) == 1 and used[0][1] == 1:
        return used[0][0].to(dtype)
    merged = torch.empty_like(base, dtype=dtype, memory_format=torch.contiguous_format)
    origin, out = as_rows(base), as_rows(merged)
    factors = as_vector([share for _, share in used], merged)[:, None, None]
    for rows, stack in delta_blocks(base, [expert for expert, _ in used], dtype):
        # the base comes last, so that the sum is rounded by its own size
        out[rows] = stack.mul_(factors).sum(dim=0).add_(origin[rows])
    return merged


def resolve_layout(
    layout: TableLayout, name: str | None, ndim: int, kind: StoredKind | None = None
) -> FixedLayout:
    """Return the layout that a tensor of `ndim` axes gets; ``mean`` where the chosen one is unfit.

    ``auto`` goes by what the architecture says of its kind, and by a component of the name that is
    ``experts``, whose packed biases, (E, n), are vectors.
    """
    if layout == "auto":
        components = (name or "").split(".")
        packed = "experts" in components
        if ndim == 3 and packed:
            return "transposed" if kind == "transposed" else "stacked"
        if ndim == 2 and not (packed and components[-1].endswith("bias")):
            return kind if kind in ("transposed", "table") else "matrix"
        return "flattened" if ndim > 3 and kind == "kernel" else "mean"
    fits = {"matrix": ndim == 2, "table": ndim == 2, "mean": True}.get(layout, ndim >= 2)
    return layout if fits else "mean"


def as_matrices(tensor: Tensor, layout: FixedLayout) -> tuple[Tensor, ...]:
    """Return the matrices (o, i) of a tensor, as views where strides allow."""
    if layout == "flattened":
        return (tensor.flatten(start_dim=1),)
    if layout == "transposed":
        tensor = tensor.mT
    return tensor.reshape(-1, *tensor.shape[-2:]).unbind(0)


def from_matrices(parts: Sequence[Tensor], shape: torch.Size, layout: FixedLayout) -> Tensor:
    """Invert `as_matrices`; the parts may differ in dtype, the widest one wins."""
    stacked = torch.stack(tuple(parts)) if len(parts) > 1 else parts[0][None]
    return (stacked.mT if layout == "transposed" else stacked).reshape(shape)


def by_layout(
    base: Tensor,
    experts: Sequence[Tensor],
    layout: FixedLayout,
    select: Callable[[Tensor, Sequence[Tensor]], ActiveExperts],
    scale: float,
    formula: Callable[[Tensor, ActiveExperts], tuple[Tensor, MatrixRecord] | None],
    *,
    entrywise: bool = False,
) -> tuple[Tensor, TensorRecord]:
    """Merge the versions of one stored tensor, each of its matrices by a formula.

    The formula is for a matrix, (o, i), that at least two experts changed, and if `entrywise` for
    what is no matrix, too. The mean, times `scale`, is for all else, and where the formula returns
    None. `select` tells who takes part.
    """
    has_matrices = layout != "mean" and base.numel() > 0
    parts, records = [], []
    views = (as_matrices(t, layout) if has_matrices else (t,) for t in (base, *experts))
    for origin, *versions in zip(*views, strict=True):
        active = select(origin, versions)
        # One row is its own column mean: a vector in the shape of a matrix.
        solved = entrywise or (has_matrices and active.shape[0] > 1)
        own = formula(origin, active) if solved and len(active.experts) > 1 else None
        merged, record = own or merge_mean(origin, active, scale)
        parts.append(merged)
        records.append(record)
    merged = parts[0]
    if all(record.rule == "base" for record in records):
        merged = base
    elif has_matrices:
        merged = from_matrices(parts, base.shape, layout)
    fixed = layout if has_matrices else "mean"
    return merged, TensorRecord(tuple(base.shape), fixed, tuple(records))


def compare_entries(base: Tensor, experts: Sequence[Tensor]) -> dict[str, Any]:
    """Compare task vectors entry by entry, in float64, of tensors of any shape; see `Record`."""
    count, origin = base.numel(), as_rows(base)
    products = torch.zeros(len(experts), len(experts), dtype=torch.float64, device=base.device)
    changed = torch.zeros(len(experts), dtype=torch.int64, device=base.device)
    base_square = 0.0
    for rows, stack in delta_blocks(base, experts, torch.float64):
        base_square += float(torch.linalg.vector_norm(origin[rows], dtype=torch.float64)) ** 2
        deltas = stack.flatten(1)
        products += deltas @ deltas.mT
        changed += torch.count_nonzero(deltas, dim=1)
    base_norm, norms = math.sqrt(base_square), products.diagonal().sqrt()
    sizes, cosines = norms.tolist(), (products / torch.outer(norms, norms)).tolist()
    return {
        "base_norm": base_norm,
        "norm": sizes,
        "relative_size": [norm / base_norm if base_norm else None for norm in sizes],
        "unchanged": [1 - n / count if count else 1.0 for n in changed.tolist()],
        # 0/0 where one of them is zero
        "cosine": [[None if math.isnan(one) else one for one in row] for row in cosines],
    }
