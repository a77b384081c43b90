# SPDX-License-Identifier: Apache-2.0
"""Learned coefficients that belong to another merge."""

from __future__ import annotations

from collections.abc import Iterator

from mergekit_ace.coefficients.file import CoefficientFileError
from mergekit_ace.methods.lookup import FileCoefficients, TensorVersions, component_coefficients
from mergekit_ace.methods.ridge import RidgeMethod
from mergekit_ace.methods.statsmerging import StatsMerge
from mergekit_ace.planning import PlannedMerge
from mergekit_ace.preflight.findings import Finding, listed


def check_coefficients(plan: PlannedMerge) -> Iterator[Finding]:
    """What a merge would say when it comes to the first tensor whose coefficients do not fit.

    And, where they do fit, whether the components have changed under them by weights of experts.
    """
    method, weighted = plan.method, []
    for tensor in plan.tensors:
        parameters = tensor.parameters
        if parameters.get("coefficients") is None:
            continue
        tasks = tensor.expert_parameter("task", None)
        versions = TensorVersions(tensor.name, tensor.base, tensor.experts, tasks)
        try:
            if isinstance(method, RidgeMethod):
                options = method.options(parameters)
                component_coefficients(method.spec.name, parameters, options, versions)
            elif isinstance(method, StatsMerge):
                by_depth = parameters["match"] == "depth"
                source = FileCoefficients(parameters["coefficients"], by_depth=by_depth)
                source.find(versions, missing=parameters["missing"])
        except CoefficientFileError as error:
            yield Finding("error", "coefficients", str(error))
            return
        if isinstance(method, RidgeMethod) and len(set(tensor.weights)) > 1:
            weighted.append(tensor.name)
    if weighted:
        yield Finding(
            "warning",
            "coefficients",
            f"experts have different weights in {listed(weighted)}; the coefficients were learned "
            "for equal ones",
            "leave `weight` out, or expect another merge than the one that was trained",
        )
