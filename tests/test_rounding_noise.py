# SPDX-License-Identifier: Apache-2.0
"""Rounding noise against a naive transcription in NumPy's float64, entry by entry."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
from torch import Tensor

from mergekit_ace.algebra.rounding_noise import (
    CHUNK,
    changed_share,
    genuine_share,
    grids_of,
    noise_energy,
    rounding_energy,
    rounding_of_base,
    storage_grid,
)

BF16, F16, F32, F64 = torch.bfloat16, torch.float16, torch.float32, torch.float64
BITS = {BF16: 8, F16: 11, F32: 24, F64: 53}
SMALLEST = {BF16: 2.0**-133, F16: 2.0**-24, F32: 2.0**-149, F64: 0.0}
LARGEST = {BF16: 3.4e38, F16: 65504.0, F32: 3.5e38, F64: np.inf}
PRECISIONS = (BF16, F16, F32)


def naive_ulp(values: np.ndarray, grid: torch.dtype) -> np.ndarray:
    _, exponents = np.frexp(values)
    return np.where(values == 0, 0, np.maximum(2.0 ** (exponents - BITS[grid]), SMALLEST[grid]))


def naive_round(values: np.ndarray, grid: torch.dtype) -> np.ndarray:
    spacing = np.where(values == 0, 1, naive_ulp(values, grid))
    return np.rint(values / spacing) * spacing


def naive_grids(tensor: Tensor) -> list[torch.dtype]:
    values = tensor.double().numpy()
    found = [g for g in BITS if (naive_round(values, g) == values).all()]
    found = [g for g in found if (abs(values) <= LARGEST[g]).all()]
    return [g for g in found if g == tensor.dtype or torch.promote_types(g, tensor.dtype) != g]


def naive_storage(tensor: Tensor) -> torch.dtype:
    grid, values = naive_grids(tensor)[0], tensor.double().numpy()
    multiples = (values / np.where(values == 0, 1, naive_ulp(values, grid))) % 2
    return grid if (multiples == 1).any() else tensor.dtype


def naive_noise(expert: Tensor, base: Tensor) -> float:
    total, moved = 0.0, (expert != base).numpy()
    for tensor in (expert, base):
        ulp = naive_ulp(tensor.double().numpy(), naive_storage(tensor))
        total += float((ulp[moved] ** 2).sum()) / 12
    return total


def naive_share(expert: Tensor, base: Tensor) -> float:
    w, w0, grids = expert.double().numpy(), base.double().numpy(), naive_grids(expert)
    tau = float(((w - w0) ** 2).sum())
    own = 0.0
    for order in itertools.chain(
        *(itertools.permutations(grids, n + 1) for n in range(len(grids)))
    ):
        saved = w0
        for grid in order:
            saved = naive_round(saved, grid)
        own = max(own, float(((saved - w0) ** 2).sum()))
    full = 0.1 * float((naive_ulp(w, grids[0]) ** 2).sum()) / 12
    excess = tau - 1.05 * own
    return min(1.0, excess / full) if excess > 0 else 0.0


def distance(expert: Tensor, base: Tensor) -> float:
    return float((expert.double() - base.double()).square().sum())


def weights(rng: torch.Generator, *shape: int, size: float = 0.02) -> Tensor:
    return size * torch.randn(shape, generator=rng)


@pytest.mark.parametrize("size", [1e-30, 1e-6, 0.02, 1e3, 1e30])
@pytest.mark.parametrize("dtype", [F32, F64])
def test_the_spacing_of_every_grid(rng, dtype, size):
    tensor = weights(rng, 40, 30, size=size).to(dtype)
    tensor[0] = 0
    tensor[1] = torch.tensor([1.0, -2.0, 0.5] * 10) * size
    for grid in BITS:
        if torch.promote_types(grid, dtype) == dtype:
            ulp = naive_ulp(tensor.double().numpy(), grid)
            ulp[0] = SMALLEST[grid] if grid == F16 else 0
            expected = float((ulp**2).sum()) / 12
            assert rounding_energy(tensor, grid) == pytest.approx(expected, rel=1e-5, abs=1e-85)


@pytest.mark.parametrize("size", [1e-6, 0.02, 1e3])
@pytest.mark.parametrize("stored", PRECISIONS)
@pytest.mark.parametrize("dtype", [BF16, F16, F32, F64])
def test_the_grid_is_told_from_values(rng, dtype, stored, size):
    tensor = weights(rng, 50, 40, size=size).to(stored).to(dtype)
    assert grids_of(tensor) == tuple(naive_grids(tensor))
    assert storage_grid(tensor) == naive_storage(tensor)


@pytest.mark.parametrize("dtype", [F16, F32, F64])
def test_constants_are_no_evidence_of_a_grid(dtype):
    for value in (0.0, 1.0, -0.5, 1.5):
        tensor = torch.full((3, 4), value, dtype=dtype)
        assert grids_of(tensor)[0] == BF16
        assert storage_grid(tensor) == dtype
    assert storage_grid(torch.tensor([1.0, 1.0078125, 0.0])) == BF16
    assert storage_grid(torch.tensor([1.0, 1.0009765625])) == F16
    assert storage_grid(torch.tensor([3 * 2.0**-24, 2049 * 2.0**-24])) == F32
    assert storage_grid(torch.tensor([129 * 2.0**-100])) == BF16


@pytest.mark.parametrize(
    ("shape", "strides"), [((1, 64), (1, 1)), ((1, 64), (1, 64)), ((1, 1), (1, 7))]
)
def test_an_axis_of_one_entry_may_keep_any_stride(shape, strides):
    tensor = torch.empty_strided(shape, strides)
    assert storage_grid(tensor.fill_(1 + 2**-20)) == F32
    assert storage_grid(torch.cat([tensor.fill_(1 + 2**-7)] * 2).mT.contiguous().mT) == BF16


def test_one_value_that_lacks_decides_wherever_it_stands(rng):
    tensor = weights(rng, 300, 2000).bfloat16().float()
    assert tensor.numel() > 2 * CHUNK
    assert grids_of(tensor) == (BF16, F32)
    tensor[-1, -1] = 0.1
    assert grids_of(tensor) == (F32,)
    for view in (tensor.mT, tensor[1::2], tensor.reshape(3, 100, 2000)):
        assert grids_of(view) == (F32,)


@pytest.mark.parametrize("ours", PRECISIONS)
@pytest.mark.parametrize("theirs", PRECISIONS)
def test_noise_against_the_transcription(rng, ours, theirs):
    plain = weights(rng, 60, 50)
    base = plain.to(ours).float()
    expert = (plain + weights(rng, 60, 50, size=1e-4)).to(theirs).float()
    expert[:20] = base[:20]
    assert noise_energy(expert, base) == pytest.approx(naive_noise(expert, base), rel=1e-6)
    assert noise_energy(expert.mT, base.mT) == pytest.approx(naive_noise(expert, base), rel=1e-6)
    assert noise_energy(base, base) == 0


@pytest.mark.parametrize("stored", [BF16, F16])
def test_noise_is_what_rounding_leaves(rng, stored):
    """Of numbers with all digits that were rounded, apart from each other, to a grid."""
    plain = weights(rng, 400, 500).double()
    moved = plain + weights(rng, 400, 500, size=1e-3)
    base, expert = plain.to(stored), moved.to(stored)
    rounded = (expert.double() - base.double()) - (moved - plain)
    assert float(rounded.square().sum()) == pytest.approx(noise_energy(expert, base), rel=0.08)
    single = noise_energy(moved.to(stored).double(), plain)
    assert distance(moved.to(stored), moved) == pytest.approx(single, rel=0.02)


@pytest.mark.parametrize("second", PRECISIONS)
@pytest.mark.parametrize("first", PRECISIONS)
@pytest.mark.parametrize("origin", PRECISIONS)
def test_the_base_saved_through_other_precisions_has_not_changed(rng, origin, first, second):
    """Whatever its size is, and if it was saved twice."""
    large = [(600, 500)] if first == second else []  # more than a chunk
    for shape in [(), (1,), (7,), (1, 1), (3, 5), (2, 3, 4), *large]:
        base = weights(rng, *shape).to(origin)
        for saved in (base.to(first), base.to(first).to(second)):
            for wide in (F32, F64):
                expert, before = saved.to(wide), base.to(wide)
                tau = distance(expert, before)
                assert changed_share(expert, before, tau) == 0, shape


def test_norms_that_all_round_to_one_have_not_changed(rng):
    base = 1 + weights(rng, 64, size=1e-4)
    assert changed_share(torch.ones(64), base, distance(torch.ones(64), base)) == 0
    assert changed_share(base, torch.ones(64), distance(torch.ones(64), base)) == 1


@pytest.mark.parametrize("size", [1e-9, 1e-7, 1e-6, 1e-5, 3e-5, 1e-4, 1e-2])
@pytest.mark.parametrize("theirs", PRECISIONS)
@pytest.mark.parametrize("ours", PRECISIONS)
def test_the_share_against_the_transcription(rng, ours, theirs, size):
    base = weights(rng, 80, 70).to(ours).float()
    expert = (base + weights(rng, 80, 70, size=size)).to(theirs).float()
    tau = distance(expert, base)
    expected = naive_share(expert, base)
    assert changed_share(expert, base, tau) == pytest.approx(expected, rel=1e-3, abs=1e-6)


@pytest.mark.parametrize("theirs", PRECISIONS)
@pytest.mark.parametrize("ours", PRECISIONS)
def test_the_share_rises_without_jumps(rng, ours, theirs):
    """As one entry after the other of a saved base moves by one ulp."""
    base = (1 + torch.rand(100, 100, generator=rng)).to(ours).float()
    saved = base.to(theirs).float()
    order = torch.randperm(10_000, generator=rng)
    shares = []
    for moved in range(0, 300, 2):
        expert = saved.flatten().clone()
        expert[order[:moved]] -= 2.0 ** (1 - BITS[theirs])
        expert = expert.reshape(100, 100)
        assert torch.equal(expert, expert.to(theirs).float())
        shares.append(changed_share(expert, base, distance(expert, base)))
    steps = np.diff(shares)
    assert shares[0] == 0
    assert shares[-1] == 1
    if BITS[theirs] < BITS[ours]:  # an entry may move to the other neighbour of the base's
        assert abs(steps).max() < 0.1
    else:
        assert steps.min() >= 0
        assert steps.max() < 0.03


@pytest.mark.parametrize("theirs", PRECISIONS)
@pytest.mark.parametrize("ours", PRECISIONS)
def test_what_is_genuine_of_a_change(rng, ours, theirs):
    base = weights(rng, 200, 300).to(ours).float()
    change = weights(rng, 200, 300, size=5e-5)
    expert = (base + change).to(theirs).float()
    tau = distance(expert, base)
    share = genuine_share(expert, base, tau)
    if BITS[theirs] >= BITS[ours]:
        assert share == pytest.approx(1, abs=1e-9)
    else:
        assert share * tau == pytest.approx(float(change.square().sum()), rel=0.06)
    assert genuine_share(expert, expert, 1.0) == 1


def test_a_finer_expert_of_a_coarser_base_has_learned_what_it_says(rng):
    base = weights(rng, 30, 30).bfloat16().float()
    expert = base + weights(rng, 30, 30, size=1e-7)  # less than an ulp of the base
    assert noise_energy(expert, base) > distance(expert, base)
    assert changed_share(expert, base, distance(expert, base)) == 1


def test_values_beyond_the_range_of_a_grid_are_no_rounding(rng):
    base = weights(rng, 20, 20)
    base[0, 0], base[0, 1] = 1e6, -1e30
    assert rounding_of_base(base, F16) < 1e-6
    expert = base.half().float().clamp(-60000, 60000)
    assert changed_share(expert, base, distance(expert, base)) == 1


@pytest.mark.parametrize("shape", [(0,), (0, 4), (4, 0), (0, 2, 3)])
def test_empty_tensors(shape):
    empty = torch.zeros(shape)
    assert noise_energy(empty, empty) == rounding_energy(empty, F32) == 0
    assert rounding_of_base(empty, BF16) == changed_share(empty, empty, 0.0) == 0


def test_zeros_and_integers(rng):
    base = weights(rng, 8, 8)
    assert changed_share(torch.zeros(8, 8), base, distance(torch.zeros(8, 8), base)) == 1
    assert changed_share(base, torch.zeros(8, 8), distance(torch.zeros(8, 8), base)) == 1
    counts = torch.arange(6)
    assert changed_share(counts + 1, counts, 6.0) == 1
    assert noise_energy(counts + 1, counts) == 0
