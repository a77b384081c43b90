# SPDX-License-Identifier: Apache-2.0
"""Blocks of rows or columns, so that a large matrix never exists twice in the compute dtype."""

from __future__ import annotations

from collections.abc import Iterator

# 4 MiB in float32, at which products of blocks run at nine tenths of their speed, and 16 MiB.
BLOCK_ENTRIES = 2**20
LARGEST = 4


def block_entries(entries: int) -> int:
    """Entries of a block of a matrix that has so many: an eighth, within bounds."""
    return min(max(BLOCK_ENTRIES, entries // 8), LARGEST * BLOCK_ENTRIES)


def blocks(length: int, width: int) -> Iterator[slice]:
    """Slices of 0…length, each of about `block_entries` entries.

    Args:
        length: how many items.
        width: entries of one.
    """
    step = max(1, block_entries(length * width) // max(1, width))
    for start in range(0, length, step):
        yield slice(start, min(start + step, length))
