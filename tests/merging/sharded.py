# SPDX-License-Identifier: Apache-2.0
"""Families in several shards, with tokenizers, and how results are compared."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path

import commands
import pytest
import torch
import yaml
from checkpoints import LLAMA, fine_tuned, save_family, save_tokenizer, tiny_llama
from families import Killed, killed_after
from safetensors.torch import load_file

from mergekit_ace.merging import workers
from mergekit_ace.merging.output import MANIFEST_FILE, Manifest

SHARDS = ("--out-shard-size", "12000")  # of the result: seven
INPUT_SHARDS = "30KB"
VOCABULARY = [f"t{n}" for n in range(LLAMA["vocab_size"])]
TEMPLATE = "{% for message in messages %}{{ message['content'] }}{% endfor %}"
command = partial(commands.command, "merge")
refusal = partial(command, fails=True)


def save_llamas(folder: Path, **config) -> list[str]:
    """A base and two experts, each in several files."""
    return save_family(tiny_llama(**config), folder, max_shard_size=INPUT_SHARDS)


def save_speakers(folder: Path) -> list[str]:
    """A base and two experts with tokenizers: the experts have tokens of their own."""
    paths, base = [str(folder / name) for name in ("base", "expert0", "expert1")], tiny_llama()
    base.save_pretrained(paths[0], max_shard_size=INPUT_SHARDS)
    save_tokenizer(paths[0], VOCABULARY, template=TEMPLATE)
    for n, path in enumerate(paths[1:]):
        grown = fine_tuned(base, seed=10 + n)
        grown.resize_token_embeddings(42, mean_resizing=False)
        with torch.no_grad():
            grown.get_input_embeddings().weight[40:] = 0.1 * (n + 1)
        grown.save_pretrained(path, max_shard_size=INPUT_SHARDS)
        save_tokenizer(path, VOCABULARY, (f"<own{n}>", f"<also{n}>"), TEMPLATE)
    return paths


def linear(paths: list[str], **config) -> dict:
    models = [{"model": path, "parameters": {"weight": 1}} for path in paths]
    return {"merge_method": "linear", "models": models, "dtype": "float32", **config}


def write_config(path: Path, config: dict) -> Path:
    path.write_text(yaml.safe_dump(config))
    return path


def begin(config: Path, out: Path) -> None:
    """Compute two shards of a merge, which ends then, as if killed."""
    with pytest.MonkeyPatch.context() as patch:
        killed_after(patch, workers, "compute_shard", 2)
        with pytest.raises(Killed):
            command(config, out, *SHARDS)


def contents(folder: Path) -> dict[str, bytes]:
    """All files but the manifest."""
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file() and path.name != MANIFEST_FILE
    }


def assert_same(one: Path, other: Path) -> None:
    first, second = contents(one), contents(other)
    assert first.keys() == second.keys()
    assert [name for name in first if first[name] != second[name]] == []


def finished(folder: Path) -> dict[str, tuple[int, int]]:
    """Inode and time of every finished shard, in their order: others were written anew."""
    manifest = Manifest.read(folder)
    names = [n for n in sorted(manifest.files if manifest else ()) if n.endswith(".safetensors")]
    states = {name: (folder / name).stat() for name in names}
    return {name: (state.st_ino, state.st_mtime_ns) for name, state in states.items()}


def tensors_of(folder: Path) -> list[str]:
    """Names of the tensors in finished shards."""
    return [name for file in finished(folder) for name in load_file(folder / file)]


def reported(path: Path) -> list[str]:
    """Names of the tensors in a report."""
    return [json.loads(line)["tensor"] for line in path.read_text().splitlines()]
