# SPDX-License-Identifier: Apache-2.0
"""What must hold for every family of matrices."""

from __future__ import annotations

from itertools import combinations

import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from matrices import merge_matrix
from reference import naive_ace, task_vector_error
from torch import Tensor

from mergekit_ace import AceOptions, IllConditionedError
from mergekit_ace.algebra.ace import PlusOptions

settings.register_profile("ours", deadline=None, derandomize=True, max_examples=60)
settings.load_profile("ours")
# Tall, wide, square, and some whose rows just determine the merge of two or three experts.
SHAPES = [(24, 6), (48, 12), (6, 24), (5, 40), (16, 16), (12, 24), (8, 24), (30, 60), (20, 1)]
WEIGHTS = st.lists(st.floats(-2, 1).map(lambda exponent: 10**exponent), min_size=3, max_size=3)
SWITCHES = st.fixed_dictionaries(
    {
        "adaptive_normalization": st.sampled_from(["auto", "always", "never"]),
        "spectral_refinement": st.sampled_from(["auto", "always", "never"]),
        "structural_prior": st.booleans(),
        "epsilon_scale": st.sampled_from(["absolute", "relative", "spectrum"]),
        "epsilon": st.sampled_from([1e-5, 1e-3, 1e-1]),
        "refinement_mean": st.sampled_from(["plain", "ridged"]),
        "rank_fraction": st.sampled_from([0.3, 0.45]),
    }
)


@st.composite
def families(draw) -> list[Tensor]:
    """Task vectors with a common and an own part of low rank, noise, and a mean row."""
    rng = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    shape = draw(st.sampled_from(SHAPES))
    rank = draw(st.sampled_from([1, 2, 4, 8]))
    common, own = draw(st.sampled_from([0.1, 0.3, 1.0])), draw(st.sampled_from([0.3, 1.0]))
    noise, row = draw(st.sampled_from([1e-3, 0.1, 0.5])), draw(st.sampled_from([0.0, 0.3, 1.0]))
    largest = 10 ** draw(st.floats(-3, 1))
    strengths = draw(st.lists(st.floats(-3, 0), min_size=2, max_size=3))

    def random(*size: int) -> Tensor:
        return torch.randn(size, generator=rng, dtype=torch.float64)

    def part() -> Tensor:
        return random(shape[0], rank) @ random(rank, shape[1]) / rank**0.5

    shared = common * part() + row * random(shape[1])
    return [
        largest * 10**strength * (shared + own * part() + noise * random(*shape))
        for strength in strengths
    ]


def agree(deltas: list[Tensor]) -> bool:
    return all(float((a * b).sum()) > 0 for a, b in combinations(deltas, 2))


@given(families(), WEIGHTS, SWITCHES, st.sampled_from(["float64", "float32"]))
def test_agrees_with_the_reference_in_any_order_of_experts(deltas, weights, switches, precision):
    exact = precision == "float64"
    experts = deltas if exact else [delta.float() for delta in deltas]
    base, weights = torch.zeros_like(experts[0]), weights[: len(experts)]
    given = AceOptions(**switches, scale=0.7, compute_dtype=precision)
    copies = [tensor.clone() for tensor in experts]
    try:
        merged, record = merge_matrix(base, experts, weights, given)
    except IllConditionedError:
        assume(False)
    assert torch.isfinite(merged).all()
    assert all(map(torch.equal, experts, copies)), "inputs are left alone"
    assume(abs(record.log_variance - 1) > 1e-3)
    bar = 1e-5 if exact else 1e-3  # of directions at the edge of rounding
    again, other = merge_matrix(base, experts[::-1], weights[::-1], given)
    assert record.tau == other.tau[::-1]
    assert task_vector_error(again, merged, base) <= bar
    expected = naive_ace(base, experts, weights, lambda_=0.7, **switches)
    assert task_vector_error(merged, expected, base) <= bar


@settings(max_examples=300)
@given(families(), WEIGHTS, st.sampled_from(["auto", "always", "never"]), st.booleans())
def test_no_merge_points_against_the_sum_of_experts_that_agree(deltas, weights, switch, plus):
    """With the ridge that follows the spectrum, without the prior: with it, 2 of 1,500 do.

    Centring takes the mean rows out; what is left has to agree, too.
    """
    options = PlusOptions()
    if not plus:
        switches = {"adaptive_normalization": switch, "spectral_refinement": switch}
        options = AceOptions(**switches, structural_prior=False)
    assume(agree(deltas))
    assume(plus or agree([delta - delta.mean(dim=0) for delta in deltas]))
    base, total = torch.zeros_like(deltas[0]), sum(deltas)
    merged, _ = merge_matrix(base, deltas, weights[: len(deltas)], options)
    assert float((merged * total).sum()) >= -1e-6 * float(merged.norm() * total.norm())
