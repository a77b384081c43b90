# SPDX-License-Identifier: Apache-2.0
"""What the merge methods by ridge regression share: weights, layouts, full devices, reports."""

from __future__ import annotations

import time
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from mergekit.merge_methods.base import TensorGroup
from pydantic import BaseModel
from torch import Tensor

from mergekit_ace.algebra.closed_form import IllConditionedError
from mergekit_ace.algebra.records import FixedLayout, TensorRecord
from mergekit_ace.methods.inputs import describe, is_finite
from mergekit_ace.methods.lookup import TensorVersions, component_coefficients
from mergekit_ace.methods.report import append_report
from mergekit_ace.methods.sparing import merge_sparingly
from mergekit_ace.methods.task_vectors import TaskVectorMethod


class RidgeMethod(TaskVectorMethod):
    """A method that solves a ridge regression per matrix.

    Its parameters are ``weight`` and ``task`` per expert, ``layout``, ``coefficients``, ``report``
    and those of its own.
    """

    remedy = ", a smaller lambda or a larger epsilon"

    def merge(self, group: TensorGroup, parameters: Mapping[str, Any]) -> Tensor:
        start = time.perf_counter()
        base, experts, name = group.base, group.non_base, group.metadata.name
        assert base is not None  # the contract requires it
        weights = [parameters["weight"][expert.id] for expert in experts]
        models = [str(expert.id) for expert in experts]
        layout = self.layout(group, parameters)
        versions = TensorVersions.of(group, parameters)
        options = self.options(parameters)
        coefficients = component_coefficients(self.spec.name, parameters, options, versions)
        if coefficients is not None and not any(coefficients):
            weights = [0.0] * len(experts)  # left out of the training: the base's, nothing to solve

        def merge(tensors: Sequence[Tensor], lean: bool) -> tuple[Tensor, TensorRecord]:
            return self.merge_tensors(
                tensors, weights, options, layout, coefficients, least_memory=lean
            )

        tensors = [base.tensor, *(expert.tensor for expert in experts)]
        try:
            merged, record = merge_sparingly(tensors, merge, self.spec.name, describe(name))
        except (IllConditionedError, OverflowError, torch.linalg.LinAlgError) as error:
            raise ValueError(self._explain(error, name, models)) from error
        # a result too large for its dtype is an error, and no line of a report
        if parameters["report"] is not None and is_finite(merged):
            seconds = time.perf_counter() - start
            if coefficients is not None:
                record = replace(record, coefficients=tuple(coefficients))
            append_report(parameters["report"], name, models, record, seconds)
        return merged

    @abstractmethod
    def merge_tensors(
        self,
        tensors: Sequence[Tensor],
        weights: Sequence[float],
        options: Any,
        layout: FixedLayout,
        coefficients: Sequence[float] | None,
        *,
        least_memory: bool,
    ) -> tuple[Tensor, TensorRecord]:
        """The merged tensor in any dtype, and its record.

        Args:
            tensors: the base's and the experts', on one device.
            weights: of the experts.
            options: of the tensor, as `options` makes them.
            layout: how it is read.
            coefficients: of the components, and of the refinement where the method has one; None:
                all are 1.
            least_memory: take the form with the least working memory instead of the fastest.
        """

    @abstractmethod
    def options(self, parameters: Mapping[str, Any]) -> BaseModel:
        """The parameters of a tensor as options of the algebra."""

    def _explain(self, error: Exception, name: str | None, experts: Sequence[str]) -> str:
        what = f"{self.spec.name}: {describe(name)} cannot be merged: {error}"
        if isinstance(error, IllConditionedError):
            return f"{what}, too much to be solved even in float64. {self.ill_conditioned}"
        listed = ", ".join(f"{position}: {model}" for position, model in enumerate(experts))
        return f"{what} (experts: {listed})."

    ill_conditioned = "Raise `epsilon` for this tensor (by a filter) or for all."
