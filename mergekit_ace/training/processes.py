# SPDX-License-Identifier: Apache-2.0
"""One process or several."""

from __future__ import annotations

from datetime import timedelta

from accelerate import Accelerator
from accelerate.utils import InitProcessGroupKwargs


def new_accelerator(mixed_precision: str) -> Accelerator:
    """An accelerator, alone or one of several processes.

    While one process lets the experts answer, the others wait: for hours, if need be.
    """
    patience = InitProcessGroupKwargs(timeout=timedelta(days=7))
    return Accelerator(mixed_precision=mixed_precision, kwargs_handlers=[patience])
