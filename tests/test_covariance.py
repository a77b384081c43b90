# SPDX-License-Identifier: Apache-2.0
"""The sums over experts against their definitions, formed one expert at a time."""

from __future__ import annotations

import pytest
import torch
from matrices import HETEROGENEOUS, family

from mergekit_ace.algebra import blocks as row_blocks
from mergekit_ace.algebra.covariance import add_ridge_terms, sum_covariances
from mergekit_ace.algebra.options import AceOptions
from mergekit_ace.algebra.task_vectors import select_active


@pytest.mark.parametrize("shape", [(12, 30), (30, 12), (12, 12)])
@pytest.mark.parametrize("normalized", [True, False])
@pytest.mark.parametrize("block", [1, 100, 2**22])
def test_sums_against_their_definitions(rng, monkeypatch, block, shape, normalized):
    monkeypatch.setattr(row_blocks, "BLOCK_ENTRIES", block)
    base, experts = family(rng, *shape, 3, scales=HETEROGENEOUS)
    weights = [2.0, 1.0, 3.0]
    active = select_active(base, experts, weights, torch.float64)
    options = AceOptions(epsilon=0.01, compute_dtype="float64")
    got = sum_covariances(
        base, active, options, normalized=normalized, refined=True, dtype=torch.float64
    )
    unit = got.unit
    want = {"covariance": 0, "product": 0, "ridged": 0, "total": 0, "mean_product": 0}
    ridge = 0.0
    for expert, w in zip(experts, (1.0, 0.5, 1.5), strict=True):
        delta = (expert.double() - base.double()) / unit
        mean = delta.mean(dim=0)
        centred = delta - mean
        gram = centred.T @ centred
        trace = float(gram.trace())
        s = w * (gram / trace if normalized else gram)
        eps = w * 0.01 / unit**2 / (trace if normalized else 1)
        want["covariance"] += s
        want["product"] += centred @ s
        want["ridged"] += eps * centred
        want["total"] += delta
        want["mean_product"] += s @ mean
        ridge += eps
    ridged = want.pop("ridged")
    for name, value in want.items():
        torch.testing.assert_close(getattr(got, name), value, msg=name)
    numerator = add_ridge_terms(got, base, active)
    torch.testing.assert_close(numerator, want["product"] + ridged)
    assert got.ridge == pytest.approx(ridge)
    assert got.tasks == 3


def test_epsilon_is_reported_in_the_unit_of_the_weights(rng):
    base, experts = family(rng, 12, 10, 2)
    active = select_active(base, experts, [1.0, 1.0], torch.float64)
    options = AceOptions(epsilon=0.02, compute_dtype="float64")
    sums = sum_covariances(
        base, active, options, normalized=False, refined=False, dtype=torch.float64
    )
    assert sums.epsilon == pytest.approx([0.02, 0.02])
    sums = sum_covariances(
        base, active, options, normalized=True, refined=False, dtype=torch.float64
    )
    deltas = [e.double() - base.double() for e in experts]
    traces = [float(((d - d.mean(dim=0)) ** 2).sum()) for d in deltas]
    assert sums.epsilon == pytest.approx([0.02 / trace for trace in traces])


def test_the_unit_is_a_power_of_two(rng):
    base, experts = family(rng, 12, 10, 2)
    active = select_active(base, experts, [1.0, 1.0], torch.float32)
    sums = sum_covariances(
        base, active, AceOptions(), normalized=False, refined=False, dtype=torch.float32
    )
    mantissa, _ = torch.frexp(torch.tensor(sums.unit))
    assert mantissa == 0.5
