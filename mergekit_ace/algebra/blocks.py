# SPDX-License-Identifier: Apache-2.0
"""Blocks of rows or columns, so that a large matrix never exists twice in the compute dtype."""

from __future__ import annotations

from collections.abc import Iterator

# 4 MiB in float32: products of such blocks still run at nearly full speed, and little memory beside
# the matrices is needed.
BLOCK_ENTRIES = 2**20


def blocks(length: int, width: int, scale: int = 1) -> Iterator[slice]:
    """Slices of 0…length, each with about `BLOCK_ENTRIES` entries when every item has `width`.

    Args:
        length: how many items.
        width: of one.
        scale: makes the blocks larger.
    """
    step = max(1, scale * BLOCK_ENTRIES // max(1, width))
    for start in range(0, length, step):
        yield slice(start, min(start + step, length))
