# SPDX-License-Identifier: Apache-2.0
"""Which samples a step sees: a function of the seed and the step alone, so nothing to save."""

from __future__ import annotations

from functools import lru_cache

import torch


def step_indices(seed: int, task: int, step: int, batch: int, count: int) -> list[int]:
    """The samples of one expert in one step, all processes together.

    The samples are gone through in a new random order each time around; a step may end one round
    and begin the next.

    Args:
        seed: of the run.
        task: index of the expert.
        step: from 0.
        batch: samples per step.
        count: samples that there are.
    """
    places = range(step * batch, (step + 1) * batch)
    return [_order(seed, task, place // count, count)[place % count] for place in places]


@lru_cache(maxsize=64)
def _order(seed: int, task: int, turn: int, count: int) -> list[int]:
    # Four numbers to one seed: mixed, so that no two of them meet in the same order.
    mixed = (seed * 1_000_003 + task) * 1_000_003 + turn
    generator = torch.Generator("cpu").manual_seed(mixed % 2**63)
    return torch.randperm(count, generator=generator).tolist()
