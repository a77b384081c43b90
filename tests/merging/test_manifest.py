# SPDX-License-Identifier: Apache-2.0
"""A manifest is not believed: what is damaged or foreign in it is refused, or made again."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from checkpoints import ace_config
from sharded import (
    SHARDS,
    command,
    contents,
    finished,
    refusal,
    save_speakers,
    shards_of,
    write_config,
)

from mergekit_ace.merging.manifest import MANIFEST_FILE, Manifest


@pytest.fixture(scope="module")
def merged(tmp_path_factory) -> tuple[Path, Path]:
    """A config with a built tokenizer, and its result."""
    folder = tmp_path_factory.mktemp("merged")
    paths = save_speakers(folder)
    report = {"report": str(folder / "report.jsonl")}
    settings = ace_config(paths, tokenizer={"source": "base"}, parameters=report)
    config = write_config(folder / "merge.yml", settings)
    command(config, folder / "whole" / "merged", *SHARDS)
    return config, folder / "whole" / "merged"


@pytest.fixture
def out(merged, tmp_path) -> Path:
    """A copy of the result, to be changed."""
    return Path(shutil.copytree(merged[1], tmp_path / "merged"))


def change(out: Path, act: Callable[[dict], object]) -> None:
    path = out / MANIFEST_FILE
    content = json.loads(path.read_text())
    act(content)
    path.write_text(json.dumps(content))


def first(content: dict) -> str:
    """The name of the first shard."""
    return min(name for name in content["files"] if name.endswith(".safetensors"))


DAMAGES = {
    "no files": lambda c: c.pop("files"),
    "a hash that is none": lambda c: c["files"].update({first(c): "../../etc"}),
    "a file that leads out": lambda c: c["files"].update({"../stolen": "0" * 64}),
    "an absolute file": lambda c: c["files"].update({"/stolen": "0" * 64}),
    "a size below 0": lambda c: c.update(reports={"report.jsonl": -1}),
    "complete, or not": lambda c: c.update(complete="yes"),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_damage(merged, out, damage):
    config, _ = merged
    change(out, DAMAGES[damage])
    before = contents(out.parent)
    text = refusal(config, out, *SHARDS)
    assert f"{out / MANIFEST_FILE} is damaged; --overwrite" in text
    assert contents(out.parent) == before


@pytest.mark.parametrize("text", ["", "{", "[]", "[" * 200_000, '{"format": 4}'])
def test_no_manifest_at_all(merged, out, text):
    (out / MANIFEST_FILE).write_text(text)
    assert "is damaged; --overwrite" in refusal(merged[0], out, *SHARDS)


def test_another_version(merged, out):
    change(out, lambda c: c.update(format=1, complete=False, tokenizer="0" * 64))
    text = refusal(merged[0], out, *SHARDS)
    assert "was written by another version of mergekit-ace" in text


def test_a_foreign_report(merged, out, tmp_path):
    victim = tmp_path / "notes.txt"
    victim.write_text('not JSON\n{"tensor": "model.norm.weight"}\n')
    before = victim.read_bytes()
    change(out, lambda c: c.update(reports={str(victim): 0}))
    (out / shards_of(out)[0]).unlink()
    text = refusal(merged[0], out, *SHARDS)
    assert "changed since it was begun: report. Undo" in text
    assert victim.read_bytes() == before


def nothing_was_written(content: dict) -> None:
    content["files"][first(content)] = ""


def other_hash(content: dict) -> None:
    content["files"][first(content)] = "0" * 64


@pytest.mark.parametrize("act", [nothing_was_written, other_hash])
@pytest.mark.parametrize("deleted", [False, True])
def test_an_entry_that_is_not_true(merged, out, act, deleted):
    """The shard is computed again, whatever lies under its name."""
    config, whole = merged
    file, before = shards_of(out)[0], finished(out)
    change(out, act)
    if deleted:
        (out / file).unlink()
    text = command(config, out, *SHARDS)
    assert f"{file} is not what it was" in text
    assert contents(out) == contents(whole)
    after = finished(out)
    assert [name for name in before if before[name] != after[name]] == [file]


def unlisted_shard(content: dict) -> None:
    del content["files"][first(content)]


def unlisted_config(content: dict) -> None:
    del content["files"]["config.json"]


def unknown_file(content: dict) -> None:
    content["files"]["unknown.json"] = "0" * 64


@pytest.mark.parametrize("act", [unlisted_shard, unlisted_config, unknown_file])
def test_a_list_of_files_that_is_not_true(merged, out, act):
    """What is planned counts, and not what the manifest calls complete."""
    config, whole = merged
    change(out, act)
    command(config, out, *SHARDS)
    assert contents(out) == contents(whole)
    assert Manifest.read(out).files.keys() == Manifest.read(whole).files.keys()
    assert "is complete: all" in command(config, out, *SHARDS)


@pytest.mark.parametrize(
    "name",
    ["config.json", "model.safetensors.index.json", "tokenizer.json", "README.md"],
)
def test_a_file_that_is_gone(merged, out, name):
    config, whole = merged
    assert name in Manifest.read(out).files
    before = finished(out)
    (out / name).unlink()
    text = command(config, out, *SHARDS)
    assert f"{name} is not what it was when it was finished: it is made again" in text
    assert contents(out) == contents(whole)
    assert finished(out) == before
    assert "is complete: all" in command(config, out, *SHARDS)


@pytest.mark.parametrize("repaired", [False, True])
def test_what_somebody_has_edited_stays(merged, out, repaired):
    config, whole = merged
    edited = json.loads((out / "config.json").read_text()) | {"use_cache": False}
    (out / "config.json").write_text(json.dumps(edited))
    (out / "README.md").write_text("My own words.\n")
    file = shards_of(out)[0]
    if repaired:
        (out / file).unlink()
    for _ in range(2):
        text = command(config, out, *SHARDS)
        assert "config.json was edited after the merge, and stays; delete it" in text
        assert json.loads((out / "config.json").read_text()) == edited
        assert (out / "README.md").read_text() == "My own words.\n"
        assert (out / file).read_bytes() == (whole / file).read_bytes()
    (out / "README.md").unlink()
    command(config, out, *SHARDS)
    assert (out / "README.md").read_bytes() == (whole / "README.md").read_bytes()
