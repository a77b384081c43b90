# SPDX-License-Identifier: Apache-2.0
"""Data-free merge methods that ACE-Merging is compared with, a file each.

A new one is a file here with a class `Method`, and its name in this list.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from mergekit.merge_methods import MergeMethod

PEERS = ("tsv_m", "iso_c", "iso_cts", "wudi", "cart", "consensus_ta", "lines")


def peer_methods() -> tuple[MergeMethod, ...]:
    """One instance of every method here."""
    return tuple(import_module(f"{__name__}.{name}").Method() for name in PEERS)
