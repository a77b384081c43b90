# SPDX-License-Identifier: Apache-2.0
"""Random families of matrices with the properties that merging turns on."""

from __future__ import annotations

import torch
from torch import Tensor

from mergekit_ace.algebra.closed_form import Attempt, choose_forms
from mergekit_ace.algebra.rounding_noise import changed_share


def family(
    rng: torch.Generator,
    rows: int,
    columns: int,
    experts: int,
    *,
    scales: list[float] | None = None,
    rank: int = 4,
    noise: float = 0.1,
) -> tuple[Tensor, list[Tensor]]:
    """A base and experts whose task vectors are low-rank plus noise, with a mean of their own."""
    base = torch.randn(rows, columns, generator=rng)
    members = []
    for t in range(experts):
        left = torch.randn(rows, rank, generator=rng)
        right = torch.randn(rank, columns, generator=rng)
        delta = left @ right / rank**0.5 + noise * torch.randn(rows, columns, generator=rng)
        delta += 0.2 * torch.randn(columns, generator=rng)
        scale = scales[t] if scales else 1.0
        members.append(base + 0.01 * scale * delta)
    return base, members


def hardly_changed(base: Tensor) -> Tensor:
    """The base, saved as bfloat16, with some entries moved by an ulp: s is neither 0 nor 1."""
    saved = base.bfloat16().float()
    for count in range(base.numel()):
        nearly = saved.clone()
        nearly.view(-1)[:count] *= 1 + 2**-7
        nearly = nearly.bfloat16().float()
        if 0.1 < changed_share(nearly, base, float((nearly - base).square().sum())) < 0.9:
            return nearly
    raise AssertionError("every step is too large")


HETEROGENEOUS = [0.1, 1.0, 10.0]


def as_if_large(shape: tuple[int, ...], tasks: int, *, refined: bool) -> list[Attempt]:
    """The attempts of a matrix of this shape if it were so large that float64 took long."""
    forms = choose_forms(*shape, tasks, refined=refined)
    return [*(Attempt(form, torch.float32) for form in forms), Attempt(forms[0], torch.float64)]
