# SPDX-License-Identifier: Apache-2.0
"""Fisher merging against its formula in float64."""

from __future__ import annotations

import pytest
import torch
from matrices import deltas_of, family
from measured_files import write_statistics
from mergekit.merge_methods import merge_tensors
from naive_peers import naive_fisher
from reference import naive_mean, task_vector_error
from torch import Tensor


def merge(path: str | None, tensors: list[Tensor], name: str = "w", **parameters) -> Tensor:
    given = {"statistics": path, **parameters}
    return merge_tensors(tensors, "fisher", base_index=0, name=name, parameters=given)


def information(rng: torch.Generator, *shape: int) -> Tensor:
    return torch.randn(shape, generator=rng).square() * torch.rand(shape, generator=rng)


@pytest.mark.parametrize("shape", [(10, 8), (7,), (3, 2, 4), ()])
@pytest.mark.parametrize("options", [{}, {"lambda": 0.7}, {"fisher_floor": 0.5}])
def test_against_the_formula(rng, tmp_path, shape, options):
    base = torch.randn(shape, generator=rng)
    experts = [base + 0.1 * torch.randn(shape, generator=rng) for _ in range(3)]
    fisher = [information(rng, *shape) for _ in experts]
    path = write_statistics(tmp_path, {"fisher": {"w": fisher}}, ["1", "2", "3"])
    merged = merge(path, [base, *experts], weight={1: 1.0, 2: 2.0, 3: 0.5}, **options)
    floor = options.get("fisher_floor", 1e-6)
    found = naive_fisher(deltas_of(base, experts), fisher, [1.0, 2.0, 0.5], floor)
    expected = base + options.get("lambda", 1.0) * found
    assert task_vector_error(merged, expected, base) <= 1e-5


def test_entries_without_information_get_the_mean(rng, tmp_path):
    base, experts = family(rng, 6, 5, 2)
    fisher = [information(rng, 6, 5) for _ in experts]
    for part in fisher:
        part[2] = 0
    zeros = [torch.zeros(6, 5)] * 2
    path = write_statistics(tmp_path, {"fisher": {"w": fisher, "v": zeros}}, ["1", "2"], ("u",))
    mean = naive_mean(base, experts).float()
    torch.testing.assert_close(merge(path, [base, *experts])[2], mean[2])
    torch.testing.assert_close(merge(path, [base, *experts], "v"), mean)
    torch.testing.assert_close(merge(path, [base, *experts], "u"), mean)


def test_experts_that_did_not_change_a_tensor(rng, tmp_path):
    base, experts = family(rng, 6, 5, 2)
    fisher = [information(rng, 6, 5) for _ in range(3)]
    path = write_statistics(tmp_path, {"fisher": {"w": fisher}}, ["1", "2", "3"])
    assert torch.equal(merge(path, [base, base.clone(), base.clone()]), base)
    assert torch.equal(merge(path, [base, base.clone(), experts[0]]), experts[0])
    merged = merge(path, [base, experts[0], base.clone(), experts[1]])
    pair = [fisher[0], fisher[2]]
    expected = base + naive_fisher(deltas_of(base, experts), pair, [1.0, 1.0])
    assert task_vector_error(merged, expected, base) <= 1e-5


def test_huge_and_tiny_information(rng, tmp_path):
    base, experts = family(rng, 6, 5, 2)
    fisher = [information(rng, 6, 5) for _ in experts]
    path = write_statistics(tmp_path / "a", {"fisher": {"w": fisher}}, ["1", "2"])
    expected = merge(path, [base, *experts])
    for exponent in (-60, 60):
        scaled = [part * 2.0**exponent for part in fisher]
        path = write_statistics(tmp_path / "b", {"fisher": {"w": scaled}}, ["1", "2"])
        torch.testing.assert_close(merge(path, [base, *experts]), expected)


def test_what_is_wrong_is_said(rng, tmp_path):
    base, experts = family(rng, 6, 5, 2)
    with pytest.raises(ValueError, match="fisher: there are no statistics; run `mergekit-ace st"):
        merge(None, [base, *experts])
    path = write_statistics(tmp_path, {"covariance": {"w": [torch.eye(5)] * 2}}, ["1", "2"])
    with pytest.raises(ValueError, match=r"holds no fisher; add `measure: \[fisher\]`"):
        merge(path, [base, *experts])
    path = write_statistics(tmp_path / "f", {"fisher": {"w": experts}}, ["1", "2"])
    with pytest.raises(ValueError, match="tensor w does not have the shape that it had"):
        merge(path, [t[:4] for t in (base, *experts)])
