# SPDX-License-Identifier: Apache-2.0
"""RegMean against its formula in float64."""

from __future__ import annotations

import pytest
import torch
from matrices import deltas_of, family
from measured_files import random_covariance, write_statistics
from mergekit.merge_methods import merge_tensors
from naive_peers import naive_regmean
from reference import naive_mean, task_vector_error
from torch import Tensor

SHAPES = {"wide": (10, 40), "tall": (50, 12), "square": (24, 24)}


def merge(path: str | None, tensors: list[Tensor], name: str = "w", **parameters) -> Tensor:
    given = {"statistics": path, **parameters}
    return merge_tensors(tensors, "regmean", base_index=0, name=name, parameters=given)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize(
    "options", [{}, {"off_diagonal": 1.0, "epsilon": 0.01}, {"off_diagonal": 0.1, "lambda": 0.7}]
)
def test_against_the_formula(rng, tmp_path, shape, options):
    base, experts = family(rng, *SHAPES[shape], 3)
    covariances = [random_covariance(rng, base.shape[1]) for _ in experts]
    path = write_statistics(tmp_path, {"covariance": {"w": covariances}}, ["1", "2", "3"])
    merged = merge(path, [base, *experts], **options)
    given = {name: value for name, value in options.items() if name != "lambda"}
    found = naive_regmean(deltas_of(base, experts), covariances, [1.0] * 3, **given)
    expected = base + options.get("lambda", 1.0) * found
    assert task_vector_error(merged, expected, base) <= 5e-5
    turned = merge(path, [t.T for t in (base, *experts)], layout="transposed", **options)
    torch.testing.assert_close(turned.T, merged)


def test_weights(rng, tmp_path):
    base, experts = family(rng, 10, 8, 2)
    covariances = [random_covariance(rng, 8) for _ in experts]
    path = write_statistics(tmp_path, {"covariance": {"w": covariances}}, ["1", "2"])
    merged = merge(path, [base, *experts], weight={1: 1.0, 2: 3.0})
    expected = base + naive_regmean(deltas_of(base, experts), covariances, [1.0, 3.0])
    assert task_vector_error(merged, expected, base) <= 5e-5
    assert torch.equal(merge(path, [base, *experts], weight={1: 1.0, 2: 0.0}), experts[0])


def test_where_nothing_was_measured_is_the_mean(rng, tmp_path):
    base, experts = family(rng, 10, 8, 2)
    covariances = [random_covariance(rng, 8) for _ in experts]
    path = write_statistics(tmp_path, {"covariance": {"w": covariances}}, ["1", "2"], ("v",))
    expected = naive_mean(base, experts)
    assert task_vector_error(merge(path, [base, *experts], "v"), expected, base) <= 1e-5
    vectors = [base[0], *(expert[0] for expert in experts)]
    expected = naive_mean(vectors[0], vectors[1:])
    assert task_vector_error(merge(path, vectors, "v"), expected, vectors[0]) <= 1e-5
    stacks = [torch.stack([t, t]) for t in (base, *experts)]
    averaged = merge(path, stacks, "v", layout="stacked")
    assert task_vector_error(averaged[1], naive_mean(base, experts), base) <= 1e-5


def test_inputs_that_no_sample_has_get_the_mean(rng, tmp_path):
    """As of a unit that is never active: there is nothing to regress on."""
    base, experts = family(rng, 10, 8, 2)
    covariances = [random_covariance(rng, 8) for _ in experts]
    for covariance in covariances:
        covariance[3] = covariance[:, 3] = 0
    covariances[1] *= float(covariances[0].trace() / covariances[1].trace())
    path = write_statistics(tmp_path, {"covariance": {"w": covariances}}, ["1", "2"])
    merged = merge(path, [base, *experts])
    torch.testing.assert_close(merged[:, 3], naive_mean(base, experts)[:, 3].float())


def test_an_expert_whose_samples_never_came_there(rng, tmp_path):
    base, experts = family(rng, 10, 8, 3)
    covariances = [random_covariance(rng, 8) for _ in experts]
    covariances[1] = torch.zeros(8, 8)
    path = write_statistics(tmp_path, {"covariance": {"w": covariances}}, ["1", "2", "3"])
    merged = merge(path, [base, *experts])
    kept = [0, 2]
    deltas = deltas_of(base, experts)
    expected = base + naive_regmean(
        [deltas[t] for t in kept], [covariances[t] for t in kept], [1.0, 1.0]
    )
    assert task_vector_error(merged, expected, base) <= 5e-5


def test_experts_that_did_not_change_a_tensor(rng, tmp_path):
    base, experts = family(rng, 10, 8, 2)
    covariances = [random_covariance(rng, 8) for _ in range(3)]
    path = write_statistics(tmp_path, {"covariance": {"w": covariances}}, ["1", "2", "3"])
    assert torch.equal(merge(path, [base, base.clone(), base.clone()]), base)
    assert torch.equal(merge(path, [base, base.clone(), experts[0]]), experts[0])
    merged = merge(path, [base, experts[0], base.clone(), experts[1]])
    pair = [covariances[0], covariances[2]]
    expected = base + naive_regmean(deltas_of(base, experts), pair, [1.0, 1.0])
    assert task_vector_error(merged, expected, base) <= 5e-5


def test_without_statistics_it_says_what_to_run(rng):
    base, experts = family(rng, 4, 4, 2)
    with pytest.raises(ValueError, match="regmean: there are no statistics; run `mergekit-ace st"):
        merge(None, [base, *experts])
    with pytest.raises(ValueError, match=r"'statistics' is 'none.json' \(there are no statistics"):
        merge("none.json", [base, *experts])
