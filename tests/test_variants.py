# SPDX-License-Identifier: Apache-2.0
"""`ace_relative` and `ace_plus` against their naive float64 transcriptions."""

from __future__ import annotations

import pytest
import torch
from checkpoints import ace_config, check_merge, save_family
from covering import covered
from matrices import HETEROGENEOUS, deltas_of, family
from mergekit.merge_methods import merge_tensors
from naive_peers import naive_tsv_m
from reference import (
    RELATIVE,
    naive_flattened,
    naive_plus,
    naive_relative,
    naive_table,
    task_vector_error,
)
from tiny_models import tiny_model

from mergekit_ace.algebra.ace import PlusOptions, RelativeOptions, merge_tensor

WEIGHTS = [None, [1.0, 0.2, 3.0], [0.0, 1.0, 1.0]]
OWN = [1.7, 0.0, -0.6]


def relative(base, experts, weights=None, layout="auto", own=None, **options):
    return merge_tensor(base, experts, weights, RelativeOptions(**options), layout, own)


def plus(base, experts, layout="matrix", dtype="float64"):
    return merge_tensor(base, experts, None, PlusOptions(compute_dtype=dtype), layout)


@covered(
    shape=[(20, 90), (50, 60), (120, 24), (32, 32), (12, 60)],
    method=[
        (naive_relative, RelativeOptions, {}),
        (naive_relative, RelativeOptions, {"epsilon": 1.0}),
        (naive_relative, RelativeOptions, {"epsilon": 1e-4, "epsilon_scale": "relative"}),
        (naive_plus, PlusOptions, {}),
    ],
    weights=WEIGHTS,
    scales=[None, HETEROGENEOUS],
    coefficients=[None, OWN],
)
def test_matrices(rng, shape, method, weights, scales, coefficients):
    naive, kind, options = method
    base, experts = family(rng, *shape, 3, scales=scales, noise=0.3)
    expected = naive(base, experts, weights, lambda_=0.8, coefficients=coefficients, **options)
    for dtype, bar in (("float64", 1e-9), ("float32", 2e-4)):
        given = kind(scale=0.8, compute_dtype=dtype, **options)
        merged, record = merge_tensor(base, experts, weights, given, "matrix", coefficients)
        rule = "ace_plus" if kind is PlusOptions else "ace_relative"
        assert record.matrices[0].rule == rule
        assert task_vector_error(merged, expected, base) <= bar


@pytest.mark.parametrize(
    ("shape", "layout"), [((50, 12), "table"), ((90, 10), "matrix"), ((10, 90), "matrix")]
)
def test_tables_and_long_matrices_add_the_orthogonal_sum(rng, shape, layout):
    base, experts = family(rng, *shape, 3, noise=0.3)
    regression = (naive_table if layout == "table" else naive_relative)(base, experts)
    orthogonal = naive_tsv_m(deltas_of(base, experts))
    total = 0.72 * (regression - base.double()) + 0.28 * orthogonal
    for dtype, bar in (("float64", 1e-9), ("float32", 2e-4)):
        merged, _ = plus(base, experts, layout=layout, dtype=dtype)
        assert task_vector_error(merged, base.double() + total, base) <= bar


def test_experts_that_share_neither_inputs_nor_outputs_are_both_kept(rng):
    base = torch.zeros(20, 16, dtype=torch.float64)
    one, other = base.clone(), base.clone()
    one[:8, :6] = torch.randn(8, 6, generator=rng).double()
    other[8:, 6:] = torch.randn(12, 10, generator=rng).double()
    merged, _ = plus(base, [one, other])
    both = one + other
    expected = naive_flattened(both, both)
    assert task_vector_error(merged, expected, base) <= 0.1


@pytest.mark.parametrize("unit", [1e-30, 1e-12, 1.0, 1e12, 1e30])
def test_the_unit_of_the_weights_does_not_count(rng, unit):
    base, experts = family(rng, 16, 24, 3)
    expected = naive_plus(base, experts) - base.double()
    deltas = [(unit * delta).float() for delta in deltas_of(base, experts)]
    merged, _ = plus(torch.zeros(16, 24), deltas, dtype="float32")
    assert task_vector_error(merged.double() / unit, expected, torch.zeros(16, 24)) <= 1e-4


def test_experts_that_agree_or_cancel(rng):
    base, (one, other) = family(rng, 16, 24, 2)
    merged, _ = plus(base, [one, one.clone()])
    assert task_vector_error(merged, one, base) <= 1e-9
    merged, _ = plus(torch.zeros(16, 24), [other - base, base - other])
    assert merged.norm() <= 1e-6 * (other - base).norm()
    merged, _ = plus(base, [one, base.clone()])
    assert torch.equal(merged.float(), one)


@covered(
    epsilon=[0.0, 1e-5, 0.03, 1.0],
    scales=[None, HETEROGENEOUS],
    exponent=[0, -60, 55],
    weights=WEIGHTS,
    own=[None, OWN],
)
def test_a_table_of_rows(rng, epsilon, scales, exponent, weights, own):
    base, experts = family(rng, 30, 8, 3, scales=scales)
    experts[0][:10] = base[:10]  # rows that one expert, or all but one, left as they were
    experts[1][5:15] = base[5:15]
    base, *experts = (2.0**exponent * tensor for tensor in (base, *experts))
    known = {"lambda_": 0.8, "epsilon": epsilon, "coefficients": own}
    expected = naive_table(base, experts, weights, **known)
    rounding = 2**-24 * float(expected.norm() / (expected - base.double()).norm())
    for dtype, bar in (("float64", 1e-9), ("float32", 5e-6 + rounding)):
        given = {"scale": 0.8, "epsilon": epsilon, "layout": "table", "compute_dtype": dtype}
        merged, record = relative(base, experts, weights, own=own, **given)
        assert task_vector_error(merged, expected, base) <= bar
        assert record.layout == "table"
    alone, _ = relative(base, [base.clone(), experts[0]], layout="table")
    assert torch.equal(alone, experts[0])


@pytest.mark.parametrize("weak", [1e-20, 1e-36])
def test_a_table_with_an_expert_far_weaker_than_another(rng, weak):
    base = torch.zeros(30, 8)
    strong, other = torch.randn(2, 30, 8, generator=rng)
    strong[:10] = 0
    expected = naive_table(base, [strong, weak * other])
    merged, _ = relative(base, [strong, weak * other], layout="table")
    assert merged.isfinite().all()
    for rows in (slice(0, 10), slice(10, 30)):
        assert task_vector_error(merged[rows], expected[rows], base[rows]) <= 1e-5, rows


@pytest.mark.parametrize("method", ["ace", "ace_relative"])
def test_an_epsilon_of_zero_says_what_to_do(rng, method):
    tensors = [torch.zeros(3, 9), *torch.randn(2, 3, 9, generator=rng)]
    given = {"base_index": 0, "parameters": {"epsilon": 0}, "name": "w"}
    with pytest.raises(ValueError, match=rf"{method}: tensor w cannot.*Raise `epsilon`"):
        merge_tensors(tensors, method, **given)


@pytest.mark.parametrize(
    ("name", "model_type", "table"),
    [
        ("LlamaForCausalLM", "llama", "model.embed_tokens.weight"),
        ("GPT2LMHeadModel", "gpt2", "transformer.wpe.weight"),  # the other, tied, is a matrix
    ],
)
def test_a_checkpoint_through_mergekit_yaml(tmp_path, mergekit_yaml, name, model_type, table):
    model = tiny_model(name, model_type, layers=1)
    paths = save_family(model, tmp_path, experts=3, scales=[0.002, 0.02, 0.1])
    config = ace_config(paths, merge_method="ace_relative", parameters={"epsilon": "3e-2"})

    def options_of(tensor: str) -> dict:
        return {**RELATIVE, "epsilon": 3e-2, **({"layout": "table"} if tensor == table else {})}

    check_merge(type(model), paths, mergekit_yaml(config), 1e-4, options_of)
