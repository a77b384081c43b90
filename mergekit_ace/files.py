# SPDX-License-Identifier: Apache-2.0
"""Files that are there whole or not at all, whenever the process is killed."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from safetensors.torch import save_file
from torch import Tensor


def write_text(path: str | os.PathLike, text: str) -> None:
    """Write a text file."""
    partial = _partial(path)
    partial.write_text(text, encoding="utf-8")
    os.replace(partial, path)


def save_tensors(
    path: str | os.PathLike, tensors: Mapping[str, Tensor], metadata: dict[str, str] | None = None
) -> None:
    """Write a safetensors file; the tensors are contiguous and share no memory."""
    partial = _partial(path)
    save_file(dict(tensors), partial, metadata)
    os.replace(partial, path)


def _partial(path: str | os.PathLike) -> Path:
    return Path(f"{os.fspath(path)}.partial")
