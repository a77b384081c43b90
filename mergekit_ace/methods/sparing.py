# SPDX-License-Identifier: Apache-2.0
"""A merge that goes on where the memory of a device ends."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from mergekit_ace.algebra.records import TensorRecord

LOG = logging.getLogger(__name__)
Merge = Callable[[Sequence[Tensor], bool], tuple[Tensor, TensorRecord]]


def merge_sparingly(
    tensors: Sequence[Tensor], merge: Merge, method: str, what: str
) -> tuple[Tensor, TensorRecord]:
    """A merge in the base's dtype; on a full device in its leanest form, then on the CPU.

    Args:
        tensors: the base's and the experts'.
        merge: the merge of tensors on one device, and whether it has to be lean.
        method: the merge method, for the one warning.
        what: what is merged, likewise.

    Returns:
        The merged tensor, on the CPU if the device has not even room for that, and its record.
    """
    base = tensors[0]
    for where, attempt in _attempts(tensors, merge):
        result = _try(attempt)
        if result is not None:
            if where:
                LOG.warning(
                    "%s: %s does not fit into the free memory of %s; merged %s. Other work on "
                    "the device, or tensors that --read-to-gpu and --low-cpu-memory keep there, "
                    "leave it less.",
                    method,
                    what,
                    base.device,
                    where,
                )
            return result
    raise torch.OutOfMemoryError(f"{method}: there is no memory left to merge {what}")


def _attempts(
    tensors: Sequence[Tensor], merge: Merge
) -> Iterator[tuple[str, Callable[[], tuple[Tensor, TensorRecord]]]]:
    """Where a merge happens, empty for the usual way, and the merge itself; ever leaner."""
    here = tensors[0].device

    def on(device: torch.device, lean: bool) -> tuple[Tensor, TensorRecord]:
        merged, record = merge([tensor.to(device) for tensor in tensors], lean)
        return merged.to(tensors[0].dtype), record

    yield "", lambda: on(here, False)
    yield "there in the form that takes the least of it", lambda: on(here, True)
    yield "on the CPU instead, which takes longer", lambda: on(torch.device("cpu"), True)


def _try(attempt: Callable[[], tuple[Tensor, TensorRecord]]) -> tuple[Tensor, TensorRecord] | None:
    """The result; None where memory ran out. All that the attempt had allocated is free again."""
    try:
        return attempt()
    except torch.OutOfMemoryError:
        pass  # not here: the error holds on to the tensors of its frames
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    return None
