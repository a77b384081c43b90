# SPDX-License-Identifier: Apache-2.0
"""Names, shapes and dtypes of a checkpoint's tensors, from the headers of its files alone.

Old `.bin` files, which are pickles, are opened by mergekit's loader, which reads nothing but
tensors. Not by the one of `--lazy-unpickle`: that one would run a TorchScript archive.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

# By what a safetensors file calls them, all that mergekit reads.
DTYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2,
    "I64": torch.int64, "I32": torch.int32, "I16": torch.int16, "I8": torch.int8,
    "U64": torch.uint64, "U32": torch.uint32, "U16": torch.uint16, "U8": torch.uint8,
    "BOOL": torch.bool, "C64": torch.complex64,
}  # fmt: skip
DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}
FLOATING = ("F64", "F32", "F16", "BF16")
_LFS_POINTER = b"version https://git-lfs.github.com/spec"
_WEB_PAGES = (b"<!doctype html", b"<html", b"<?xml", b"<head", b"<body")


class DamagedFileError(RuntimeError):
    """A file that is not what its name says; the message names it and the remedy.

    No ValueError: mergekit plans within pydantic validators, which would bury one in a report.
    """


@dataclass(frozen=True)
class TensorHeader:
    """What is known of a tensor without reading it.

    Attributes:
        dtype: as safetensors calls it, `BF16`, `F32`, …
    """

    dtype: str
    shape: tuple[int, ...]
    file: str

    @property
    def entries(self) -> int:
        """The number of entries."""
        return math.prod(self.shape)

    @property
    def bytes(self) -> int:
        """The bytes on disk."""
        return self.entries * item_size(self.dtype)


def item_size(dtype: str) -> int:
    """Return the bytes of an entry; 4 of a dtype that mergekit does not read."""
    return DTYPES[dtype].itemsize if dtype in DTYPES else 4


def read_headers(tensor_paths: Mapping[str, str], folder: str) -> dict[str, TensorHeader]:
    """Return the headers of all tensors that an index names.

    Args:
        tensor_paths: file name by tensor name, as mergekit's index has them.

    Raises:
        DamagedFileError: a file is missing, damaged, or lacks a tensor that the index expects
            there.
    """
    files = {name: read_file_header(Path(folder, name)) for name in set(tensor_paths.values())}
    found = {}
    for tensor, name in tensor_paths.items():
        if tensor in files[name]:
            found[tensor] = files[name][tensor]
        elif name.endswith(".safetensors"):  # mergekit's index of a pickle has more than tensors
            raise DamagedFileError(
                f"{os.path.join(folder, name)} lacks the tensor {tensor} that the index expects "
                "there; download or save the checkpoint again"
            )
    return found


def read_file_header(path: Path) -> dict[str, TensorHeader]:
    """Return the headers of the tensors in a safetensors file, or in an old `.bin` file.

    Raises:
        DamagedFileError: the file is missing, something else, cut short, holds more than tensors,
            or its header contradicts itself.
    """
    check_content(path)
    if path.suffix != ".safetensors":
        return _pickled_headers(path)
    try:
        with safe_open(path, framework="pt") as file:
            parts = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118
            headers = {
                name: TensorHeader(part.get_dtype(), tuple(part.get_shape()), str(path))
                for name, part in parts.items()
            }
    except (SafetensorError, OSError) as error:
        raise DamagedFileError(f"{path} is damaged: {error}; download or save it again") from error
    unknown = [
        (name, header.dtype) for name, header in headers.items() if header.dtype not in DTYPES
    ]
    for name, dtype in unknown:
        raise DamagedFileError(
            f"tensor {name} of {path} has the dtype {dtype!r}, which mergekit cannot read; get "
            "the model in bfloat16, float16 or float32"
        )
    return headers


def _pickled_headers(path: Path) -> dict[str, TensorHeader]:
    """Return the headers of the tensors in an old `.bin` file."""
    from mergekit.io.loader import DumbPytorchLoader

    try:
        content = DumbPytorchLoader(str(path), device="meta").tensors
        content = content.get("state_dict", content)
    except Exception as error:  # of many kinds; torch's advice is to trust the file
        raise DamagedFileError(
            f"{path} is damaged, or holds more than tensors, which is never executed here; "
            "download it again, or the model's safetensors files"
        ) from error
    return {
        name: TensorHeader(DTYPE_NAMES.get(tensor.dtype, "F32"), tuple(tensor.shape), str(path))
        for name, tensor in content.items()
        if isinstance(tensor, torch.Tensor)
    }


def check_content(path: Path) -> None:
    """Raise a `DamagedFileError` unless a file is there, and none that a failed download left."""
    if path.is_symlink() and not path.is_file():
        raise DamagedFileError(
            f"{path} is a link to {os.readlink(path)}, where no file is; get that file, or "
            "download the checkpoint again"
        )
    if not path.is_file():
        raise DamagedFileError(f"{path} is missing; download or save the checkpoint again")
    if not path.stat().st_size:
        raise DamagedFileError(f"{path} is empty; download or save it again")
    with open(path, "rb") as file:
        start = file.read(len(_LFS_POINTER) + 200).lstrip().lower()
    if start.startswith(_LFS_POINTER):
        raise DamagedFileError(
            f"{path} is a Git LFS pointer in the place of the file: run `git lfs pull` in "
            f"{path.parent}"
        )
    if start.startswith(_WEB_PAGES):
        raise DamagedFileError(
            f"{path} is a web page in the place of the file: download it again, after signing in "
            "where the model asks for that (hf download)"
        )


def read_json(path: Path) -> dict[str, Any]:
    """Return the object in a JSON file of a checkpoint.

    Raises:
        DamagedFileError: the file is missing, something else, or holds no JSON object.
    """
    check_content(path)
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise DamagedFileError(
            f"{path} is damaged: it is not JSON ({error}); download or save it again"
        ) from error
    if not isinstance(content, dict):
        raise DamagedFileError(
            f"{path} is damaged: it holds a {type(content).__name__} instead of a JSON object; "
            "download or save it again"
        )
    return content


def json_or_empty(path: str | os.PathLike | None) -> dict[str, Any]:
    """Return the object in a JSON file; an empty one where there is none."""
    try:
        content = json.loads(Path(path or "").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return content if isinstance(content, dict) else {}
