# SPDX-License-Identifier: Apache-2.0
"""The files under `report:`, written by the driver alone, a shard at a time."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping, Set
from pathlib import Path

from mergekit_ace.files import flush_to_disk, write_text


def report_sizes(paths: Iterable[str]) -> dict[str, int]:
    """Bytes of every file; 0 for one that is not there."""
    return {path: os.path.getsize(path) if os.path.exists(path) else 0 for path in paths}


def append_lines(reports: Mapping[str, str]) -> None:
    """Append the lines of a shard.

    Args:
        reports: lines by path.
    """
    for path, lines in reports.items():
        with open(path, "a", encoding="utf-8") as file:
            file.write(lines)
        flush_to_disk(path)


def drop_lines(path: str, start: int, unfinished: Set[str]) -> None:
    """Remove what a killed run wrote of tensors that will be merged again.

    Args:
        path: of the report; it may be missing.
        start: bytes that it had before that run, which stay.
        unfinished: names of the tensors.
    """
    if not os.path.exists(path):
        return
    content = Path(path).read_bytes()
    kept = [line for line in content[start:].splitlines(keepends=True) if _keep(line, unfinished)]
    changed = content[:start] + b"".join(kept)
    if changed != content:
        write_text(path, changed.decode("utf-8"), durable=True)


def _keep(line: bytes, unfinished: Set[str]) -> bool:
    try:
        return json.loads(line)["tensor"] not in unfinished
    except (ValueError, KeyError, TypeError):  # cut off by a kill
        return False
