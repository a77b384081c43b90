# SPDX-License-Identifier: Apache-2.0
"""The float64 results handed to us, which are the paper's formula to the letter."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from mergekit.merge_methods import merge_tensors
from reference import naive_tensor, task_vector_error
from safetensors.torch import load_file

from mergekit_ace.algebra.task_vectors import measure_heterogeneity

GOLDEN = Path(__file__).parent / "golden"
CASES = json.loads((GOLDEN / "ace.json").read_text())
PAPER = {"epsilon_scale": "absolute", "heterogeneity": "gamma", "refinement_mean": "ridged"}
TENSORS = load_file(GOLDEN / "ace.safetensors")


@pytest.mark.parametrize("case", CASES)
def test_golden_case(case):
    """Through mergekit's own entry, and by the reference, so that the judge is judged, too."""
    base, expected = TENSORS[f"{case}.base"], TENSORS[f"{case}.merged"]
    experts = [TENSORS[f"{case}.expert{t}"] for t in range(CASES[case]["experts"])]
    parameters = {**PAPER, **CASES[case]["parameters"]}
    for dtype, bar in (("float32", 5e-5), ("float64", 1e-10)):
        merged = merge_tensors(
            [base, *experts],
            "ace",
            base_index=0,
            dtype=getattr(torch, dtype),
            parameters={**parameters, "compute_dtype": dtype},
        )
        assert task_vector_error(merged, expected, base) <= bar
    layout = parameters.pop("layout", "matrix" if base.ndim == 2 else "mean")
    scale = parameters.pop("lambda", 1.0)
    judged = naive_tensor(base, experts, layout, lambda_=scale, **parameters)
    assert task_vector_error(judged, expected, base) <= 1e-10


def test_statistics_match_the_golden_ones():
    cases = [case for case in CASES.values() if "tau" in case]
    assert len(cases) >= 15
    for case in cases:
        statistics = case["gamma"], case["log_variance"]
        assert measure_heterogeneity(case["tau"]) == pytest.approx(statistics, rel=1e-9)
