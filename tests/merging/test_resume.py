# SPDX-License-Identifier: Apache-2.0
"""A merge goes on where it was, or says why not; what is finished is not touched."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import pytest
import yaml
from checkpoints import ace_config, fine_tuned, tiny_llama
from sharded import (
    SHARDS,
    Killed,
    assert_same,
    command,
    contents,
    finished,
    linear,
    refusal,
    save_llamas,
    save_speakers,
    shards_of,
    stop_at,
    tensors_of,
    write_config,
)

from mergekit_ace.merging.manifest import MANIFEST_FILE, Manifest
from mergekit_ace.merging.output import LOCK_FILE, SCRATCH_FOLDER, OutputFolder


@pytest.fixture
def family(tmp_path) -> list[str]:
    return save_llamas(tmp_path)


@pytest.fixture
def begun(tmp_path, family, monkeypatch):
    """A merge of which two shards are finished: its config, its directory."""
    config = write_config(tmp_path / "merge.yml", ace_config(family))
    return begin(config, tmp_path / "merged", monkeypatch)


def begin(config: Path, out: Path, monkeypatch) -> tuple[Path, Path]:
    """Compute two shards of a merge."""
    with monkeypatch.context() as patch:
        stop_at(patch, 2)
        with pytest.raises(Killed):
            command(config, out, *SHARDS)
    return config, out


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
    text = command(config, out, *SHARDS)
    assert "is complete: all" in command(config, out, *SHARDS)
    count = len(shards_of(out))
    assert f"2 of {count} shards are finished and kept" in text
    assert f"{count - 2} shards in" in text
    assert {name: finished(out)[name] for name in before} == before
    assert_same(whole(tmp_path, config), out)
    assert not (out / SCRATCH_FOLDER).exists()
    assert not (out / LOCK_FILE).exists()


def test_overwrite_begins_anew(begun, tmp_path):
    config, out = begun
    before = finished(out)
    (out / SCRATCH_FOLDER / "shard-00001-left").mkdir()
    (out / "additional_chat_templates").mkdir()
    for name in (  # of a result that had them
        "tokenizer.json", "generation_config.json", "additional_chat_templates/tools.jinja",
    ):  # fmt: skip
        (out / name).write_text("{}")
    text = command(config, out, "--overwrite")
    assert "kept" not in text
    assert not [name for name in before if (out / name).exists()]
    assert_same(whole(tmp_path, config, "--quiet"), out)


def test_an_input_is_not_overwritten(tmp_path, family):
    """Whatever is asked for: the model that is merged stays."""
    config = write_config(tmp_path / "merge.yml", linear(family))
    expert = Path(family[-1])
    before = contents(expert)
    assert "write elsewhere" in refusal(config, expert, "--overwrite")
    assert contents(expert) == before


@pytest.mark.parametrize("name", ["config.json", "model.safetensors"])
def test_a_model_is_not_overwritten(tmp_path, family, name):
    config = write_config(tmp_path / "merge.yml", ace_config(family))
    out = tmp_path / "merged"
    out.mkdir()
    (out / name).write_text("{}")
    assert f"holds a model already ({name})" in refusal(config, out)
    assert contents(out) == {name: b"{}"}
    command(config, out, *SHARDS, "--overwrite")
    assert_same(whole(tmp_path, config), out)


@pytest.mark.parametrize("flags", [(), ("--resume",), ("--overwrite",)])
def test_a_folder_of_other_files_is_refused(tmp_path, family, monkeypatch, flags):
    """Such as that in which the command is given."""
    config = write_config(tmp_path / "merge.yml", ace_config(family))
    (tmp_path / "README.md").write_text("By hand.")
    before = contents(tmp_path)
    monkeypatch.chdir(tmp_path)
    text = refusal(config, ".", *flags)
    assert "holds files that are none of a merge (README.md, base, " in text
    assert "choose a directory that is new or empty" in text
    assert contents(tmp_path) == before


def change_config(family, config):
    content = yaml.safe_load(config.read_text())
    config.write_text(yaml.safe_dump({**content, "parameters": {"epsilon": 0.1}}))
    return (), "config.parameters"


def change_flag(family, config):
    return ("--random-seed", "7"), "flags.random_seed"


def change_time(family, config):
    path = next(Path(family[1]).glob("*.safetensors"))
    os.utime(path, ns=(1, 1))
    return (), f"inputs.{family[1]}.{path.name}.1"


def change_model(family, config):
    shutil.rmtree(family[2])
    fine_tuned(tiny_llama(), seed=99).save_pretrained(family[2])
    return (), f"inputs.{family[2]}.model"


def change_version(family, config):
    path = config.parent / "merged" / MANIFEST_FILE
    content = json.loads(path.read_text())
    content["identity"]["versions"]["torch"] = "0.1"
    path.write_text(json.dumps(content))
    return (), "versions.torch"


@pytest.mark.parametrize(
    "change",
    [change_config, change_flag, change_time, change_model, change_version],
)
def test_what_changed_is_named(tmp_path, begun, family, change):
    config, out = begun
    flags, expected = change(family, config)
    before = contents(out)
    text = refusal(config, out, *SHARDS, *flags)
    assert "cannot be resumed; changed since it was begun: " in text
    assert expected in text
    assert contents(out) == before
    command(config, out, *SHARDS, "--overwrite", *flags)
    assert Manifest.read(out).complete


def test_flags_that_change_nothing(begun):
    config, out = begun
    command(config, out, *SHARDS, "--quiet", "--lazy-unpickle")


@pytest.mark.parametrize("complete", [False, True])
def test_a_shard_that_was_changed_is_computed_again(tmp_path, begun, complete):
    config, out = begun
    if complete:
        command(config, out, *SHARDS)
    before = finished(out)
    first, second = sorted(before)[:2]
    content = bytearray((out / first).read_bytes())
    content[-1] ^= 1
    (out / first).write_bytes(content)
    text = command(config, out, *SHARDS)
    assert f"{first} is not what it was when it was finished" in text
    assert finished(out)[second] == before[second]
    assert_same(whole(tmp_path, config), out)


def test_a_kill_during_the_last_steps(tmp_path, begun, monkeypatch):
    config, out = begun
    whole(tmp_path, config)
    original = OutputFolder.move_in
    for name in ("mergekit_config.yml", "model.safetensors.index.json", "config.json"):

        def move_in(self, source, to, name=name):
            if to == name:
                raise Killed
            original(self, source, to)

        monkeypatch.setattr(OutputFolder, "move_in", move_in)
        with pytest.raises(Killed):
            command(config, out, *SHARDS)
        assert not (out / "config.json").exists()
        assert not Manifest.read(out).complete
    monkeypatch.setattr(OutputFolder, "move_in", original)
    command(config, out, *SHARDS)
    assert_same(tmp_path / "whole" / "merged", out)


def test_a_joint_tokenizer_begins_anew(tmp_path, monkeypatch):
    """And says so; nothing in the directory is taken for a tokenizer."""
    paths = save_speakers(tmp_path)
    config = write_config(tmp_path / "merge.yml", ace_config(paths, tokenizer={"source": "union"}))
    _, out = begin(config, tmp_path / "merged", monkeypatch)
    before, stolen = finished(out), tmp_path / "stolen"
    planted = out / SCRATCH_FOLDER / "tokenizer.pickle"
    planted.write_bytes(f"cos\nsystem\n(S'touch {stolen}'\ntR.".encode())
    text = command(config, out, *SHARDS)
    assert "a merge with a joint tokenizer (`source: union`) begins anew" in text
    assert not stolen.exists()
    assert before.items().isdisjoint(finished(out).items())
    assert_same(whole(tmp_path, config), out)


def lines_of(path: Path) -> list[str]:
    return [json.loads(line)["tensor"] for line in path.read_text().splitlines()]


def test_a_report_has_every_tensor_once(tmp_path, family, monkeypatch):
    report = tmp_path / "report.jsonl"
    settings = ace_config(family, parameters={"report": str(report)})
    config = write_config(tmp_path / "merge.yml", settings)
    reference = whole(tmp_path, config)
    files, every = shards_of(reference), lines_of(report)
    report.write_text('{"tensor": "of another merge"}\n')
    out = tmp_path / "merged"
    begin(config, out, monkeypatch)
    done = len(tensors_of(*(reference / file for file in files[:2])))
    assert lines_of(report) == ["of another merge", *every[:done]]
    # killed after the lines of the third shard were written, and before its entry
    third = tensors_of(reference / files[2])
    with open(report, "a") as file:
        file.write("".join(json.dumps({"tensor": name}) + "\n" for name in third) + '{"tens')
    command(config, out, *SHARDS)
    assert lines_of(report) == ["of another merge", *every]
    assert all("seconds" in line for line in report.read_text().splitlines()[1:])


def test_a_report_beside_a_model(tmp_path, family):
    """It grows with the merge, and is none of the files that are merged."""
    report = Path(family[0], "report.jsonl")
    settings = ace_config(family, parameters={"report": str(report)})
    config = write_config(tmp_path / "merge.yml", settings)
    command(config, tmp_path / "merged", *SHARDS)
    assert "is complete: all" in command(config, tmp_path / "merged", *SHARDS)


def test_random_methods_draw_the_same(tmp_path, family, monkeypatch):
    settings = linear(family[1:], merge_method="dare_ties", base_model=family[0])
    settings["parameters"] = {"density": 0.5}
    config = write_config(tmp_path / "merge.yml", settings)
    reference = whole(tmp_path, config)
    begin(config, tmp_path / "merged", monkeypatch)
    command(config, tmp_path / "merged", *SHARDS)
    assert_same(reference, tmp_path / "merged")
    shutil.rmtree(tmp_path / "merged")
    command(config, tmp_path / "merged", *SHARDS, "--random-seed", 1)
    name = shards_of(reference)[0]
    assert contents(reference)[name] != contents(tmp_path / "merged")[name]
