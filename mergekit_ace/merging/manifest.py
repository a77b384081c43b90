# SPDX-License-Identifier: Apache-2.0
"""`merge_manifest.json`: what a result depends on, and which of its files are finished.

A manifest may be damaged, or made by somebody else. It says what need not be computed again, and
nothing more: names of files come from the plan and paths from the config.
"""

from __future__ import annotations

import json
import os
from collections.abc import Collection, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path, PurePosixPath
from typing import Annotated, Any, Literal

import torch
from mergekit.common import ModelReference
from mergekit.io.tasks import LoaderCache
from pydantic import AfterValidator, BaseModel, Field
from pydantic_core import from_json

from mergekit_ace.adapters.read import adapter_folder
from mergekit_ace.files.saving import differences, file_states, package_versions, sha256, write_text
from mergekit_ace.merging.shards import MERGE_PACKAGES, MergeError, Shard
from mergekit_ace.methods.parameters import FILE_PARAMETERS
from mergekit_ace.planning import PlannedMerge, config_content

MANIFEST_FILE = "merge_manifest.json"
_FORMAT = 4
# Flags that change neither a tensor nor which files there are.
_FREE_FLAGS = set(
    """
    quiet verbosity lazy_unpickle async_write write_threads gpu_rich multi_gpu cuda num_threads
    transformers_cache lora_merge_cache
    """.split()
)
_READERS = 4  # files that are hashed side by side


def _check_name(name: str) -> str:
    path = PurePosixPath(name)
    if not path.parts or path.is_absolute() or ".." in path.parts:
        raise ValueError("not the name of a file in this directory")
    return name


Hash = Annotated[str, Field(pattern="^[0-9a-f]{64}$")]
FileName = Annotated[str, AfterValidator(_check_name)]


class Manifest(BaseModel):
    """The whole manifest.

    Attributes:
        identity: the `fingerprint` of the merge.
        reports: bytes that the files under `report:` had before the run, by path.
        files: SHA-256 of every finished file, by name; empty for a shard whose tensors all turned
            out to be absent, so that there is no file.
        complete: whether the directory holds a model.
    """

    identity: dict[str, Any]
    reports: dict[str, Annotated[int, Field(ge=0)]]
    files: dict[FileName, Hash | Literal[""]]
    complete: bool = False
    format: Literal[4] = _FORMAT

    @classmethod
    def begin(cls, plan: PlannedMerge, identity: dict[str, Any]) -> Manifest:
        """Return the manifest of a merge of which nothing is finished."""
        paths = plan.named_paths("report")
        reports = {path: os.path.getsize(path) if os.path.exists(path) else 0 for path in paths}
        return cls(identity=identity, reports=reports, files={})

    @classmethod
    def read(cls, folder: Path) -> Manifest | None:
        """Read the manifest of a folder; None where there is none.

        Raises:
            MergeError: it is damaged, or another version's.
        """
        path = folder / MANIFEST_FILE
        try:
            content = from_json(path.read_bytes())
            if isinstance(content, dict) and content.get("format") in range(1, _FORMAT):
                raise MergeError(
                    f"{path} was written by another version of mergekit-ace; resume with that one, "
                    "or --overwrite"
                )
            return cls.model_validate(content, strict=True)
        except FileNotFoundError:
            return None
        except (ValueError, OSError) as error:
            raise MergeError(f"{path} is damaged; --overwrite starts anew") from error

    def check(self, folder: Path, plan: PlannedMerge, identity: dict[str, Any]) -> None:
        """Check that this is the manifest of a merge.

        Raises:
            MergeError: naming what has changed since the merge was begun.
        """
        changed = differences(self.identity, identity)
        if self.reports.keys() != set(plan.named_paths("report")):
            changed.append("report")
        if changed:
            raise MergeError(
                f"{folder} holds a merge that cannot be resumed; changed since it was begun: "
                f"{', '.join(changed)}. Undo that, choose another directory, or --overwrite to "
                "begin anew"
            )

    def write(self, folder: Path) -> None:
        """Write the manifest, whole or not at all; it is on the disk when this returns."""
        text = json.dumps(self.model_dump(), indent=1) + "\n"
        write_text(folder / MANIFEST_FILE, text, durable=True)

    def compare(self, folder: Path, shards: Sequence[Shard]) -> tuple[list[str], list[str]]:
        """Compare a folder with what was finished in it.

        Returns:
            The files that are gone or damaged, which count as unfinished from now on; and those
            beside the shards that somebody has edited.
        """
        with ThreadPoolExecutor(_READERS) as readers:
            hashes = list(readers.map(partial(_hash, folder), self.files))
        sizes = {shard.file: shard.bytes for shard in shards}
        lost, edited = [], []
        for (name, recorded), found in zip(list(self.files.items()), hashes, strict=True):
            if found == recorded and (recorded or not sizes.get(name)):
                continue
            if found and name not in sizes and not _is_broken(folder / name):
                edited.append(name)
            else:
                lost.append(name)
                del self.files[name]
        return lost, edited


def fingerprint(plan: PlannedMerge) -> dict[str, Any]:
    """Return what a merge depends on, as JSON; where it has changed, the merge is not resumed.

    Files are named by their model, so that a family may be moved as a whole. The number of threads
    counts as a flag: the last bits of a sum depend on it.
    """
    reports = [Path(path).expanduser().resolve() for path in plan.named_paths("report")]
    models = plan.config.referenced_models()
    return {
        "config": config_content(plan.source),
        "flags": plan.options.model_dump(exclude=_FREE_FLAGS)
        | {"num_threads": torch.get_num_threads()},
        "versions": package_versions(*MERGE_PACKAGES),
        "inputs": {str(model): _model_files(model, reports) for model in models},
        "files": file_states(plan.named_paths(*FILE_PARAMETERS)),
        "unplanned": sorted({"merge" if t.merged else "base" for t in plan.unplanned}) or None,
    }


def _model_files(model: ModelReference, reports: Collection[Path]) -> dict[str, list[int]]:
    """Return size and time of change by file name.

    Args:
        reports: what the merge itself writes, which may be in the folder of a model.
    """
    folders = {"": Path(LoaderCache().get(model).index.base_path)}
    if model.lora is not None:
        folders["adapter/"] = adapter_folder(model.lora)
    return {
        prefix + path.name: [path.stat().st_size, path.stat().st_mtime_ns]
        for prefix, folder in folders.items()
        for path in sorted(folder.iterdir())
        if path.is_file() and path.resolve() not in reports
    }


def _hash(folder: Path, name: str) -> str:
    """Return the hash of a file; empty where there is none. A link is none of ours."""
    path = folder / name
    return sha256(path) if path.is_file() and not path.is_symlink() else ""


def _is_broken(path: Path) -> bool:
    """Tell whether a file that was changed is damaged, rather than edited by somebody."""
    if path.suffix != ".json":
        return not path.stat().st_size
    try:
        from_json(path.read_bytes())
    except ValueError:
        return True
    return path.name.endswith(".index.json")  # it follows from the shards
