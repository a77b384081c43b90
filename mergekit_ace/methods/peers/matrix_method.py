# SPDX-License-Identifier: Apache-2.0
"""What methods have in common that merge the task vectors of each matrix by a formula.

Task vectors are float64, but for checkpoints whose own rounding hides what float32 would change:
the error that is allowed is that of the closed form (`records.tolerance`).

As in `ace`, an expert that left a tensor as it was takes no part in it, one that alone changed it
is what comes out, and what is no matrix gets the mean of the task vectors.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from mergekit_ace.algebra.covariance import choose_unit
from mergekit_ace.algebra.forms import rounding_in_merge
from mergekit_ace.algebra.linalg import full_precision
from mergekit_ace.algebra.records import (
    MatrixRecord,
    hidden_error,
    is_noisy,
    show,
    tolerance,
)
from mergekit_ace.algebra.rounding_noise import estimate_rounding
from mergekit_ace.algebra.spectrum import DEFAULT_TOLERANCE, SMALL_SIDE, noise_edge
from mergekit_ace.algebra.task_vectors import ActiveExperts, by_layout, select_active, task_vector
from mergekit_ace.methods.base import Merged, TaskVectorMethod, Work, matrices_in
from mergekit_ace.methods.inputs import TensorSettings


@dataclass(frozen=True)
class TaskMatrices:
    """The task vectors of the experts in use, of one matrix.

    Attributes:
        deltas: Δ_t / unit, (o, i), o > 1, none of them zero; in float64, or in float32 where the
            rounding of the checkpoints hides the loss of some digits. May be overwritten.
        unit: a power of two.
        shape: (o, i); that of the task vectors, unless these are cores.
        noise: what of ‖Δ_t‖² is float32's rounding, in unit².
        rounding: what of it is the rounding of the checkpoints, in unit²; 0 where that is small.
        tolerance: the relative error that is allowed in what is made of them, but for what that
            rounding hides.
    """

    deltas: tuple[Tensor, ...]
    unit: float
    shape: tuple[int, ...]
    noise: tuple[float, ...]
    rounding: tuple[float, ...]
    tolerance: float

    def total(self) -> Tensor:
        """Return Σ_t Δ_t in new memory."""
        first, *others = self.deltas
        total = first.clone()
        for delta in others:
            total.add_(delta)
        return total

    def edges(self) -> list[float]:
        """Return what the singular values of the rounding in each task vector do not exceed."""
        return [noise_edge(energy, self.shape) for energy in self.noise]

    def edge(self) -> float:
        """Return the same of the sum of all task vectors."""
        return noise_edge(math.fsum(self.noise), self.shape)

    def allowed(self, share: float) -> float:
        """Return the relative error that is allowed in what has such a share of rounding."""
        return max(self.tolerance, hidden_error(share))


class MatrixMethod(TaskVectorMethod):
    """A method that merges the task vectors of each matrix by a formula of its own.

    It takes room for a task vector per expert and a few matrices of the tensor's size. Weights of
    experts are not known to it.
    """

    timed = False  # decompositions do not run at the rate of products

    def merge(self, tensors: Sequence[Tensor], settings: TensorSettings) -> Merged:
        base, *experts = tensors
        weights, scale = [1.0] * len(experts), self.scale(settings.parameters)
        select = partial(select_active, weights=weights, dtype=torch.float64, space=settings.space)
        formula = partial(self._merge_matrix, settings)
        return by_layout(base, experts, settings.layout, select, scale, formula)

    @full_precision()
    def _merge_matrix(
        self, settings: TensorSettings, base: Tensor, active: ActiveExperts
    ) -> tuple[Tensor, MatrixRecord]:
        parameters, shape = settings.parameters, active.shape
        unit = choose_unit(active, base.numel())
        dtype, stored, allowed = _precision(base, active)
        deltas = [task_vector(w, base, dtype).div_(unit) for w in active.experts]
        noise, stored = _rounding(base, active, unit), tuple(energy / unit**2 for energy in stored)
        matrices = TaskMatrices(tuple(deltas), unit, shape, noise, stored, allowed)
        merged = self.combine(matrices, parameters)
        show(settings.observe, "closed form", merged, unit)
        record = active.record(
            self.spec.name,
            rank=self.rank(shape, len(deltas), parameters),
            precision=str(dtype).removeprefix("torch."),
        )
        return merged.mul_(unit * self.scale(parameters)).add_(base), record

    def scale(self, parameters: Mapping[str, Any]) -> float:
        """Return λ: what the merged task vector is multiplied by."""
        return parameters["lambda"]

    def rank(self, shape: Sequence[int], experts: int, parameters: Mapping[str, Any]) -> int | None:
        """Return how many directions of its own each expert keeps; None where nobody counts."""
        return None

    @abstractmethod
    def combine(self, matrices: TaskMatrices, parameters: Mapping[str, Any]) -> Tensor:
        """Return the merged task vector of one matrix before λ, in new memory.

        Args:
            matrices: of at least two experts.
            parameters: of the method.
        """

    def work(self, settings: TensorSettings, shape: Sequence[int], experts: int) -> Work:
        plain = super().work(settings, shape, experts)
        found = matrices_in(shape, settings.layout)
        if found is None or experts < 2:
            return plain
        count, rows, columns = found
        operations = count * self.operations(rows, columns, experts, settings.parameters)
        working = 8 * (experts + 3) * rows * columns
        return Work((operations, operations), plain.moved, working)

    def operations(
        self, rows: int, columns: int, experts: int, parameters: Mapping[str, Any]
    ) -> float:
        """Return those for one matrix (o, i): a decomposition per expert, and two of them all."""
        return (experts + 2) * decomposition_operations(rows, columns)


def _precision(base: Tensor, active: ActiveExperts) -> tuple[torch.dtype, tuple[float, ...], float]:
    """Return the dtype of task vectors, their rounding, and the error that is allowed in a merge.

    Small matrices, and cores, take milliseconds in float64.
    """
    none = (0.0,) * len(active.experts)
    wide = torch.float64 in (active.experts[0].dtype, base.dtype)
    if wide or active.space:
        return torch.float64, none, DEFAULT_TOLERANCE
    if min(base.shape) <= SMALL_SIDE:
        return torch.float64, none, tolerance(1.0)
    stored = tuple(estimate_rounding(expert, base) for expert in active.experts)
    noise = rounding_in_merge(base, active)
    if not is_noisy(noise):
        return torch.float64, none, tolerance(1.0, noise)
    return torch.float32, stored, tolerance(1.0, noise)


def _rounding(base: Tensor, active: ActiveExperts, unit: float) -> tuple[float, ...]:
    """Return the energy of float32's rounding in each task vector, in unit²; float64's in that.

    ulp² is at most eps² w². That of what was added to a weight counts, too: an adapter's change is
    a product, and may be larger than the weight. The rounding of checkpoints in bfloat16 is left as
    it is: it fills the whole spectrum of a fine-tune, and the papers' methods work on that.
    """
    own = torch.finfo(torch.promote_types(torch.float32, base.dtype)).eps ** 2
    return tuple(own * (m.size / 12 + m.tau) / unit**2 for m in active.moments)


def decomposition_operations(rows: int, columns: int) -> float:
    """Return 6 m n² + 20 n³ with n ≤ m, of a singular value decomposition (Golub and Van Loan)."""
    small, large = sorted((rows, columns))
    return 6.0 * large * small**2 + 20.0 * small**3
