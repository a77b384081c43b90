# SPDX-License-Identifier: Apache-2.0
"""The files that make a folder a model or an adapter: their headers, and what is wrong with them.

Whatever is damaged, missing or something else raises a `FileError`.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import huggingface_hub
import torch
from huggingface_hub.utils import HFValidationError, validate_repo_id
from safetensors import SafetensorError, safe_open

from mergekit_ace.naming import FileError

if TYPE_CHECKING:
    from mergekit.common import ModelPath, ModelReference

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
PEFT_PREFIX = "base_model.model."  # of every tensor that PEFT writes and loads
INDEX_FILES = ("model.safetensors.index.json", "model.safetensors")  # mergekit takes the first
_AGAIN = "download or save it again"
_CONVERT = (
    "a .bin is a pickle, which may hold code; load it by transformers or PEFT and save it again by "
    "save_pretrained, in safetensors"
)
_LFS_POINTER = b"version https://git-lfs.github.com/spec"
_WEB_PAGES = (b"<!doctype html", b"<html", b"<?xml")


@dataclass(frozen=True)
class TensorHeader:
    """What is known of a tensor without reading it."""

    dtype: str  # as safetensors calls it, `BF16`, `F32`, …
    shape: tuple[int, ...]
    file: str

    @property
    def entries(self) -> int:
        return math.prod(self.shape)

    @property
    def bytes(self) -> int:
        return self.entries * item_size(self.dtype)


def item_size(dtype: str) -> int:
    """Return the bytes of an entry; 4 of a dtype that mergekit does not read."""
    return DTYPES.get(dtype, torch.float32).itemsize


def check_content(path: Path) -> None:
    """Raise a `FileError` unless a file is there itself, and no pointer or web page instead."""
    if not path.is_file():
        link = f": it is a link to {os.readlink(path)}" if path.is_symlink() else ""
        raise FileError(f"{path} is missing{link}; {_AGAIN}")
    with open(path, "rb") as file:
        start = file.read(100).lstrip().lower()
    if start.startswith(_LFS_POINTER):
        raise FileError(f"{path} is a Git LFS pointer: run `git lfs pull` in {path.parent}")
    if start.startswith(_WEB_PAGES):
        raise FileError(f"{path} is a web page: {_AGAIN}, after signing in where that is asked for")


def read_json(path: Path) -> dict[str, Any]:
    """Return the object in a JSON file of a checkpoint."""
    check_content(path)
    try:
        return dict(json.loads(path.read_text(encoding="utf-8")))
    except (ValueError, TypeError, RecursionError) as error:
        raise FileError(f"{path} is damaged: it is no JSON object ({error}); {_AGAIN}") from error


def json_or_empty(path: str | os.PathLike | None) -> dict[str, Any]:
    """Return the object in a JSON file; an empty one where there is none."""
    try:
        return read_json(Path(path or ""))
    except (FileError, OSError):
        return {}


def read_file_header(path: Path) -> dict[str, TensorHeader]:
    """Return the headers of the tensors in a safetensors file."""
    if path.suffix == ".bin":
        raise FileError(f"{path} cannot be read: {_CONVERT}")
    check_content(path)
    headers = {}
    try:
        with safe_open(path, framework="pt") as file:
            for name in file.keys():  # noqa: SIM118
                part = file.get_slice(name)
                headers[name] = TensorHeader(part.get_dtype(), tuple(part.get_shape()), str(path))
    except (SafetensorError, OSError) as error:
        raise FileError(f"{path} is damaged: {error}; {_AGAIN}") from error
    return headers


def read_headers(folder: Path) -> dict[str, TensorHeader]:
    """Return the headers of all tensors of the model in a folder, by its index where it has one."""
    main = _main_file(folder, INDEX_FILES)
    if main.suffix != ".json":
        return read_file_header(main)
    places = read_json(main).get("weight_map")
    if not isinstance(places, dict) or any(Path(str(n)).name != n for n in places.values()):
        fault = "it has no weight_map of tensors and of files beside it"
        raise FileError(f"{main} is damaged: {fault}; {_AGAIN}")
    files = {name: read_file_header(folder / name) for name in set(places.values())}
    for tensor, name in places.items():
        if tensor not in files[name]:
            fault = f"lacks the tensor {tensor} that the index expects there"
            raise FileError(f"{folder / name} {fault}; {_AGAIN}")
    return {tensor: files[name][tensor] for tensor, name in places.items()}


def _main_file(folder: Path, names: Sequence[str]) -> Path:
    """Return the first file of these names; an error says what to do with what is there."""
    for name in names:
        if os.path.lexists(folder / name):
            return folder / name
    present = sorted(path.name for path in folder.iterdir())
    remedy = f"{_AGAIN}, in safetensors"
    if "adapter_config.json" in present and names == INDEX_FILES:
        remedy = f"it is an adapter; write BASE+{folder}, with the model it was trained on"
    elif any(name.endswith(".bin") for name in present):
        remedy = _CONVERT
    raise FileError(
        f"{folder} holds no weights, no {' or '.join(reversed(names))} "
        f"(but: {', '.join(present[:5]) or 'nothing'}); {remedy}"
    )


def weight_files(folder: Path) -> list[Path]:
    """Return the files that hold the weights of a model, in the order of their names."""
    return sorted({Path(header.file) for header in read_headers(folder).values()})


def check_model_folder(folder: Path) -> None:
    """Check config, weights and tokenizer of a model, by headers alone; nothing beside them."""
    from transformers import CONFIG_MAPPING

    if not read_headers(folder):
        raise FileError(f"{folder} holds no tensors; {_AGAIN}")
    path = folder / "config.json"
    content = read_json(path)
    kind = content.get("model_type", "")
    if "auto_map" not in content:  # else the model brings code of its own, which says what it is
        try:
            CONFIG_MAPPING[kind].from_json_file(path)  # it may hold {"__float__": "Infinity"}
        except Exception as error:  # of many kinds: dataclasses, lookups, arithmetic
            said = (
                f"{path} is no config of `model_type`: {kind!r} that this version of transformers"
            )
            remedy = "correct it, or update transformers"
            raise FileError(f"{said} reads: {str(error).strip()}; {remedy}") from error
    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json", "vocab.json"):
        if os.path.lexists(folder / name):
            read_json(folder / name)


def check_adapter_folder(folder: Path) -> Path:
    """Check config and weights of an adapter; return the file that holds the weights."""
    read_json(folder / "adapter_config.json")
    file = _main_file(folder, ("adapter_model.safetensors",))
    read_file_header(file)
    return file


def existing_folder(path: str) -> Path | None:
    """Return the folder that a config names; None for what can be a name on the Hub."""
    if Path(path).is_dir():
        return Path(path)
    try:
        validate_repo_id(path)
    except HFValidationError as error:
        where = "" if Path(path).is_absolute() else f" in {Path.cwd()}"
        said = f"there is no folder {path}{where}; correct the name (~ is not expanded)"
        raise FileError(said) from error
    return None


def hub_file(part: ModelPath, name: str, *, cached: bool = False, **options: Any) -> Path:
    """Return where a file of a model on the Hub is, once it is downloaded.

    Args:
        cached: whether one in the cache will do, though the Hub may have a newer one.
        options: of `hf_hub_download`.
    """
    place, revision = (part.path, name), part.revision
    try:
        known = huggingface_hub.try_to_load_from_cache(*place, revision=revision)
        if cached and isinstance(known, str):
            return Path(known)
        return Path(huggingface_hub.hf_hub_download(*place, revision=revision, **options))
    except Exception as error:  # of many kinds: no such model, no access, no network
        raise unreachable(part, error) from error


def unreachable(part: ModelPath, error: Exception) -> FileError:
    """Return an error that says that a model is neither here nor on the Hub."""
    why = ": ".join((type(error).__name__, *str(error).splitlines()[:1]))
    return FileError(
        f"{part.path} is no folder in {Path.cwd()}, and no model of the Hub that can be read "
        f"({why}); correct the name, or download the model first"
    )


def check_reference(model: ModelReference) -> None:
    """Check the files of a model and of its adapter, where they are folders here."""
    if folder := existing_folder(model.model.path):
        check_model_folder(folder)
        names = read_json(folder / "config.json").get("architectures")
        known = isinstance(names, list) and len(names) == 1 and isinstance(names[0], str)
        if not known and model.override_architecture is None:
            said = f"{folder / 'config.json'} has `architectures`: {names!r} instead of a list of"
            raise FileError(f"{said} one name; correct it after the base model's")
    if model.lora and (folder := existing_folder(model.lora.path)):
        check_adapter_folder(folder)


def check_references(models: Sequence[ModelReference]) -> None:
    """Raise a `FileError` for the first that is damaged, or neither here nor on the Hub."""
    for model in models:
        check_reference(model)
        for part, name in ((model.model, "config.json"), (model.lora, "adapter_config.json")):
            if part is not None and not Path(part.path).is_dir():
                hub_file(part, name, cached=True)
