# SPDX-License-Identifier: Apache-2.0
"""A merge goes on where it was, or says why not; what is finished is not touched.

A manifest is not believed: what is damaged or foreign in it is refused, or made again.
"""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import pytest
from checkpoints import ace_config, configure, fine_tuned, tiny_llama
from families import Killed
from sharded import (
    SHARDS,
    assert_same,
    begin,
    command,
    contents,
    finished,
    linear,
    refusal,
    save_llamas,
    write_config,
)

from mergekit_ace.merging.output import (
    LOCK_FILE,
    MANIFEST_FILE,
    SCRATCH_FOLDER,
    Manifest,
    OutputFolder,
)

INDEX = "model.safetensors.index.json"


@pytest.fixture(scope="module")
def merged(tmp_path_factory, speakers) -> tuple[Path, Path]:
    """A config with a built tokenizer, and its result."""
    folder = tmp_path_factory.mktemp("merged")
    settings = ace_config(speakers, tokenizer={"source": "base"})
    config = write_config(folder / "merge.yml", settings)
    return config, whole(folder, config)


@pytest.fixture
def begun(tmp_path, merged) -> Path:
    """The same merge with two shards finished, to be changed."""
    begin(merged[0], tmp_path / "merged")
    return tmp_path / "merged"


@pytest.fixture
def out(tmp_path, merged) -> Path:
    """A copy of the result, to be changed."""
    return Path(shutil.copytree(merged[1], tmp_path / "merged"))


def whole(tmp_path: Path, config: Path, *flags: str) -> Path:
    """The same merge, not interrupted."""
    out = tmp_path / "whole" / "merged"
    command(config, out, *(flags or SHARDS))
    return out


def test_it_goes_on(merged, begun):
    (config, reference), out = merged, begun
    assert not (out / "config.json").exists()
    assert not (out / INDEX).exists()
    before = finished(out)
    assert len(before) == 2
    text = command(config, out, *SHARDS, "--lazy-unpickle")  # a flag that changes nothing
    assert f"2 of {len(finished(out))} shards are finished and kept" in text
    assert {name: finished(out)[name] for name in before} == before
    assert_same(reference, out)
    assert not (out / SCRATCH_FOLDER).exists()
    assert not (out / LOCK_FILE).exists()
    assert "shards in" not in command(config, out, *SHARDS)


def test_overwrite_begins_anew(merged, begun, tmp_path):
    config, out = merged[0], begun
    before = finished(out)
    (out / SCRATCH_FOLDER / "shard-left").mkdir(parents=True)
    (out / "additional_chat_templates").mkdir()
    for name in ("generation_config.json", "additional_chat_templates/tools.jinja"):
        (out / name).write_text("{}")  # of a result that had them
    text = command(config, out, "--overwrite")
    assert "kept" not in text
    assert not [name for name in before if (out / name).exists()]
    assert_same(whole(tmp_path, config, "--quiet"), out)


def test_what_changed_is_named(tmp_path):
    """And nothing is touched."""
    base, _, expert = save_llamas(tmp_path)
    config = write_config(tmp_path / "merge.yml", ace_config([base, expert]))
    out = tmp_path / "merged"
    begin(config, out)
    identity = json.loads((out / MANIFEST_FILE).read_text())["identity"]
    os.utime(f"{base}/config.json", ns=(1, 1))
    shutil.rmtree(expert)
    fine_tuned(tiny_llama(), seed=99).save_pretrained(expert)
    write_config(config, ace_config([base, expert], parameters={"epsilon": 0.1}))
    versions = {**identity["versions"], "torch": "0.1"}
    configure(out, MANIFEST_FILE, identity={**identity, "versions": versions})
    before = contents(out)
    text = refusal(config, out, *SHARDS, "--random-seed", 7)
    assert "cannot be resumed; changed since then: " in text
    for name in (
        "config.parameters", "flags.random_seed", "versions.torch", "base/config.json.1",
        "expert1/model.safetensors",
    ):  # fmt: skip
        assert name in text
    assert contents(out) == before


@pytest.mark.parametrize("name", [INDEX, "config.json"])
def test_a_kill_during_the_last_steps(merged, begun, monkeypatch, name):
    (config, reference), out = merged, begun
    original = OutputFolder.move_in

    def move_in(self, source, to):
        if to == name:
            raise Killed
        original(self, source, to)

    monkeypatch.setattr(OutputFolder, "move_in", move_in)
    with pytest.raises(Killed):
        command(config, out, *SHARDS)
    assert not (out / "config.json").exists()
    assert not Manifest.read(out).complete
    monkeypatch.undo()
    command(config, out, *SHARDS)
    assert_same(reference, out)


def test_a_joint_tokenizer_begins_anew(tmp_path, speakers):
    """And says so; what somebody has edited stays."""
    settings = ace_config(speakers, tokenizer={"source": "union"})
    config, out = write_config(tmp_path / "merge.yml", settings), tmp_path / "merged"
    begin(config, out)
    before = finished(out)
    text = command(config, out, *SHARDS)
    (out / "README.md").write_text("By hand.")
    (out / "config.json").unlink()
    command(config, out, *SHARDS)
    assert (out / "README.md").read_text() == "By hand."
    (out / "README.md").unlink()
    command(config, out, *SHARDS)
    assert "a merge with a joint tokenizer (`source: union`) begins anew" in text
    assert before.items().isdisjoint(finished(out).items())
    assert_same(whole(tmp_path, config), out)


def test_random_methods_draw_the_same(tmp_path, llamas):
    settings = linear(llamas[1:], merge_method="dare_ties", base_model=llamas[0])
    settings["parameters"] = {"density": 0.5}
    config, out = write_config(tmp_path / "merge.yml", settings), tmp_path / "merged"
    reference = whole(tmp_path, config)
    begin(config, out)
    command(config, out, *SHARDS)
    assert_same(reference, out)
    command(config, out, *SHARDS, "--random-seed", 1, "--overwrite")
    assert contents(reference) != contents(out)


# What a manifest says, and what lies beside it.


def enter(out: Path, **files: str | None) -> None:
    """Change what a manifest says of files; None: they are not in it."""
    named = json.loads((out / MANIFEST_FILE).read_text())["files"] | files
    named = {name: digest for name, digest in named.items() if digest is not None}
    configure(out, MANIFEST_FILE, files=named)


@pytest.mark.parametrize("damage", ["", "[" * 200_000, '{"format": 4}', '{"format": 1}'])
def test_a_damaged_manifest(merged, out, damage):
    """Or one of another version."""
    (out / MANIFEST_FILE).write_text(damage)
    before = contents(out.parent)
    text = refusal(merged[0], out, *SHARDS)
    assert f"{out / MANIFEST_FILE} is damaged, or another version's; --overwrite" in text
    assert contents(out.parent) == before


def test_what_is_not_what_it_was_is_made_again(merged, out):
    """And no other shard: what is planned counts, and not what the manifest calls complete.

    Names of files elsewhere lead to nothing.
    """
    config, reference = merged
    before = finished(out)
    flipped, gone, empty, unlisted = lost = list(before)[:4]
    content = bytearray((out / flipped).read_bytes())
    content[-1] ^= 1  # the last bit
    (out / flipped).write_bytes(content)
    for name in (gone, "tokenizer.json", "README.md", "config.json"):
        (out / name).unlink()
    (out / INDEX).write_text("{}")
    (out.parent / "stolen").write_text("")
    no_file = dict.fromkeys(["a/../../stolen", "../stolen", "/stolen", "x"], "0" * 64)
    enter(out, **no_file, **{empty: "", unlisted: None, "config.json": None})
    text = command(config, out, *SHARDS)
    for name in (*lost, INDEX):
        said = f"{name} is not what it was when it was finished: it is made again"
        assert (said in text) == (name != unlisted)
    after = finished(out)
    assert [name for name in before if before[name] != after[name]] == lost
    assert contents(out) == contents(reference)
    assert Manifest.read(out) == Manifest.read(reference)


def test_what_somebody_has_edited_stays(merged, out):
    """Where a shard is made again, too."""
    config, reference = merged
    configure(out, use_cache=False)
    edited = (out / "config.json").read_text()
    (out / "README.md").write_text("My own words.\n")
    file = next(iter(finished(out)))
    for _ in range(2):
        (out / file).unlink()
        text = command(config, out, *SHARDS)
        assert "config.json was edited after the merge, and stays; delete it" in text
        assert (out / "config.json").read_text() == edited
        assert (out / "README.md").read_text() == "My own words.\n"
        assert (out / file).read_bytes() == (reference / file).read_bytes()
    (out / "README.md").unlink()
    command(config, out, *SHARDS)
    assert (out / "README.md").read_bytes() == (reference / "README.md").read_bytes()
