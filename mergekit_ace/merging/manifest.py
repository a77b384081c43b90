# SPDX-License-Identifier: Apache-2.0
"""`merge_manifest.json`: what the result consists of, what it was made of, what is finished."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from mergekit_ace.files import write_text
from mergekit_ace.merging.errors import MergeError
from mergekit_ace.merging.shards import Shard

NAME = "merge_manifest.json"
FORMAT = 1


@dataclass
class Finished:
    """A shard that is under its name and on the disk.

    Attributes:
        size: bytes of the file.
        sha256: of the file; empty where all of its tensors turned out to be absent: no file.
        tensors: names and bytes of what is in it.
    """

    size: int
    sha256: str
    tensors: dict[str, int]


@dataclass
class Entry:
    """A shard in the manifest.

    Attributes:
        file: its name.
        tensors: names of those that were planned.
        bytes: of all of them, as planned.
        finished: None while it is not.
    """

    file: str
    tensors: list[str]
    bytes: int
    finished: Finished | None = None


@dataclass
class Manifest:
    """The whole.

    Attributes:
        identity: see `merge_identity`.
        models: in the order that the run has given them.
        tokenizer: hash of the pickled tokenizer that a resumed run goes on with; None without.
        reports: bytes that the files under `report:` had before the run, by path.
        shards: in the order of their files.
        complete: whether the directory holds a model.
    """

    identity: dict[str, Any]
    models: list[str]
    tokenizer: str | None
    reports: dict[str, int]
    shards: list[Entry]
    complete: bool = False
    format: int = field(default=FORMAT)

    @classmethod
    def read(cls, folder: Path) -> Manifest | None:
        """That of a folder; None where there is none.

        Raises:
            MergeError: it is damaged, or another version's.
        """
        path = folder / NAME
        try:
            content = json.loads(path.read_text(encoding="utf-8"))
            if content["format"] != FORMAT:
                raise MergeError(
                    f"{path} was written by another version of mergekit-ace; resume with that one, "
                    "or --overwrite"
                )
            shards = [
                Entry(**{**one, "finished": one["finished"] and Finished(**one["finished"])})
                for one in content.pop("shards")
            ]
            return cls(**content, shards=shards)
        except FileNotFoundError:
            return None
        except (ValueError, KeyError, TypeError) as error:
            raise MergeError(f"{path} is damaged; --overwrite starts anew") from error

    def write(self, folder: Path) -> None:
        """Write it, whole or not at all; on the disk when this returns."""
        text = json.dumps(asdict(self), indent=1) + "\n"
        write_text(folder / NAME, text, durable=True)


def planned_entries(shards: list[Shard]) -> list[Entry]:
    """Entries of shards of which none is finished."""
    return [Entry(shard.file, list(shard.tensors), shard.bytes) for shard in shards]
