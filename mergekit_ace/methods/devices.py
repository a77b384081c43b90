# SPDX-License-Identifier: Apache-2.0
"""Where a tensor is merged: on its device, or on the CPU where that is full."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import TypeVar

import torch

from mergekit_ace.methods.inputs import describe

LOG = logging.getLogger(__name__)
T = TypeVar("T")

# In the messages of libraries that allocate memory of their own, which torch passes on as errors
# of another kind.
OUT_OF_MEMORY = ("out of memory", "ALLOC_FAILED")


def check_device(device: str) -> None:
    """Raise a `ValueError` if torch cannot compute on a device here."""
    try:
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:  # a torch without CUDA asserts that it has it
        reason = str(error).partition("\n")[0]
        raise ValueError(
            f"torch cannot compute on {device!r} here: {reason}; leave out --cuda and --device, or "
            "install a torch for this device"
        ) from error


def first_that_fits(
    device: torch.device, work: Callable[[torch.device], T], method: str, name: str | None
) -> T:
    """Work on a device; if it is full, on the CPU.

    Args:
        device: where the tensors are, or are meant to go.
        work: from a device, to which it moves the tensors, to a result.
        method, name: of the merge and of the tensor, for the warning.

    Raises:
        torch.OutOfMemoryError: there is no memory on the CPU either.
    """
    for where in (device, torch.device("cpu")):
        try:
            return work(where)
        except RuntimeError as error:
            if not is_out_of_memory(error):
                raise
        if torch.cuda.is_available():  # out here: the error holds on to the tensors of its frames
            torch.cuda.empty_cache()
        if where.type == "cpu":
            break
        LOG.warning(
            "%s: %s does not fit into the free memory of %s; merged on the CPU instead, which "
            "takes longer. Other work on the device, or tensors that --read-to-gpu and "
            "--low-cpu-memory keep there, leave it less.",
            method, describe(name), device,
        )  # fmt: skip
    raise torch.OutOfMemoryError(f"{method}: there is no memory left to merge {describe(name)}")


def is_out_of_memory(error: RuntimeError) -> bool:
    """Tell whether an error says that a device has too little free memory."""
    if isinstance(error, torch.OutOfMemoryError):
        return True
    return any(words in str(error) for words in OUT_OF_MEMORY)
