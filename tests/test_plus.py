# SPDX-License-Identifier: Apache-2.0
"""`ace_plus` against its naive float64 transcription."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from checkpoints import ace_config, check_merge, save_family
from covering import covered
from matrices import HETEROGENEOUS, deltas_of, family
from reference import naive_flattened, naive_plus, naive_table, task_vector_error
from tiny_models import tiny_model

from mergekit_ace.algebra.ace import PlusOptions, merge_table, merge_tensor
from mergekit_ace.algebra.task_vectors import select_active

WEIGHTS = [None, [1.0, 0.2, 3.0], [0.0, 1.0, 1.0]]
OWN = [1.7, 0.0, -0.6]


def plus(base, experts, layout="matrix", dtype="float64"):
    return merge_tensor(base, experts, None, PlusOptions(compute_dtype=dtype), layout)


@covered(
    shape=[(20, 90), (50, 60), (120, 24), (32, 32), (12, 60), (90, 10), (10, 90)],
    weights=WEIGHTS,
    scales=[None, HETEROGENEOUS],
    coefficients=[None, OWN],
)
def test_matrices(rng, shape, weights, scales, coefficients):
    base, experts = family(rng, *shape, 3, scales=scales, noise=0.3)
    expected = naive_plus(base, experts, weights, lambda_=0.8, coefficients=coefficients)
    for dtype, bar in (("float64", 1e-9), ("float32", 2e-4)):
        given = PlusOptions(scale=0.8, compute_dtype=dtype)
        merged, record = merge_tensor(base, experts, weights, given, "matrix", coefficients)
        assert record.matrices[0].rule == "ace_plus"
        assert task_vector_error(merged, expected, base) <= bar


@pytest.mark.parametrize("shape", [(64, 32), (20, 200)])
def test_experts_that_changed_a_few_rows(rng, shape):
    """As of tokens that they added; the error of X is measured where there is one."""
    base, experts = family(rng, *shape, 3)
    for expert in experts:
        expert[:-5] = base[:-5]
    expected = naive_plus(base, experts)
    assert task_vector_error(plus(base, experts, dtype="float32")[0], expected, base) <= 2e-4


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


@covered(scales=[None, HETEROGENEOUS], exponent=[0, -60, 55], weights=WEIGHTS, own=[None, OWN])
def test_a_table_of_rows(rng, scales, exponent, weights, own):
    base, experts = family(rng, 30, 8, 3, scales=scales)
    experts[0][:10] = base[:10]  # rows that one expert, or all but one, left as they were
    experts[1][5:15] = base[5:15]
    base, *experts = (2.0**exponent * tensor for tensor in (base, *experts))
    expected = naive_plus(base, experts, weights, lambda_=0.8, coefficients=own, table=True)
    rounding = 2**-24 * float(expected.norm() / (expected - base.double()).norm())
    for dtype, bar in (("float64", 1e-9), ("float32", 2e-4 + rounding)):
        options = PlusOptions(scale=0.8, compute_dtype=dtype)
        merged, record = merge_tensor(base, experts, weights, options, "table", own)
        assert task_vector_error(merged, expected, base) <= bar
        assert record.layout == "table"
    own, weights = own or [1.0] * 3, weights or [1.0] * 3
    active = select_active(base, experts, weights, torch.float32, own)
    means = base.double() + 0.8 * naive_table(base, experts, weights, own)
    rounding = 2**-24 * float(means.norm() / (means - base.double()).norm())
    assert task_vector_error(merge_table(base, active, 0.8)[0], means, base) <= 5e-6 + rounding
    alone, _ = plus(base, [base.clone(), experts[0]], layout="table")
    assert torch.equal(alone.float(), experts[0])


@pytest.mark.parametrize("weak", [1e-20, 1e-36])
def test_a_table_with_an_expert_far_weaker_than_another(rng, weak):
    base = torch.zeros(30, 8)
    strong, other = torch.randn(2, 30, 8, generator=rng)
    strong[:10] = 0
    expected = naive_plus(base, [strong, weak * other], table=True)
    merged, _ = plus(base, [strong, weak * other], "table", "float32")
    assert merged.isfinite().all()
    for rows in (slice(0, 10), slice(10, 30)):
        assert task_vector_error(merged[rows], expected[rows], base[rows]) <= 1e-5, rows


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
    config = ace_config(paths, merge_method="ace_plus", parameters={"lambda": "8e-1"})

    def options_of(tensor: str) -> dict:
        return {"lambda_": 0.8, "naive": partial(naive_plus, table=tensor == table)}

    check_merge(type(model), paths, mergekit_yaml(config), 1e-4, options_of)
