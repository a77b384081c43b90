# SPDX-License-Identifier: Apache-2.0
"""Every number that `inspect` measures against a plain computation in float64."""

from __future__ import annotations

import pytest
import torch
from matrices import deltas_of

from mergekit_ace.algebra import linalg
from mergekit_ace.algebra.task_vectors import compare_entries


@pytest.mark.parametrize("shape", [(24, 40), (7,), (2, 5, 6), (), (0, 4)])
@pytest.mark.parametrize("scale", [1.0, 1e-30, 1e30])
def test_comparison(rng, monkeypatch, shape, scale):
    monkeypatch.setattr(linalg, "BLOCK_ENTRIES", 400)
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
