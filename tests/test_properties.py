# SPDX-License-Identifier: Apache-2.0
"""What must hold for every family of matrices."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import combinations

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from matrices import as_if_large, family
from mergekit_ace.algebra.relative import RelativeOptions, merge_tensor_relative
from reference import naive_ace, task_vector_error
from torch import Tensor

from mergekit_ace import AceOptions, IllConditionedError, merge_matrix
from mergekit_ace.algebra.components import split_tensor

settings.register_profile("ours", deadline=None, derandomize=True, max_examples=60)
settings.load_profile("ours")


@dataclass(frozen=True)
class Case:
    base: Tensor
    experts: list[Tensor]
    weights: list[float]


@st.composite
def cases(draw) -> Case:
    rng = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    experts = draw(st.integers(2, 5))
    exponents = draw(st.lists(st.floats(-2, 2), min_size=experts, max_size=experts))
    base, members = family(
        rng,
        draw(st.integers(2, 24)),
        draw(st.integers(1, 24)),
        experts,
        scales=[10.0**e for e in exponents],
        rank=draw(st.integers(1, 6)),
        noise=draw(st.sampled_from([0.01, 0.1, 1.0])),
    )
    weights = draw(st.lists(st.floats(0.1, 10), min_size=experts, max_size=experts))
    return Case(base, members, weights)


switches = st.fixed_dictionaries(
    {
        "adaptive_normalization": st.sampled_from(["auto", "always", "never"]),
        "spectral_refinement": st.sampled_from(["auto", "always", "never"]),
        "structural_prior": st.booleans(),
        "epsilon_scale": st.sampled_from(["absolute", "relative"]),
        "epsilon": st.sampled_from([1e-5, 1e-3, 1e-1]),
    }
)


def merge(case: Case, **options):
    return merge_matrix(case.base, case.experts, case.weights, AceOptions(**options))


def close(got: Tensor, expected: Tensor, base: Tensor, bar: float) -> bool:
    """Up to `bar` of the task vector, and to the rounding of a float32 weight."""
    rounding = 2e-7 * float(expected.norm() / (expected - base).norm().clamp(min=1e-30))
    return task_vector_error(got, expected, base) <= bar + rounding


@given(cases(), switches, st.sampled_from(["float64", "float32", "as if large"]))
def test_agrees_with_the_reference_and_is_finite(case, options, precision):
    given = AceOptions(
        **options, compute_dtype=precision.replace("as if large", "float32"), ridge_floor=False
    )
    merged, record = merge_matrix(case.base, case.experts, case.weights, given)
    assert torch.isfinite(merged).all()
    assume(record.rule == "ace" and abs(record.gamma - 0.3) > 1e-3)
    if precision == "as if large":
        tasks = sum(tau > 0 for tau in record.tau)
        attempts = as_if_large(case.base.shape, tasks, refined=record.refined)
        merged, record = merge_matrix(
            case.base, case.experts, case.weights, given, attempts=attempts
        )
    expected = naive_ace(case.base, case.experts, case.weights, **options)
    bar = 1e-14 * record.condition + 1e-7
    if precision != "float64":
        bar = max(5e-5, 2e-7 * record.condition)
    assert close(merged, expected, case.base, bar)


@given(cases(), st.randoms(use_true_random=False))
def test_the_order_of_experts_does_not_matter(case, random):
    order = list(range(len(case.experts)))
    random.shuffle(order)
    merged, record = merge(case, compute_dtype="float64")
    shuffled = Case(case.base, [case.experts[t] for t in order], [case.weights[t] for t in order])
    again, record_again = merge(shuffled, compute_dtype="float64")
    assert close(again, merged, case.base, 1e-14 * (record.condition or 1) + 1e-9)
    assert [record.tau[t] for t in order] == list(record_again.tau)


# Tall, wide, square, and some whose rows just determine the merge of two or three experts.
SHAPES = [(24, 6), (48, 12), (6, 24), (5, 40), (16, 16), (12, 24), (8, 24), (30, 60)]


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


settings_of_ace = st.fixed_dictionaries(
    {
        "epsilon": st.just(0.0) | st.floats(-12, 6).map(lambda exponent: 10**exponent),
        "epsilon_scale": st.sampled_from(["absolute", "relative"]),
        "heterogeneity": st.sampled_from(["gamma", "log_variance"]),
        "adaptive_normalization": st.sampled_from(["auto", "always", "never"]),
        "spectral_refinement": st.sampled_from(["auto", "always", "never"]),
        "structural_prior": st.booleans(),
        "rank_fraction": st.sampled_from([0.05, 0.1, 0.3, 0.5, 1.0]),
        "centred": st.booleans(),
        "ridge_floor": st.booleans(),
    }
)


def agree(deltas: list[Tensor]) -> bool:
    return all(float((a * b).sum()) > 0 for a, b in combinations(deltas, 2))


def experts_that_agree(
    deltas: list[Tensor], centred: bool, exponents: list[float]
) -> tuple[Tensor, list[float], Tensor]:
    """The base, the weights and the sum of experts that agree, after centring as well."""
    assume(agree(deltas))
    if centred:
        assume(agree([delta - delta.mean(dim=0) for delta in deltas]))
    weights = [10**exponent for exponent in exponents[: len(deltas)]]
    return torch.zeros_like(deltas[0]), weights, sum(deltas)


@settings(max_examples=500)
@given(families(), settings_of_ace, st.lists(st.floats(-2, 1), min_size=3, max_size=3))
def test_no_merge_points_against_the_sum_of_experts_that_agree(deltas, options, exponents):
    """By the formula in float64, and by ours.

    Centring takes the mean rows out of the merge. What is left of the experts then has to agree,
    too: where all that they share is a mean row, what is left may be opposed, and so may be any
    merge of it.
    """
    base, weights, total = experts_that_agree(deltas, options["centred"], exponents)
    try:
        merged, record = merge_matrix(base, deltas, weights, AceOptions(**options))
    except IllConditionedError:
        assume(False)
    found = [merged]
    # the formula has the ridge as given; and beyond 1e11 an explicit inverse is rounding errors
    if not options.pop("ridge_floor") and record.condition < 1e11:
        found.append(naive_ace(base, deltas, weights, **options))
    for merged in found:
        assert float((merged * total).sum()) >= -1e-6 * float(merged.norm() * total.norm())


settings_of_relative = st.fixed_dictionaries(
    {
        "epsilon": st.just(0.0) | st.floats(-12, 6).map(lambda exponent: 10**exponent),
        "structural_prior": st.booleans(),
        "centred": st.booleans(),
        "ridge_floor": st.booleans(),
    }
)


@settings(max_examples=500)
@given(families(), settings_of_relative, st.lists(st.floats(-2, 1), min_size=3, max_size=3))
def test_no_merge_by_relative_errors_points_against_the_sum_of_experts_that_agree(
    deltas, options, exponents
):
    """In `ace_relative`, too, a prior that would do so is left out."""
    base, weights, total = experts_that_agree(deltas, options["centred"], exponents)
    try:
        merged, _ = merge_tensor_relative(base, deltas, weights, RelativeOptions(**options))
    except IllConditionedError:
        assume(False)
    assert float((merged * total).sum()) >= -1e-6 * float(merged.norm() * total.norm())


@pytest.mark.parametrize(
    ("step", "shape", "strengths", "weights", "share"),
    [
        ("prior", (24, 60), (0.1, 0.01), [1.0, 1.0], (0.02, 0.3)),
        ("refined", (8, 24), (0.1, 0.001), [0.03, 1.0], (0.9, 1.0)),
    ],
)
def test_steps_that_would_turn_against_the_experts(step, shape, strengths, weights, share):
    """They are left out, of the merge and of its components."""
    rng = torch.Generator().manual_seed(3)
    switches = {
        "epsilon": 1e-4,
        "epsilon_scale": "relative",
        "adaptive_normalization": "always",
        "spectral_refinement": "always" if step == "refined" else "never",
    }
    options = AceOptions(**switches, ridge_floor=False)
    base, left_out, count = torch.zeros(shape), 0, 60
    for _ in range(count):
        shared = torch.randn(shape[0], 1, generator=rng) @ torch.randn(1, shape[1], generator=rng)
        deltas = [s * (shared + 0.03 * torch.randn(shape, generator=rng)) for s in strengths]
        merged, record = merge_matrix(base, deltas, weights, options)
        if not getattr(record, step):
            left_out += 1
            expected = naive_ace(base, deltas, weights, **switches)
            assert close(merged, expected, base, 1e-4)
            parts = split_tensor(base, deltas, options, "matrix", weights)
            assert close(sum(parts), expected, base, 1e-4)
    assert share[0] <= left_out / count <= share[1]
