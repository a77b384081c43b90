# SPDX-License-Identifier: Apache-2.0
"""The directory of the result: whose it is, what is finished in it, and what makes it a model.

mergekit's private functions are used as they are: `test_identical.py` compares the results.
"""

from __future__ import annotations

import json
import logging
import os
import shutil
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatch
from importlib.metadata import version
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal

import click
import torch
from mergekit import card
from mergekit.common import ModelPath, ModelReference
from mergekit.io.tasks import LoaderCache
from mergekit.merge import (
    _copy_tagalong_files,
    _copy_tokenizer,
    _set_chat_template,
    _update_config_vocab,
)
from mergekit.tokenizer import TokenizerInfo
from pydantic import BaseModel
from safetensors import safe_open

from mergekit_ace.adapters.read import base_of
from mergekit_ace.files.checkpoints import (
    INDEX_FILES,
    MORE_TEMPLATES,
    READ_BESIDE,
    TOKENIZER_CONFIG,
    TensorHeader,
    add_model_files,
    config_donor,
    find_model_file,
    read_file_header,
)
from mergekit_ace.files.saving import LOCK_FILE, check_apart, flush_to_disk, sha256, write_text
from mergekit_ace.merge_config import HEADS
from mergekit_ace.merging.shards import Shard, ShardResult
from mergekit_ace.naming import ConfigError, listed
from mergekit_ace.planning import PlannedMerge

_LOG = logging.getLogger(__name__)
MANIFEST_FILE = "merge_manifest.json"
SCRATCH_FOLDER = ".merging"
_INDEX = INDEX_FILES[0]
# What makes a directory a model: these go first when it is begun anew, and come last at the end.
_MARKS = ("config.json", _INDEX, "pytorch_model.bin.index.json")
_CONTENT = (
    "model*.safetensors", "pytorch_model*.bin", "adapter_model.safetensors", "adapter_config.json"
)  # fmt: skip
_CARD = ("README.md", "mergekit_config.yml")


def say(plan: PlannedMerge, text: str) -> None:
    """Print what happens in a merge, unless it is to be quiet."""
    if not plan.options.quiet:
        click.echo(text)


class Manifest(BaseModel):
    """`merge_manifest.json`: what a result depends on, and which of its files are finished.

    It may be damaged, or made by somebody else. It says what need not be computed again, and
    nothing more: names of files come from the plan and paths from the config.
    """

    identity: dict[str, Any]  # what the result depends on, as `plan.fingerprint` returns it
    # SHA-256 of every finished file; empty for a shard without a file, all its tensors being absent
    files: dict[str, str] = {}
    complete: bool = False  # whether the directory holds a model
    format: Literal[4] = 4

    @classmethod
    def read(cls, folder: Path) -> Manifest | None:
        """Return the manifest of a folder, or None; a damaged one raises a `ConfigError`."""
        path = folder / MANIFEST_FILE
        try:
            return cls.model_validate_json(path.read_bytes(), strict=True)
        except FileNotFoundError:
            return None
        except (ValueError, OSError) as error:
            said = f"{path} is damaged, or another version's; --overwrite starts anew"
            raise ConfigError(said) from error


def check_own(folder: Path, *, overwrite: bool) -> None:
    """Raise a `ConfigError` for a folder that holds what no merge has written.

    With `overwrite`, a model may be there, which is dropped.
    """
    for path in map(folder.joinpath, (SCRATCH_FOLDER, LOCK_FILE, MORE_TEMPLATES)):
        if path.is_symlink():
            raise ConfigError(f"{path} is a link, whose target would be changed; remove it")
    if not folder.is_dir() or (folder / MANIFEST_FILE).exists():
        return
    killed = (SCRATCH_FOLDER, LOCK_FILE, f"{MANIFEST_FILE}.partial")  # what a kill leaves
    foreign = sorted(path.name for path in folder.iterdir() if path.name not in killed)
    model = [name for name in foreign if any(fnmatch(name, part) for part in (*_MARKS, *_CONTENT))]
    if foreign and not (model and overwrite):
        what = f"{'a model that is' if model else 'files that are'} none of a merge"
        remedy = f"choose a new or empty folder{', or --overwrite' if model else ''}"
        raise ConfigError(f"{folder} holds {what} ({listed(model or foreign, 3)}); {remedy}")


@dataclass(frozen=True)
class OutputFolder:
    """The directory that a merge writes to, and which nobody else does."""

    path: Path
    manifest: Manifest

    @property
    def scratch(self) -> Path:
        """Where everything is that is not finished."""
        return self.path / SCRATCH_FOLDER

    def check_inputs(self, read: Iterable[Path], reports: Iterable[str]) -> None:
        """Raise a `ConfigError` for what the merge reads that lies here, itself or by a link.

        Reports may, but not under a name of the result.
        """
        check_apart(map(str, read), [self.path])
        root = self.path.resolve()
        for place in (Path(report).resolve() for report in reports):
            beside = place.parent == root and place.suffix == ".jsonl"
            if place.is_relative_to(root) and not beside:
                raise ConfigError(f"the result in {root} may replace the report {place}; move it")

    def find_finished(self, plan: PlannedMerge, shards: Sequence[Shard]) -> set[str]:
        """Forget what is no longer what it was, and return what somebody has edited; say both.

        Weights and their index are made again where they differ, other files stay.
        """
        manifest, sizes = self.manifest, {shard.file: shard.bytes for shard in shards}
        edited, root = set(), self.path.resolve()
        for name, recorded in list(manifest.files.items()):
            path = self.path / name
            # a link is none of ours, nor is what lies elsewhere
            there = path.is_file() and not path.is_symlink() and path.resolve().is_relative_to(root)
            if recorded == (sha256(path) if there else "") and (recorded or not sizes.get(name)):
                continue
            if there and name not in sizes and name != _INDEX:
                edited.add(name)
                say(plan, f"{name} was edited after the merge, and stays; delete it to renew it")
            else:
                del manifest.files[name]
                manifest.complete = False
                say(plan, f"{name} is not what it was when it was finished: it is made again")
        manifest.complete &= {*sizes, "config.json"} <= manifest.files.keys()
        tokens = plan.config.tokenizer
        source = tokens.source if tokens else plan.config.tokenizer_source
        # mergekit numbers the new tokens of a joint tokenizer in another order in every run
        if source == "union" and not manifest.complete:
            manifest.files = {name: manifest.files[name] for name in edited}
            say(plan, "a merge with a joint tokenizer (`source: union`) begins anew")
            return edited
        finished = len(sizes.keys() & manifest.files.keys())
        say(plan, f"{finished} of {len(shards)} shards are finished and kept")
        return edited

    def begin(self, *, overwrite: bool, kept: Collection[str]) -> None:
        """Let the directory no longer look like a model, and remove what killed workers have left.

        With `overwrite`, drop the model, or the unfinished merge, that is there.
        """
        dropped = (MANIFEST_FILE, *_CONTENT, *_CARD, *READ_BESIDE) if overwrite else ()
        for pattern in (*(set(_MARKS) - set(kept)), *dropped):
            for path in self.path.glob(pattern):
                path.unlink()
        for folder in (MORE_TEMPLATES, SCRATCH_FOLDER) if overwrite else (SCRATCH_FOLDER,):
            shutil.rmtree(self.path / folder, ignore_errors=True)
        self.scratch.mkdir(exist_ok=True)
        self.enter({}, complete=False)

    def enter(self, hashes: Mapping[str, str], *, complete: bool) -> None:
        """Enter finished files into the manifest; it is on the disk when this returns."""
        self.manifest.files.update(hashes)
        self.manifest.complete = complete
        text = json.dumps(self.manifest.model_dump(), indent=1) + "\n"
        write_text(self.path / MANIFEST_FILE, text, durable=True)

    def take(self, shard: Shard, result: ShardResult) -> None:
        """Give a shard its name, and append its lines to the reports.

        A kill before it is in the manifest lets lines be written twice; readers take the last ones.
        """
        for path, lines in result.reports.items():
            before = Path(path).read_text("utf-8") if Path(path).exists() else ""
            write_text(path, before + Path(lines).read_text("utf-8"), durable=True)
        if result.path:
            self.move_in(Path(result.path), shard.file)
        self.enter({shard.file: result.sha256}, complete=False)
        for left in self.scratch.glob(f"{shard.file}-*"):
            shutil.rmtree(left, ignore_errors=True)

    def move_in(self, source: Path, name: str) -> None:
        """Give a file that is on the disk its name in the directory."""
        (self.path / name).parent.mkdir(exist_ok=True)
        os.replace(source, self.path / name)
        flush_to_disk(self.path)

    def complete(
        self,
        plan: PlannedMerge,
        tokenizer: TokenizerInfo | None,
        shards: Sequence[Shard],
        kept: Collection[str],
    ) -> None:
        """Make finished shards a model, with all that is beside weights.

        The files are written below `.merging/` and then moved into place, `config.json` last; those
        that are `kept` are not.
        """
        staging = self.scratch / "complete"
        staging.mkdir()
        stored: dict[str, TensorHeader] = {}  # not all that were planned need be there
        for shard in shards:
            path = self.path / shard.file
            headers = read_file_header(path) if path.exists() else {}
            stored |= {name: headers[name] for name in shard.sizes if name in headers}
        if len(shards) > 1:
            total = sum(header.bytes for header in stored.values())
            index = {
                "metadata": {"total_size": total, "mergekit_version": version("mergekit")},
                "weight_map": {name: Path(header.file).name for name, header in stored.items()},
            }
            (staging / _INDEX).write_text(json.dumps(index, indent=2), "utf-8")
        # mergekit would merge an adapter to copy files from it, and ask the Hub for the files of a
        # model; it asks no adapter for its chat template
        place = LoaderCache().get(base_of(config_donor(plan.config))).index.base_path
        donor: Any = SimpleNamespace(
            base_model=ModelReference(model=ModelPath(path=place)),
            chat_template=plan.config.chat_template,
            referenced_models=lambda: [*map(_speaker, plan.config.referenced_models())],
        )
        if tokenizer is not None:
            built, multiple = tokenizer.tokenizer, plan.vocabulary_multiple
            _update_config_vocab(plan.out_config, plan.architecture, built, multiple)
            _set_chat_template(built, donor)
            built.save_pretrained(staging)
        _untie_head(plan, stored)
        plan.out_config.save_pretrained(staging)
        if plan.options.write_model_card:
            (staging / "README.md").write_text(_model_card(plan, self.path.name), "utf-8")
            (staging / "mergekit_config.yml").write_text(plan.config.source, "utf-8")
        if tokenizer is None and plan.options.copy_tokenizer:
            try:
                _copy_tokenizer(donor, str(staging), plan.options)
            except Exception as error:  # as mergekit: the weights are worth keeping without it
                _LOG.error("The result has no tokenizer, as none can be copied: %s", error)
        along = plan.architecture.tagalong_files or []
        _copy_tagalong_files(donor, str(staging), along, plan.options)
        add_model_files(plan.config, staging)
        files = [path for path in staging.rglob("*") if path.is_file()]
        names = {path.relative_to(staging).as_posix() for path in files} - set(kept)
        hashes = {name: sha256(staging / name) for name in names}
        for name in names:
            flush_to_disk(staging / name)
        for name in sorted(names, key=lambda name: (name == "config.json", name in _MARKS)):
            self.move_in(staging / name, name)
        self.enter(hashes, complete=True)


def _speaker(model: ModelReference) -> ModelReference:
    """Return whose chat template counts for a model: its adapter's, if that has a tokenizer."""
    own = model.lora if model.lora and find_model_file(model.lora, TOKENIZER_CONFIG) else None
    return ModelReference(model=own or model.model)


def _untie_head(plan: PlannedMerge, stored: dict[str, TensorHeader]) -> None:
    """Let the config say that the head is its own, where the result holds another than it ties.

    Programs that tie it all the same would answer with the embedding in its place.
    """
    configs = (plan.out_config, plan.out_config.get_text_config())
    tied = [config for config in configs if getattr(config, "tie_word_embeddings", False)]
    heads, others = [], []
    for tensor in plan.tensors if tied else ():
        if tensor.task.output_weight.vocabulary_axis == 0 and tensor.name in stored:
            with safe_open(stored[tensor.name].file, framework="pt") as file:
                rows = file.get_tensor(tensor.name)
            (heads if tensor.name.endswith(HEADS) else others).append(rows)
    if others and any(not any(torch.equal(head, other) for other in others) for head in heads):
        for config in tied:
            config.tie_word_embeddings = False


def _model_card(plan: PlannedMerge, name: str) -> str:
    """Return mergekit's model card; the Hub is not asked for models that are folders here."""
    is_hf = card.is_hf
    card.is_hf = lambda path: not os.path.isdir(path) and is_hf(path)
    try:
        return card.generate_card(config=plan.config, config_yaml=plan.config.source, name=name)
    finally:
        card.is_hf = is_hf
