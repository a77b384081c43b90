# SPDX-License-Identifier: Apache-2.0
"""Stored tensors, read as matrices by every layout."""

from __future__ import annotations

import pytest
import torch
from matrices import family
from reference import naive_tensor, task_vector_error

from mergekit_ace import AceOptions, merge_tensor


@pytest.mark.parametrize(
    ("layout", "shape"),
    [
        ("matrix", (10, 12)),
        ("transposed", (10, 12)),
        ("transposed", (3, 10, 12)),
        ("stacked", (2, 3, 8, 9)),
        ("flattened", (8, 3, 2, 2)),
        ("mean", (10, 12)),
        ("mean", (8, 3, 2, 2)),
        ("mean", ()),
        ("mean", (3, 0, 4)),
    ],
)
def test_every_layout_against_the_reference(rng, layout, shape):
    base = torch.randn(shape, generator=rng)
    experts = [base + 0.02 * torch.randn(shape, generator=rng) for _ in range(3)]
    options = AceOptions(compute_dtype="float64")
    merged, record = merge_tensor(base, experts, options=options, layout=layout)
    assert merged.shape == base.shape
    assert record.layout == layout
    if base.numel():
        assert task_vector_error(merged, naive_tensor(base, experts, layout), base) <= 1e-9
    assert merge_tensor(base, [base.clone()] * 2, layout=layout)[0] is base


def test_each_stacked_matrix_takes_its_own_branch(rng):
    alike, alike_experts = family(rng, 8, 8, 2)
    apart, apart_experts = family(rng, 8, 8, 2, scales=[0.05, 5.0])
    base = torch.stack([alike, apart, alike])
    experts = [torch.stack([alike_experts[t], apart_experts[t], alike]) for t in range(2)]
    merged, record = merge_tensor(base, experts, layout="stacked")
    assert [m.rule for m in record.matrices] == ["ace", "ace", "base"]
    assert [m.heterogeneous for m in record.matrices] == [False, True, None]
    assert torch.equal(merged[2].float(), alike)  # untouched by everyone: bit for bit
