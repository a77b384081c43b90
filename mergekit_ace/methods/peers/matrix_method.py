# SPDX-License-Identifier: Apache-2.0
"""What methods have in common that merge the task vectors of each matrix by a formula.

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

from mergekit_ace.algebra.linalg import full_precision
from mergekit_ace.algebra.records import MatrixRecord
from mergekit_ace.algebra.task_vectors import ActiveExperts, by_layout, select_active, task_vector
from mergekit_ace.methods.base import Merged, TaskVectorMethod, Work, matrices_in
from mergekit_ace.methods.inputs import TensorSettings


@dataclass(frozen=True)
class TaskMatrices:
    """The task vectors of the experts in use, of one matrix.

    Attributes:
        deltas: Δ_t, (o, i), o > 1, none of them zero, float64. May be overwritten.
        shape: (o, i); that of the task vectors, unless these are cores.
        floors: what the singular values of the rounding of each W_t to float32 do not exceed.
        rank: how many directions each expert keeps, see `MatrixMethod.rank`; 0 where nobody counts.
    """

    deltas: list[Tensor]
    shape: tuple[int, ...]
    floors: tuple[float, ...]
    rank: int

    def total(self) -> Tensor:
        """Return Σ_t Δ_t in new memory."""
        total = self.deltas[0].clone()
        for delta in self.deltas[1:]:
            total += delta
        return total


class MatrixMethod(TaskVectorMethod):
    """A method that merges the task vectors of each matrix by a formula of its own, in float64.

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
        deltas = [task_vector(expert, base, torch.float64) for expert in active.experts]
        rank = self.rank(shape, len(deltas), parameters)
        matrices = TaskMatrices(deltas, shape, _floors(base, active), rank or 0)
        merged = self.combine(matrices, parameters)
        if settings.observe is not None:
            settings.observe("closed form", merged)
        record = active.record(self.spec.name, rank=rank, precision="float64")
        return merged.mul_(self.scale(parameters)).add_(base), record

    def scale(self, parameters: Mapping[str, Any]) -> float:
        """Return λ: what the merged task vector is multiplied by."""
        return parameters["lambda"]

    def rank(self, shape: Sequence[int], experts: int, parameters: Mapping[str, Any]) -> int | None:
        """Return how many directions of its own each expert keeps; None where nobody counts."""
        return None

    @abstractmethod
    def combine(self, matrices: TaskMatrices, parameters: Mapping[str, Any]) -> Tensor:
        """Return the merged task vector of one matrix before λ, (o, i), float64, in new memory.

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


def _floors(base: Tensor, active: ActiveExperts) -> tuple[float, ...]:
    """Return what singular values do not exceed that float32's rounding of weights alone has made.

    Independent entries of standard deviation s have none above s (√o + √i), but for chance. ulp² is
    at most eps² w². What was added to a weight counts, too: an adapter's change may be the larger.
    The rounding of bfloat16 is left in: it fills the whole spectrum of a fine-tune, and the papers'
    methods work on that.
    """
    rows, columns = active.shape
    eps = torch.finfo(torch.promote_types(torch.float32, base.dtype)).eps
    unit = eps * (rows**-0.5 + columns**-0.5)
    return tuple(unit * math.sqrt(active.size / 12 + tau) for tau in active.tau)


def decomposition_operations(rows: int, columns: int) -> float:
    """Return 6 m n² + 20 n³ with n ≤ m, of a singular value decomposition (Golub and Van Loan)."""
    small, large = sorted((rows, columns))
    return 6.0 * large * small**2 + 20.0 * small**3
