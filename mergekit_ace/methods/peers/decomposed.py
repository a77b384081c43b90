# SPDX-License-Identifier: Apache-2.0
"""What the methods here have in common: task vectors in, a merged task vector out.

As in `ace`, an expert that left a tensor as it was takes no part in it, one that alone changed it
is what comes out, and what is no matrix gets the mean of the task vectors.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from mergekit.merge_methods.base import ParameterScope, TensorGroup
from torch import Tensor

from mergekit_ace.algebra.covariance import choose_unit
from mergekit_ace.algebra.layouts import by_layout
from mergekit_ace.algebra.linalg import full_precision
from mergekit_ace.algebra.records import MatrixRecord, Number, TensorRecord
from mergekit_ace.algebra.task_vectors import (
    ActiveExperts,
    merge_mean,
    merge_trivial,
    select_active,
    task_vector,
)
from mergekit_ace.methods.inputs import describe
from mergekit_ace.methods.parameters import LAYOUT, NamedParameter
from mergekit_ace.methods.sparing import merge_sparingly
from mergekit_ace.methods.task_vectors import TaskVectorMethod


def parameter(
    method: str, name: str, value_type: Any, default: Any, allowed: str
) -> NamedParameter:
    """A parameter of whole tensors.

    Args:
        method: that has it.
        name, value_type, default: as mergekit reads it.
        allowed: what a value may be, in words.
    """
    return NamedParameter(
        name, value_type, ParameterScope.SHARED, default, allowed=allowed, method=method
    )


def shared_parameters(method: str, scale: float = 1.0) -> tuple[NamedParameter, ...]:
    """``lambda`` and ``layout``."""
    layout = parameter(method, "layout", LAYOUT.value_type, LAYOUT.default, LAYOUT.allowed)
    return (parameter(method, "lambda", Number, scale, "a finite number"), layout)


class Peer(TaskVectorMethod):
    """A method that merges the task vectors of each matrix by a formula of its own.

    Everything is computed in float64, with room for a task vector per expert and a few matrices of
    the tensor's size.
    """

    def merge(self, group: TensorGroup, parameters: Mapping[str, Any]) -> Tensor:
        assert group.base is not None  # the contract requires it
        what, layout = describe(group.metadata.name), self.layout(group, parameters)
        scale = self.scale(parameters)

        def active(base: Tensor, experts: Sequence[Tensor]) -> ActiveExperts:
            return select_active(base, experts, [1.0] * len(experts), torch.float64)

        def matrix(base: Tensor, experts: Sequence[Tensor]) -> tuple[Tensor, MatrixRecord]:
            chosen = active(base, experts)
            if len(base) == 1:  # a vector in the shape of a matrix
                return merge_mean(base, chosen, scale)
            trivial = merge_trivial(base, chosen, scale)
            return trivial or self._merge_matrix(base, chosen, parameters)

        def other(base: Tensor, experts: Sequence[Tensor]) -> tuple[Tensor, MatrixRecord]:
            return merge_mean(base, active(base, experts), scale)

        def merge(tensors: Sequence[Tensor], lean: bool) -> tuple[Tensor, TensorRecord]:
            return by_layout(tensors[0], tensors[1:], layout, matrix, other)

        tensors = [group.base.tensor, *(entry.tensor for entry in group.non_base)]
        try:
            merged, _ = merge_sparingly(tensors, merge, self.spec.name, what)
        except (OverflowError, torch.linalg.LinAlgError) as error:
            raise ValueError(f"{self.spec.name}: {what} cannot be merged: {error}") from error
        return merged

    @full_precision()
    def _merge_matrix(
        self, base: Tensor, active: ActiveExperts, parameters: Mapping[str, Any]
    ) -> tuple[Tensor, MatrixRecord]:
        unit = choose_unit(active, base.numel())
        deltas = [task_vector(w, base, torch.float64).div_(unit) for w in active.experts]
        merged = self.combine(deltas, parameters, unit)
        record = MatrixRecord("peer", active.spread(active.weights, 0.0), active.all_tau)
        return merged.mul_(unit * self.scale(parameters)).add_(base), record

    def scale(self, parameters: Mapping[str, Any]) -> float:
        """λ: what the merged task vector is multiplied by."""
        return parameters["lambda"]

    @abstractmethod
    def combine(
        self, deltas: Sequence[Tensor], parameters: Mapping[str, Any], unit: float
    ) -> Tensor:
        """The merged task vector of one matrix before λ, new memory.

        Args:
            deltas: Δ_t / unit of at least two experts, (o, i), o > 1, in float64, none of them
                zero. May be overwritten.
            parameters: of the method.
            unit: a power of two.
        """
