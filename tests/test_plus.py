# SPDX-License-Identifier: Apache-2.0
"""`ace_plus` against its naive float64 transcription, and what its objective promises."""

from __future__ import annotations

import pytest
import torch
from covering import covered
from matrices import HETEROGENEOUS, deltas_of, family
from naive_peers import naive_tsv_m
from reference import naive_plus, naive_relative, naive_table, task_vector_error

from mergekit_ace.algebra.ace import PlusOptions, merge_tensor
from mergekit_ace.algebra.ridge import MeasuredCovariance, MeasuredInputs, pack

EXACT = PlusOptions(compute_dtype="float64")


def merge(base, experts, weights=None, layout="matrix", options=EXACT, **known):
    return merge_tensor(base, experts, weights, options, layout, **known)


@covered(
    shape=[(12, 60), (20, 24), (40, 9), (16, 16)],
    weights=[None, [1.0, 0.2, 3.0], [0.0, 1.0, 1.0]],
    scales=[None, HETEROGENEOUS],
    coefficients=[None, [1.7, 0.0, -0.6]],
)
def test_against_the_transcription(rng, shape, weights, scales, coefficients):
    base, experts = family(rng, *shape, 3, scales=scales, noise=0.3)
    given = {"lambda_": 0.8, "coefficients": coefficients}
    expected = naive_plus(base, experts, weights, **given)
    for dtype, bar in (("float64", 1e-9), ("float32", 2e-4)):
        options = PlusOptions(scale=0.8, compute_dtype=dtype)
        known = {"options": options, "coefficients": coefficients}
        merged, record = merge(base, experts, weights, **known)
        assert record.matrices[0].rule == "ace_plus"
        assert task_vector_error(merged, expected, base) <= bar


@pytest.mark.parametrize("mix", [0.3, 1.0])
def test_measured_covariances(rng, mix):
    base, experts = family(rng, 20, 24, 3, noise=0.3)
    samples = [torch.randn(50, 24, generator=rng) * torch.rand(24, generator=rng) for _ in experts]
    known = [x.T @ x / 50 for x in samples]
    found = tuple(MeasuredCovariance(pack(matrix), 24) for matrix in known)
    merged, record = merge(base, experts, measured=MeasuredInputs(found, mix=mix))
    expected = naive_plus(base, experts, measured=known, mix=mix)
    assert task_vector_error(merged, expected, base) <= 1e-6
    assert record.matrices[0].mix == mix


@pytest.mark.parametrize(
    ("shape", "layout"), [((50, 12), "table"), ((90, 10), "matrix"), ((10, 90), "matrix")]
)
def test_tables_and_long_matrices_add_the_orthogonal_sum(rng, shape, layout):
    base, experts = family(rng, *shape, 3, noise=0.3)
    merged, _ = merge(base, experts, layout=layout)
    regression = (naive_table if layout == "table" else naive_relative)(base, experts)
    orthogonal = naive_tsv_m(deltas_of(base, experts))
    total = 0.72 * (regression - base.double()) + 0.28 * orthogonal
    assert task_vector_error(merged, base.double() + 0.9 * total, base) <= 1e-9


@pytest.mark.parametrize("unit", [1e-30, 1e-12, 1.0, 1e12, 1e30])
def test_the_unit_of_the_weights_does_not_count(rng, unit):
    base, experts = family(rng, 16, 24, 3)
    expected = naive_plus(base, experts) - base.double()
    deltas = [unit * delta for delta in deltas_of(base, experts)]
    merged, _ = merge(torch.zeros(16, 24), [d.float() for d in deltas], options=PlusOptions())
    assert task_vector_error(merged.double() / unit, expected, torch.zeros(16, 24)) <= 1e-4


def test_experts_that_agree_or_cancel(rng):
    base, (one, other) = family(rng, 16, 24, 2)
    merged, _ = merge(base, [one, one.clone()])
    assert task_vector_error(merged, base + 0.9 * (one.double() - base), base) <= 1e-9
    merged, _ = merge(torch.zeros(16, 24), [other - base, base - other])
    assert merged.norm() <= 1e-6 * (other - base).norm()
    merged, _ = merge(base, [one, base.clone()])
    assert torch.equal(merged.float(), one)
