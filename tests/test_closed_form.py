# SPDX-License-Identifier: Apache-2.0
"""The closed form in each of its forms, against definitions."""

from __future__ import annotations

import math
from itertools import product

import pytest
import torch
from covering import covered
from matrices import HETEROGENEOUS, family

from mergekit_ace.algebra import linalg
from mergekit_ace.algebra.conditioning import (
    factorize,
    inverse_norm,
    inverse_trace,
    largest_eigenvalue,
    smallest_eigenvalue,
)
from mergekit_ace.algebra.covariance import estimate_covariances
from mergekit_ace.algebra.dual import solve_dual
from mergekit_ace.algebra.forms import COSTS, MATRICES, choose_forms
from mergekit_ace.algebra.primal import prior_row, solve_lean, solve_primal, solve_tall
from mergekit_ace.algebra.records import AceOptions, IllConditionedError, tolerance
from mergekit_ace.algebra.task_vectors import select_active

SOLVERS = {"primal": solve_primal, "tall": solve_tall, "lean": solve_lean, "dual": solve_dual}


def spd(rng: torch.Generator, size: int, condition: float) -> torch.Tensor:
    """A symmetric positive definite matrix of known condition number."""
    basis, _ = torch.linalg.qr(torch.randn(size, size, generator=rng, dtype=torch.float64))
    exponents = torch.linspace(0, 1, size, dtype=torch.float64)
    return basis * condition**-exponents @ basis.T


def estimates(base, experts, weights, *, normalized, **options):
    active = select_active(base, experts, weights, torch.float64)
    options = AceOptions(compute_dtype="float64", ridge_floor=False, **options)
    return estimate_covariances(base, active, options, normalized=normalized, dtype=torch.float64)


@covered(
    strength=3,
    form=SOLVERS,
    shape=[(9, 30), (30, 9), (12, 12), (10, 16), (2, 40)],
    normalized=[True, False],
    prior=[True, False],
    block=[1, 100, 2**22],
    mean=["plain", "ridged"],
)
def test_x_and_f_against_their_definitions(
    rng, monkeypatch, form, shape, normalized, prior, block, mean
):
    if form == "dual" and 3 * shape[0] >= shape[1]:
        shape = (shape[0], 3 * shape[0] + 1)  # the dual form is for N < i
    monkeypatch.setattr(linalg, "BLOCK_ENTRIES", block)
    base, experts = family(rng, *shape, 3, scales=HETEROGENEOUS)
    weights = [2.0, 1.0, 3.0]
    covariances = estimates(
        base, experts, weights, normalized=normalized, epsilon=0.01, refinement_mean=mean
    )
    got = SOLVERS[form](covariances, prior=prior, refined=True)

    columns = shape[1]
    deltas = [e.double() - base.double() for e in experts]
    means = [d.mean(dim=0) for d in deltas]
    centred = [d - m for d, m in zip(deltas, means, strict=True)]
    grams = [c.T @ c for c in centred]
    norms = [float(g.trace()) if normalized else 1.0 for g in grams]
    scales = [w / 2 / n for w, n in zip(weights, norms, strict=True)]
    s = [scale * g for scale, g in zip(scales, grams, strict=True)]
    ridged = [x + 0.01 * f * torch.eye(columns).double() for x, f in zip(s, scales, strict=True)]
    system = sum(ridged)
    mean_tau = sum(float(d.square().sum()) for d in deltas) / 3 if normalized else 1.0
    common = sum(s).mean(dim=0) / mean_tau
    full = system + torch.ones(columns, 1).double() * common if prior else system
    numerator = sum(c @ r for c, r in zip(centred, ridged, strict=True))
    x = torch.linalg.solve(full, numerator, left=False)
    mean_estimate = (system if mean == "ridged" else sum(s)) / 3
    residual = sum(d @ (t - mean_estimate) for d, t in zip(deltas, s, strict=True))

    assert (x - got.merged).norm() <= 1e-9 * x.norm()
    f = residual + x
    assert (f - got.target).norm() <= 1e-9 * f.norm()
    condition = float(torch.linalg.cond(system))
    assert condition / 2 <= got.condition <= condition * 1.01
    assert got.error < 1e-9


@pytest.mark.parametrize("form", SOLVERS)
def test_without_refinement_there_is_no_target(rng, form):
    base, experts = family(rng, 4, 20, 3)
    covariances = estimates(base, experts, [1.0] * 3, normalized=False)
    plain = SOLVERS[form](covariances, prior=True, refined=False)
    full = SOLVERS[form](covariances, prior=True, refined=True)
    assert plain.target is None
    assert torch.equal(plain.merged, full.merged)


@pytest.mark.parametrize("form", SOLVERS)
def test_singular(rng, form):
    base, experts = family(rng, 3, 20, 2)
    covariances = estimates(base, experts, [1.0, 1.0], normalized=False, epsilon=0)
    with pytest.raises(IllConditionedError, match="condition number") as caught:
        SOLVERS[form](covariances, prior=True, refined=False)
    assert caught.value.condition > 1e12


@pytest.mark.parametrize("form", SOLVERS)
def test_refuses_what_float32_would_spoil(rng, form):
    base, experts = family(rng, 6, 40, 3, scales=[1.0, 10.0, 100.0], noise=1e-3)
    active = select_active(base, experts, [1.0] * 3, torch.float32)
    covariances = estimate_covariances(
        base,
        active,
        AceOptions(epsilon=1e-9, ridge_floor=False),
        normalized=False,
        dtype=torch.float32,
    )
    with pytest.raises(IllConditionedError):
        SOLVERS[form](covariances, prior=True, refined=False)


@pytest.mark.parametrize("form", ["tall", "lean"])
@pytest.mark.parametrize("epsilon", [1.0, 1e-3])
def test_mixing_matrices(rng, form, epsilon):
    base, experts = family(rng, 70, 60, 4, scales=[1.0, 1.5, 2.0, 3.0], noise=1e-2)
    members = select_active(base, experts, [1.0] * 4, torch.float32)
    options = AceOptions(epsilon=epsilon)
    exact, coarse = (
        estimate_covariances(base, members, options, normalized=True, dtype=dtype)
        for dtype in (torch.float64, torch.float32)
    )
    expected = SOLVERS["primal"](exact, prior=True, refined=True)
    got = SOLVERS[form](coarse, prior=True, refined=True)
    error = (got.merged - expected.merged).norm() / expected.merged.norm()
    assert error <= got.error <= tolerance(got.condition)
    assert (got.target - expected.target).norm() <= 2 * got.error * expected.target.norm()


def test_independent_rounding_errors_average_out(rng):
    """An estimate by norms alone would be several times the error, and 40 times in 8B models."""
    base = torch.randn(512, 1792, generator=rng)
    experts = [base + 1e-3 * torch.randn(base.shape, generator=rng) for _ in range(3)]
    members = select_active(base, experts, [1.0] * 3, torch.float32)
    expected, got = (
        solve_dual(
            estimate_covariances(base, members, AceOptions(), normalized=False, dtype=dtype),
            prior=True,
            refined=False,
        )
        for dtype in (torch.float64, torch.float32)
    )
    error = (got.merged - expected.merged).norm() / expected.merged.norm()
    assert error <= got.error <= 6 * error


def test_the_prior_is_sherman_and_morrison(rng):
    system, common = spd(rng, 20, 1e3), torch.rand(20, generator=rng).double()
    numerator = torch.randn(7, 20, generator=rng, dtype=torch.float64)
    y = torch.linalg.solve(system, numerator, left=False)
    got = y - torch.outer(y.sum(dim=1), prior_row(torch.linalg.cholesky(system), common))
    full = system + torch.ones(20, 1).double() * common
    torch.testing.assert_close(got, torch.linalg.solve(full, numerator, left=False))


@pytest.mark.parametrize("condition", [1.0, 1e2, 1e5, 1e8])
def test_estimates_from_the_factor(rng, condition):
    system = spd(rng, 60, condition)
    lower = factorize(system.clone())
    torch.testing.assert_close(lower.tril(), torch.linalg.cholesky(system))
    largest = largest_eigenvalue(system)
    lower = lower.tril()
    assert largest == pytest.approx(largest_eigenvalue(lower, lower.mT))
    assert condition / 2 <= largest / smallest_eigenvalue(lower) <= condition * 1.01
    exact = float(torch.linalg.inv(system).norm()) / 60**0.5
    assert inverse_norm(lower) == pytest.approx(exact, rel=0.5)
    trace = float(torch.linalg.inv(system).trace())
    assert inverse_trace(lower) == pytest.approx(trace, rel=0.8)


def test_no_factor():
    for matrix in (torch.zeros(4, 4), torch.full((4, 4), math.nan)):
        with pytest.raises(IllConditionedError):
            factorize(matrix)


def test_tolerance():
    assert tolerance(1) == tolerance(100) == 2e-5
    assert tolerance(1000) == pytest.approx(2e-4)
    assert tolerance(1e7) == 1e-3


@pytest.mark.parametrize(
    ("rows", "columns", "tasks", "refined", "expected"),
    [
        (2048, 8192, 2, False, ["dual"]),  # down-projections of Llama
        (2048, 8192, 3, False, ["dual"]),
        (2048, 8192, 3, True, ["dual"]),
        (512, 2048, 3, False, ["dual"]),  # keys and values
        (2048, 8192, 8, False, ["primal", "lean"]),  # N = 16384 rows
        (2048, 2048, 2, False, ["primal", "tall"]),
        (2048, 2048, 3, False, ["primal", "tall"]),
        (2048, 2048, 8, False, ["primal", "lean"]),
        (2048, 2048, 3, True, ["tall"]),
        (8192, 2048, 3, False, ["tall"]),
        (8192, 2048, 3, True, ["tall"]),
        (128256, 2048, 3, False, ["tall"]),  # an embedding
        (128256, 2048, 8, True, ["tall"]),
        (2, 30, 3, False, ["dual"]),
    ],
)
def test_the_choice(rows, columns, tasks, refined, expected):
    assert choose_forms(rows, columns, tasks, refined=refined) == expected


@pytest.mark.parametrize("shape", [(64, 64), (60, 64), (640, 64), (64, 640), (6400, 64), (10, 999)])
def test_every_choice_keeps_to_four_matrices(shape):
    rows, columns = shape
    for tasks, refined in product((2, 3, 5, 8, 20), (False, True)):
        for form in choose_forms(rows, columns, tasks, refined=refined):
            side = rows * tasks if form == "dual" else columns
            limit = MATRICES * 4 * max(side**2, rows * columns)
            assert COSTS[form](rows, columns, tasks, refined).memory <= limit, (tasks, refined)


def test_operations_of_the_dual_form_by_hand():
    """N = 6: K, its factor, two triangular solves of 2 rows, one product."""
    cost = COSTS["dual"](2, 100, 3, False)
    assert cost.operations == pytest.approx(
        6 * 6 * 100 + 6**3 / 3 + 2 * 6 * 6 * 2 + 2 * 2 * 6 * 100
    )


def test_operations_of_the_primal_form_by_hand():
    """Three symmetric products at half price, two numerators, a factor, a solve of 50 rows."""
    cost = COSTS["primal"](50, 10, 3, False)
    product = 2 * 50 * 10 * 10
    assert cost.operations == pytest.approx(3 * product / 2 + 2 * product + 10**3 / 3 + product)
    refined = COSTS["primal"](50, 10, 3, True)
    assert refined.operations == pytest.approx(cost.operations + product)


def test_operations_of_mixing_by_hand():
    """As many symmetric products, two others; in float64 a factor, and two solves of 10 rows."""
    tall, lean = (COSTS[form](50, 10, 3, False) for form in ("tall", "lean"))
    product = 2 * 50 * 10 * 10
    solves = 2 * 10**3 / 3 + 2 * 2 * 2 * 10**3
    assert tall.operations == pytest.approx(3 * product / 2 + 2 * product + solves)
    assert lean.operations == pytest.approx(tall.operations + product / 2)  # one formed again
    assert COSTS["lean"](50, 10, 3, True).operations == pytest.approx(lean.operations + product)


@pytest.mark.parametrize("shape", [(64, 64), (640, 64), (64, 640), (10, 999)])
def test_the_lean_choice_takes_the_least_memory(shape):
    for refined in (False, True):
        (lean,) = choose_forms(*shape, 3, refined=refined, least_memory=True)
        least = COSTS[lean](*shape, 3, refined).memory
        for form in choose_forms(*shape, 3, refined=refined):
            assert least <= COSTS[form](*shape, 3, refined).memory
