# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import pytest
import torch
from matrices import family
from reference import naive_tensor, task_vector_error

from mergekit_ace import AceOptions, merge_tensor
from mergekit_ace.algebra.task_vectors import resolve_layout

EXACT = AceOptions(compute_dtype="float64")


@pytest.mark.parametrize(
    ("layout", "shape"),
    [
        ("matrix", (10, 12)),
        ("transposed", (10, 12)),
        ("transposed", (3, 10, 12)),
        ("stacked", (3, 10, 12)),
        ("stacked", (2, 3, 8, 9)),
        ("flattened", (8, 3, 2, 2)),
        ("flattened", (8, 6)),
        ("mean", (10, 12)),
        ("mean", (7,)),
        ("mean", (8, 3, 2, 2)),
        ("mean", ()),
    ],
)
def test_every_layout_against_the_reference(rng, layout, shape):
    base = torch.randn(shape, generator=rng)
    experts = [base + 0.02 * torch.randn(shape, generator=rng) for _ in range(3)]
    merged, record = merge_tensor(base, experts, options=EXACT, layout=layout)
    assert merged.shape == base.shape
    expected = naive_tensor(base, experts, layout)
    assert task_vector_error(merged, expected, base) <= 1e-9
    assert record.layout == layout


def test_each_stacked_matrix_takes_its_own_branch(rng):
    alike, alike_experts = family(rng, 8, 8, 2)
    apart, apart_experts = family(rng, 8, 8, 2, scales=[0.05, 5.0])
    base = torch.stack([alike, apart, alike])
    experts = [torch.stack([alike_experts[t], apart_experts[t], alike]) for t in range(2)]
    merged, record = merge_tensor(base, experts, layout="stacked")
    assert [m.rule for m in record.matrices] == ["ace", "ace", "base"]
    assert [m.heterogeneous for m in record.matrices] == [False, True, None]
    assert torch.equal(merged[2].float(), alike)  # untouched by everyone: bit for bit


def test_kernels_of_networks_of_convolutions_are_matrices():
    for ndim, expected in [(4, "flattened"), (5, "flattened"), (3, "mean"), (2, "matrix")]:
        assert resolve_layout("auto", "convolution.weight", ndim, kernel=True) == expected
    assert resolve_layout("mean", "convolution.weight", 4, kernel=True) == "mean"


@pytest.mark.parametrize("shape", [(0,), (0, 4), (4, 0), (3, 0, 4)])
@pytest.mark.parametrize("layout", ["matrix", "stacked", "flattened", "transposed", "mean"])
def test_empty_tensors(shape, layout):
    base = torch.empty(shape)
    merged, _ = merge_tensor(base, [base.clone(), base.clone()], layout=layout)
    assert merged.shape == base.shape


@pytest.mark.parametrize("layout", ["matrix", "stacked", "transposed", "flattened"])
def test_unchanged_tensors_come_back_as_they_are(layout):
    base = torch.randn(2, 4, 4) if layout != "matrix" else torch.randn(4, 4)
    merged, _ = merge_tensor(base, [base.clone()] * 2, layout=layout)
    assert merged is base


@pytest.mark.parametrize(
    ("layout", "name", "ndim", "transposed", "expected"),
    [
        ("auto", "model.layers.0.mlp.up_proj.weight", 2, False, "matrix"),
        ("auto", "transformer.h.0.mlp.c_fc.weight", 2, True, "transposed"),
        ("auto", "model.layers.0.mlp.experts.down_proj", 3, False, "stacked"),
        ("auto", "model.layers.0.mlp.experts.down_proj", 3, True, "transposed"),
        ("auto", "model.layers.0.my_experts_bank.weight", 3, False, "mean"),
        ("auto", "model.layers.0.mlp.experts.gate_up_proj_bias", 2, False, "mean"),
        ("auto", "model.layers.0.mlp.experts.3.w1.weight", 2, False, "matrix"),
        ("auto", "conv.weight", 3, False, "mean"),
        ("auto", "patch.weight", 4, False, "mean"),
        ("auto", "norm.weight", 1, False, "mean"),
        ("auto", None, 2, False, "matrix"),
        ("matrix", "transformer.h.0.mlp.c_fc.weight", 2, True, "matrix"),
        ("matrix", "norm.weight", 1, False, "mean"),
        ("matrix", "experts.w", 3, False, "mean"),
        ("stacked", "w", 3, False, "stacked"),
        ("flattened", "patch.weight", 4, False, "flattened"),
        ("flattened", "norm.weight", 1, False, "mean"),
        ("transposed", "b", 1, True, "mean"),
        ("mean", "w", 2, False, "mean"),
    ],
)
def test_resolve_layout(layout, name, ndim, transposed, expected):
    assert resolve_layout(layout, name, ndim, transposed=transposed) == expected


@pytest.mark.parametrize(
    ("layout", "ndim", "expected"),
    [
        ("auto", 2, "table"),
        ("matrix", 2, "matrix"),
        ("table", 2, "table"),
        ("table", 3, "mean"),
        ("auto", 1, "mean"),
    ],
)
def test_resolve_the_layout_of_a_table(layout, ndim, expected):
    assert resolve_layout(layout, "embed_tokens.weight", ndim, table=True) == expected
