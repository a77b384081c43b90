# SPDX-License-Identifier: Apache-2.0
"""Whether what a manifest says of finished shards still holds."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from mergekit_ace.files import sha256
from mergekit_ace.merging.folder import OutputFolder
from mergekit_ace.merging.manifest import Entry, Manifest

# Files hashed side by side when a directory is resumed.
_READERS = 4


def forget_changed(folder: OutputFolder, known: Manifest | None) -> list[str]:
    """Take shards whose file is not what it was for unfinished; their names."""
    finished = [entry for entry in known.shards if entry.finished] if known is not None else []
    with ThreadPoolExecutor(_READERS) as readers:
        right = list(readers.map(lambda entry: _is_intact(folder.path, entry), finished))
    changed = [entry for entry, ok in zip(finished, right, strict=True) if not ok]
    for entry in changed:
        entry.finished = None
    return [entry.file for entry in changed]


def _is_intact(folder: Path, entry: Entry) -> bool:
    path, finished = folder / entry.file, entry.finished
    assert finished is not None  # only those are asked for
    if not finished.sha256:  # nothing was to be written
        return not path.exists()
    if not path.is_file() or path.stat().st_size != finished.size:
        return False
    return sha256(path) == finished.sha256
