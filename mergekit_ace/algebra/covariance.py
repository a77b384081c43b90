# SPDX-License-Identifier: Apache-2.0
"""Covariance estimates of the tasks (step 2 of ACE-Merging, Eqs. 5-10).

With C_t the column-centred task vector and G_t = C_tᵀC_t, the estimate is S_t = s_t G_t, where
s_t = w_t, or w_t / tr(G_t) when normalised; its ridge is ε_t. No scale needs a G_t: the traces
follow from what is known of the task vectors, tr(G_t) = τ_t − o‖μ_t‖². A covariance M_t that was
measured on samples may stand in its place, or be mixed with it: S_t = s_t G_t + m_t M_t.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from mergekit_ace.algebra.linalg import add_gram, blocks
from mergekit_ace.algebra.low_rank import CoreSpace
from mergekit_ace.algebra.measured import MeasuredCovariance, MeasuredInputs
from mergekit_ace.algebra.records import AceOptions, tolerance
from mergekit_ace.algebra.task_vectors import ActiveExperts, Moments, squared_norm

ALL = slice(None)
# The least ridge ε̄ with `ridge_floor`, in mean eigenvalues of Σ S_t: products in float32 are noise
# below it. What a spectrum asks for is in `ridge_floor`.
LEAST_RIDGE = 1e-6
# The largest, also without it: from there on X is the mean of the Δ_t with weights ε_t to ten
# digits, while R, in which the ridges cancel, would be nothing but their rounding.
LARGEST_RIDGE = 1e10
# An X this small beside √(Σ_t ‖Δ_t‖²) is what rounding leaves of 0.
CANCELLED = 1e-6
# Task vectors whose root mean square entry lies within 2^±20 need no other unit: their third powers
# stay far inside of float32's range.
PLAIN_EXPONENT = 20


@dataclass(frozen=True)
class Task:
    """One expert's estimate, in units of `unit` for the weights.

    Attributes:
        expert, base: W_t and W0, (o, i).
        mean: μ_t, (i,), in units; 0 where nothing is centred.
        scale: s_t.
        ridge: ε_t.
        unit: what Δ_t is divided by.
        coefficient: λ_t, by which the component of the task is multiplied, its covariance not.
        gram: C_tᵀC_t, (i, i), in the lower triangle, where that is known already.
        measured: M_t; None where S_t is the estimate alone.
        measured_scale: m_t.
    """

    expert: Tensor
    base: Tensor
    mean: Tensor
    scale: float
    ridge: float
    unit: float
    coefficient: float = 1.0
    gram: Tensor | None = None
    measured: MeasuredCovariance | None = None
    measured_scale: float = 0.0

    def mixed_with(self, measured: MeasuredCovariance | None, mix: float, trace: float) -> Task:
        """Return the task with a share of its estimate replaced, see `MeasuredInputs`.

        Args:
            measured: M_t; None where there is none.
            mix: the share, 0 to 1.
            trace: tr(G_t), in units.
        """
        if measured is None or mix == 0:
            return self
        share = mix * self.scale * trace / measured.trace
        rest = (1 - mix) * self.scale
        return replace(self, scale=rest, measured=measured, measured_scale=share)

    def delta(self, rows: slice = ALL, columns: slice = ALL, out: Tensor | None = None) -> Tensor:
        """Form Δ_t there, anew in the dtype of μ_t: the caller may write to it.

        Args:
            rows, columns: which part.
            out: where, if not in a new tensor.
        """
        part = self.expert[rows, columns]
        delta = torch.empty_like(part, dtype=self.mean.dtype) if out is None else out
        delta.copy_(part).sub_(self.base[rows, columns])  # the base is widened entry by entry
        return delta if self.unit == 1 else delta.div_(self.unit)

    def centred(self, rows: slice = ALL, columns: slice = ALL, out: Tensor | None = None) -> Tensor:
        """Form C_t = Δ_t − 1 μ_tᵀ there; arguments as of `delta`."""
        return self.delta(rows, columns, out).sub_(self.mean[columns])


@dataclass(frozen=True)
class Covariances:
    """The estimates of all tasks of one matrix.

    Task vectors are divided by `unit`, a power of two, so that their third powers stay in range; a
    result X is X·unit in the base's unit.

    Attributes:
        tasks: the estimates; an expert whose rows all moved alike has none when normalised.
        reference: the task r that the others are compared with. As Σ_t (S_t + ε_t I) = A, Eq. 14
            without its prior is X = C_r + Σ_{t≠r} (C_t − C_r)(S_t + ε_t I) A⁻¹: a product fewer,
            and where experts agree nothing is left that a solve could spoil. Every r is exact; the
            smallest task vector cancels least, and a vanishing weight would be divided by. Outside
            of the S_t, with coefficients, λ_t C_t takes the place of C_t everywhere.
        unit: the scale that the task vectors were divided by.
        covariance_unit: what S_t and ε_t are measured in: unit², or 1 where S_t is normalised.
        epsilon: ε_t per active expert as Eqs. 9-10 define it, in the base's unit; 0 for one that
            has no estimate.
        mean_tau: mean_t τ_t of the original task vectors where S_t is normalised, by which the
            structural prior is divided (Eq. 13); otherwise 1.
        centred: whether the column means are taken out of the task vectors.
        ridged_mean: whether the S̄ of the refinement holds the ridges, as the paper's does.
        taus: ‖Δ_t‖² of the experts in use, in units of unit².
        refined: whether the refinement of the spectrum follows.
        trace: Σ_t tr(S_t), in the unit of S_t.
        floored: whether the ridge is at least what the spectrum asks for, see `raise_ridge`.
        raised: whether the ε_t are larger than was asked for; bounded: whether ‖X‖ needed it.
        noise: of the experts' rounding in X, see `rounding_in_merge`.
        space: of which the matrices are cores; None for matrices that stand for themselves.
    """

    tasks: tuple[Task, ...]
    reference: int
    unit: float
    covariance_unit: float
    epsilon: tuple[float, ...]
    mean_tau: float
    centred: bool = True
    ridged_mean: bool = False
    taus: tuple[float, ...] = ()
    refined: bool = False
    trace: float = 0.0
    floored: bool = False
    raised: bool = False
    bounded: bool = False
    noise: float = 0.0
    space: CoreSpace | None = None
    _buffers: dict[str, Tensor] = field(default_factory=dict, repr=False, compare=False)

    def unweighted(self) -> Covariances:
        """Return the same estimates with all coefficients 1."""
        tasks = tuple(replace(task, coefficient=1.0) for task in self.tasks)
        return replace(self, tasks=tasks)

    def times_ridge(self, factor: float) -> Covariances:
        """Return the same estimates with all ε_t multiplied by a factor."""
        tasks = tuple(replace(task, ridge=factor * task.ridge) for task in self.tasks)
        epsilon = tuple(factor * value for value in self.epsilon)
        return replace(self, tasks=tasks, epsilon=epsilon)

    def with_ridges_of(self, other: Covariances) -> Covariances:
        """Return the same estimates with the ridges of others of the same tasks."""
        pairs = zip(self.tasks, other.tasks, strict=True)
        tasks = tuple(replace(task, ridge=same.ridge) for task, same in pairs)
        return replace(
            self,
            tasks=tasks,
            epsilon=other.epsilon,
            raised=other.raised,
            bounded=other.bounded,
        )

    def tolerance(self, condition: float) -> float:
        """Return the relative error that float32 may leave in X, for A's condition number."""
        return tolerance(condition, self.noise)

    @property
    def device(self) -> torch.device:
        """Where the task vectors are."""
        return self.tasks[0].mean.device

    def row_blocks(self) -> Iterator[slice]:
        """Iterate over blocks of rows of a task vector."""
        return blocks(*self.shape, self.device)

    def column_blocks(self, rows: int | None = None) -> Iterator[slice]:
        """Iterate over blocks of columns of a task vector, or of what has so many rows."""
        return blocks(self.shape[1], self.shape[0] if rows is None else rows, self.device)

    def buffer(self, name: str, rows: int, columns: int) -> Tensor:
        """Return room for a block, (rows, columns), the same memory for the same name.

        Fresh memory comes from the system page by page, which takes as long as what is done on it.
        """
        size = rows * columns
        if name not in self._buffers or len(self._buffers[name]) < size:
            self._buffers[name] = self.tasks[0].mean.new_empty(size)
        return self._buffers[name][:size].view(rows, columns)

    @property
    def reference_task(self) -> Task:
        """The task r."""
        return self.tasks[self.reference]

    @property
    def others(self) -> list[Task]:
        """The tasks t ≠ r."""
        return [task for t, task in enumerate(self.tasks) if t != self.reference]

    def reference_block(self, block: slice) -> Tensor:
        """Form λ_r C_r in a block of rows, in a buffer of its own."""
        room = self.buffer("reference", block.stop - block.start, self.shape[1])
        return _times(self.reference_task.centred(block, out=room), self.reference_task.coefficient)

    def difference(self, task: Task, block: slice, first: Tensor) -> Tensor:
        """Form λ_t C_t − λ_r C_r in a block of rows, in another buffer; the latter is `first`."""
        part = task.centred(block, out=self.buffer("task", *first.shape))
        return _times(part, task.coefficient).sub_(first)

    def add_estimate(self, total: Tensor, task: Task) -> Tensor:
        """Add S_t, (i, i), to a lower triangle."""
        if task.measured is not None:
            task.measured.add_to(total, task.measured_scale)
        if task.scale == 0:
            return total
        if task.gram is not None:
            return total.add_(task.gram, alpha=task.scale)
        for block in self.row_blocks():
            room = self.buffer("task", block.stop - block.start, self.shape[1])
            centred = task.centred(block, out=room)
            add_gram(total, centred.mT, task.scale)
        return total

    def points_against(self, matrix: Tensor) -> bool:
        """Tell whether ⟨M, Σ_t Δ_t⟩ < 0 for M, (o, i): whether M undoes what the experts share."""
        total = matrix.new_zeros((), dtype=torch.float64)  # there, so that no task waits for a GPU
        for block in self.row_blocks():
            room = self.buffer("task", block.stop - block.start, self.shape[1])
            part = matrix[block].reshape(-1).to(room)
            for task in self.tasks:
                total += task.delta(block, out=room).view(-1).dot(part)
        return bool(total < 0)

    def size(self, merged: Tensor) -> float:
        """Return ‖X‖, in units, by which errors are divided; at least `CANCELLED` of the experts'.

        Where the experts cancel one another X is nothing but rounding, and no digit of it counts.
        """
        return max(squared_norm(merged) ** 0.5, CANCELLED * self.energy**0.5)

    @property
    def is_measured(self) -> bool:
        """Whether an S_t is not the estimate alone, and so not of the rank of its task vector."""
        return any(task.measured is not None for task in self.tasks)

    @property
    def energy(self) -> float:
        """Σ_t ‖Δ_t‖²."""
        return math.fsum(self.taus)

    @property
    def ridge(self) -> float:
        """ε̄ = Σ ε_t, so that A = Σ S_t + ε̄ I."""
        return math.fsum(task.ridge for task in self.tasks)

    @property
    def relative_ridge(self) -> float:
        """ε̄ in mean eigenvalues of Σ S_t."""
        return self.ridge * self.whole_shape[1] / self.trace if self.trace else math.inf

    @property
    def mean_ridge(self) -> float:
        """The ridge in T S̄ of the refinement: ε̄, or 0 where S̄ is the plain mean of the S_t."""
        return self.ridge if self.ridged_mean else 0.0

    @property
    def mean(self) -> Tensor:
        """μ̄, (i,), the mean of the μ_t."""
        return torch.stack([task.mean for task in self.tasks]).mean(dim=0)

    @property
    def shape(self) -> tuple[int, int]:
        """(o, i)."""
        rows, columns = self.tasks[0].base.shape
        return rows, columns

    @property
    def whole_shape(self) -> tuple[int, int]:
        """(o, i) of the matrices that stand behind these, if they are cores."""
        return self.space.shape if self.space else self.shape

    def new(self, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        """Return zeros in the dtype of the products, unless in another, where the tensors are."""
        mean = self.tasks[0].mean
        return torch.zeros(*shape, dtype=dtype or mean.dtype, device=mean.device)


@dataclass(frozen=True)
class Solution:
    """The closed form of one matrix, in units of ``Covariances.unit``.

    Attributes:
        merged: X, (o, i).
        target: F = R + X, (o, i), whose leading directions the refinement adds (Eq. 16); None
            where it was not asked for.
        condition: estimated condition number of A.
        error: estimated relative error of X and F.
        covariances: the estimates with the ridge that was used.
    """

    merged: Tensor
    target: Tensor | None
    condition: float
    error: float
    covariances: Covariances


def estimate_covariances(
    base: Tensor,
    active: ActiveExperts,
    options: AceOptions,
    *,
    normalized: bool,
    refined: bool = False,
    dtype: torch.dtype,
    noise: float = 0.0,
    measured: MeasuredInputs | None = None,
) -> Covariances:
    """Estimate the covariances of the active experts of one matrix.

    Args:
        base: W0, (o, i).
        active: the experts W_t, each (o, i), with their weights, τ_t and μ_t.
        options: ε and its scale.
        normalized: divide S_t and ε_t by tr(G_t), Eqs. 8 and 10.
        refined: whether the refinement follows.
        dtype: of the products to come; at least as wide as ``active.dtype``.
        noise: see `rounding_in_merge`.
        measured: what takes the place of a share of the estimates.

    An expert whose rows all moved alike has C_t = 0. Nothing can be normalised by its trace, nor
    has a ridge that counts in traces a size. So it has no estimate there (departure: the paper
    divides by zero).
    """
    unit = choose_unit(active, base.numel())
    least = (8 * torch.finfo(active.dtype).eps) ** 2
    columns = active.shape[1]
    measured = measured or MeasuredInputs()
    tasks, order, total = [], [], 0.0
    members = zip(
        active.experts, active.weights, active.coefficients, active.moments, active.positions,
        strict=True,
    )  # fmt: skip
    for expert, weight, coefficient, moments, position in members:
        tau = moments.tau / unit**2
        mean = (moments.mean / unit).to(dtype)
        trace = tau  # tr(G_t), unit²
        if options.centred:
            trace = centred_trace(expert, base, moments, unit, active.dtype)
        else:
            mean = torch.zeros_like(mean)
        if trace <= least * tau and (normalized or options.epsilon_scale == "relative"):
            tasks.append(None)
            continue
        scale = weight / trace if normalized else weight
        task = Task(
            expert=expert,
            base=base,
            mean=mean,
            scale=scale,
            ridge=weight * _ridge(options, trace, columns, unit, normalized),
            unit=unit,
            coefficient=coefficient,
        )
        tasks.append(task.mixed_with(measured.covariance(position), measured.mix, trace))
        order.append((weight, moments.tau))
        total += scale * trace
    estimated = [task for task in tasks if task is not None]
    epsilon, unit_ridge = options.epsilon, _unit_ridge(estimated, total, columns)
    plain = options.refinement_mean == "plain"  # the paper's to the letter otherwise
    if options.ridge_floor:
        epsilon = max(epsilon, LEAST_RIDGE * unit_ridge)
    if plain and unit_ridge > 0:
        epsilon = min(epsilon, LARGEST_RIDGE * unit_ridge)
    covariance_unit = 1.0 if normalized else unit**2
    return Covariances(
        tasks=tuple(estimated),
        reference=choose_reference(order),
        unit=unit,
        covariance_unit=covariance_unit,
        epsilon=tuple(task.ridge * covariance_unit if task else 0.0 for task in tasks),
        mean_tau=math.fsum(active.tau) / len(active.tau) if normalized else 1.0,
        centred=options.centred,
        ridged_mean=options.refinement_mean == "ridged",
        taus=tuple(tau / unit**2 for tau in active.tau),
        refined=refined,
        trace=total,
        floored=options.ridge_floor and plain,
        raised=epsilon > options.epsilon,
        noise=noise,
        space=active.space,
    ).times_ridge(epsilon)


def _unit_ridge(tasks: Sequence[Task], trace: float, columns: int) -> float:
    """Return the ε with which ε̄ is one mean eigenvalue, for tasks with the ridges of ε = 1."""
    per_epsilon = math.fsum(task.ridge for task in tasks)
    return trace / columns / per_epsilon if per_epsilon > 0 else 0.0


def _times(part: Tensor, coefficient: float) -> Tensor:
    return part if coefficient == 1 else part.mul_(coefficient)


def choose_reference(tasks: Sequence[tuple[float, float]]) -> int:
    """Return the index of the task that the others are compared with, see `Covariances`.

    Args:
        tasks: weight and τ_t of each.
    """
    if not tasks:
        return 0
    heaviest = max(weight for weight, _ in tasks)
    order = [(weight >= 1e-3 * heaviest, -tau) for weight, tau in tasks]
    return order.index(max(order))


def choose_unit(active: ActiveExperts, entries: int) -> float:
    """Return 1, or the power of two nearest to the root mean square entry: exact to divide by."""
    total = math.log2(math.fsum(active.tau))
    exponent = round((total - math.log2(len(active.experts) * entries)) / 2)
    return 1.0 if abs(exponent) <= PLAIN_EXPONENT else 2.0**exponent


def centred_trace(
    expert: Tensor, base: Tensor, moments: Moments, unit: float, dtype: torch.dtype
) -> float:
    """Return tr(G_t) = ‖C_t‖_F² = τ_t − o‖μ_t‖², in units of unit²."""
    mean = moments.mean / unit
    trace = moments.tau / unit**2 - len(base) * float(mean.square().sum())
    if trace > 1e-2 * moments.tau / unit**2:
        return trace
    # the means make up nearly all of τ_t, and the difference would lose its digits
    task = Task(expert, base, mean.to(dtype), 1.0, 0.0, unit)
    return math.fsum(squared_norm(task.centred(rows)) for rows in blocks(*base.shape, base.device))


def _ridge(options: AceOptions, trace: float, columns: int, unit: float, normalized: bool) -> float:
    """Return ε_t for ε = 1 before the weight, for a trace in units of unit² (Eqs. 9-10)."""
    if options.epsilon_scale == "relative":  # ε times the mean eigenvalue tr(S_t)/i
        return (1.0 if normalized else trace) / columns
    return 1 / unit**2 / (trace if normalized else 1.0)
