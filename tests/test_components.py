# SPDX-License-Identifier: Apache-2.0
"""Coefficients over the components of a merge, against the naive transcription."""

from __future__ import annotations

import pytest
import torch
from matrices import HETEROGENEOUS, family
from reference import naive_ace, naive_relative, naive_table, task_vector_error

from mergekit_ace.algebra.ace import (
    AceOptions,
    PlusOptions,
    RelativeOptions,
    merge_tensor,
    split_tensor,
)

OWN = [1.7, 0.0, -0.6]
SHAPES = [(20, 90), (120, 24), (50, 60), (22, 55)]


@pytest.mark.parametrize("scales", [None, HETEROGENEOUS], ids=["even", "uneven"])
@pytest.mark.parametrize(("dtype", "bar"), [("float32", 5e-4), ("float64", 1e-8)])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("switches", [{}, {"refinement_mean": "ridged"}])
def test_ace(rng, switches, shape, dtype, bar, scales):
    base, experts = family(rng, *shape, 3, scales=scales, noise=0.3)
    epsilon = 1e-4 if scales is None else 1e-2
    options = AceOptions(epsilon=epsilon, scale=0.8, compute_dtype=dtype, **switches)
    for weights in (None, [1.0, 0.2, 3.0]):
        for own in (OWN, [0.0, 0.0, 2.0], [1.0, 1.0, 1.0]):
            given = [*own, 0.4]  # of the refinement
            merged, record = merge_tensor(base, experts, weights, options, "matrix", given)
            known = {"lambda_": 0.8, "epsilon": epsilon, "coefficients": given, **switches}
            expected = naive_ace(base, experts, weights, **known)
            assert record.matrices[0].refined == (scales is not None)
            assert task_vector_error(merged, expected, base) <= bar


@pytest.mark.parametrize("shape", SHAPES)
def test_ace_relative(rng, shape):
    base, experts = family(rng, *shape, 3, scales=HETEROGENEOUS, noise=0.3)
    options = RelativeOptions(compute_dtype="float64")
    matrix = naive_relative(base, experts, coefficients=OWN)
    table = naive_table(base, experts, coefficients=OWN)
    for layout, expected in (("matrix", matrix), ("table", table)):
        merged, _ = merge_tensor(base, experts, None, options, layout, OWN)
        assert task_vector_error(merged, expected, base) <= 1e-9


@pytest.mark.parametrize("layout", ["matrix", "transposed", "mean", "stacked"])
@pytest.mark.parametrize("kind", [AceOptions, RelativeOptions, PlusOptions])
def test_components_add_up(rng, kind, layout):
    base, experts = family(rng, 12, 16, 3, scales=HETEROGENEOUS)
    experts.append(base.bfloat16().float())  # left the tensor as it was
    if layout == "stacked":
        other, more = family(rng, 12, 16, 4)
        base = torch.stack([base, other])
        experts = [torch.stack(pair) for pair in zip(experts, more, strict=True)]
    known = {"scale": 0.5, **({} if kind is PlusOptions else {"epsilon": 1e-2})}
    parts = split_tensor(base, experts, kind(**known), layout)
    assert len(parts) == (5 if kind is AceOptions else 4)
    if layout != "stacked":
        assert not parts[3].any()
    given = [0.3, 1.0, 2.0, 7.0, -1.0][: len(parts)]
    wide = kind(**known, compute_dtype="float64")
    merged, _ = merge_tensor(base, experts, None, wide, layout, given)
    expected = base.double() + 0.5 * sum(a * p for a, p in zip(given, parts, strict=True)).double()
    assert task_vector_error(merged, expected, base) <= 1e-4
