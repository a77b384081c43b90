# SPDX-License-Identifier: Apache-2.0
"""Coefficients over the components of a merge, against the naive transcription."""

from __future__ import annotations

import pytest
import torch
from matrices import HETEROGENEOUS, family
from reference import naive_ace, naive_relative, naive_table, task_vector_error

from mergekit_ace.algebra.adaptive import merge_tensor
from mergekit_ace.algebra.components import split_tensor
from mergekit_ace.algebra.forms import Attempt
from mergekit_ace.algebra.records import AceOptions, tolerance
from mergekit_ace.algebra.relative import RelativeOptions, merge_tensor_relative

OWN = [1.7, 0.0, -0.6]
REFINEMENT = 0.4


@pytest.mark.parametrize("scales", [None, HETEROGENEOUS], ids=["even", "uneven"])
@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("form", ["primal", "tall", "lean", "dual"])
@pytest.mark.parametrize("switches", [{}, {"refinement_mean": "ridged"}, {"centred": False}])
def test_ace(rng, switches, form, dtype, scales):
    wide = torch.float64 if dtype == "float64" else torch.float32
    both = [Attempt(form, wide), Attempt(form, torch.float64)]
    shape = {"dual": (20, 90), "tall": (120, 24)}.get(form, (50, 60))
    base, experts = family(rng, *shape, 3, scales=scales, noise=0.3)
    epsilon = 1e-4 if scales is None else 1e-2
    options = AceOptions(
        epsilon=epsilon, scale=0.8, compute_dtype=dtype, ridge_floor=False, **switches
    )
    for weights in (None, [1.0, 0.2, 3.0]):
        for own in (OWN, [0.0, 0.0, 2.0], [1.0, 1.0, 1.0]):
            given = [*own, REFINEMENT]
            merged, record = merge_tensor(
                base, experts, weights, options, "matrix", given, attempts=both
            )
            expected = naive_ace(
                base, experts, weights,
                lambda_=0.8, epsilon=epsilon, coefficients=given, **switches,
            )  # fmt: skip
            (matrix,) = record.matrices
            assert matrix.refined == (scales is not None)
            bar = 1e-8 if dtype == "float64" else 3 * tolerance(matrix.condition)
            assert task_vector_error(merged, expected, base) <= bar


@pytest.mark.parametrize("form", ["primal", "tall", "lean", "dual"])
def test_ace_relative(rng, form):
    only = [Attempt(form, torch.float64)]
    shape = {"dual": (20, 90), "tall": (120, 24)}.get(form, (50, 60))
    base, experts = family(rng, *shape, 3, scales=HETEROGENEOUS, noise=0.3)
    for options in ({}, {"centred": True, "structural_prior": True}):
        expected = naive_relative(base, experts, floor=True, coefficients=OWN, **options)
        chosen = RelativeOptions(compute_dtype="float64", **options)
        merged, _ = merge_tensor_relative(base, experts, None, chosen, "matrix", OWN, attempts=only)
        assert task_vector_error(merged, expected, base) <= 1e-9
    expected = naive_table(base, experts, coefficients=OWN)
    merged, _ = merge_tensor_relative(base, experts, None, chosen, "table", OWN)
    assert task_vector_error(merged, expected, base) <= 1e-9


def test_ones_change_no_bit(rng):
    base, experts = family(rng, 30, 40, 3, scales=HETEROGENEOUS)
    plain, _ = merge_tensor(base, experts)
    assert torch.equal(merge_tensor(base, experts, coefficients=[1.0] * 4)[0], plain)


@pytest.mark.parametrize("layout", ["matrix", "transposed", "mean", "stacked"])
@pytest.mark.parametrize("method", ["ace", "ace_relative"])
def test_components_add_up(rng, method, layout):
    base, experts = family(rng, 12, 16, 3, scales=HETEROGENEOUS)
    experts.append(base.clone())  # left the tensor as it was
    if layout == "stacked":
        other, more = family(rng, 12, 16, 4)
        base = torch.stack([base, other])
        experts = [torch.stack(pair) for pair in zip(experts, more, strict=True)]
    merge = merge_tensor if method == "ace" else merge_tensor_relative
    kind = AceOptions if method == "ace" else RelativeOptions
    options = kind(epsilon=1e-2, scale=0.5)
    parts = split_tensor(base, experts, options, layout)
    assert len(parts) == (5 if method == "ace" else 4)
    if layout != "stacked":
        assert not parts[3].any()
    given = [0.3, 1.0, 2.0, 7.0, -1.0][: len(parts)]
    wide = kind(epsilon=1e-2, scale=0.5, compute_dtype="float64")
    merged, _ = merge(base, experts, None, wide, layout, given)
    expected = base.double() + 0.5 * sum(a * p for a, p in zip(given, parts, strict=True)).double()
    assert task_vector_error(merged, expected, base) <= 1e-4


@pytest.mark.parametrize("layout", ["matrix", "transposed", "mean", "stacked", "table"])
@pytest.mark.parametrize("method", ["ace", "ace_relative"])
def test_components_of_experts_that_hardly_changed_add_up(rng, method, layout):
    """One expert is the base, saved through bfloat16; another one is mixed in by a share."""
    if method == "ace" and layout == "table":
        pytest.skip("ace has no such layout")
    base, experts = family(rng, 12, 16, 2, scales=[0.03, 0.1])
    nearly = base.bfloat16().float()
    nearly[0, 0] *= 1 + 2**-7
    experts += [base.bfloat16().float(), nearly.bfloat16().float()]
    if layout == "stacked":
        base, experts = torch.stack([base] * 2), [torch.stack([e] * 2) for e in experts]
    merge = merge_tensor if method == "ace" else merge_tensor_relative
    kind = AceOptions if method == "ace" else RelativeOptions
    options = kind(epsilon=1e-2)
    parts = split_tensor(base, experts, options, layout)
    assert not parts[2].any()
    given = [0.3, 1.0, 7.0, 2.0, -1.0][: len(parts)]
    wide = kind(epsilon=1e-2, compute_dtype="float64")
    merged, record = merge(base, experts, None, wide, layout, given)
    changed = record.matrices[0].changed
    assert changed[:3] == (1, 1, 0)
    assert 0.1 < changed[3] < 0.9
    expected = base.double() + sum(a * p for a, p in zip(given, parts, strict=True)).double()
    assert task_vector_error(merged, expected, base) <= 1e-4


def test_one_expert_alone(rng):
    base, (expert, _) = family(rng, 6, 5, 2)
    merged, _ = merge_tensor(base, [base.clone(), expert], coefficients=[5.0, 0.5, 1.0])
    torch.testing.assert_close(merged, (base + expert) / 2)
    parts = split_tensor(base, [base.clone(), expert], RelativeOptions(), "matrix")
    assert not parts[0].any()
    torch.testing.assert_close(parts[1], expert - base)
