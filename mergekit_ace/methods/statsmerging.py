# SPDX-License-Identifier: Apache-2.0
"""`merge_method: statsmerging`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Literal

from mergekit.merge_methods.base import ParameterScope, TensorGroup
from torch import Tensor

from mergekit_ace.algebra.records import Number
from mergekit_ace.algebra.task_vectors import merge_linear
from mergekit_ace.methods.inputs import describe
from mergekit_ace.methods.lookup import FileCoefficients, LearnerCoefficients, TensorVersions
from mergekit_ace.methods.parameters import COEFFICIENTS, TASK, NamedParameter, of_method
from mergekit_ace.methods.task_vectors import TaskVectorMethod, method_spec

NAME = "statsmerging"


def _parameter(name: str, value_type: Any, scope: ParameterScope, default: Any, allowed: str):
    return NamedParameter(name, value_type, scope, default, allowed=allowed, method=NAME)


class StatsMerge(TaskVectorMethod):
    """StatsMerging (layer-wise merging with coefficients learned from weight statistics).

    θ_0 + Σ_k λ_k Δ_k in float32, one tensor at a time. The coefficients are looked up in a file
    that the trainer wrote (``coefficients``), predicted from each tensor as it passes by a trained
    network (``learner``), or given in the config (``weight``).
    """

    layouts = False
    spec = method_spec(
        NAME,
        "StatsMerging",
        "https://arxiv.org/abs/2506.04567",
        (
            _parameter("weight", Number | None, ParameterScope.NON_BASE, None, "a finite number"),
            of_method(COEFFICIENTS, NAME),
            replace(of_method(COEFFICIENTS, NAME), name="learner"),
            of_method(TASK, NAME),
            _parameter(
                "missing",
                Literal["error", "mean"],
                ParameterScope.SHARED,
                "error",
                "one of error, mean",
            ),
            _parameter(
                "match",
                Literal["name", "depth"],
                ParameterScope.SHARED,
                "name",
                "one of name, depth",
            ),
        ),
    )

    def merge(self, group: TensorGroup, parameters: Mapping[str, Any]) -> Tensor:
        assert group.base is not None  # the contract requires it
        tensors = [expert.tensor for expert in group.non_base]
        return merge_linear(group.base.tensor, tensors, coefficients_of(group, parameters))


def coefficients_of(group: TensorGroup, parameters: Mapping[str, Any]) -> list[float]:
    """λ_k of one tensor, from the one source that the config names.

    Args:
        group: the tensor's versions.
        parameters: resolved; those of experts by model.
    """
    weights = [parameters["weight"][expert.id] for expert in group.non_base]
    weighted = any(weight is not None for weight in weights)
    given = [name for name in ("coefficients", "learner") if parameters[name] is not None]
    given += ["weight"] * weighted
    where = describe(group.metadata.name)
    if len(given) != 1:
        raise ValueError(
            f"{NAME}: {where} has {' and '.join(given) or 'no coefficients'}; give exactly one of "
            "`coefficients: PATH` (the trainer's file), `learner: PATH` (predict from statistics), "
            "or a `weight` for every expert"
        )
    if weighted:
        for expert, weight in zip(group.non_base, weights, strict=True):
            if weight is None:
                raise ValueError(
                    f"{NAME}: {where} has no weight for {expert.id}, but for another expert; give "
                    "one to every expert (0 leaves it out), e.g. as a last entry without filter"
                )
        return weights
    if parameters["learner"] is not None:
        return LearnerCoefficients(parameters["learner"]).predict(group)
    source = FileCoefficients(parameters["coefficients"], by_depth=parameters["match"] == "depth")
    return source.find(TensorVersions.of(group, parameters), missing=parameters["missing"])
