# SPDX-License-Identifier: Apache-2.0
"""Experts that have not changed a tensor, or hardly, beside the rounding of their checkpoints."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable
from math import ceil

import pytest
import torch
from matrices import family, hardly_changed
from measured_files import needs_statistics
from mergekit.merge_methods import merge_tensors
from torch import Tensor

from mergekit_ace.algebra import task_vectors
from mergekit_ace.algebra.records import MatrixRecord
from mergekit_ace.algebra.rounding_noise import changed_share
from mergekit_ace.algebra.task_vectors import merge_by_change, nested_sets
from mergekit_ace.methods.notices import flush_notices
from mergekit_ace.plugin import our_methods

PRECISIONS = (torch.float32, torch.bfloat16, torch.float16)
# What makes a method independent of how many experts are listed, or quick.
PARAMETERS = {"lines": {"alpha": 0.3}, "wudi": {"steps": 20}}
# Shapes of stored tensors by layout; methods without layouts read them entry by entry.
SHAPES = {
    "matrix": (12, 20),
    "transposed": (20, 12),
    "stacked": (2, 12, 20),
    "table": (20, 12),
    "mean": (40,),
}
METHODS = {method.spec.name: method for method in our_methods() if not needs_statistics(method)}


def merge(name: str, layout: str, base: Tensor, experts: list[Tensor], **parameters) -> Tensor:
    method = METHODS[name]
    given = {**PARAMETERS.get(name, {}), **parameters}
    if layout in method.layouts:
        given["layout"] = layout
    if name == "statsmerging":
        given["weight"] = [0.5, 0.3, 0.9, -0.4, 1.0][: len(experts)]
    return merge_tensors([base, *experts], name, base_index=0, parameters=given)


def members(rng: torch.Generator, shape: tuple[int, ...], count: int) -> tuple[Tensor, list]:
    """A base with experts of different strength, in float32."""
    flat = (shape[0], 1) if len(shape) == 1 else (shape[0], torch.Size(shape[1:]).numel())
    base, experts = family(rng, *flat, count, scales=[1.0, 3.0, 0.5, 1.0][:count])
    return 0.02 * base.reshape(shape), [0.02 * expert.reshape(shape) for expert in experts]


@pytest.mark.parametrize("layout", SHAPES)
@pytest.mark.parametrize("name", METHODS)
def test_a_base_saved_through_another_precision_changes_no_bit(rng, name, layout):
    """Of any precision of both, beside one to three experts of any precision, widened."""
    pairs = list(itertools.product(PRECISIONS, PRECISIONS))
    for number, (ours, theirs) in enumerate(pairs):
        count = 1 + number % 3
        base, experts = members(rng, SHAPES[layout], count)
        base = base.to(ours).float()
        experts = [expert.to(pairs[number - 1][1]).float() for expert in experts]
        plain = merge(name, layout, base, experts)
        saved = base.to(theirs).float()
        for more in ([saved], [saved, base.half().bfloat16().float()]):
            assert torch.equal(merge(name, layout, base, [*experts, *more]), plain)
    assert torch.equal(merge(name, layout, base, [saved]), base)


@pytest.mark.parametrize("layout", SHAPES)
@pytest.mark.parametrize("name", METHODS)
def test_an_expert_that_hardly_changed_enters_by_its_share(rng, name, layout, monkeypatch):
    """The result lies on the line from the merge without it to that with it, at s."""
    shape = SHAPES[layout] if layout != "mean" else (240,)
    base, experts = members(rng, shape, 2)
    nearly = hardly_changed(base)
    if layout == "stacked" and METHODS[name].layouts:  # matrices are judged one by one
        nearly = torch.stack([hardly_changed(base[0]), base[1].bfloat16().float()])
    shares: list[float] = []

    def share(expert: Tensor, origin: Tensor, *known: float) -> float:
        shares.append(changed_share(expert, origin, *known))
        return shares[-1]

    monkeypatch.setattr(task_vectors, "changed_share", share)
    merged = merge(name, layout, base, [*experts, nearly])
    between = {s for s in shares if 0 < s < 1}
    without = merge(name, layout, base, experts)
    monkeypatch.setattr(task_vectors, "changed_share", lambda *given: ceil(changed_share(*given)))
    whole = merge(name, layout, base, [*experts, nearly])
    (s,) = between
    torch.testing.assert_close(merged, without.lerp(whole, s), rtol=0, atol=1e-8)


def jumps_by_noise(rng, name: str, ours: torch.dtype, **parameters) -> Callable:
    """Return how far merges lie apart, in ‖X‖, as noise grows from one size to the next, in ν.

    It is stored in bfloat16, beside two experts.
    """
    base, experts = members(rng, (96, 128), 2)
    base = base.to(ours).float()
    ulp = 2.0 ** (base.abs().log2().floor() - 7)
    noise = ulp / 12**0.5 * torch.randn(base.shape, generator=rng)

    def at(size: float) -> Tensor:
        noisy = (base + size * noise).bfloat16().float()
        return merge(name, "matrix", base, [*experts, noisy], **parameters)

    def jumps(sizes: Tensor) -> list[float]:
        found = [at(float(size)) - base for size in sizes]
        largest = max(float(torch.linalg.norm(x)) for x in found)
        pairs = itertools.pairwise(found)
        return [float(torch.linalg.norm(b - a)) / largest for a, b in pairs]

    return jumps


CONTINUOUS = ["ace", "ace_relative", "iso_c", "cart", "statsmerging", "lines", "consensus_ta"]


@pytest.mark.parametrize("name", CONTINUOUS)
@pytest.mark.parametrize("ours", [torch.float32, torch.bfloat16])
def test_growing_noise_enters_without_a_jump(rng, name, ours):
    """Noise of up to 10 ν; of `ace` within a branch."""
    steady = {"adaptive_normalization": "always", "spectral_refinement": "never"}
    jumps = jumps_by_noise(rng, name, ours, **(steady if name == "ace" else {}))
    fine = torch.linspace(0, 0.8, 81)
    largest = max(jumps(fine))  # an entry in 12,288 moves at a time
    assert largest < 0.12 or largest < min(0.25, 0.85 * max(jumps(fine[::2])))
    assert max(jumps(torch.linspace(0.8, 10, 60))) < 0.3


@pytest.mark.parametrize(
    ("name", "parameters"), [("tsv_m", {}), ("iso_cts", {}), ("wudi", {"solver": "exact"})]
)
def test_where_single_entries_of_noise_turn_a_merge(rng, name, parameters):
    """What is left of ‖X‖ by 0.02 ν more: these methods have every expert count alike.

    They divide an expert's directions, or all of it, by their size, so that those of noise, which
    any entry that is rounded otherwise turns, count as much as what the others have learned.
    """
    jumps = jumps_by_noise(rng, name, torch.bfloat16, **parameters)
    found = jumps(torch.linspace(0.6, 0.8, 11))
    assert 0.2 < max(found) < 0.8
    finer = jumps(torch.linspace(0.6, 0.8, 21))
    assert max(finer) > 0.5 * max(found)  # the same at half the step


def test_nested_sets():
    assert nested_sets([1.0, 0.0, 1.0], [1.0, 1.0, 2.0]) == [(1.0, (True, False, True))]
    assert nested_sets([0.0, 0.0], [1.0, 1.0]) == []
    assert nested_sets([0.25, 1.0, 0.75], [1.0, 1.0, 1.0]) == [
        (0.25, (True, True, True)),
        (0.5, (False, True, True)),
        (0.25, (False, True, False)),
    ]
    assert nested_sets([0.25, 0.5], [0.0, 1.0]) == [(0.5, (False, True))]


def test_the_mixture_is_the_choquet_integral(rng):
    """Σ_k (s_(k) − s_(k+1)) v({1…k}) of any function v of sets of experts."""
    base, experts = members(rng, (5, 6), 3)
    changed = (0.2, 0.7, 0.4)
    calls = []

    def rule(origin: Tensor, given: list[Tensor]) -> tuple[Tensor, MatrixRecord]:
        present = [float(not torch.equal(expert, origin)) for expert in given]
        calls.append(present)
        moved = sum((expert - origin) for expert in given)
        record = MatrixRecord("odd", (1.0,) * 3, (1.0,) * 3, changed)
        return origin + moved.abs() * sum(present), record

    merged, record = merge_by_change(base, experts, rule)
    sets = [[1, 2, 0], [1, 2], [1]]
    value = [sum(experts[t] - base for t in kept).abs() * len(kept) for kept in sets]
    expected = base + 0.2 * value[0] + 0.2 * value[1] + 0.3 * value[2]
    torch.testing.assert_close(merged, expected)
    assert calls == [[1, 1, 1], [0, 1, 1], [0, 1, 0]]
    assert record.changed == changed


def test_linear_methods_multiply_their_coefficients(rng):
    base, experts = members(rng, (48, 64), 1)
    nearly = hardly_changed(base)
    both = merge("statsmerging", "mean", base, [*experts, nearly])
    one = merge("statsmerging", "mean", base, experts)
    share = (both - one).flatten() @ (nearly - base).flatten() / (nearly - base).square().sum()
    assert 0.05 < float(share) / 0.3 < 0.95
    torch.testing.assert_close(both, one + share * (nearly - base))


def test_experts_of_rounding_are_named_once(rng, caplog):
    flush_notices()
    caplog.clear()
    base, experts = members(rng, (12, 20), 2)
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            merge("ace", "matrix", base, [*experts, base.bfloat16().float(), base])
        assert not caplog.messages
        flush_notices()
    (message,) = caplog.messages
    assert "3 is left out of 3 tensors" in message
    assert "rounding" in message
