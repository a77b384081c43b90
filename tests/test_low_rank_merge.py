# SPDX-License-Identifier: Apache-2.0
"""Merges of low-rank task vectors within their span, beside the merges of the full tensors."""

from __future__ import annotations

import pytest
import torch
from matrices import REFINED, dense
from mergekit import merge_methods

from mergekit_ace.algebra.low_rank import LowRank
from mergekit_ace.methods.base import TensorSettings


def low_rank(shape, rank, seed, scale=1.0, stack=()):
    """A random task vector."""
    rng, (rows, columns) = torch.Generator().manual_seed(seed), shape[-2:]
    left = torch.randn(*stack, rows, rank, generator=rng, dtype=torch.float64)
    right = torch.randn(*stack, rank, columns, generator=rng, dtype=torch.float64)
    return LowRank(scale * left, right / columns**0.5, tuple(shape))


def settings_of(method, experts, layout="matrix", coefficients=None, **parameters):
    values, models = {p.name: p.default for p in method.spec.parameters}, tuple(range(experts))
    for parameter in method.spec.input_parameters:
        values[parameter.name] = dict.fromkeys(models, parameter.default)
    for name, value in parameters.items():
        values[name] = dict(enumerate(value)) if isinstance(value, list) else value
    return TensorSettings("layer.weight", "base", models, values, layout, coefficients)


SAME = "rule weight heterogeneous normalized refined rank side".split()
NEAR = "tau gamma ridge sigma_iso amplification changed".split()


def check(method_name, deltas, layout="matrix", coefficients=None, bar=1e-9, **parameters):
    """Compare the merge of factors with that of full tensors."""
    method = merge_methods.get(method_name)
    settings = settings_of(method, len(deltas), layout, coefficients, **parameters)
    shape = next(delta for delta in deltas if delta).shape
    base = torch.zeros(shape, dtype=torch.float64)
    full = [dense(delta) if delta else base.clone() for delta in deltas]
    expected, wanted = method.merge([base, *full], settings)
    delta, _, record = method.merge_low_rank(deltas, settings)
    got = dense(delta) if delta else base
    assert got.shape == expected.shape
    assert float((got - expected).norm()) <= bar * float(expected.norm())
    assert record.shape == wanted.shape
    assert record.layout == wanted.layout
    for ours, theirs in zip(record.matrices, wanted.matrices, strict=True):
        for name in SAME + NEAR:
            expected = getattr(theirs, name)
            if name in NEAR and expected is not None:
                expected = pytest.approx(expected, rel=1e-6)
            assert getattr(ours, name) == expected, name


def family(shape=(40, 56), ranks=(3, 5, 2), stack=()):
    given = zip(ranks, (1, 9, 17), (1.0, 0.7, 1.3), strict=False)
    return [low_rank(shape, rank, seed, scale, stack) for rank, seed, scale in given]


CASES = {
    "ace": [
        {},
        {"structural_prior": False},
        {"epsilon": 0.1, "epsilon_scale": "absolute"},
        {"epsilon": 0.0},  # by a tall matrix: without a ridge, wide ones have no solution
        {"epsilon": 0.1, "epsilon_scale": "relative", "adaptive_normalization": "always"},
        REFINED,
        {**REFINED, "rank_fraction": 1.0, "refinement_mean": "ridged"},
        {"lambda": 0.6, "weight": [1.0, 0.0, 0.5]},
        {**REFINED, "side": "outputs"},
    ],
    "ace_plus": [{}, {"side": "outputs"}, {"weight": [1.0, 2.0, 0.5], "lambda": 1.4}],
    "tsv_m": [{}, {"lambda": 0.5}],
    "iso_c": [{}],
    "iso_cts": [{}, {"common_fraction": 0.98}],
    "cart": [{}, {"rank_fraction": 0.5, "lambda": 0.3}],
    "actmat": [{}],
    "wudi": [{"solver": "exact"}],
}
SHAPES = [(40, 56), (56, 40), (9, 200), (200, 9), (4, 5)]


@pytest.mark.parametrize(
    ("method", "parameters", "shape"),
    [
        (method, parameters, shape)
        for method, cases in CASES.items()
        for number, parameters in enumerate(cases)
        # what a method does with a shape depends on no other parameter than the refinement
        for shape in (SHAPES if number == 0 or parameters is REFINED else [SHAPES[number % 5]])
    ],
)
def test_a_merge_in_the_span_is_that_of_the_full_tensors(method, parameters, shape):
    check(method, family(shape), bar=1e-7, **parameters)


LAYOUTS = [
    ("transposed", (40, 56), ()),
    ("mean", (40, 56), ()),
    ("stacked", (3, 20, 30), (3,)),
    ("transposed", (3, 20, 30), (3,)),
    ("mean", (3, 20, 30), (3,)),
]


@pytest.mark.parametrize(("layout", "shape", "stack"), LAYOUTS)
@pytest.mark.parametrize("method", ["ace", "ace_plus", "tsv_m", "iso_c", "cart"])
def test_every_layout_is_read_as_the_full_merge_reads_it(method, layout, shape, stack):
    check(method, family(shape, stack=stack), layout, bar=1e-7)


def test_coefficients_are_those_of_the_full_tensors():
    check("ace", family(), coefficients=[0.5, 1.2, 0.9, 0.7], bar=1e-7, **REFINED)
    check("ace_plus", family(), coefficients=[0.5, 1.2, 0.9], bar=1e-7)
    check("ace_plus", family(), "table", coefficients=[0.5, 1.2, 0.9], bar=1e-7)


def test_the_ranks_of_a_table_count_for_nothing():
    check("ace_plus", family((90, 24), ranks=(11, 2)), "table", bar=1e-7)
