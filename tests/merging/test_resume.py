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
import yaml
from checkpoints import ace_config, fine_tuned, tiny_llama
from safetensors.torch import load_file
from sharded import (
    SHARDS,
    Killed,
    assert_same,
    begin,
    command,
    contents,
    finished,
    linear,
    refusal,
    save_llamas,
    save_speakers,
    write_config,
)

from mergekit_ace.merging.output import (
    LOCK_FILE,
    MANIFEST_FILE,
    SCRATCH_FOLDER,
    Manifest,
    OutputFolder,
)


@pytest.fixture
def family(tmp_path) -> list[str]:
    return save_llamas(tmp_path)


@pytest.fixture
def begun(tmp_path, family) -> tuple[Path, Path]:
    """A merge of which two shards are finished: its config, its directory."""
    config = write_config(tmp_path / "merge.yml", ace_config(family))
    begin(config, tmp_path / "merged")
    return config, tmp_path / "merged"


def whole(tmp_path: Path, config: Path, *flags: str) -> Path:
    """The same merge, not interrupted."""
    out = tmp_path / "whole" / "merged"
    command(config, out, *(flags or SHARDS))
    return out


def test_it_goes_on(tmp_path, begun):
    config, out = begun
    assert not (out / "config.json").exists()
    assert not list(out.glob("*.index.json"))
    before = finished(out)
    assert len(before) == 2
    text = command(config, out, *SHARDS, "--lazy-unpickle")  # a flag that changes nothing
    assert f"2 of {len(finished(out))} shards are finished and kept" in text
    assert f"{len(finished(out)) - 2} shards in" in text
    assert {name: finished(out)[name] for name in before} == before
    assert_same(whole(tmp_path, config), out)
    assert not (out / SCRATCH_FOLDER).exists()
    assert not (out / LOCK_FILE).exists()
    assert "shards in" not in command(config, out, *SHARDS)


def test_overwrite_begins_anew(begun, tmp_path):
    config, out = begun
    before = finished(out)
    (out / SCRATCH_FOLDER / "shard-left").mkdir()
    (out / "additional_chat_templates").mkdir()
    for name in (  # of a result that had them
        "tokenizer.json", "generation_config.json", "additional_chat_templates/tools.jinja",
    ):  # fmt: skip
        (out / name).write_text("{}")
    text = command(config, out, "--overwrite")
    assert "kept" not in text
    assert not [name for name in before if (out / name).exists()]
    assert_same(whole(tmp_path, config, "--quiet"), out)


def rewrite(path: Path, **changes) -> None:
    """Change a YAML or JSON file, which is YAML, too."""
    path.write_text(json.dumps(yaml.safe_load(path.read_text()) | changes))


def other_version(family, config):
    path = config.parent / "merged" / MANIFEST_FILE
    identity = json.loads(path.read_text())["identity"]
    rewrite(path, identity={**identity, "versions": {**identity["versions"], "torch": "0.1"}})


CHANGES = {
    "config.parameters": lambda family, config: rewrite(config, parameters={"epsilon": 0.1}),
    "flags.random_seed": lambda family, config: None,
    "base/config.json.1": lambda family, config: os.utime(f"{family[0]}/config.json", ns=(1, 1)),
    "expert1/model.safetensors": lambda family, config: (
        shutil.rmtree(family[2]),
        fine_tuned(tiny_llama(), seed=99).save_pretrained(family[2]),
    ),
    "versions.torch": other_version,
}


@pytest.mark.parametrize("what", CHANGES)
def test_what_changed_is_named(begun, family, what):
    config, out = begun
    CHANGES[what](family, config)
    before = contents(out)
    text = refusal(config, out, *SHARDS, "--random-seed", 7 if "seed" in what else 0)
    assert "cannot be resumed; changed since it was begun: " in text
    assert what in text
    assert contents(out) == before


@pytest.mark.parametrize("name", ["model.safetensors.index.json", "config.json"])
def test_a_kill_during_the_last_steps(tmp_path, begun, monkeypatch, name):
    config, out = begun
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
    assert_same(whole(tmp_path, config), out)


def test_a_joint_tokenizer_begins_anew(tmp_path):
    """And says so."""
    settings = ace_config(save_speakers(tmp_path), tokenizer={"source": "union"})
    config, out = write_config(tmp_path / "merge.yml", settings), tmp_path / "merged"
    begin(config, out)
    before = finished(out)
    text = command(config, out, *SHARDS)
    assert "a merge with a joint tokenizer (`source: union`) begins anew" in text
    assert before.items().isdisjoint(finished(out).items())
    assert_same(whole(tmp_path, config), out)


def lines_of(path: Path) -> list[str]:
    return [json.loads(line)["tensor"] for line in path.read_text().splitlines()]


def test_a_report_has_every_tensor(tmp_path, family):
    """It may lie beside a model, and hold the lines of another merge, which stay."""
    report = Path(family[0], "report.jsonl")
    settings = ace_config(family, parameters={"report": str(report)})
    config, out = write_config(tmp_path / "merge.yml", settings), tmp_path / "merged"
    reference = whole(tmp_path, config)
    every = lines_of(report)
    report.write_text('{"tensor": "of another merge"}\n')
    begin(config, out)
    done = sum(len(load_file(reference / name)) for name in list(finished(reference))[:2])
    assert lines_of(report) == ["of another merge", *every[:done]]
    command(config, out, *SHARDS)
    assert lines_of(report) == ["of another merge", *every]


def test_random_methods_draw_the_same(tmp_path, family):
    settings = linear(family[1:], merge_method="dare_ties", base_model=family[0])
    settings["parameters"] = {"density": 0.5}
    config, out = write_config(tmp_path / "merge.yml", settings), tmp_path / "merged"
    reference = whole(tmp_path, config)
    begin(config, out)
    command(config, out, *SHARDS)
    assert_same(reference, out)
    command(config, out, *SHARDS, "--random-seed", 1, "--overwrite")
    name = next(iter(finished(reference)))
    assert contents(reference)[name] != contents(out)[name]


# What a manifest says, and what lies beside it.


@pytest.fixture(scope="module")
def merged(tmp_path_factory) -> tuple[Path, Path]:
    """A config with a built tokenizer, and its result."""
    folder = tmp_path_factory.mktemp("merged")
    settings = ace_config(save_speakers(folder), tokenizer={"source": "base"})
    config = write_config(folder / "merge.yml", settings)
    return config, whole(folder, config)


@pytest.fixture
def out(merged, tmp_path) -> Path:
    """A copy of the result, to be changed."""
    return Path(shutil.copytree(merged[1], tmp_path / "merged"))


def change(out: Path, act) -> None:
    """Change the manifest; `act` gets its content, and the name of the first shard."""
    content = json.loads((out / MANIFEST_FILE).read_text())
    act(content["files"], min(finished(out)))
    (out / MANIFEST_FILE).write_text(json.dumps(content))


DAMAGES = {
    "a hash that is none": lambda files, first: files.update({first: "../../etc"}),
    "a file that leads out": lambda files, first: files.update({"../stolen": "0" * 64}),
    "a file that leads out later": lambda files, first: files.update({"a/../../stolen": "0" * 64}),
    "an absolute file": lambda files, first: files.update({"/stolen": "0" * 64}),
}


@pytest.mark.parametrize("damage", [*DAMAGES, "", "[" * 200_000, '{"format": 4}', '{"format": 1}'])
def test_a_damaged_manifest(merged, out, damage):
    if damage in DAMAGES:
        change(out, DAMAGES[damage])
    else:
        (out / MANIFEST_FILE).write_text(damage)
    before = contents(out.parent)
    text = refusal(merged[0], out, *SHARDS)
    assert f"{out / MANIFEST_FILE} is damaged, or another version's; --overwrite" in text
    assert contents(out.parent) == before


def flip(out: Path) -> None:
    """Change the last bit of the first shard."""
    file = out / min(finished(out))
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)


def remove(*names: str):
    return lambda out: [(out / name).unlink() for name in names]


SHARD_CHANGES = {
    "other bytes": flip,
    "gone": lambda out: (out / min(finished(out))).unlink(),
    "empty hash": lambda out: change(out, lambda files, first: files.update({first: ""})),
    "not listed": lambda out: change(out, lambda files, first: files.pop(first)),
}
OTHER_CHANGES = {
    "all files beside weights": remove("config.json", "tokenizer.json", "README.md"),
    "no index": remove("model.safetensors.index.json"),
    "damaged index": lambda out: (out / "model.safetensors.index.json").write_text("{}"),
    "unlisted config": lambda out: change(out, lambda files, first: files.pop("config.json")),
    "unknown file": lambda out: change(out, lambda files, first: files.update({"x": "0" * 64})),
}


@pytest.mark.parametrize("act", [*SHARD_CHANGES, *OTHER_CHANGES])
def test_what_is_not_what_it_was_is_made_again(merged, out, act):
    """And nothing else: what is planned counts, and not what the manifest calls complete."""
    config, reference = merged
    before = finished(out)
    (SHARD_CHANGES | OTHER_CHANGES)[act](out)
    text = command(config, out, *SHARDS)
    said = "is not what it was when it was finished" in text
    assert said == (act not in ("not listed", "unlisted config"))
    assert contents(out) == contents(reference)
    after = finished(out)
    expected = [min(before)] if act in SHARD_CHANGES else []
    assert [name for name in before if before[name] != after[name]] == expected
    assert Manifest.read(out) == Manifest.read(reference)


@pytest.mark.parametrize("repaired", [False, True])
def test_what_somebody_has_edited_stays(merged, out, repaired):
    config, reference = merged
    edited = json.loads((out / "config.json").read_text()) | {"use_cache": False}
    (out / "config.json").write_text(json.dumps(edited))
    (out / "README.md").write_text("My own words.\n")
    file = next(iter(finished(out)))
    if repaired:
        (out / file).unlink()
    for _ in range(2):
        text = command(config, out, *SHARDS)
        assert "config.json was edited after the merge, and stays; delete it" in text
        assert json.loads((out / "config.json").read_text()) == edited
        assert (out / "README.md").read_text() == "My own words.\n"
        assert (out / file).read_bytes() == (reference / file).read_bytes()
    (out / "README.md").unlink()
    command(config, out, *SHARDS)
    assert (out / "README.md").read_bytes() == (reference / "README.md").read_bytes()
