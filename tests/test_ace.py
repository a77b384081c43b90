# SPDX-License-Identifier: Apache-2.0
"""`merge_tensor` against the naive reference, its limits and its degenerate inputs."""

from __future__ import annotations

import math
from functools import partial

import pytest
import torch
from matrices import HETEROGENEOUS, family, merge_matrix
from mergekit.merge_methods import merge_tensors
from reference import naive_ace, naive_mean, task_vector_error

from mergekit_ace import AceOptions, IllConditionedError, merge_tensor
from mergekit_ace.algebra import linalg, ridge
from mergekit_ace.algebra.ace import PlusOptions
from mergekit_ace.methods.base import take_notices

merge_plus = partial(merge_tensor, options=PlusOptions())


@pytest.mark.parametrize("shape", [(60, 16), (16, 60), (30, 30)])
@pytest.mark.parametrize("scales", [None, HETEROGENEOUS], ids=["even", "uneven"])
def test_blocks_change_nothing_but_rounding(rng, monkeypatch, shape, scales):
    base, experts = family(rng, *shape, 3, scales=scales)
    options, given = AceOptions(compute_dtype="float64"), [1.0, 0.5, 2.0, 0.7]
    expected, _ = merge_matrix(base, experts, options=options, coefficients=given)
    monkeypatch.setattr(linalg, "BLOCK_ENTRIES", 130)
    monkeypatch.setattr(ridge, "LARGEST_STACK", 3 * 60 * 7)
    merged, record = merge_matrix(base, experts, options=options, coefficients=given)
    assert record.refined == (scales is not None)
    assert task_vector_error(merged, expected, base) <= 1e-10


@pytest.mark.parametrize("scales", [None, HETEROGENEOUS], ids=["even", "uneven"])
@pytest.mark.parametrize(("dtype", "bar"), [("float32", 5e-4), ("float64", 1e-8)])
@pytest.mark.parametrize("shape", [(20, 90), (120, 24), (50, 60), (22, 55)])
@pytest.mark.parametrize("switches", [{}, {"refinement_mean": "ridged"}])
def test_coefficients(rng, switches, shape, dtype, bar, scales):
    base, experts = family(rng, *shape, 3, scales=scales, noise=0.3)
    epsilon = 1e-4 if scales is None else 1e-2
    options = AceOptions(epsilon=epsilon, scale=0.8, compute_dtype=dtype, **switches)
    for weights in (None, [1.0, 0.2, 3.0]):
        for own in ([1.7, 0.0, -0.6], [0.0, 0.0, 2.0], [1.0, 1.0, 1.0]):
            given = [*own, 0.4]  # of the refinement
            merged, record = merge_tensor(base, experts, weights, options, "matrix", given)
            known = {"lambda_": 0.8, "epsilon": epsilon, "coefficients": given, **switches}
            expected = naive_ace(base, experts, weights, **known)
            assert record.matrices[0].refined == (scales is not None)
            assert task_vector_error(merged, expected, base) <= bar


@pytest.mark.parametrize("shape", [(48, 200), (90, 80), (200, 60)])
@pytest.mark.parametrize("kind", ["low rank", "noise"])
def test_float64_comes_where_float32_does_not_carry(rng, shape, kind):
    """Over condition numbers up to 1e8, with the paper's ridge."""
    dtypes = []
    for exponent in (-4, -3, -2, -1, 0):
        base, experts = 1e-6 * torch.randn(shape, generator=rng), []
        for _ in range(3):
            delta = torch.randn(shape, generator=rng)
            if kind == "low rank":
                delta = delta[:, :4] @ torch.randn(4, shape[1], generator=rng)
            experts.append(base + 10.0**exponent * delta)
        merged, _ = merge_matrix(base, experts, options=AceOptions(epsilon_scale="absolute"))
        expected = naive_ace(base, experts, epsilon_scale="absolute")
        bar = 3 * ridge.TOLERANCE if merged.dtype == torch.float32 else 1e-6
        assert task_vector_error(merged, expected, base) <= bar
        dtypes.append(merged.dtype)
    assert dtypes[0] == torch.float32
    assert torch.float64 in dtypes or kind != "low rank"


@pytest.mark.parametrize("statistic", ["gamma", "log_variance"])
def test_the_threshold_decides_the_branch(rng, statistic):
    base, experts = family(rng, 20, 20, 3, scales=[0.5, 1.0, 2.0])
    record = merge_matrix(base, experts)[1]
    assert record.heterogeneous == (record.log_variance > 1)  # by default only the spread counts
    value = getattr(record, statistic)
    for threshold, heterogeneous in ((0.9 * value, True), (1.1 * value, False)):
        switches = {"heterogeneity": statistic, "heterogeneity_threshold": threshold}
        merged, record = merge_matrix(base, experts, options=AceOptions(**switches))
        assert record.heterogeneous == record.normalized == record.refined == heterogeneous
        assert task_vector_error(merged, naive_ace(base, experts, **switches), base) <= 5e-5


def test_float64_tensors_are_not_rounded(rng):
    base, experts = family(rng, 12, 10, 3)
    base, experts = base.double(), [e.double() + 1e-9 for e in experts]
    merged, _ = merge_matrix(base, experts)
    assert task_vector_error(merged, naive_ace(base, experts), base) <= 1e-9
    merged, record = merge_matrix(base, [base + 1e-12, base.clone()])
    assert record.rule == "single"
    assert torch.equal(merged, base + 1e-12)


def test_merges_are_reproducible(rng):
    """Bit for bit, without random numbers, and inside of a device context, as of --multi-gpu."""
    base, experts = family(rng, 40, 50, 3, scales=HETEROGENEOUS)
    state = torch.get_rng_state()
    expected, _ = merge_matrix(base, experts)
    assert torch.equal(torch.get_rng_state(), state)
    with torch.device("meta"):
        merged, _ = merge_matrix(base, experts)
    assert torch.equal(merged, expected)


@pytest.mark.parametrize("scale", [1.0, 0.4])
def test_one_expert_changed_it(rng, scale):
    base, (expert,) = family(rng, 8, 9, 1)
    options = AceOptions(scale=scale)
    merged, record = merge_matrix(base, [base.clone(), expert, base.clone()], options=options)
    assert record.rule == "single"
    torch.testing.assert_close(merged, base + scale * (expert - base))
    assert torch.equal(merged, expert) == (scale == 1)
    merged, record = merge_matrix(base, [base.clone(), base.clone()], options=options)
    assert merged is base
    assert record.rule == "base"


@pytest.mark.parametrize("size", [1.0, 1e-300, 1e300])
def test_an_unchanged_expert_and_one_of_weight_zero_are_left_out(rng, size):
    base, experts = family(rng, 12, 14, 3, scales=HETEROGENEOUS)
    expected, _ = merge_matrix(base, experts[:2], [1.0, 3.0])
    versions = [experts[0], base.clone(), experts[1], experts[2]]
    merged, record = merge_matrix(base, versions, [size, size, 3 * size, 0.0])
    assert torch.equal(merged, expected)
    assert record.tau[1] == 0
    assert [e is None for e in record.epsilon] == [False, True, False, True]
    assert record.weight == pytest.approx((0.5, 0.0, 1.5, 0.0))


@pytest.mark.parametrize(
    "switches", [{"adaptive_normalization": "always"}, {"epsilon_scale": "relative"}]
)
def test_rows_that_all_moved_alike(rng, switches):
    base, experts = family(rng, 10, 8, 2, scales=[0.1, 10.0])
    alike = base + torch.randn(8, generator=rng)
    merged, record = merge_matrix(base, [*experts, alike], options=AceOptions(**switches))
    assert torch.isfinite(merged).all()
    assert record.rule == "ace"
    for versions in ([base, alike, base + 1.0], [version[:1] for version in (base, *experts)]):
        origin, *others = versions  # one row is a vector: its centred task vector is zero
        merged, record = merge_matrix(origin, others, options=AceOptions(**switches))
        assert record.rule == "mean"
        torch.testing.assert_close(merged, naive_mean(origin, others).float())


@pytest.mark.parametrize("refinement", ["never", "always"])
@pytest.mark.parametrize("shape", [(3, 10), (10, 3)])
def test_experts_that_cancel_one_another(rng, shape, refinement):
    """X is what rounding leaves of 0, and its relative error means nothing."""
    base = torch.zeros(shape, dtype=torch.float64)
    delta = torch.randn(shape, generator=rng, dtype=torch.float64)
    switches = {"adaptive_normalization": "always", "spectral_refinement": refinement}
    merged, _ = merge_matrix(base, [delta, -delta], options=AceOptions(epsilon=0.1, **switches))
    assert merged.norm() <= 1e-8 * delta.norm()


@pytest.mark.parametrize("exponent", [-60, 60])
@pytest.mark.parametrize("shape", [(20, 16), (5, 30)])
@pytest.mark.parametrize("switch", ["never", "always"])
def test_huge_and_tiny_weights(rng, exponent, shape, switch):
    """Third powers of task vectors leave float32's range long before the weights do."""
    base, experts = family(rng, *shape, 3, scales=[0.5, 1.0, 2.0], noise=1.0)
    options = AceOptions(
        epsilon_scale="relative",
        epsilon=0.1,
        adaptive_normalization=switch,
        spectral_refinement=switch,
        structural_prior=switch == "never",
    )
    reference, _ = merge_matrix(base, experts, options=options)
    unit = 2.0**exponent
    merged, _ = merge_matrix(base * unit, [e * unit for e in experts], options=options)
    torch.testing.assert_close(merged / unit, reference.double(), rtol=1e-4, atol=1e-5)


def test_a_task_vector_that_overflows():
    base = torch.full((2, 2), -3e38)
    with pytest.raises(OverflowError, match=r"0 overflows torch\.float32; write compute_dtype"):
        merge_matrix(base, [-base, base])
    merged, _ = merge_matrix(base, [-base, base], options=AceOptions(compute_dtype="float64"))
    assert torch.equal(merged, -base.double())


MATRIX, NAN = torch.eye(3), torch.full((3, 3), float("nan"))


@pytest.mark.parametrize(
    ("experts", "given", "error", "message"),
    [
        ([], {}, ValueError, "give at least one expert"),
        ([MATRIX, MATRIX[:2]], {}, ValueError, r"expert 1 has the shape \(2, 3\), but the base"),
        ([MATRIX + 1, NAN], {}, ValueError, "expert 1 contains NaN or Inf"),
        ([MATRIX + 1], {"weights": [-1.0]}, ValueError, r"finite weight for each, .* \[-1"),
        ([MATRIX + 1], {"coefficients": [1.0]}, ValueError, "and a last one for the refinement"),
        ([MATRIX + 1], {"coefficients": [1.0, math.nan]}, ValueError, r"coefficients \[1.0, nan"),
    ],
)
def test_what_cannot_be_merged(experts, given, error, message):
    with pytest.raises(error, match=message):
        merge_matrix(MATRIX, experts, **given)


@pytest.mark.parametrize("shape", [(60, 10), (8, 8), (4, 30)])
@pytest.mark.parametrize("scale", ["spectrum", "absolute"])
def test_without_a_ridge_there_may_be_no_solution(rng, shape, scale):
    base, experts = family(rng, *shape, 3, noise=1.0)
    options = AceOptions(epsilon=0, epsilon_scale=scale)
    if shape == (60, 10):  # of full rank
        merged, _ = merge_matrix(base, experts, options=options)
        assert task_vector_error(merged, naive_ace(base, experts, epsilon=0), base) <= 5e-5
        return
    low = [torch.randn(2, n, 2, generator=rng, dtype=torch.float64) for n in shape]
    with pytest.raises(IllConditionedError, match="singular"):
        merge_matrix(base.double() * 0, list(low[0] @ low[1].mT), options=options)


def test_an_epsilon_of_zero_says_what_to_do(rng):
    tensors = [torch.zeros(3, 9), *torch.randn(2, 3, 9, generator=rng)]
    with pytest.raises(ValueError, match=r"ace: tensor w cannot.*Raise `epsilon`"):
        merge_tensors(tensors, "ace", base_index=0, parameters={"epsilon": 0}, name="w")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("merge", [merge_tensor, merge_plus])
def test_an_expert_that_is_the_base_in_another_precision_takes_no_part(rng, dtype, merge):
    base, experts = family(rng, 20, 30, 2)
    saved = [base.to(dtype), base.to(dtype).float()]
    expected, _ = merge(base, experts)
    merged, record = merge(base, [*experts, *saved])
    assert torch.equal(merged, expected)
    assert record.matrices[0].changed == (1, 1, 0, 0)
    moved = base.to(dtype).float()
    moved[3, 4] += 1  # one entry of its own, and it counts
    assert merge(base, [*experts, moved])[1].matrices[0].changed == (1, 1, 1)


WEAK = torch.logspace(math.log10(0.3), -6, 40).tolist()


@pytest.mark.parametrize("merge", [merge_tensor, merge_plus])
@pytest.mark.parametrize("kind", ["flat", "low rank", "slow"])
@pytest.mark.parametrize("shape", [(48, 48), (60, 20), (20, 66), (14, 70), (22, 66)])
@pytest.mark.parametrize(("unit", "cosine"), [(1, 0), (1e-3, 0.6), (1, 0.95)])
def test_a_weak_expert_does_not_decide_the_merge(rng, merge, kind, shape, unit, cosine):
    """Two experts of one norm, and a third of strength r, by defaults; see the algebra's README."""

    def random() -> torch.Tensor:
        delta = torch.randn(shape, generator=rng, dtype=torch.float64)
        if kind == "low rank":
            wide = torch.randn(4, shape[1], generator=rng, dtype=torch.float64)
            delta = delta[:, :4] @ wide + 0.1 * delta
        if kind == "slow":
            left, sigma, right = torch.linalg.svd(delta, full_matrices=False)
            delta = left * torch.arange(1.0, len(sigma) + 1).double() ** -0.7 @ right
        return unit * delta / delta.norm()

    base, common = torch.zeros(shape, dtype=torch.float64), cosine**0.5 * random()
    first, second, weak = (common + (1 - cosine) ** 0.5 * random() for _ in "abc")
    alone, _ = merge(base, [first, second], layout="matrix")
    total, before = first + second, None
    for strength in WEAK:
        merged, _ = merge(base, [first, second, strength * weak], layout="matrix")
        assert (merged * total).sum() >= 0.6 * (alone * total).sum()
        assert merged.norm() <= 1.4 * alone.norm()
        assert before is None or (merged - before).norm() <= 0.35 * alone.norm()
        before = merged


@pytest.mark.parametrize("method", ["ace", "ace_plus"])
def test_whitened_updates_are_mentioned(rng, method):
    base, (one, other) = torch.zeros(160, 140), torch.randn(2, 160, 140, generator=rng)
    merge_tensors([base, one, other], method, base_index=0, name="w")
    assert [text for text in take_notices() if "nearly whitened" in text]
    strengths = 0.9 ** torch.arange(140)
    merge_tensors([base, one * strengths, other * strengths], method, base_index=0, name="w")
    assert not take_notices()
