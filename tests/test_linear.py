# SPDX-License-Identifier: Apache-2.0
"""What TIES keeps of task vectors, beside a naive transcription."""

from __future__ import annotations

import pytest
import torch

from mergekit_ace.algebra.linear import elected_task_vectors, merge_elected


def naive(deltas, kept):
    """Trim, elect and select, entry by entry, on lists."""
    trimmed = []
    for delta in deltas:
        least = sorted((abs(x) for x in delta), reverse=True)[kept - 1]
        trimmed.append([x if abs(x) >= least else 0.0 for x in delta])
    result = []
    for row in trimmed:
        sums = [sum(column) for column in zip(*trimmed, strict=True)]
        result.append([x if x * s > 0 else 0.0 for x, s in zip(row, sums, strict=True)])
    return result


@pytest.mark.parametrize("density", [0.1, 0.25, 1.0])
def test_what_is_kept(rng, density):
    base = torch.randn(5, 8, generator=rng)
    experts = [base + torch.randn(5, 8, generator=rng) for _ in range(3)]
    found = elected_task_vectors(base, experts, density)
    deltas = [(expert - base).flatten().tolist() for expert in experts]
    expected = torch.tensor(naive(deltas, int(density * 40)))
    assert torch.equal(torch.stack(found).flatten(1), expected)
    assert (expected != 0).any(1).all()


def test_signs_are_elected_by_size():
    base = torch.zeros(2)
    experts = [torch.tensor([3.0, 1.0]), torch.tensor([-1.0, -2.0]), torch.tensor([-1.0, 1.0])]
    found = elected_task_vectors(base, experts, 1.0)
    assert torch.stack(found).tolist() == [[3, 0], [0, 0], [0, 0]]  # a sum of 0 elects nothing
    merged = merge_elected(base, [experts[0], 4 * experts[0]], [1.0, 0.5])
    assert merged.tolist() == [9.0, 0.0]  # of two entries, one is kept


def test_degenerate_tensors():
    assert [len(delta) for delta in elected_task_vectors(torch.empty(0), [torch.empty(0)])] == [0]
    one = torch.tensor([0.5])  # less than a fifth of it is nothing: one entry is kept
    assert elected_task_vectors(torch.zeros(1), [one, one])[0].tolist() == [0.5]
    base = torch.randn(4, dtype=torch.bfloat16)
    assert torch.equal(merge_elected(base, [base + 1, base + 2], [0.0, 0.0]), base)


def test_rounding_neither_counts_nor_votes(rng):
    """An expert that is the base, saved in bfloat16, has learned nothing."""
    base = torch.randn(20, 30, generator=rng)
    learned = base + 1e-3 * torch.randn(20, 30, generator=rng)
    rounded = base.to(torch.bfloat16).float()
    found, nothing = elected_task_vectors(base, [learned, rounded])
    assert torch.equal(found, elected_task_vectors(base, [learned])[0])
    assert not nothing.any()
