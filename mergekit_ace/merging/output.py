# SPDX-License-Identifier: Apache-2.0
"""The directory of the result: whose it is, what may be in it when, and what makes it a model.

mergekit's private functions are used as they are: `test_identical.py` compares the results.
"""

from __future__ import annotations

import json
import logging
import os
import shutil
import uuid
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from contextlib import ExitStack, contextmanager
from fnmatch import fnmatch
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
import yaml
from mergekit.card import generate_card
from mergekit.config import MergeConfiguration
from mergekit.io.loader import TensorLoader
from mergekit.merge import (
    _copy_tagalong_files,
    _copy_tokenizer,
    _set_chat_template,
    _update_config_vocab,
)
from mergekit.tokenizer import TokenizerInfo
from torch import Tensor

from mergekit_ace.adapters.read import base_of
from mergekit_ace.files.headers import read_file_header
from mergekit_ace.files.model_files import (
    MORE_TEMPLATES,
    READ_BESIDE,
    add_model_files,
    config_donor,
)
from mergekit_ace.files.saving import flush_to_disk, locked, sha256, write_text
from mergekit_ace.merge_config import HEADS
from mergekit_ace.merging.manifest import MANIFEST_FILE
from mergekit_ace.merging.shards import MergeError, Shard, shard_file
from mergekit_ace.planning import PlannedMerge

_LOG = logging.getLogger(__name__)
SCRATCH_FOLDER = ".merging"
LOCK_FILE = ".merging.lock"
# What makes a directory a model: these go first when it is begun anew, and come last at the end.
_MARKS = ("config.json", "model.safetensors.index.json", "pytorch_model.bin.index.json")
_WEIGHTS = ("*.safetensors", "pytorch_model*.bin")
_DROPPED = (*_MARKS, *_WEIGHTS, *READ_BESIDE, MANIFEST_FILE, LOCK_FILE)
_CARD_FILES = ("README.md", "mergekit_config.yml")


class OutputFolder:
    """The directory that a merge writes to.

    Unfinished files are below `.merging/` in it, which is gone at the end.

    Attributes:
        name: of the directory, as mergekit puts it into the card.
        scratch: subfolder for what is unfinished.
    """

    def __init__(self, path: str):
        self.name = os.path.basename(os.path.abspath(path))  # of `OUT/`, too
        self.path = Path(path).absolute()
        self.scratch = self.path / SCRATCH_FOLDER

    @contextmanager
    def lock(self) -> Iterator[None]:
        """Keep other runs out; a folder that was made here goes again where nothing was written.

        Raises:
            MergeError: another run is at work here, or nothing can be written here.
        """
        busy = MergeError(f"another run is writing to {self.path}; wait for it")
        with ExitStack() as stack:
            try:
                stack.enter_context(locked(self.path, LOCK_FILE, busy))
            except OSError as error:
                raise MergeError(f"cannot write to {self.path}: {error}") from error
            yield

    def check_own(self, *, overwrite: bool) -> None:
        """Refuse a folder that holds what no merge has written; nothing is written before that.

        Args:
            overwrite: whether a model may be there, which is dropped.

        Raises:
            MergeError: naming what is there.
        """
        for name in (SCRATCH_FOLDER, LOCK_FILE, MORE_TEMPLATES):
            if (self.path / name).is_symlink():
                raise MergeError(
                    f"{self.path / name} is a link, and what it leads to would be changed; remove "
                    "the link"
                )
        if not self.path.is_dir() or (self.path / MANIFEST_FILE).exists():
            return
        names = sorted(path.name for path in self.path.iterdir())
        own = (SCRATCH_FOLDER, LOCK_FILE, f"{MANIFEST_FILE}.partial")  # of a merge that was killed
        foreign = [name for name in names if name not in own]
        model = [n for n in foreign for part in ("config.json", *_WEIGHTS) if fnmatch(n, part)]
        if model and not overwrite:
            raise MergeError(
                f"{self.path} holds a model already ({model[0]}); choose another directory, "
                "or --overwrite"
            )
        if foreign and not model:
            raise MergeError(
                f"{self.path} holds files that are none of a merge ({', '.join(foreign[:3])}); "
                "choose a directory that is new or empty"
            )

    def check_needed(self, read: Iterable[Path], reports: Iterable[str]) -> None:
        """Refuse to merge where something that the merge needs would be dropped or replaced.

        Args:
            read: files and folders that are read.
            reports: files to which lines are appended.

        Raises:
            MergeError: naming the file.
        """
        needed = [(path, _DROPPED) for path in read]
        needed += [(Path(path), (*_DROPPED, *_CARD_FILES)) for path in reports]
        for path, patterns in needed:
            # realpath, as a link to itself beside a model's weights is no error
            places = path.parent.resolve() / path.name, Path(os.path.realpath(path))
            if any(self._takes(place, patterns) for place in places):
                raise MergeError(
                    f"{path} is needed by the merge, and has a name that belongs to its result in "
                    f"{self.path}, so it would be replaced; move it, or choose another directory"
                )

    def _takes(self, place: Path, patterns: Sequence[str]) -> bool:
        """Tell whether a file is below `.merging/`, or here under a name in `patterns`."""
        root = self.path.resolve()
        inside = place.parent == root and any(fnmatch(place.name, name) for name in patterns)
        return inside or root / SCRATCH_FOLDER in (place, *place.parents)

    def check_room(self, needed: int) -> None:
        """Raise a `MergeError` if the disk has less than so many bytes free."""
        usage = shutil.disk_usage(self.path)
        if usage.total and usage.free < needed:  # some network file systems tell nothing
            raise MergeError(
                f"{self.path} needs {needed / 1e9:.1f} GB more, and its disk has "
                f"{usage.free / 1e9:.1f} GB free; make room and give the same command again"
            )

    def unmark(self, kept: Iterable[str] = ()) -> None:
        """Let it no longer look like a model, but for files that are kept."""
        for name in set(_MARKS) - set(kept):
            (self.path / name).unlink(missing_ok=True)

    def drop(self) -> None:
        """Remove the model, or the unfinished merge, that is here: what marks it as one first."""
        self.unmark()
        (self.path / MANIFEST_FILE).unlink(missing_ok=True)
        for pattern in (*_WEIGHTS, *READ_BESIDE):
            for path in self.path.glob(pattern):
                path.unlink()
        shutil.rmtree(self.path / MORE_TEMPLATES, ignore_errors=True)
        self.remove_scratch()

    def clean_scratch(self) -> None:
        """Remove what killed workers have left; make the folder for new ones."""
        self.remove_scratch()
        self.scratch.mkdir(exist_ok=True)

    def remove_scratch(self) -> None:
        """Remove all that is unfinished."""
        shutil.rmtree(self.scratch, ignore_errors=True)

    def remove_parts(self, shard: Shard) -> None:
        """Remove the unfinished files of one shard."""
        for path in self.scratch.glob(f"shard-{shard.index + 1:05d}-*"):
            shutil.rmtree(path, ignore_errors=True)

    def move_in(self, source: Path, name: str) -> None:
        """Give a file that is on the disk its name in the directory."""
        (self.path / name).parent.mkdir(exist_ok=True)
        os.replace(source, self.path / name)
        flush_to_disk(self.path)


def complete_model(
    folder: OutputFolder,
    plan: PlannedMerge,
    tokenizer: TokenizerInfo | None,
    shards: Sequence[Shard],
    *,
    kept: Sequence[str] = (),
) -> dict[str, str]:
    """Add what makes finished shards a model, as `mergekit-yaml`, and what that leaves out.

    Index, config, tokenizer and model card are written below `.merging/` first and then moved into
    place, `config.json` last.

    Args:
        tokenizer: of the result; None where none is built.
        kept: names of files that are there and stay as they are.

    Returns:
        SHA-256 of every file that was written, by name.
    """
    staging = folder.scratch / f"complete-{uuid.uuid4().hex}"
    staging.mkdir()
    _write_config(folder, staging, plan, tokenizer, shards)
    _write_tokenizer(staging, plan, tokenizer)
    along = plan.architecture.tagalong_files or []
    _copy_tagalong_files(_donor_config(plan), str(staging), along, plan.options)
    add_model_files(plan.config, staging, cache=plan.options.transformers_cache)
    files = [path.relative_to(staging) for path in sorted(staging.rglob("*")) if path.is_file()]
    files = [path for path in files if path.as_posix() not in kept]
    for path in files:
        flush_to_disk(staging / path)
    hashes = {path.as_posix(): sha256(staging / path) for path in files}
    ranks = {name: rank for rank, name in enumerate(reversed(_MARKS), start=1)}
    for path in sorted(files, key=lambda path: ranks.get(str(path), 0)):
        folder.move_in(staging / path, str(path))
    return hashes


def _write_config(
    folder: OutputFolder,
    staging: Path,
    plan: PlannedMerge,
    tokenizer: TokenizerInfo | None,
    shards: Sequence[Shard],
) -> None:
    """Write index, config and model card."""
    if len(shards) > 1:
        stem = shard_file(0, 1, safetensors=plan.options.safe_serialization)
        (staging / f"{stem}.index.json").write_text(_index_text(folder.path, shards), "utf-8")
    if tokenizer is not None:
        multiple = plan.vocabulary_multiple
        _update_config_vocab(plan.out_config, plan.architecture, tokenizer.tokenizer, multiple)
    _untie_head(folder.path, plan, shards)
    plan.out_config.save_pretrained(staging)
    if plan.options.write_model_card:
        (staging / "README.md").write_text(_model_card(plan, folder.name), "utf-8")
        (staging / "mergekit_config.yml").write_text(plan.source, "utf-8")


def _untie_head(folder: Path, plan: PlannedMerge, shards: Sequence[Shard]) -> None:
    """Let the config say that the head is its own, where the result holds another than it ties.

    Programs that tie it all the same would answer with the embedding in its place.
    """
    config = plan.out_config
    tied = [
        part
        for part in (config, config.get_text_config())
        if getattr(part, "tie_word_embeddings", False)
    ]
    if not tied:
        return
    matrices = [t.name for t in plan.tensors if t.task.output_weight.vocabulary_axis == 0]
    files = {name: folder / shard.file for shard in shards for name in shard.tensors}
    stored = {
        name: tensor for name in matrices if (tensor := _stored(files[name], name)) is not None
    }
    heads = [name for name in stored if name.endswith(HEADS)]
    others = [stored[name] for name in stored if name not in heads]
    for head in heads:
        if others and not any(torch.equal(stored[head], other) for other in others):
            for part in tied:
                part.tie_word_embeddings = False


def _stored(file: Path, name: str) -> Tensor | None:
    """Return a tensor of the result; None where all models lack it."""
    if not file.exists() or name not in read_file_header(file):
        return None
    return TensorLoader.get(str(file)).get_tensor(name)


def _donor_config(plan: PlannedMerge) -> MergeConfiguration:
    """Return the config for mergekit to copy files by, which merges an adapter for that."""
    return plan.config.model_copy(update={"base_model": base_of(config_donor(plan.config))})


def _model_card(plan: PlannedMerge, name: str) -> str:
    """Return mergekit's model card.

    mergekit asks the Hub for every model whose name could be of the Hub, although it is a folder
    here. Where there is no answer, folders are written with a leading ``./``, and nobody is asked.
    """
    try:
        return generate_card(config=plan.config, config_yaml=plan.source, name=name)
    except Exception:  # of the libraries below, by what is wrong with the network
        config = type(plan.config).model_validate(_mark_folders(yaml.safe_load(plan.source)))
        return generate_card(config=config, config_yaml=plan.source, name=name)


def _mark_folders(value: Any) -> Any:
    """Return the content of a config with a leading ``./`` before the names of folders."""
    if isinstance(value, dict):
        return {key: _mark_folders(part) for key, part in value.items()}
    if isinstance(value, list):
        return [_mark_folders(part) for part in value]
    if isinstance(value, str):
        parts = value.split("+")
        return "+".join(
            f"./{p}" if p and p[0] not in "./~" and os.path.isdir(p) else p for p in parts
        )
    return value


def _index_text(folder: Path, shards: Iterable[Shard]) -> str:
    """Return which file holds which tensor; not all that were planned need be there."""
    places, total = {}, 0
    for shard in shards:
        path = folder / shard.file
        headers = read_file_header(path) if path.exists() else {}
        places |= {name: shard.file for name in shard.tensors if name in headers}
        total += sum(header.bytes for header in headers.values())
    metadata = {"total_size": total, "mergekit_version": version("mergekit")}
    return json.dumps({"metadata": metadata, "weight_map": places}, indent=2)


def _write_tokenizer(staging: Path, plan: PlannedMerge, built: TokenizerInfo | None) -> None:
    options, config = plan.options, plan.config
    if built is not None:
        _set_chat_template(built.tokenizer, config)
        built.tokenizer.save_pretrained(staging)
    elif options.copy_tokenizer:
        try:
            _copy_tokenizer(_donor_config(plan), str(staging), options)
        except Exception as error:  # as mergekit: the weights are worth keeping without it
            _LOG.error(
                "The tokenizer could not be copied (%s). The merge is complete without it: copy "
                "one into %s",
                (str(error) or type(error).__name__).splitlines()[0],
                staging.parent.parent,
            )
    elif config.chat_template:
        _LOG.warning("There is no tokenizer in the result, so its chat_template: is not saved")


def append_lines(reports: Mapping[str, str]) -> None:
    """Append the lines of a shard to the files under `report:`.

    Args:
        reports: files of lines by the path of the report.
    """
    for path, lines in reports.items():
        with open(path, "ab") as file:
            file.write(Path(lines).read_bytes())
        flush_to_disk(path)


def drop_lines(path: str, start: int, unfinished: Set[str]) -> None:
    """Remove from a report what a killed run wrote of tensors that will be merged again.

    Args:
        path: of the report; it may be missing.
        start: bytes that it had before that run, which stay.
    """
    if not os.path.exists(path):
        return
    content = Path(path).read_bytes()
    lines = content[start:].splitlines(keepends=True)
    if lines and not lines[-1].endswith(b"\n"):  # cut off by the kill
        lines.pop()
    changed = content[:start] + b"".join(line for line in lines if _keep(line, unfinished))
    if changed != content:
        write_text(path, changed.decode("utf-8"), durable=True)


def _keep(line: bytes, unfinished: Set[str]) -> bool:
    try:
        return json.loads(line)["tensor"] not in unfinished
    except (ValueError, KeyError, TypeError, RecursionError):  # no line of a merge
        return True
