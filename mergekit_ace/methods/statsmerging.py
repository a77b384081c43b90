# SPDX-License-Identifier: Apache-2.0
"""`merge_method: statsmerging`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal

from mergekit_ace.algebra.task_vectors import Factor
from mergekit_ace.methods.base import TaskVectorMethod, TensorSettings, describe, method_spec
from mergekit_ace.methods.coefficients import file_coefficients, load_learner, predict_coefficients
from mergekit_ace.methods.parameters import COEFFICIENTS, TASK, per_expert, shared


class StatsMerge(TaskVectorMethod):
    """StatsMerging (layer-wise merging with coefficients learned from weight statistics).

    θ_0 + Σ_k λ_k Δ_k in float32, one tensor at a time. The coefficients are looked up in a file
    that the trainer wrote (``coefficients``), predicted from each tensor as it passes by a trained
    network (``learner``), or given in the config (``weight``).
    """

    weight = per_expert("weight", Factor | None, None, "λ of the expert, instead of a file.")
    learner = replace(
        COEFFICIENTS, name="learner", description="The file whose network predicts coefficients."
    )
    missing = shared(
        "missing", Literal["error", "mean"], "error", "Of tensors not in the file; mean: λ = 1/T."
    )
    spec = method_spec(
        "statsmerging",
        "StatsMerging",
        "https://arxiv.org/abs/2506.04567",
        (weight, COEFFICIENTS, learner, TASK, missing),
    )
    summary = (
        "Adds the task vectors with a coefficient per expert and tensor that `mergekit-ace train` "
        "has learned from statistics of the weights."
    )

    def leaves_span(self, parameters: Mapping[str, Any]) -> str:
        reads = parameters.get("learner") is not None
        return "the network of its `learner` reads the weights of full models" if reads else ""

    def coefficients(self, settings: TensorSettings) -> Sequence[float] | None:
        """Return λ_k from the one source that the config names."""
        learner, weights = settings.parameters["learner"], settings.of_experts("weight", None)
        given = [n for n in ("coefficients", "learner") if settings.parameters[n] is not None]
        given += ["weight"] * any(weight is not None for weight in weights)
        where = f"{self.spec.name}: {describe(settings.name)}"
        if len(given) != 1:
            raise ValueError(
                f"{where} has {' and '.join(given) or 'no coefficients'}; give exactly one of "
                "`coefficients: PATH` (the trainer's file), `learner: PATH` (predict from "
                "statistics), or a `weight` for every expert"
            )
        if given == ["coefficients"]:
            return file_coefficients(self.spec.name, settings)
        if given == ["weight"]:
            if None in weights:
                raise ValueError(
                    f"{where} has no weight for {settings.models[weights.index(None)]}, but for "
                    "another expert; give one to every expert (0 leaves it out)"
                )
            return weights
        if settings.group is None:
            load_learner(learner)  # says, before a tensor is read, if it cannot predict
            return None
        return predict_coefficients(learner, settings.group)
