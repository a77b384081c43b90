# SPDX-License-Identifier: Apache-2.0
"""Every number that `inspect` measures against a plain computation in float64."""

from __future__ import annotations

import math

import pytest
import torch
from matrices import HETEROGENEOUS, deltas_of, family
from measured_files import in_memory, random_covariance
from reference import naive_ace

from mergekit_ace.algebra import inspection
from mergekit_ace.algebra.ace import AceOptions, merge_tensor
from mergekit_ace.algebra.inspection import (
    BINS,
    REACH,
    TensorInspection,
    compare_covariances,
    compare_entries,
    compare_subspaces,
    inspect_tensor,
)
from mergekit_ace.algebra.task_vectors import MatrixRecord, TensorRecord


def look(base, experts, layout, weights=None, **options) -> TensorInspection:
    """At a tensor as `ace` merges it."""

    def merge(tensors, layout, refine=True):
        own = AceOptions(**options, **({} if refine else {"spectral_refinement": "never"}))
        return merge_tensor(tensors[0], tensors[1:], weights, own, layout)

    return inspect_tensor(base, experts, layout, merge)


@pytest.mark.parametrize("shape", [(24, 40), (7,), (2, 5, 6), ()])
def test_comparison(rng, shape):
    base = torch.randn(shape, generator=rng)
    experts = [base + s * torch.randn(shape, generator=rng) for s in (0.01, 1.0, 3.0)]
    experts[1] = torch.where(torch.rand(shape, generator=rng) < 0.5, base, experts[1])
    found = compare_entries(base, experts)
    deltas = [d.flatten() for d in deltas_of(base, experts)]
    assert found.base_norm == pytest.approx(float(base.double().norm()))
    assert found.norm == pytest.approx([float(d.norm()) for d in deltas])
    assert found.unchanged == pytest.approx([float((d == 0).double().mean()) for d in deltas])
    for s, one in enumerate(deltas):
        for t, other in enumerate(deltas):
            if one.norm() == 0 or other.norm() == 0:
                assert found.cosine[s][t] is None
                continue
            cosine = float(one @ other / one.norm() / other.norm())
            assert found.cosine[s][t] == pytest.approx(cosine, abs=1e-6)
    unit = math.sqrt(sum(float(d.square().sum()) for d in deltas) / sum(len(d) for d in deltas))
    assert found.unit == pytest.approx(unit)
    width = 2 * REACH / BINS
    for counts, delta in zip(found.histogram, deltas, strict=True):
        expected = [0] * (BINS + 2)
        for entry in (delta / unit).tolist():
            place = math.floor((entry + REACH) / width)
            expected[min(max(place, -1), BINS) + 1] += 1
        assert list(counts) == expected


def test_a_histogram_of_a_large_tensor_counts_evenly_spaced_entries(rng, monkeypatch):
    monkeypatch.setattr(inspection, "SAMPLE", 100)
    base = torch.randn(30, 20, generator=rng)
    expert = base + torch.randn(30, 20, generator=rng)
    counts = compare_entries(base, [expert]).histogram[0]
    assert sum(counts) == 100
    whole = (expert - base).double()
    sampled = whole.flatten()[::6] / whole.square().mean().sqrt()
    assert counts[0] == (sampled < -REACH).sum()
    inside = torch.histc(sampled, BINS, -REACH, REACH)
    assert counts[1:-1] == tuple(inside.long().tolist())


def test_comparison_of_what_cannot_be_compared():
    base = torch.ones(3, 4)
    found = compare_entries(base, [base.clone(), base + 1])
    assert found.unchanged == (1.0, 0.0)
    assert found.cosine == ((None, None), (None, pytest.approx(1)))
    empty = compare_entries(torch.ones(0, 4), [torch.ones(0, 4)])
    assert empty.unchanged == (1.0,)
    assert empty.unit == 0


@pytest.mark.parametrize("scale", [1e-30, 1e30])
def test_huge_and_tiny_task_vectors(rng, scale):
    base = torch.zeros(6, 8)
    experts = [scale * torch.randn(6, 8, generator=rng) for _ in range(2)]
    before = experts[0].clone()
    found = compare_entries(base, experts)
    a, b = deltas_of(base, experts)
    assert found.cosine[0][1] == pytest.approx(float((a * b).sum() / a.norm() / b.norm()))
    subspaces = compare_subspaces(base, experts, torch.float32)
    rank = float(a.norm() ** 2 / torch.linalg.matrix_norm(a, 2) ** 2)
    assert subspaces.stable_rank[0] == pytest.approx(rank, rel=1e-5)
    assert torch.equal(experts[0], before)


@pytest.mark.parametrize("shape", [(40, 24), (24, 40), (5, 9), (1, 6)])
def test_subspaces(rng, shape):
    base = torch.randn(shape, generator=rng)
    experts = [base + torch.randn(shape, generator=rng) for _ in range(2)]
    experts.append(base.clone())
    k = min(16, *shape)
    found = compare_subspaces(base, experts, torch.float32)
    svds = [torch.linalg.svd(d, full_matrices=False) for d in deltas_of(base, experts[:2])]
    for t, (_, sigma, _) in enumerate(svds):
        rank = float(sigma.square().sum() / sigma[0] ** 2)
        assert found.stable_rank[t] == pytest.approx(rank, rel=1e-5)
    assert found.stable_rank[2] is None
    inputs = float((svds[0][2][:k] @ svds[1][2][:k].T).square().sum()) / k
    outputs = float((svds[0][0][:, :k].T @ svds[1][0][:, :k]).square().sum()) / k
    assert found.inputs[0][1] == pytest.approx(inputs, abs=1e-5)
    assert found.outputs[1][0] == pytest.approx(outputs, abs=1e-5)
    assert found.inputs[0][0] == pytest.approx(1, abs=1e-5)
    assert found.inputs[0][2] is None


@pytest.mark.parametrize("shape", [(48, 40), (30, 64)])
@pytest.mark.parametrize("heterogeneous", [False, True])
def test_the_spectrum_of_the_merge(rng, shape, heterogeneous):
    base, experts = family(rng, *shape, 3, scales=HETEROGENEOUS if heterogeneous else None)
    (matrix,) = look(base, experts, "matrix").matrices
    spectrum = matrix.spectrum
    assert matrix.heterogeneous == heterogeneous
    k = math.ceil(0.05 * min(shape))
    assert spectrum.leading == k
    switches = ("never", "always" if heterogeneous else "never")
    merges = [naive_ace(base, experts, spectral_refinement=s) - base.double() for s in switches]
    svds = [torch.linalg.svd(x, full_matrices=False) for x in merges]
    for (_, sigma, _), values, share in (
        (svds[0], spectrum.before, spectrum.share_before),
        (svds[1], spectrum.after, spectrum.share_after),
    ):
        assert values == pytest.approx(sigma[:k].tolist(), rel=1e-4)
        assert share == pytest.approx(float(sigma[:k].square().sum() / sigma.square().sum()), 1e-4)
    if not heterogeneous:
        assert spectrum.alignment is None
        return
    side = 0 if shape[0] <= shape[1] else 2
    for j, cosine in enumerate(spectrum.alignment):
        one, other = (s[side][:, j] if side == 0 else s[side][j] for s in svds)
        assert cosine == pytest.approx(abs(float(one @ other)), abs=1e-3)


def test_the_branch_is_the_merges_own(rng):
    """`inspect` says what a merge would do, with its options."""
    base, experts = family(rng, 20, 30, 3, scales=HETEROGENEOUS)
    options = {"heterogeneity": "log_variance", "heterogeneity_threshold": 1e9}
    (matrix,) = look(base, experts, "matrix", [1, 1, 0], **options).matrices
    assert not matrix.heterogeneous
    assert matrix.weight[2] == 0
    taus = [float(d.square().sum()) for d in deltas_of(base, experts)]
    assert matrix.tau == pytest.approx(taus)


def test_layouts(rng):
    base = torch.randn(6, 8, 10, generator=rng)
    experts = [base + torch.randn(6, 8, 10, generator=rng) for _ in range(2)]
    stacked = look(base, experts, "stacked")
    assert [n for n, matrix in enumerate(stacked.matrices) if matrix.spectrum] == [0, 2, 3, 5]
    (alone,) = look(base[2], [e[2] for e in experts], "matrix").matrices
    assert stacked.matrices[2].tau == alone.tau
    assert stacked.matrices[2].subspaces == alone.subspaces
    (mean,) = look(base, experts, "mean").matrices
    assert (mean.rule, mean.spectrum) == ("mean", None)
    (turned,) = look(base[0], [e[0] for e in experts], "transposed").matrices
    (plain,) = look(base[0].T, [e[0].T for e in experts], "matrix").matrices
    assert turned.tau == pytest.approx(plain.tau)


def test_a_merge_without_a_refinement(rng):
    """Its spectrum is that of what it has added to the base."""
    base, experts = family(rng, 24, 40, 2)

    def merge(tensors, layout):
        merged = tensors[0] + 0.5 * (tensors[1] - tensors[0])
        record = MatrixRecord("half", (1.0, 1.0), (1.0, 1.0), (1, 1))
        return merged, TensorRecord(tuple(base.shape), layout, (record,))

    (matrix,) = inspect_tensor(base, experts, "matrix", merge).matrices
    sigma = torch.linalg.svdvals(0.5 * (experts[0] - base).double())
    assert matrix.rule == "half"
    assert matrix.spectrum.before == pytest.approx(sigma[:2].tolist(), rel=1e-4)
    assert matrix.spectrum.alignment is None


@pytest.mark.parametrize("shape", [(10, 30), (40, 24)])
def test_agreement_with_measured_covariances(rng, shape):
    base, experts = family(rng, *shape, 2)
    covariances = [random_covariance(rng, shape[1]) for _ in experts]
    found = compare_covariances(base, experts, in_memory(covariances))
    grams = [d.T @ d for d in deltas_of(base, experts)]
    assert found.size == min(16, *shape)
    for t, gram in enumerate(grams):
        for s, covariance in enumerate(covariances):
            m = covariance.double()
            expected = float((gram * m).sum() / gram.norm() / m.norm())
            assert found.cosine[t][s] == pytest.approx(expected, rel=1e-4)
        one = torch.linalg.eigh(gram).eigenvectors[:, -found.size :]
        other = torch.linalg.eigh(covariances[t].double()).eigenvectors[:, -found.size :]
        cosines = torch.linalg.svdvals(one.T @ other).clamp(max=1)
        expected = [math.degrees(math.acos(c)) for c in cosines.tolist()]
        assert found.angles[t] == pytest.approx(expected, abs=0.5)


def test_agreement_without_a_change_or_a_measurement(rng):
    base, experts = family(rng, 8, 6, 2)
    covariance = random_covariance(rng, 6)
    three = [base.clone(), *experts]
    found = compare_covariances(base, three, in_memory([covariance, None, covariance * 0]))
    assert found.angles == (None, None, None)
    assert found.cosine[0] == (None, None, None)
    assert found.cosine[1][0] is not None
    assert found.cosine[1][1:] == (None, None)
