# SPDX-License-Identifier: Apache-2.0
"""One process or several: which samples are whose, and sums over all."""

from __future__ import annotations

from datetime import timedelta

from accelerate import Accelerator
from accelerate.utils import InitProcessGroupKwargs
from torch import Tensor


def new_accelerator(mixed_precision: str) -> Accelerator:
    """An accelerator, alone or one of several processes.

    While one process lets the experts answer, the others wait: for hours, if need be.
    """
    patience = InitProcessGroupKwargs(timeout=timedelta(days=7))
    return Accelerator(mixed_precision=mixed_precision, kwargs_handlers=[patience])


def samples_per_step(accelerator: Accelerator, batch_size: int, accumulation: int) -> int:
    """Samples in a step, all processes and backward passes together."""
    return batch_size * accumulation * accelerator.num_processes


def own_batches(accelerator: Accelerator, indices: list[int], batch_size: int) -> list[list[int]]:
    """This process's share of some samples, in batches."""
    own = indices[accelerator.process_index :: accelerator.num_processes]
    return [own[start : start + batch_size] for start in range(0, len(own), batch_size)]


def sum_over_processes(accelerator: Accelerator, numbers: Tensor) -> Tensor:
    """The sum of what all processes have, where `numbers` lie."""
    if accelerator.num_processes == 1:
        return numbers
    total = accelerator.reduce(numbers.to(accelerator.device), reduction="sum")
    return total.to(numbers.device)
