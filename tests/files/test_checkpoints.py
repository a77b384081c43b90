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

import pytest
import torch
import yaml
from checkpoints import ace_config
from click.testing import CliRunner
from families import llama_family
from safetensors.torch import load_file, save_file

from mergekit_ace.cli import main
from mergekit_ace.files.checkpoints import check_adapter_folder, weight_files
from mergekit_ace.files.headers import DamagedFileError

LFS = "version https://git-lfs.github.com/spec/v1\noid sha256:" + "0" * 64 + "\nsize 4997\n"
PAGE = "<!DOCTYPE html>\n<html><head><title>Sign in</title></head></html>"
UP = "model.layers.0.mlp.up_proj.weight"
AGAIN = "download or save it again"
PULL = "is a Git LFS pointer in the place of the file: run `git lfs pull` in "
Change = Callable[[Path], None]


@pytest.fixture(scope="module")
def intact(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("intact")
    config = llama_family(folder)
    (folder / "train.json").write_text(json.dumps(config))
    return folder


@pytest.fixture
def family(intact, tmp_path) -> Path:
    return Path(shutil.copytree(intact, tmp_path / "family"))


def commands(family: Path, *names: str) -> list[list[str]]:
    """Write the configs of a merge and a training of these folders; how each command is called."""
    out, paths = family / "out", [str(family / name) for name in names or ("base", "expert0")]
    (family / "merge.yml").write_text(yaml.safe_dump(ace_config(paths)))
    config = json.loads((family / "train.json").read_text())
    config["base_model"], experts = paths[0], paths[1:]
    config["training"]["max_steps"] = 1
    config["models"] = [
        {**config["models"][0], "model": path, "task": f"task{n}"} for n, path in enumerate(experts)
    ]
    (family / "train.yml").write_text(yaml.safe_dump(config))
    merge, train = str(family / "merge.yml"), str(family / "train.yml")
    return [
        ["check", merge],
        ["inspect", merge, str(out / "inspect"), "--quiet"],
        ["merge", merge, str(out / "merge"), "--quiet"],
        ["train", train, str(out / "train"), "--quiet"],
    ]


def replace(name: str, content: str | bytes) -> Change:
    """A file of another content."""

    def change(folder: Path) -> None:
        (folder / name).write_bytes(content if isinstance(content, bytes) else content.encode())

    return change


def cut(count: int) -> Change:
    """Weights of which only the first bytes have arrived, or all but the last."""

    def change(folder: Path) -> None:
        file = folder / "model.safetensors"
        file.write_bytes(file.read_bytes()[:count])

    return change


def entry(**values) -> Change:
    """Weights with another header of one tensor."""

    def change(folder: Path) -> None:
        file = folder / "model.safetensors"
        content = file.read_bytes()
        (length,) = struct.unpack("<Q", content[:8])
        entries = json.loads(content[8 : 8 + length])
        entries[UP].update(values)
        text = json.dumps(entries).encode()
        file.write_bytes(struct.pack("<Q", len(text)) + text + content[8 + length :])

    return change


def config(**values) -> Change:
    """A config with other values; those that are None are missing."""

    def change(folder: Path) -> None:
        content = {**json.loads((folder / "config.json").read_text()), **values}
        kept = {key: value for key, value in content.items() if value is not None}
        (folder / "config.json").write_text(json.dumps(kept))

    return change


def link(name: str, target: str) -> Change:
    """A link in the place of a file."""

    def change(folder: Path) -> None:
        (folder / name).unlink()
        (folder / name).symlink_to(target)

    return change


def without_weights(*beside: str) -> Change:
    """No weights, but perhaps other files."""

    def change(folder: Path) -> None:
        (folder / "model.safetensors").unlink()
        for name in beside:
            (folder / name).write_text("{}")

    return change


def pickled(content: bytes) -> Change:
    """A .bin file instead."""

    def change(folder: Path) -> None:
        (folder / "model.safetensors").unlink()
        (folder / "pytorch_model.bin").write_bytes(content)

    return change


SHARDS = ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors")
INDEX = "model.safetensors.index.json"


def sharded(edit: Callable[[Path, dict], str | None]) -> Change:
    """Two shards with an index, which `edit` changes or replaces."""

    def change(folder: Path) -> None:
        tensors = load_file(folder / "model.safetensors")
        (folder / "model.safetensors").unlink()
        names = sorted(tensors)
        parts = (names[::2], names[1::2])
        places = {}
        for shard, part in zip(SHARDS, parts, strict=True):
            save_file({name: tensors[name] for name in part}, folder / shard, {"format": "pt"})
            places |= dict.fromkeys(part, shard)
        index = {"metadata": {"total_size": 1}, "weight_map": places}
        text = edit(folder, index)
        (folder / INDEX).write_text(json.dumps(index) if text is None else text)

    return change


def remove(folder: Path) -> None:
    shutil.rmtree(folder)


def become_file(folder: Path) -> None:
    shutil.rmtree(folder)
    folder.write_text("{}")


def empty_folder(folder: Path) -> None:
    shutil.rmtree(folder)
    folder.mkdir()


WEIGHTS = "expert0/model.safetensors"
DAMAGED = {
    "cut at the end": (cut(-100), WEIGHTS, "is damaged", AGAIN),
    "cut in the length": (cut(5), WEIGHTS, "header too small", AGAIN),
    "empty": (replace("model.safetensors", ""), WEIGHTS, "is empty", AGAIN),
    "LFS pointer": (replace("model.safetensors", LFS), WEIGHTS, PULL, "expert0"),
    "web page": (replace("model.safetensors", PAGE), WEIGHTS, "is a web page", "signing in"),
    "no tensors": (
        replace("model.safetensors", struct.pack("<Q", 2) + b"{}"),
        WEIGHTS,
        "holds no tensors",
        AGAIN,
    ),
    "shape of other bytes": (entry(shape=[3, 3]), WEIGHTS, "invalid shape, data type", AGAIN),
    "unknown dtype": (
        entry(dtype="F4", shape=[96, 128]),
        WEIGHTS,
        "has the dtype 'F4'",
        "get the model in",
    ),
    "dangling link": (link("model.safetensors", "../blob"), WEIGHTS, "a link to ../blob", "again"),
    "no weights": (without_weights(), "expert0 holds no weights", "", "again"),
    "GGUF": (without_weights("q4.gguf"), "expert0 holds no weights", "q4.gguf is none", "get or"),
    "an adapter": (without_weights("adapter_config.json"), "it is an adapter", "", "write BASE+"),
    "shards without index": (without_weights(SHARDS[0]), "no index beside", SHARDS[0], INDEX),
    "pickle that is cut": (pickled(b"PK\x03\x04 and so on"), "pytorch_model.bin", "", "safeten"),
    "pickle of code": (
        pickled(b"cposix\nsystem\n(S'touch executed'\ntR."),
        "pytorch_model.bin",
        "or holds more than tensors",
        "or the model's safetensors files",
    ),
    "no config": (lambda f: (f / "config.json").unlink(), "expert0/config.json", "missing", "dow"),
    "config without JSON": (replace("config.json", "{'a': 1"), "config.json", "not JSON", AGAIN),
    "config of wrong types": (
        config(hidden_size="many"),
        "config.json is not a config of llama",
        "Field 'hidden_size' expected int, got str",
        "correct it",
    ),
    "config without model_type": (config(model_type=None), "config.json", "`model_type`", "downl"),
    "unknown model_type": (
        config(model_type="llamma"),
        "expert0/config.json",
        "'llamma', which this version of transformers does not know",
        "correct it, or update transformers",
    ),
    "no architectures": (config(architectures=None), "config.json", "list of one name", "correct"),
    "tokenizer that is an LFS pointer": (
        replace("tokenizer.json", LFS),
        "tokenizer.json",
        PULL,
        "expert0",
    ),
    "index that is not JSON": (sharded(lambda f, i: "{weight"), INDEX, "is not JSON", AGAIN),
    "index without a map": (sharded(lambda f, i: "{}"), INDEX, "has no weight_map", AGAIN),
    "map to another folder": (
        sharded(lambda f, i: i["weight_map"].update({UP: "../base/model.safetensors"})),
        INDEX,
        "'../base/model.safetensors' for " + UP,
        AGAIN,
    ),
    "map to another shard": (
        sharded(lambda f, i: i["weight_map"].update({UP: SHARDS[1], "lm_head.weight": SHARDS[1]})),
        SHARDS[1],
        "lacks the tensor",
        "again",
    ),
    "lost shard": (sharded(lambda f, i: (f / SHARDS[1]).unlink()), SHARDS[1], "missing", "again"),
    "no folder": (remove, "there is no folder", "expert0", "correct the name"),
    "folder that is a file": (become_file, "there is no folder", "expert0", "correct the name"),
    "empty folder": (empty_folder, "expert0 holds no weights", "", "again"),
}


@pytest.mark.parametrize("case", DAMAGED)
def test_every_command_names_the_file_and_the_remedy(family, case, monkeypatch):
    change, *parts = DAMAGED[case]
    monkeypatch.chdir(family)
    change(family / "expert0")
    for command in commands(family):
        result = CliRunner().invoke(main, command)
        assert isinstance(result.exception, SystemExit), (command[0], result.exception)
        assert result.exit_code == 1
        for part in parts:
            assert part in result.output, command[0]
        assert "Traceback" not in result.output
    assert not list(family.rglob("out/**/*.safetensors"))
    assert not (family / "executed").exists()


def stray_link(folder: Path) -> None:
    (folder / "again").symlink_to(folder)
    (folder / "loop.safetensors").symlink_to("loop.safetensors")


def good_adapter(folder: Path) -> None:
    save_file({"a": torch.ones(2)}, folder / "adapter_model.safetensors")


BESIDE = {
    "shards and a damaged adapter": (
        sharded(lambda f, i: None),
        replace("adapter_model.safetensors", "junk"),
    ),
    "one file, an adapter and all kinds of strays": (
        good_adapter,
        replace("consolidated.safetensors", LFS),  # of another format
        replace("._model.safetensors", b"\0\5\26\7"),  # as macOS leaves it
        stray_link,
    ),
}


@pytest.mark.parametrize("case", BESIDE)
def test_what_lies_beside_good_weights_stops_nothing(family, case):
    for change in BESIDE[case]:
        change(family / "expert0")
    for command in commands(family, "base", "expert0", "expert1"):
        result = CliRunner().invoke(main, command)
        assert result.exit_code == 0, (command[0], result.output, result.exception)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ({}, "holds no adapter_config.json; give the folder"),
        ({"adapter_config.json": "{"}, "adapter_config.json is damaged: it is not JSON"),
        ({"adapter_config.json": "{}"}, "holds no weights of an adapter"),
        ({"adapter_config.json": "{}", "adapter_model.safetensors": LFS}, "git lfs pull"),
    ],
)
def test_adapters(tmp_path, content, message):
    for name, text in content.items():
        (tmp_path / name).write_text(text)
    with pytest.raises(DamagedFileError, match=message):
        check_adapter_folder(tmp_path)


def test_weight_files(family):
    assert [path.name for path in weight_files(family / "base")] == ["model.safetensors"]
    sharded(lambda f, i: None)(family / "base")
    save_file({"a": torch.ones(2)}, family / "base" / "adapter_model.safetensors")
    assert [path.name for path in weight_files(family / "base")] == list(SHARDS)


def test_names_of_folders(family, tmp_path):
    family = Path(shutil.move(family, tmp_path / "#x bra{ce} quo\"te it's * [list] a: b %20 ä"))
    for command in commands(family, "base", "expert0"):
        result = CliRunner().invoke(main, command)
        assert result.exit_code == 0, (command[0], result.output, result.exception)


def test_names_that_a_config_cannot_have(family, tmp_path):
    family = Path(shutil.move(family, tmp_path / "a+b"))
    for command in commands(family, "base", "expert0"):
        result = CliRunner().invoke(main, command)
        assert result.exit_code == 1
        assert f"the folder {family}/" in result.output
        assert "cannot be named in a config" in result.output
        assert "rename it" in result.output


@pytest.mark.parametrize("name", ["family/expert0", "../family/expert0"])
def test_relative_folders(family, monkeypatch, name):
    monkeypatch.chdir(family if name.startswith("..") else family.parent)
    lines = commands(family, "base", "expert0")
    for file in ("merge.yml", "train.yml"):
        text = (family / file).read_text().replace(str(family / "expert0"), name)
        (family / file).write_text(text)
    for command in lines:
        result = CliRunner().invoke(main, command)
        assert result.exit_code == 0, (command[0], result.output, result.exception)
        if command[0] == "check":
            assert ("write ./family/expert0" in result.output) == (not name.startswith("."))


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("nobody/nothing", "nobody/nothing is no folder"),
        ("a/b/c", "there is no folder a/b/c in "),
        ("~/none", "~ is not expanded"),
    ],
)
def test_relative_folders_that_are_not_there(family, monkeypatch, name, message):
    monkeypatch.chdir(family.parent)
    lines = commands(family, "base", "expert0")
    for file in ("merge.yml", "train.yml"):
        text = (family / file).read_text().replace(str(family / "expert0"), name)
        (family / file).write_text(text)
    for command in lines:
        result = CliRunner().invoke(main, command)
        assert isinstance(result.exception, SystemExit), (command[0], result.exception)
        assert message in result.output, command[0]
        assert "correct the name" in result.output
