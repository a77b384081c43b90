# SPDX-License-Identifier: Apache-2.0
"""What a check has to say."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

Level = Literal["error", "warning"]
LISTED = 6


@dataclass(frozen=True)
class Finding:
    """Something that is wrong, or may be.

    Attributes:
        level: ``error``: the merge fails, or is not what the config says. ``warning``: it may not
            be what you want.
        subject: what it is about: ``config``, ``tensors``, ``tokenizers``, …
        message: what was found.
        remedy: what to do.
    """

    level: Level
    subject: str
    message: str
    remedy: str = ""


def listed(names: Sequence[str], most: int = LISTED) -> str:
    """The first names, and how many more there are."""
    more = len(names) - most
    return ", ".join(names[:most]) + (f" and {more} more" if more > 0 else "")
