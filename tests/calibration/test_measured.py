# SPDX-License-Identifier: Apache-2.0
"""Measured covariances in `ace` and `ace_plus`, against the naive references."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from covering import covered
from matrices import HETEROGENEOUS, family, merge_matrix
from measured_files import in_memory, random_covariance, write_statistics
from mergekit.merge_methods import merge_tensors
from reference import naive_ace, naive_plus, task_vector_error

from mergekit_ace.algebra.ace import AceOptions, PlusOptions, merge_tensor
from mergekit_ace.algebra.ridge import MeasuredCovariance

SHAPES = {"wide": (10, 40), "tall": (50, 12), "square": (24, 24)}


def measured(covariances, mix: float) -> list[MeasuredCovariance | None]:
    return [own and replace(own, mix=mix) for own in in_memory(covariances)]


FORCED = {"adaptive_normalization": "always", "spectral_refinement": "always", "epsilon": 1e-3}
PLAIN = {"epsilon": 1e-3, "epsilon_scale": "relative"}


@covered(
    mix=[0.25, 0.5, 1.0],
    shape=SHAPES,
    scales=[None, HETEROGENEOUS],
    method=[
        (naive_ace, AceOptions, {}),
        (naive_ace, AceOptions, PLAIN),
        (naive_ace, AceOptions, FORCED),
        (naive_ace, AceOptions, {"structural_prior": False}),
        (naive_plus, PlusOptions, {}),
    ],
)
def test_matrices(rng, mix, shape, scales, method):
    naive, kind, options = method
    base, experts = family(rng, *SHAPES[shape], 3, scales=scales)
    covariances = [random_covariance(rng, base.shape[1]) for _ in experts]
    expected = naive(base, experts, [1.0, 2.0, 0.5], measured=covariances, mix=mix, **options)
    given = {"options": kind(**options), "measured": measured(covariances, mix)}
    merged, record = merge_tensor(base, experts, [1.0, 2.0, 0.5], layout="matrix", **given)
    assert task_vector_error(merged, expected, base) <= 5e-5
    assert record.matrices[0].mix == mix


def test_experts_without_a_measurement_or_a_change(rng):
    """They keep their estimate, or take no part; the others keep their own covariances."""
    base, experts = family(rng, 12, 30, 3)
    plain, _ = merge_matrix(base, experts)
    covariances = [random_covariance(rng, 30) for _ in experts]
    merged, record = merge_matrix(base, experts, measured=measured(covariances, 0.0))
    assert torch.equal(merged, plain)
    assert record.mix is None
    grams = [e.double() - base.double() for e in experts]
    grams = [(g - g.mean(dim=0)).T @ (g - g.mean(dim=0)) for g in grams]
    own = [grams[0], covariances[1], grams[2]]
    expected = naive_ace(base, experts, measured=own, mix=0.5)
    for absent in (None, torch.zeros(30, 30)):  # its samples never came to this layer
        mixed = measured([absent, covariances[1], absent], 0.5)
        merged, _ = merge_matrix(base, experts, measured=mixed)
        assert task_vector_error(merged, expected, base) <= 5e-5
    three = [experts[0], base.clone(), experts[1]]
    merged, _ = merge_matrix(base, three, measured=measured(covariances, 0.5))
    pair = [covariances[0], covariances[2]]
    expected, _ = merge_matrix(base, experts[:2], measured=measured(pair, 0.5))
    torch.testing.assert_close(merged, expected)


@pytest.mark.parametrize("method", ["ace", "ace_plus"])
def test_through_mergekit(rng, tmp_path, method):
    base, experts = family(rng, 12, 30, 2)
    covariances = [random_covariance(rng, 30) for _ in experts]
    path = write_statistics(tmp_path, {"covariance": {"w": covariances}}, ["1", "2"], ("v",))
    fisher = write_statistics(tmp_path / "f", {"fisher": {"w": experts}}, ["1", "2"])
    nan = [float("nan") * own for own in covariances]
    nan = write_statistics(tmp_path / "n", {"covariance": {"w": nan}}, ["1", "2"])
    reference = naive_ace if method == "ace" else naive_plus
    expected = reference(base, experts, measured=covariances, mix=0.25)

    def merge(tensors, name="w", **more):
        parameters = {"covariances": path, "mix": 0.25, **more}
        return merge_tensors(tensors, method, base_index=0, name=name, parameters=parameters)

    turned = merge([base.T, *(e.T for e in experts)], layout="transposed")
    assert task_vector_error(turned.T, expected, base) <= 5e-5
    unmeasured = merge([base, *experts], "v")
    assert task_vector_error(unmeasured, reference(base, experts), base) <= 5e-5
    cut, more = [t[:, :20] for t in (base, *experts)], [base, *experts, experts[0]]
    for tensors, name, given, message in (
        ([base, *experts], "u", {}, "does not know tensor u"),
        (more, "w", {}, "holds nothing of 3"),
        (cut, "w", {}, "tensor w does not have the shape that it had"),
        ([base, *experts], "w", {"side": "outputs"}, "holds those of inputs"),
        ([base, *experts], "w", {"task": "task0"}, "two experts have the same row"),
        ([base, *experts], "w", {"covariances": nan}, "measured of tensor w contains NaN"),
        (more, "w", {"covariances": fisher}, r"no covariances; add `measure: \[covariances\]`"),
    ):
        with pytest.raises(ValueError, match=message):
            merge(tensors, name, **given)
