# SPDX-License-Identifier: Apache-2.0
"""The floor of the ridge against dense solves, and what it promises."""

from __future__ import annotations

import math

import pytest
import torch
from matrices import HETEROGENEOUS, family
from reference import naive_ace, naive_relative, naive_spectral_ridge, task_vector_error

from mergekit_ace.algebra.adaptive import merge_matrix
from mergekit_ace.algebra.closed_form import SOLVERS
from mergekit_ace.algebra.components import split_tensor
from mergekit_ace.algebra.forms import Attempt
from mergekit_ace.algebra.records import AceOptions
from mergekit_ace.algebra.relative import RelativeOptions, merge_tensor_relative
from mergekit_ace.algebra.ridge_floor import LIMIT, is_near_threshold, rows_per_column

# Rows over columns, for three experts below, at and above the threshold T·o = i, and far from it.
SHAPES = {"0.9": (27, 90), "1": (30, 90), "1.1": (33, 90), "wide": (12, 90), "tall": (120, 40)}
SMALL = (0.0, 1e-12, 1e-8, 1e-5)
PLAIN = {"adaptive_normalization": "never", "spectral_refinement": "never"}
EXACT = {"compute_dtype": "float64"}


def noise_family(rng, shape, experts=3, spread=0.0):
    """Task vectors of independent entries, whose rows only just determine X where T·o = i."""
    base = torch.randn(shape, generator=rng, dtype=torch.float64)
    deltas = [torch.randn(shape, generator=rng, dtype=torch.float64) for _ in range(experts)]
    return base, [base + 10.0 ** (spread * t) * delta for t, delta in enumerate(deltas)]


def energies(base, experts):
    return [float((expert - base).square().sum()) for expert in experts]


def naive_limit(base, experts):
    """Return what ‖X‖² / Σ ‖Δ_t‖² may be: 2.5, or less where experts differ in strength."""
    found = energies(base, experts)
    typical = math.prod(found) ** (1 / len(found))
    return max(*found, LIMIT * len(found) * typical) / sum(found)


def naive_least_ridge(base, experts, merge):
    """Return the smallest relative ε at which ‖X‖² is within the bound, by bisection."""
    bound = naive_limit(base, experts) * sum(energies(base, experts))
    low, high = 1e-9, 1e3
    while high > 1.001 * low:
        middle = math.sqrt(low * high)
        size = float((merge(base, experts, middle) - base).square().sum())
        low, high = (middle, high) if size > bound else (low, middle)
    return high


def asked_by_spectrum(base, experts, record, centred=True):
    """Return the ridge that no ε goes below, in mean eigenvalues."""
    total = 0
    for t, expert in enumerate(experts):
        delta = expert - base
        delta = delta - delta.mean(dim=0) if centred else delta
        gram = delta.T @ delta
        total = total + (gram if record.share is None else record.share[t] * gram / gram.trace())
    return len(total) * naive_spectral_ridge(total) / float(total.trace())


def ace(base, experts, epsilon=1e-5, **options):
    given = AceOptions(epsilon=epsilon, structural_prior=False, **EXACT, **options)
    merged, record = merge_matrix(base, experts, options=given)
    return merged, record


def relative(base, experts, epsilon=0.03, **options):
    given = RelativeOptions(epsilon=epsilon, **EXACT, **options)
    merged, record = merge_tensor_relative(base, experts, None, given)
    return merged, record.matrices[0]


@pytest.mark.parametrize("shape", SHAPES)
def test_the_ridge_is_that_of_a_dense_search(rng, shape):
    """Lanczos' algorithm and random signs are within a fifth of it in ‖X‖²."""
    base, experts = noise_family(rng, SHAPES[shape])
    merged, record = relative(base, experts, 0.0)
    expected = naive_least_ridge(
        base, experts, lambda b, e, epsilon: naive_relative(b, e, epsilon=epsilon)
    )
    assert merged.isfinite().all()
    least = asked_by_spectrum(base, experts, record, centred=False)
    if expected < least:  # nothing is amplified
        assert record.ridge == pytest.approx(least, rel=1e-6)
        assert record.amplification <= 1.2 * LIMIT
    else:
        assert record.amplification == pytest.approx(LIMIT, rel=0.2)
        assert expected / 2 <= record.ridge <= 2 * expected
    assert (shape in ("0.9", "1", "1.1")) == (expected > 1e-3)


@pytest.mark.parametrize("shape", ["0.9", "1", "1.1", "wide"])
@pytest.mark.parametrize("spread", [0.0, 0.5], ids=["even", "uneven"])
def test_a_refined_merge_has_a_quarter_of_the_bound(rng, shape, spread):
    """The ridge is large there, and found in few steps."""
    base, experts = noise_family(rng, SHAPES[shape], spread=spread)
    given = {"epsilon_scale": "relative", "adaptive_normalization": "always"}
    _, record = ace(base, experts, 1e-8, spectral_refinement="always", **given)
    given |= {"epsilon": record.ridge, "spectral_refinement": "never", "structural_prior": False}
    x = naive_ace(base, experts, **given) - base
    bound = naive_limit(base, experts) * sum(energies(base, experts)) / 4
    assert record.bounded
    assert float(x.square().sum()) == pytest.approx(bound, rel=0.2)


@pytest.mark.parametrize("shape", ["0.9", "1", "1.1"])
@pytest.mark.parametrize("spread", [0.0, 0.5], ids=["even", "uneven"])
def test_x_is_the_closed_form_at_the_ridge_of_the_record(rng, shape, spread):
    base, experts = noise_family(rng, SHAPES[shape], spread=spread)
    for epsilon in SMALL:
        merged, record = ace(base, experts, epsilon, epsilon_scale="relative", **PLAIN)
        expected = naive_ace(
            base,
            experts,
            epsilon=record.ridge,
            epsilon_scale="relative",
            structural_prior=False,
            **PLAIN,
        )
        assert task_vector_error(merged, expected, base) <= 1e-8
        assert record.ridge > max(epsilon, 1e-4)


@pytest.mark.parametrize("method", [ace, relative])
@pytest.mark.parametrize("shape", [(4, 90), (120, 40)], ids=["wide", "tall"])
@pytest.mark.parametrize("centred", [False, True])
def test_the_ridge_follows_the_spectrum(rng, method, shape, centred):
    rows, columns = shape
    base, experts = noise_family(rng, (rows, columns))
    naive, given = naive_relative, {"centred": centred}
    if method is ace:
        naive, given = naive_ace, {"centred": centred, "epsilon_scale": "relative", **PLAIN}
    more = {"structural_prior": False} if method is ace else {}
    asked = []
    for decades in (0.0, 1.0, 2.0):
        fall = 10.0 ** -torch.linspace(0, decades, columns, dtype=torch.float64)
        members = [base + (expert - base) * fall for expert in experts]
        _, record = method(base, members, 0.0, **given)
        least = asked_by_spectrum(base, members, record, centred)
        assert record.ridge == pytest.approx(least, rel=1e-6)
        asked.append(least)
        for epsilon in (0.01 * least, 0.5 * least, 2 * least):
            merged, record = method(base, members, epsilon, **given)
            expected = naive(base, members, epsilon=epsilon, floor=True, **given, **more)
            assert task_vector_error(merged, expected, base) <= 1e-8
            assert record.raised is (epsilon < least)
            assert record.bounded is False
        merged, record = method(base, members, 0.5 * least, **given, ridge_floor=False)
        expected = naive(base, members, epsilon=0.5 * least, **given, **more)
        assert task_vector_error(merged, expected, base) <= 1e-8
        assert record.raised is None
    assert asked[0] < asked[1] < asked[2]


@pytest.mark.parametrize("method", [ace, relative])
@pytest.mark.parametrize("shape", SHAPES)
def test_below_the_floor_nothing_changes(rng, method, shape):
    base, experts = noise_family(rng, SHAPES[shape])
    merges = [method(base, experts, epsilon)[0] for epsilon in SMALL[:3]]
    for merged in merges[1:]:
        assert task_vector_error(merged, merges[0], base) <= 0.02


@pytest.mark.parametrize("method", [ace, relative])
def test_above_the_floor_it_is_as_without(rng, method):
    base, experts = noise_family(rng, SHAPES["1"])
    for epsilon in (10.0, 1e4) if method is ace else (1.0, 10.0):
        merged, record = method(base, experts, epsilon, ridge_floor=True)
        literal, _ = method(base, experts, epsilon, ridge_floor=False)
        assert torch.equal(merged, literal)
        assert record.amplification < LIMIT


@pytest.mark.parametrize("experts", [2, 3, 5])
@pytest.mark.parametrize("rows_per_column", [0.3, 0.9, 1.0, 1.1, 3.0])
@pytest.mark.parametrize("spread", [0.0, 1.5], ids=["even", "uneven"])
def test_no_merge_is_far_larger_than_its_experts(rng, experts, rows_per_column, spread):
    """‖X‖ ≤ 2 √T max_t ‖Δ_t‖, with a margin for the estimate."""
    rows = round(rows_per_column * 80 / experts)
    base, members = noise_family(rng, (rows, 80), experts, spread / experts)
    for method in (ace, relative):
        for epsilon in (*SMALL, 1e-3, 0.1):
            merged, record = method(base, members, epsilon)
            size = float((merged - base).norm()) / max(energies(base, members)) ** 0.5
            assert size <= 2 * experts**0.5
            assert record.amplification <= 1.25 * LIMIT


@pytest.mark.parametrize("method", [ace, relative])
@pytest.mark.parametrize("shape", ["0.9", "1", "1.1", "tall"])
@pytest.mark.parametrize("spread", [0.3, 0.7, 1.5])
def test_the_strongest_expert_does_not_speak_for_all(rng, method, shape, spread):
    """The bound is their geometric mean's; the refinement, where there is one, counts in it."""
    base, experts = noise_family(rng, SHAPES[shape], spread=spread)
    bound = 1.44 * naive_limit(base, experts) * sum(energies(base, experts))
    steps = {"adaptive_normalization": "always", "spectral_refinement": "always"}
    merged, record = method(base, experts, 0.0, **steps if method is ace else {})
    assert float((merged - base).square().sum()) <= bound
    if method is ace:
        _, ridged = ace(base, experts, 0.0, **steps, refinement_mean="ridged")
        assert ridged.ridge < record.ridge


@pytest.mark.parametrize("form", ["primal", "tall", "lean", "dual"])
@pytest.mark.parametrize("precision", [torch.float32, torch.float64])
def test_every_form_finds_the_same_ridge(rng, form, precision):
    shape = (40, 150) if form == "dual" else (50, 150)
    base, experts = noise_family(rng, shape)
    options = AceOptions(epsilon=0, spectral_refinement="never")
    merged, record = merge_matrix(
        base, experts, options=options, attempts=[Attempt(form, precision)]
    )
    other = Attempt("primal", torch.float64)
    expected, again = merge_matrix(base, experts, options=options, attempts=[other])
    assert record.form == form
    assert record.ridge == pytest.approx(again.ridge, rel=0.02)
    assert record.ridge > 1e-3
    assert task_vector_error(merged, expected, base) <= 1e-2


@pytest.mark.parametrize("rows", [3, 5, 7])
def test_few_rows_are_looked_at_one_by_one(rng, rows):
    """There is no chance in it then: the bound holds to the precision of the search."""
    base, experts = noise_family(rng, (rows, 3 * rows))
    fall = 10.0 ** -torch.linspace(0, 1, 3 * rows, dtype=torch.float64)
    experts = [base + (expert - base) * fall for expert in experts]
    _, record = ace(base, experts, 0.0, **PLAIN)
    limit = naive_limit(base, experts)
    assert record.bounded
    assert record.amplification <= limit * 1.001
    assert record.amplification == pytest.approx(limit, rel=0.02)


def test_no_ridge_and_rank_deficient_covariances(rng):
    """What is an error without the floor is the solution of the smallest ridge with it."""
    base, experts = family(rng, 3, 20, 2, rank=1, noise=0.0)
    merged, record = ace(base, experts, 0.0)
    assert record.ridge == pytest.approx(asked_by_spectrum(base, experts, record), rel=1e-6)
    tiny = 1e-3 * record.ridge * sum(energies(base, experts)) / 20
    expected, _ = ace(base, experts, tiny, ridge_floor=False)
    assert task_vector_error(merged, expected, base) <= 1e-2


@pytest.mark.parametrize("options", [AceOptions, RelativeOptions])
@pytest.mark.parametrize("shape", ["1", "wide", "tall"])
@pytest.mark.parametrize("scales", [None, HETEROGENEOUS], ids=["even", "uneven"])
def test_components_are_those_of_the_raised_ridge(rng, options, shape, scales):
    base, experts = noise_family(rng, SHAPES[shape])
    if scales is not None:
        experts = [base + s * (e - base) for s, e in zip(scales, experts, strict=True)]
    given = options(epsilon=0, **EXACT)
    parts = split_tensor(base, experts, given, "matrix")
    if options is AceOptions:
        merged, _ = merge_matrix(base, experts, options=given)
    else:
        merged, _ = merge_tensor_relative(base, experts, None, given)
    assert task_vector_error(base + sum(parts), merged, base) <= 1e-6


def test_coefficients_do_not_move_the_ridge(rng):
    base, experts = noise_family(rng, SHAPES["1"])
    options = AceOptions(epsilon=0, spectral_refinement="never", **EXACT)
    _, plain = merge_matrix(base, experts, options=options)
    for own in ([0.0, 0.0, 0.0], [3.0, -1.0, 0.5]):
        merged, record = merge_matrix(base, experts, options=options, coefficients=[*own, 1.0])
        assert record.ridge == pytest.approx(plain.ridge, rel=1e-6)
        assert merged.isfinite().all()


@pytest.mark.parametrize(
    ("shape", "switch", "solves"), [("1", "always", 1), ("1", "never", 2), ("tall", "never", 1)]
)
def test_matrices_are_solved_as_seldom_as_can_be(rng, monkeypatch, shape, switch, solves):
    """Once; twice where only the solution tells that it needs more ridge."""
    calls = []

    def counted(solver):
        def solve(*given, **options):
            calls.append(solver)
            return solver(*given, **options)

        return solve

    for form, solver in SOLVERS.items():
        monkeypatch.setitem(SOLVERS, form, counted(solver))
    options = {"adaptive_normalization": switch, "spectral_refinement": switch}
    _, record = ace(*noise_family(rng, SHAPES[shape]), 1e-8, **options)
    assert record.bounded is (shape == "1")
    assert len(calls) == solves


def test_the_global_random_numbers_stay_as_they_are(rng):
    base, experts = noise_family(rng, SHAPES["1"])
    torch.manual_seed(7)
    expected = torch.rand(3)
    torch.manual_seed(7)
    ace(base, experts, 0.0)
    assert torch.equal(torch.rand(3), expected)


@pytest.mark.parametrize("method", [ace, relative])
def test_the_record_says_whether_the_ridge_was_raised(rng, method):
    near, far = (noise_family(rng, SHAPES[shape]) for shape in ("1", "tall"))
    for (base, experts), epsilon, raised, bounded in [
        (near, 1e-8, True, True),
        (near, 1e3, False, False),
        (far, 0.0, True, False),  # to the least ridge
        (far, 10.0, False, False),
    ]:
        _, record = method(base, experts, epsilon)
        assert record.raised is raised
        assert record.bounded is bounded
    _, record = method(*near, 1e-8, ridge_floor=False)
    assert record.raised is record.bounded is None
    assert record.amplification > LIMIT


def test_rows_per_column():
    assert rows_per_column(192, 576, 3) == 1
    assert [is_near_threshold(r) for r in (None, 0.7, 0.8, 1, 1.25, 1.3)] == [
        False, False, True, True, True, False
    ]  # fmt: skip
