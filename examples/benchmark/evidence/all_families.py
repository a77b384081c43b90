# SPDX-License-Identifier: Apache-2.0
"""All families by name."""

from __future__ import annotations

from evidence.dictionaries import FAMILIES as DICTIONARIES
from evidence.dictionaries import Dictionaries
from evidence.families import Family
from evidence.images import Images

FAMILIES = (*DICTIONARIES, "images")


def make_family(name: str, seed: int, experts: int | None = None) -> Family:
    """A family that may still have to be trained.

    Args:
        name: one of `FAMILIES`.
        seed: of initialisation and data.
        experts: how many of its experts; all by default.
    """
    kind = Images if name == "images" else Dictionaries
    return kind(name, seed, experts)
