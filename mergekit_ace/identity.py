# SPDX-License-Identifier: Apache-2.0
"""What makes a run the run that it is, so that another one does not go on with its state."""

from __future__ import annotations

import os
from collections.abc import Iterable, Set
from pathlib import Path
from typing import Any

Key = tuple[str, ...]


def file_states(paths: Iterable[str]) -> dict[str, list[int]]:
    """Size and time of change of every file at or below `paths`; names on a Hub have none."""
    states = {}
    for path in map(Path, map(os.path.expanduser, paths)):
        files = [path] if path.is_file() else sorted(path.rglob("*")) if path.is_dir() else []
        for file in files:
            if file.is_file():
                status = file.stat()
                states[str(file)] = [status.st_size, status.st_mtime_ns]
    return states


def differences(one: Any, other: Any, free: Set[Key] = frozenset(), path: Key = ()) -> list[str]:
    """Dotted names of what differs between two JSON values.

    Args:
        one, other: the values.
        free: names, or pairs of names, that may differ.
        path: where in the whole they stand.
    """
    if path[-1:] and (path[-1:] in free or path[-2:] in free):
        return []
    if isinstance(one, dict) and isinstance(other, dict):
        names = list(dict.fromkeys([*one, *other]))
        return [d for n in names for d in differences(one.get(n), other.get(n), free, (*path, n))]
    if isinstance(one, list) and isinstance(other, list) and len(one) == len(other):
        pairs = enumerate(zip(one, other, strict=True))
        return [d for n, (a, b) in pairs for d in differences(a, b, free, (*path, str(n)))]
    return [] if one == other else [".".join(path)]
