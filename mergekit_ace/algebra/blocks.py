# SPDX-License-Identifier: Apache-2.0
"""Blocks of rows or columns, so that a large matrix never exists twice in the compute dtype."""

from __future__ import annotations

from collections.abc import Iterator

# 16 MiB in float32: products of such blocks still run at full speed, and the allocator hands the
# same pages out again instead of fetching new ones from the system.
BLOCK_ENTRIES = 2**22


def blocks(length: int, width: int) -> Iterator[slice]:
    """Slices of 0…length, each with about `BLOCK_ENTRIES` entries when every item has `width`."""
    step = max(1, BLOCK_ENTRIES // max(1, width))
    for start in range(0, length, step):
        yield slice(start, min(start + step, length))
