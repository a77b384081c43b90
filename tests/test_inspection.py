# SPDX-License-Identifier: Apache-2.0
"""Every number that `inspect` measures against a plain computation in float64."""

from __future__ import annotations

import pytest
import torch
from matrices import deltas_of

from mergekit_ace.algebra import inspection
from mergekit_ace.algebra.inspection import (
    compare_entries,
    compare_subspaces,
    inspect_versions,
)
from mergekit_ace.algebra.task_vectors import MatrixRecord, TensorRecord


@pytest.mark.parametrize("shape", [(24, 40), (7,), (2, 5, 6), (), (0, 4)])
@pytest.mark.parametrize("scale", [1.0, 1e-30, 1e30])
def test_comparison(rng, monkeypatch, shape, scale):
    monkeypatch.setattr(inspection, "CHUNK", 100)
    base = scale * torch.randn(shape, generator=rng)
    experts = [base + s * scale * torch.randn(shape, generator=rng) for s in (0.1, 1.0)]
    experts += [torch.where(torch.rand(shape, generator=rng) < 0.5, base, experts[1]), base.clone()]
    found = compare_entries(base, experts)
    deltas = [d.flatten() for d in deltas_of(base, experts)]
    assert found["base_norm"] == pytest.approx(float(base.double().norm()))
    assert found["norm"] == pytest.approx([float(d.norm()) for d in deltas])
    unchanged = [float((d == 0).double().mean()) if len(d) else 1.0 for d in deltas]
    assert found["unchanged"] == pytest.approx(unchanged)
    for s, one in enumerate(deltas):
        for t, other in enumerate(deltas):
            cosine = None
            if one.norm() and other.norm():
                product = (one / one.norm()) @ (other / other.norm())
                cosine = pytest.approx(float(product), abs=1e-6)
            assert found["cosine"][s][t] == cosine


@pytest.mark.parametrize("shape", [(40, 24), (24, 40), (5, 9), (1, 6)])
@pytest.mark.parametrize("scale", [1.0, 1e-30, 1e30])
@pytest.mark.parametrize("rank", [2, 40])
def test_subspaces(rng, shape, scale, rank):
    """Directions that a task vector has not are not compared."""
    factors = torch.randn(2, shape[0], rank, generator=rng, dtype=torch.float64)
    deltas = [scale * one @ torch.randn(rank, shape[1], generator=rng).double() for one in factors]
    k = min(16, rank, *shape)
    found = compare_subspaces(iter([*deltas, torch.zeros(shape)]))
    assert found.size == k
    svds = [torch.linalg.svd(delta, full_matrices=False) for delta in deltas]
    ranks = [float((sigma / sigma[0]).square().sum()) for _, sigma, _ in svds]
    assert found.stable_rank == (*(pytest.approx(rank, rel=1e-5) for rank in ranks), None)
    inputs = float((svds[0][2][:k] @ svds[1][2][:k].T).square().sum()) / k
    outputs = float((svds[0][0][:, :k].T @ svds[1][0][:, :k]).square().sum()) / k
    assert found.inputs[0][1] == pytest.approx(inputs, abs=1e-5)
    assert found.outputs[1][0] == pytest.approx(outputs, abs=1e-5)
    assert found.inputs[0][0] == pytest.approx(1, abs=1e-5)
    assert found.inputs[0][2] is None


def test_some_matrices_of_a_stack_are_looked_at(rng):
    matrix, shape = MatrixRecord("half", (1.0,), (1.0,), (1,)), (6, 5, 4)
    tensors = [torch.zeros(shape), torch.randn(shape, generator=rng)]
    record = TensorRecord(shape, "stacked", (matrix,) * 6)
    found = inspect_versions(tensors, record, "stacked", torch.float32)[0].matrices
    assert [n for n, one in enumerate(found) if one.subspaces] == [0, 2, 3, 5]
    assert found[2].subspaces == compare_subspaces([tensors[1][2]])
    entrywise = TensorRecord(shape, "mean", (matrix,))
    assert inspect_versions(tensors, entrywise, "stacked", torch.float32)[0] == entrywise
