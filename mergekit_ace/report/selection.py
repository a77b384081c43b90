# SPDX-License-Identifier: Apache-2.0
"""Which tensors of a merge are looked at."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import TypeVar

from mergekit_ace.algebra.inspection import evenly_spaced
from mergekit_ace.planning import PlannedTensor
from mergekit_ace.report.errors import ReportError

T = TypeVar("T")
_NUMBER = re.compile(r"\d+")


def select(
    tensors: Sequence[PlannedTensor], filters: Sequence[str], sample: int | None
) -> list[PlannedTensor]:
    """The chosen tensors, in the order of the model.

    Args:
        tensors: all that are merged.
        filters: parts of names; all tensors without any.
        sample: how many at most: as many of every kind, a kind being all tensors whose names differ
            by numbers only, evenly spaced over the depth of the model.

    Raises:
        ReportError: none is left.
    """
    chosen = {
        tensor.name: tensor
        for tensor in tensors
        if not filters or any(part in tensor.name for part in filters)
    }
    if not chosen:
        raise ReportError(
            f"no tensor contains {' or '.join(map(repr, filters))}; there are, for example, "
            f"{', '.join(tensor.name for tensor in tensors[:3])}"
        )
    names = sorted(chosen, key=natural)
    if sample is not None:
        names = thin_out(names, sample)
    return [chosen[name] for name in names]


def natural(name: str) -> list[tuple[bool, int, str]]:
    """A key that sorts layer 10 behind layer 9."""
    parts = re.split(r"(\d+)", name)
    return [(part.isdigit(), int(part) if part.isdigit() else 0, part) for part in parts]


def kind_of(name: str) -> str:
    """A name without its numbers: what tensors of all layers have in common."""
    return _NUMBER.sub("*", name)


def thin_out(names: Sequence[str], wanted: int) -> list[str]:
    """At most `wanted` names, of every kind evenly over the depth, in their order."""
    kinds: dict[str, list[str]] = {}
    for name in names:
        kinds.setdefault(kind_of(name), []).append(name)
    members = list(kinds.values())
    if wanted < len(members):
        members = [members[n] for n in evenly_spaced(len(members), wanted)]
    each = max(1, wanted // len(members))
    kept = {group[n] for group in members for n in evenly_spaced(len(group), each)}
    return [name for name in names if name in kept]
