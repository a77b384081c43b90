# SPDX-License-Identifier: Apache-2.0
"""Files that are there whole or not at all, and what tells two runs on them apart."""

from __future__ import annotations

import hashlib
import os
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from contextlib import contextmanager, suppress
from functools import lru_cache
from importlib.metadata import version
from pathlib import Path
from typing import Any, TypeVar

from filelock import FileLock, Timeout
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from mergekit_ace import __version__
from mergekit_ace.naming import ConfigError

T = TypeVar("T")
Key = tuple[str, ...]
LOCK_FILE = ".mergekit-ace.lock"  # in a folder that a run is writing to


@contextmanager
def replacing(path: str | os.PathLike) -> Iterator[Path]:
    """Yield where a file or folder is written first; what is there is removed: it may be a link."""
    partial = Path(f"{os.fspath(path)}.partial")
    if partial.is_dir() and not partial.is_symlink():
        shutil.rmtree(partial)
    partial.unlink(missing_ok=True)
    yield partial
    os.replace(partial, path)


def write_text(path: str | os.PathLike, text: str, *, durable: bool = False) -> None:
    """Write a text file; with `durable`, return only when the disk has it."""
    with replacing(path) as partial:
        partial.write_text(text, encoding="utf-8")
        if durable:
            flush_to_disk(partial)
    if durable:
        flush_to_disk(Path(path).parent)


def save_tensors(
    path: str | os.PathLike, tensors: Mapping[str, Tensor], metadata: dict[str, str] | None = None
) -> None:
    """Write a safetensors file; the tensors are contiguous and share no memory."""
    try:
        with replacing(path) as partial:
            save_file(dict(tensors), partial, metadata)
    except SafetensorError as error:
        raise OSError(f"{path} cannot be written: {error}") from error


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Keep other runs out of a folder; a `ConfigError` says that one is at work there.

    A missing folder is made, and removed again where nothing was written into it.
    """
    made = not folder.exists()
    folder.mkdir(parents=True, exist_ok=True)
    lock = FileLock(folder / LOCK_FILE, timeout=0)
    try:
        lock.acquire()
    except Timeout as error:
        said = f"another run is writing to {folder}; wait for it, or choose another folder"
        raise ConfigError(said) from error
    try:
        yield
    finally:
        with suppress(PermissionError):  # Windows removes no file that is open
            (folder / LOCK_FILE).unlink(missing_ok=True)
        lock.release()
        if made:
            with suppress(OSError):
                folder.rmdir()


def occupied(folder: Path, what: str, changed: Sequence[str] = ()) -> ConfigError:
    """Return the error for a folder of another run's; `changed` is what tells them apart."""
    since = f"; changed since then: {', '.join(changed)}" if changed else ""
    said = f"{folder} holds {what}{since}. Choose another folder, or --overwrite to drop it"
    return ConfigError(said)


def check_apart(read: Iterable[str], written: Sequence[Path]) -> None:
    """Raise a `ConfigError` where a run writes to what it reads, above it or below it."""
    for place in (Path(os.path.realpath(os.path.expanduser(path))) for path in read):
        for folder in (one.resolve() for one in written if place.exists()):
            if folder.is_relative_to(place) or place.is_relative_to(folder):
                said = f"{folder} {'holds' if place.is_relative_to(folder) else 'lies in'} {place}"
                raise ConfigError(f"{said}, which is read; choose another folder")


def flush_to_disk(path: str | os.PathLike) -> None:
    """Return when the disk has a file, or the names in a folder."""
    if os.path.isdir(path) and os.name == "nt":  # Windows opens no folders
        return
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def sha256(path: str | os.PathLike) -> str:
    """Return the hash of a file."""
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        while block := file.read(2**22):
            digest.update(block)
    return digest.hexdigest()


def read_once(read: Callable[[str], T], count: int = 8) -> Callable[[str], T]:
    """Return a reader of files that reads each of the last few again only once it has changed."""
    cached = lru_cache(maxsize=count)(lambda path, changed: read(path))

    def read_if_changed(path: str) -> T:
        path = os.path.abspath(os.path.expanduser(path))
        return cached(path, os.stat(path).st_mtime_ns if os.path.exists(path) else 0)

    return read_if_changed


def file_states(paths: Iterable[str]) -> dict[str, list[int]]:
    """Return size and time of change of every file at or below `paths`, in order of their names."""
    states = {}
    for path in sorted(map(Path, map(os.path.expanduser, paths))):
        for file in [path] if path.is_file() else sorted(path.rglob("*")):
            if file.is_file():
                status = file.stat()
                states[str(file)] = [status.st_size, status.st_mtime_ns]
    return states


@lru_cache
def package_versions(*names: str) -> dict[str, str]:
    """Return the versions of packages; ours is known where a checkout was never installed, too."""
    return {name: __version__ if name == "mergekit-ace" else version(name) for name in names}


def differences(one: Any, other: Any, free: Set[Key] = frozenset(), path: Key = ()) -> list[str]:
    """Return dotted names of what differs between two JSON values.

    Args:
        free: names, or pairs of names, that may differ.
    """
    if path[-1:] and (path[-1:] in free or path[-2:] in free):
        return []
    if isinstance(one, list) and isinstance(other, list) and len(one) == len(other):
        one, other = ({str(n): part for n, part in enumerate(parts)} for parts in (one, other))
    if isinstance(one, dict) and isinstance(other, dict):
        names = list(dict.fromkeys([*one, *other]))
        return [d for n in names for d in differences(one.get(n), other.get(n), free, (*path, n))]
    return [] if one == other else [".".join(path)]
