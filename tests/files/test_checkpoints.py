# SPDX-License-Identifier: Apache-2.0
"""Checkpoints that are damaged, missing or something else: every command says which file, and why.

A case changes the folder of an expert. `check`, `inspect`, `merge` and `train` must all say the
same of it, and must write nothing.
"""

from __future__ import annotations

import json
import shutil
import struct
from collections.abc import Callable
from pathlib import Path

import families
import pytest
import yaml
from checkpoints import ace_config, configure
from commands import command
from safetensors.torch import load_file, save_file

LFS = "version https://git-lfs.github.com/spec/v1\noid sha256:" + "0" * 64 + "\nsize 4997\n"
UP = "model.layers.0.mlp.up_proj.weight"
PAGE = "<!DOCTYPE html>\n<html><head><title>Sign in</title></head></html>"
AGAIN = "download or save it again"
PULL = "is a Git LFS pointer: run `git lfs pull` in "
WEIGHTS = "expert0/model.safetensors"
SHARDS = ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors")
INDEX = "model.safetensors.index.json"
HERE = ("base", "expert0", "expert1")
Change = Callable[[Path], object]


@pytest.fixture(scope="module")
def intact(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("intact")
    (folder / "train.json").write_text(json.dumps(families.llama(folder)))
    return folder


@pytest.fixture
def family(intact, tmp_path, monkeypatch) -> Path:
    monkeypatch.chdir(shutil.copytree(intact, tmp_path / "family"))
    return tmp_path / "family"


def run(family: Path, *names: str, fails: bool = False) -> list[str]:
    """Run all commands on these folders, or models of other names; what they say."""
    out, paths = family / "out", [str(family / name) if name in HERE else name for name in names]
    config = json.loads((family / "train.json").read_text())
    config["base_model"], config["training"]["max_steps"] = paths[0], 1
    first = config["models"][0]
    config["models"] = [{**first, "model": path, "task": path} for path in paths[1:]]
    for name, content in (("merge.yml", ace_config(paths)), ("train.yml", config)):
        (family / name).write_text(yaml.safe_dump(content))
    merge = family / "merge.yml"
    return [
        command("check", merge, fails=fails),
        command("inspect", merge, out / "inspect", "--quiet", fails=fails),
        command("merge", merge, out / "merge", "--quiet", "--lazy-unpickle", fails=fails),
        command("train", family / "train.yml", out / "train", "--quiet", fails=fails),
    ]


def replace(name: str, content: str | bytes) -> Change:
    """A file of another content."""
    data = content if isinstance(content, bytes) else content.encode()
    return lambda folder: (folder / name).write_bytes(data)


def cut(folder: Path) -> None:
    """Weights of which the last bytes have not arrived."""
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])


def without_weights(**beside: bytes) -> Change:
    """No weights, but other files, with `__` for dots in their names."""

    def change(folder: Path) -> None:
        (folder / "model.safetensors").unlink()
        for name, content in beside.items():
            (folder / name.replace("__", ".")).write_bytes(content)

    return change


def dangling(folder: Path) -> None:
    """A link to nowhere."""
    (folder / "model.safetensors").unlink()
    (folder / "model.safetensors").symlink_to("../blob")


def sharded(edit: Callable[[Path, dict], object] = lambda folder, places: None) -> Change:
    """Two shards with an index, whose map `edit` changes or replaces."""

    def change(folder: Path) -> None:
        tensors = load_file(folder / "model.safetensors")
        (folder / "model.safetensors").unlink()
        names, places = sorted(tensors), {}
        for shard, part in zip(SHARDS, (names[::2], names[1::2]), strict=True):
            save_file({name: tensors[name] for name in part}, folder / shard, {"format": "pt"})
            places |= dict.fromkeys(part, shard)
        text = edit(folder, places)
        index = json.dumps({"metadata": {"total_size": 1}, "weight_map": places})
        (folder / INDEX).write_text(text if isinstance(text, str) else index)

    return change


CODE = b"cposix\nsystem\n(S'touch executed'\ntR."
PICKLE = "a .bin is a pickle, which may hold code; load it by transformers"
NO_TENSORS = struct.pack("<Q", 2) + b"{}"
DAMAGED: dict[str, tuple[Change, tuple[str, ...]]] = {
    "cut at the end": (cut, (WEIGHTS, "is damaged", AGAIN)),
    "empty": (replace("model.safetensors", ""), (WEIGHTS, "is damaged", AGAIN)),
    "LFS pointer": (replace("model.safetensors", LFS), (WEIGHTS, PULL)),
    "web page": (replace("model.safetensors", PAGE), (WEIGHTS, "is a web page", "signing in")),
    "no tensors": (replace("model.safetensors", NO_TENSORS), ("expert0 holds no tensors", AGAIN)),
    "dangling link": (dangling, (WEIGHTS, "a link to ../blob")),
    "GGUF": (without_weights(q4__gguf=b""), ("expert0 holds no weights", "q4.gguf", "safetensors")),
    "an adapter": (
        without_weights(adapter_config__json=b"{}"),
        ("it is an adapter", "write BASE+"),
    ),
    "pickle": (without_weights(pytorch_model__bin=CODE), ("pytorch_model.bin", PICKLE)),
    "no config": (lambda f: (f / "config.json").unlink(), ("expert0/config.json", "is missing")),
    "config without JSON": (replace("config.json", "{'a': 1"), ("config.json", "no JSON", AGAIN)),
    "config of wrong types": (
        lambda f: configure(f, hidden_size="many"),
        ("is no config of", "Field 'hidden_size' expected int, got str", "correct it"),
    ),
    "unknown model_type": (
        lambda f: configure(f, model_type="llamma"),
        ("expert0/config.json", "'llamma' that this version", "correct it, or update"),
    ),
    "tokenizer that is an LFS pointer": (replace("tokenizer.json", LFS), ("tokenizer.json", PULL)),
    "index that is not JSON": (sharded(lambda *_: "[3]"), (INDEX, "is no JSON object", AGAIN)),
    "map to another folder": (
        sharded(lambda f, places: places.update({UP: "../base/model.safetensors"})),
        (INDEX, "has no weight_map of tensors and of files beside it", AGAIN),
    ),
    "lost shard": (sharded(lambda f, _: (f / SHARDS[1]).unlink()), (SHARDS[1], "missing", "again")),
    "no folder": (shutil.rmtree, ("there is no folder", "expert0", "correct the name")),
}


@pytest.mark.parametrize("case", DAMAGED)
def test_every_command_names_the_file_and_the_remedy(family, case):
    change, parts = DAMAGED[case]
    change(family / "expert0")
    for said in run(family, "base", "expert0", fails=True):
        assert [part for part in parts if part not in said] == [], said
    assert not list(family.rglob("out/**/*.safetensors"))
    assert not (family / "executed").exists()


def test_what_lies_beside_good_weights_stops_nothing(family, monkeypatch):
    """A damaged adapter; weights of another format, a file of macOS, links to themselves.

    Nor does the name of a folder.
    """
    family = Path(shutil.move(family, family.with_name("#x bra{ce} quo\"te it's * [l] a: b %20 ä")))
    sharded()(family / "expert0")
    replace("adapter_model.safetensors", "junk")(family / "expert0")
    expert = family / "expert1"
    replace("consolidated.safetensors", LFS)(expert)
    replace("._model.safetensors", b"\0\5\26\7")(expert)
    (expert / "again").symlink_to(expert)
    (expert / "loop.safetensors").symlink_to("loop.safetensors")
    monkeypatch.chdir(family)
    run(family, "base", "./expert0", "expert1")
