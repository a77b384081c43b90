# SPDX-License-Identifier: Apache-2.0
"""Float32 against the naive float64 reference, over condition numbers and kinds of families.

The bar for the relative error of a merged task vector is 2e-5 up to a condition number of A of 100,
2e-7 times it beyond that, and never above 1e-3.
"""

from __future__ import annotations

import pytest
import torch
from reference import naive_ace, task_vector_error
from torch import Tensor

from mergekit_ace import AceOptions, merge_matrix
from mergekit_ace.algebra import choose as attempts
from mergekit_ace.algebra import linalg as processor
from mergekit_ace.algebra import linalg as products
from mergekit_ace.algebra.closed_form import tolerance

KINDS = ["noise", "low rank", "low rank and noise", "spiked", "near-duplicates"]
SHAPES = {"dual": (48, 200), "primal": (90, 80), "tall": (200, 60), "lean": (90, 80)}
seen: dict[str, list[tuple[str, float]]] = {form: [] for form in SHAPES}


def task_vector(rng: torch.Generator, kind: str, shape: tuple[int, int], shared: Tensor) -> Tensor:
    rows, columns = shape
    noise = torch.randn(shape, generator=rng)
    left = torch.randn(rows, 4, generator=rng)
    low = left @ torch.randn(4, columns, generator=rng)
    if kind == "low rank":
        delta = low
    elif kind == "low rank and noise":
        delta = low + 0.1 * noise
    elif kind == "spiked":
        u, sigma, vh = torch.linalg.svd(noise, full_matrices=False)
        delta = u * torch.logspace(0, -4, len(sigma)) @ vh * (rows * columns) ** 0.5
    elif kind == "near-duplicates":
        delta = shared + 1e-3 * noise
    else:
        delta = noise
    return delta + 0.1 * torch.randn(columns, generator=rng)


@pytest.mark.parametrize("library", ["mkl", "onednn"])
@pytest.mark.parametrize("refined", [False, True], ids=["homogeneous", "heterogeneous"])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("form", SHAPES)
def test_error_against_condition(monkeypatch, form, kind, refined, library):
    monkeypatch.setattr(processor, "mkl_is_slow", lambda: library == "onednn")
    monkeypatch.setattr(products, "LARGE", 0)
    monkeypatch.setattr(attempts, "SMALL_SYSTEM", 0)
    monkeypatch.setattr(
        attempts, "_attempts", lambda *_: [(form, torch.float32), (form, torch.float64)]
    )
    shape = SHAPES[form]
    for exponent in (-4, -3, -2, -1):
        for experts in (2, 3):
            rng = torch.Generator().manual_seed(1)
            shared = torch.randn(shape, generator=rng)
            base = 1e-6 * torch.randn(shape, generator=rng)  # or its rounding would be the error
            members = []
            for t in range(experts):
                scale = 10.0 ** (exponent + (t - 1 if refined else 0))
                members.append(base + scale * task_vector(rng, kind, shape, shared))
            switch = "always" if refined else "never"
            options = {
                "adaptive_normalization": switch,
                "spectral_refinement": switch,
                # F of a low-rank family has no more directions of its own
                "rank_fraction": 0.05 if kind == "low rank" else 0.3,
            }
            merged, record = merge_matrix(base, members, options=AceOptions(**options))
            if record.condition > 1e7:
                continue
            seen[form].append((record.precision, record.condition))
            error = task_vector_error(merged, naive_ace(base, members, **options), base)
            assert error <= tolerance(record.condition), (exponent, experts, record)


@pytest.mark.parametrize("form", SHAPES)
def test_float32_is_used_as_far_as_it_carries(form):
    """The sweep above went through float32 often, and where it does not carry through float64."""
    precisions = [precision for precision, _ in seen[form]]
    if not precisions:
        pytest.skip("runs behind the sweep")
    assert precisions.count("float32") >= 0.3 * len(precisions)
    assert precisions.count("float64") >= 0.1 * len(precisions)
    assert max(condition for _, condition in seen[form]) > 1e5
