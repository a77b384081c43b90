# SPDX-License-Identifier: Apache-2.0
"""`ace_relative` against its naive float64 transcription, and what its objective promises."""

from __future__ import annotations

import pytest
import torch
from checkpoints import ace_config, check_merge, save_family
from covering import covered
from matrices import HETEROGENEOUS, family
from mergekit.merge_methods import merge_tensors
from reference import RELATIVE, naive_relative, naive_table, task_vector_error
from test_architectures import small_model

from mergekit_ace.algebra.ace import RelativeOptions, merge_tensor

WEIGHTS = [None, [1.0, 0.2, 3.0], [0.0, 1.0, 1.0]]


def merge(base, experts, weights=None, layout="auto", **options):
    return merge_tensor(base, experts, weights, RelativeOptions(**options), layout)


@covered(
    shape=[(20, 90), (50, 60), (120, 24), (32, 32)],
    options=[
        {},
        {"epsilon": 1.0},
        {"epsilon": 1e-4, "epsilon_scale": "relative"},
        {"centred": True},
        {"structural_prior": True},
        {"centred": True, "structural_prior": True},
    ],
    weights=WEIGHTS,
    scales=[None, HETEROGENEOUS],
)
def test_against_the_transcription(rng, shape, options, weights, scales):
    base, experts = family(rng, *shape, 3, scales=scales, noise=0.3)
    expected = naive_relative(base, experts, weights, lambda_=0.8, **options)
    for dtype, bar in (("float64", 1e-9), ("float32", 2e-4)):
        given = {**options, "scale": 0.8, "compute_dtype": dtype}
        merged, record = merge(base, experts, weights, **given)
        assert record.matrices[0].rule == "ace_relative"
        assert task_vector_error(merged, expected, base) <= bar


@covered(
    epsilon=[0.0, 1e-5, 0.03, 1.0],
    scales=[None, HETEROGENEOUS],
    exponent=[0, -60, 55],
    weights=WEIGHTS,
)
def test_a_table_of_rows(rng, epsilon, scales, exponent, weights):
    base, experts = family(rng, 30, 8, 3, scales=scales)
    experts[0][:10] = base[:10]  # rows that one expert, or all but one, left as they were
    experts[1][5:15] = base[5:15]
    unit = 2.0**exponent
    base, experts = base * unit, [expert * unit for expert in experts]
    expected = naive_table(base, experts, weights, lambda_=0.8, epsilon=epsilon)
    rounding = 2**-24 * float(expected.norm() / (expected - base.double()).norm())
    for dtype, bar in (("float64", 1e-9), ("float32", 5e-6 + rounding)):
        given = {"scale": 0.8, "epsilon": epsilon, "layout": "table", "compute_dtype": dtype}
        merged, record = merge(base, experts, weights, **given)
        assert task_vector_error(merged, expected, base) <= bar
        assert record.layout == "table"
    alone, _ = merge(base, [base.clone(), experts[0]], layout="table")
    assert torch.equal(alone, experts[0])


@pytest.mark.parametrize("weak", [1e-20, 1e-36])
def test_a_table_with_an_expert_far_weaker_than_another(rng, weak):
    base = torch.zeros(30, 8)
    strong, other = (torch.randn(30, 8, generator=rng) for _ in range(2))
    strong[:10] = 0
    expected = naive_table(base, [strong, weak * other])
    merged, _ = merge(base, [strong, weak * other], layout="table")
    assert merged.isfinite().all()
    for rows in (slice(0, 10), slice(10, 30)):
        error = (merged[rows].double() - expected[rows]).norm() / expected[rows].norm()
        assert error <= 1e-5, rows


def test_an_epsilon_of_zero_says_what_to_do(rng):
    base = torch.zeros(3, 9)
    experts = [torch.randn(3, 9, generator=rng) for _ in range(2)]
    given = {"base_index": 0, "parameters": {"epsilon": 0}, "name": "w"}
    with pytest.raises(ValueError, match=r"ace_relative: tensor w cannot.*Raise `epsilon`"):
        merge_tensors([base, *experts], "ace_relative", **given)


@pytest.mark.parametrize(
    ("name", "table"), [("llama", "model.embed_tokens.weight"), ("gpt2", "transformer.wpe.weight")]
)  # GPT-2's other one, which is tied, is a matrix
def test_a_checkpoint_through_mergekit_yaml(tmp_path, mergekit_yaml, name, table):
    model = small_model(name)
    paths = save_family(model, tmp_path, experts=3, scales=[0.002, 0.02, 0.1])
    config = ace_config(paths, merge_method="ace_relative", parameters={"epsilon": "3e-2"})

    def options_of(tensor: str) -> dict:
        return {**RELATIVE, "epsilon": 3e-2, **({"layout": "table"} if tensor == table else {})}

    layouts = check_merge(type(model), paths, mergekit_yaml(config), 1e-4, options_of)
    assert layouts["table"] == 1
