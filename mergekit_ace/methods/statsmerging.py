# SPDX-License-Identifier: Apache-2.0
"""`merge_method: statsmerging`."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from typing import Annotated, Any, Literal

import torch
from mergekit.merge_methods.base import (
    BasePolicy,
    GroupMergeMethod,
    InputContract,
    MergeMethodSpec,
    OptionalTensorPolicy,
    ParameterScope,
    TensorGroup,
)
from pydantic import AfterValidator
from torch import Tensor

from mergekit_ace.algebra.linear import merge_linear
from mergekit_ace.algebra.options import Number
from mergekit_ace.methods.inputs import (
    check_finite,
    check_models,
    check_shapes_in_memory,
    describe,
    is_finite,
)
from mergekit_ace.methods.lookup import FileCoefficients, LearnerCoefficients, load
from mergekit_ace.methods.parameters import NamedParameter
from mergekit_ace.methods.shapes import check_shapes

NAME = "statsmerging"


def _loadable(path: str) -> str:
    """A file that cannot be used should be known before anything is merged."""
    load(path)
    return path


FilePath = Annotated[str, AfterValidator(_loadable)]
_FILE = "the path of a coefficients.safetensors that `mergekit-ace train` wrote"


def _parameter(name: str, value_type: Any, scope: ParameterScope, default: Any, allowed: str):
    return NamedParameter(name, value_type, scope, default, allowed=allowed, method=NAME)


class StatsMerge(GroupMergeMethod):
    """StatsMerging (layer-wise merging with coefficients learned from weight statistics).

    θ_0 + Σ_k λ_k Δ_k in float32, one tensor at a time. The coefficients are looked up in a file
    that the trainer wrote (``coefficients``), predicted from each tensor as it passes by a trained
    network (``learner``), or given in the config (``weight``).
    """

    spec = MergeMethodSpec(
        name=NAME,
        pretty_name="StatsMerging",
        reference_url="https://arxiv.org/abs/2506.04567",
        parameters=(
            _parameter("weight", Number | None, ParameterScope.NON_BASE, None, "a finite number"),
            _parameter("coefficients", FilePath | None, ParameterScope.SHARED, None, _FILE),
            _parameter("learner", FilePath | None, ParameterScope.SHARED, None, _FILE),
            _parameter(
                "task",
                str | None,
                ParameterScope.NON_BASE,
                None,
                "the name that the expert has in the coefficient file",
            ),
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
        contract=InputContract(base=BasePolicy.REQUIRED, min_non_base=1),
        optional_tensor_policy=OptionalTensorPolicy.PASSTHROUGH_BASE_SINGLETON,
    )

    def validate_inputs(
        self,
        input_ids: Sequence[Hashable],
        base_id: Hashable | None = None,
        *,
        group_name: str | None = None,
    ) -> None:
        """mergekit's structural check, with errors that say what to write instead."""
        experts = check_models(NAME, input_ids, base_id, group_name)
        super().validate_inputs(input_ids, base_id, group_name=group_name)
        if group_name is not None:
            check_shapes(group_name, experts, base_id, method=NAME)

    def __call__(self, groups: Sequence[TensorGroup], /, **options: Any) -> tuple[Tensor, ...]:
        """Merge tensors in memory; mergekit's entry point for them, with its arguments."""
        for group in groups:
            check_shapes_in_memory(NAME, group)
        return super().__call__(groups, **options)

    @torch.no_grad()
    def merge_group(self, group: TensorGroup, /, **parameters: Any) -> Tensor:
        """Merge one tensor; the result has the dtype of the inputs."""
        base, experts = group.base, group.non_base
        assert base is not None  # the contract requires it
        check_finite(NAME, group)
        coefficients = coefficients_of(group, parameters)
        tensors = [expert.tensor for expert in experts]
        merged = merge_linear(base.tensor, tensors, coefficients).to(base.tensor.dtype)
        if not is_finite(merged):
            raise ValueError(
                f"{NAME}: {describe(group.metadata.name)} came out too large for {merged.dtype}. "
                "Use a dtype with more range (dtype: bfloat16 or float32)."
            )
        return merged


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
    tasks = [parameters["task"][expert.id] for expert in group.non_base]
    if parameters["learner"] is not None:
        return LearnerCoefficients(parameters["learner"]).predict(group)
    source = FileCoefficients(parameters["coefficients"], by_depth=parameters["match"] == "depth")
    return source.find(group, tasks, missing=parameters["missing"])
