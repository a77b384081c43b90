# SPDX-License-Identifier: Apache-2.0
"""The directory of the result: whose it is, and what may be in it when."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from filelock import FileLock, Timeout

from mergekit_ace.files import flush_to_disk
from mergekit_ace.merging import manifest
from mergekit_ace.merging.errors import MergeError, OutputError

SCRATCH = ".merging"
TOKENIZER = "tokenizer.pickle"
LOCK = ".merging.lock"
# What makes a directory a model: these go first when it is begun anew, and come last at the end.
MARKS = ("config.json", "model.safetensors.index.json", "pytorch_model.bin.index.json")
WEIGHTS = ("*.safetensors", "pytorch_model*.bin")


class OutputFolder:
    """The directory that a merge writes to.

    Unfinished files are below `.merging/` in it, which is gone at the end.

    Attributes:
        path: of it.
        scratch: its subfolder for what is unfinished.
    """

    def __init__(self, path: str | os.PathLike):
        self.path = Path(path).absolute()
        self.scratch = self.path / SCRATCH

    @contextmanager
    def lock(self) -> Iterator[None]:
        """Keep other runs out.

        Raises:
            MergeError: another run is at work here.
            OutputError: nothing can be written here.
        """
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            lock = FileLock(self.path / LOCK, timeout=0)
            lock.acquire()
        except Timeout as error:
            raise MergeError(f"another run is writing to {self.path}; wait for it") from error
        except OSError as error:
            raise OutputError(f"cannot write to {self.path}: {error}") from error
        try:
            yield
        finally:
            if not self.scratch.exists():  # all done, or not even begun
                (self.path / LOCK).unlink(missing_ok=True)
            lock.release()

    def check_free(self) -> None:
        """Raise a `MergeError` if a model is here that no manifest knows."""
        found = [path for pattern in ("config.json", *WEIGHTS) for path in self.path.glob(pattern)]
        if found:
            raise MergeError(
                f"{self.path} holds a model already ({found[0].name}); choose another directory, "
                "or --overwrite"
            )

    def drop(self) -> None:
        """Remove the model, or the unfinished merge, that is here: what marks it as one first."""
        self.unmark()
        (self.path / manifest.NAME).unlink(missing_ok=True)
        for pattern in WEIGHTS:
            for path in self.path.glob(pattern):
                path.unlink()
        shutil.rmtree(self.scratch, ignore_errors=True)

    def is_model(self) -> bool:
        """Whether it looks like one."""
        return (self.path / "config.json").exists()

    def unmark(self) -> None:
        """Let it no longer look like a model."""
        for name in MARKS:
            (self.path / name).unlink(missing_ok=True)

    def clean(self) -> None:
        """Remove what killed workers have left; make the folder for new ones."""
        self.scratch.mkdir(exist_ok=True)
        for path in self.scratch.iterdir():
            if path.is_dir():
                shutil.rmtree(path, ignore_errors=True)
            elif path.name != TOKENIZER:
                path.unlink(missing_ok=True)

    def move_in(self, source: Path, name: str) -> None:
        """Give a file that is on the disk its name in the directory."""
        os.replace(source, self.path / name)
        flush_to_disk(self.path)

    def remove_parts(self, shard: int) -> None:
        """Remove unfinished files of one shard."""
        for path in self.scratch.glob(f"shard-{shard + 1:05d}-*"):
            self.remove(path)

    def remove(self, path: Path) -> None:
        """Remove a folder below `.merging/`."""
        shutil.rmtree(path, ignore_errors=True)

    def done(self) -> None:
        """Remove what only an unfinished merge needs."""
        shutil.rmtree(self.scratch, ignore_errors=True)

    def check_room(self, needed: int) -> None:
        """Raise an `OutputError` if the disk has less than so many bytes free."""
        usage = shutil.disk_usage(self.path)
        if usage.total and usage.free < needed:  # some network file systems tell nothing
            raise OutputError(
                f"{self.path} needs {needed / 1e9:.1f} GB more, and its disk has "
                f"{usage.free / 1e9:.1f} GB free; make room and give the same command with --resume"
            )
