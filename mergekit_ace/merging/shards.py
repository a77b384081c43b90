# SPDX-License-Identifier: Apache-2.0
"""Which tensors go into which file of the result."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class Shard:
    """One file of the result: the unit of work.

    Attributes:
        index: from 0.
        file: its name in the end.
        tensors: names, in mergekit's order.
        bytes: of all of them, about.
        work: estimated seconds by tensor, on a nominal machine.
    """

    index: int
    file: str
    tensors: tuple[str, ...]
    bytes: int
    work: tuple[float, ...]


def group_tensors(sizes: Mapping[str, int], limit: int) -> list[tuple[str, ...]]:
    """Tensors by file, by the rule of mergekit's writer.

    Args:
        sizes: bytes by tensor name, in the order of writing.
        limit: bytes of a file; a single tensor may have more. 0 or less for one file.
    """
    groups: list[list[str]] = []
    held = 0
    for name, size in sizes.items():
        if not groups or (limit > 0 and held + size > limit):
            groups.append([])
            held = 0
        groups[-1].append(name)
        held += size
    return [tuple(group) for group in groups]


def file_name(index: int, count: int, *, safetensors: bool) -> str:
    """The name of a file of the result, as mergekit gives it."""
    stem, suffix = ("model", "safetensors") if safetensors else ("pytorch_model", "bin")
    return f"{stem}.{suffix}" if count == 1 else f"{stem}-{index + 1:05d}-of-{count:05d}.{suffix}"


def index_name(*, safetensors: bool) -> str:
    """The name of the index beside several files."""
    return f"{file_name(0, 1, safetensors=safetensors)}.index.json"


def plan_shards(
    sizes: Mapping[str, int], work: Mapping[str, float], limit: int, *, safetensors: bool
) -> list[Shard]:
    """All files of the result, in their order.

    Args:
        sizes: bytes by tensor name, in the order of writing.
        work: estimated seconds by tensor name.
        limit: bytes of a file.
        safetensors: or pickles.
    """
    groups = group_tensors(sizes, limit)
    return [
        Shard(
            index,
            file_name(index, len(groups), safetensors=safetensors),
            group,
            sum(sizes[name] for name in group),
            tuple(work[name] for name in group),
        )
        for index, group in enumerate(groups)
    ]
