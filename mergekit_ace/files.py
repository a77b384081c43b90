# SPDX-License-Identifier: Apache-2.0
"""Files that are there whole or not at all, whenever the process is killed."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping
from pathlib import Path

from safetensors.torch import save_file
from torch import Tensor

_BLOCK = 2**22


def write_text(path: str | os.PathLike, text: str, *, durable: bool = False) -> None:
    """Write a text file.

    Args:
        path: of it.
        text: its content.
        durable: return only when the disk has it, so that it outlives the machine too.
    """
    partial = _partial(path)
    partial.write_text(text, encoding="utf-8")
    if durable:
        flush_to_disk(partial)
    os.replace(partial, path)
    if durable:
        flush_to_disk(Path(path).parent)


def save_tensors(
    path: str | os.PathLike, tensors: Mapping[str, Tensor], metadata: dict[str, str] | None = None
) -> None:
    """Write a safetensors file; the tensors are contiguous and share no memory."""
    partial = _partial(path)
    save_file(dict(tensors), partial, metadata)
    os.replace(partial, path)


def flush_to_disk(path: str | os.PathLike) -> None:
    """Return when the disk has a file, or the names in a folder."""
    try:
        handle = os.open(path, os.O_RDONLY)
    except PermissionError:  # Windows opens no folders
        if os.path.isdir(path):
            return
        raise
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def sha256(path: str | os.PathLike) -> str:
    """The hash of a file."""
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        while block := file.read(_BLOCK):
            digest.update(block)
    return digest.hexdigest()


def _partial(path: str | os.PathLike) -> Path:
    return Path(f"{os.fspath(path)}.partial")
