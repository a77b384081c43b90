# SPDX-License-Identifier: Apache-2.0
"""A merge that goes on where the memory of a device ends."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from mergekit_ace.algebra.layouts import merge_tensor
from mergekit_ace.algebra.options import AceOptions, FixedLayout
from mergekit_ace.algebra.records import TensorRecord

LOG = logging.getLogger(__name__)


def merge_sparingly(
    base: Tensor,
    experts: Sequence[Tensor],
    weights: Sequence[float],
    options: AceOptions,
    layout: FixedLayout,
    what: str,
) -> tuple[Tensor, TensorRecord]:
    """`merge_tensor` in the base's dtype; on a full device in its leanest form, then on the CPU.

    Args:
        base, experts, weights, options, layout: see `merge_tensor`.
        what: what is merged, for the one warning that says so.

    Returns:
        The merged tensor, on the CPU if the device has not even room for that, and its record.
    """
    attempts = _attempts(base, experts, weights, options, layout)
    for where, attempt in attempts:
        result = _try(attempt)
        if result is not None:
            if where:
                LOG.warning(
                    "ace: %s does not fit into the free memory of %s; merged %s. Other work on "
                    "the device, or tensors that --read-to-gpu and --low-cpu-memory keep there, "
                    "leave it less.",
                    what,
                    base.device,
                    where,
                )
            return result
    raise torch.OutOfMemoryError(f"ace: there is no memory left to merge {what}")


def _attempts(
    base: Tensor,
    experts: Sequence[Tensor],
    weights: Sequence[float],
    options: AceOptions,
    layout: FixedLayout,
) -> Iterator[tuple[str, Callable[[], tuple[Tensor, TensorRecord]]]]:
    """Where a merge happens, empty for the usual way, and the merge itself; ever leaner."""

    def on(device: torch.device, options: AceOptions) -> tuple[Tensor, TensorRecord]:
        moved = [tensor.to(device) for tensor in (base, *experts)]
        merged, record = merge_tensor(moved[0], moved[1:], weights, options, layout)
        return merged.to(base.dtype), record

    lean = options.model_copy(update={"lean": True})
    yield "", lambda: on(base.device, options)
    yield "there in the form that takes the least of it", lambda: on(base.device, lean)
    yield "on the CPU instead, which takes longer", lambda: on(torch.device("cpu"), lean)


def _try(attempt: Callable[[], tuple[Tensor, TensorRecord]]) -> tuple[Tensor, TensorRecord] | None:
    """The result; None where memory ran out. All that the attempt had allocated is free again."""
    try:
        return attempt()
    except torch.OutOfMemoryError:
        pass  # not here: the error holds on to the tensors of its frames
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    return None
