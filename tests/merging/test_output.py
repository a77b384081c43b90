# SPDX-License-Identifier: Apache-2.0
"""Reports have the lines of every shard once; nothing is written where a link leads."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from sharded import command, linear, refusal, save_llamas, write_config

from mergekit_ace.files.model_files import MORE_TEMPLATES
from mergekit_ace.merging.job import MergeError
from mergekit_ace.merging.manifest import MANIFEST_FILE
from mergekit_ace.merging.output import (
    LOCK_FILE,
    SCRATCH_FOLDER,
    OutputFolder,
    append_lines,
    drop_lines,
)


def test_reports(tmp_path):
    path = str(tmp_path / "report.jsonl")
    drop_lines(path, 0, {"a"})  # there is none
    append_lines({path: '{"tensor": "a"}\n'})
    size = os.path.getsize(path)
    append_lines({path: '{"tensor": "a"}\n{"tensor": "b"}\n{"tens'})
    drop_lines(path, size, {"a"})
    assert (tmp_path / "report.jsonl").read_text() == '{"tensor": "a"}\n{"tensor": "b"}\n'


def test_lines_of_others_stay(tmp_path):
    """Only what a merge has written is dropped again, and what a kill has cut off."""
    path = tmp_path / "notes.txt"
    path.write_text('By hand.\n{"tensor": "a"}\n[1]\n{"cut": ')
    drop_lines(str(path), 0, {"a"})
    assert path.read_text() == "By hand.\n[1]\n"


@pytest.fixture
def config(tmp_path):
    return write_config(tmp_path / "merge.yml", linear(save_llamas(tmp_path)))


@pytest.mark.parametrize("flag", ["--resume", "--overwrite"])
def test_a_scratch_folder_that_leads_elsewhere(tmp_path, config, flag):
    victim, out = tmp_path / "victim", tmp_path / "merged"
    (victim / "photos").mkdir(parents=True)
    (victim / "photos" / "one").write_text("kept")
    out.mkdir()
    (out / SCRATCH_FOLDER).symlink_to(victim)
    assert f"{out / SCRATCH_FOLDER} is a link" in refusal(config, out, flag)
    assert (victim / "photos" / "one").read_text() == "kept"


def test_a_file_in_the_place_of_the_scratch_folder(tmp_path, config):
    out = tmp_path / "merged"
    out.mkdir()
    (out / SCRATCH_FOLDER).write_text("")
    assert f"{out / SCRATCH_FOLDER} is no folder; remove it" in refusal(config, out)


@pytest.mark.parametrize("name", [LOCK_FILE, f"{MANIFEST_FILE}.partial"])
def test_files_that_lead_elsewhere(tmp_path, config, name):
    victim, out = tmp_path / "victim", tmp_path / "merged"
    victim.write_text("kept")
    out.mkdir()
    (out / name).symlink_to(victim)
    if name == LOCK_FILE:
        assert f"{out / name} is a link" in refusal(config, out)
        (out / name).unlink()
    command(config, out)
    assert victim.read_text() == "kept"


def test_a_subfolder_that_leads_elsewhere(tmp_path):
    (tmp_path / "victim").mkdir()
    (tmp_path / "merged").mkdir()
    (tmp_path / "merged" / "templates").symlink_to(tmp_path / "victim")
    folder = OutputFolder(str(tmp_path / "merged"))
    folder.make_subfolder(Path("own"))
    with pytest.raises(MergeError, match="leads out of"):
        folder.make_subfolder(Path("templates"))


def test_templates_that_lead_elsewhere(tmp_path, config):
    """--overwrite removes those of an earlier result, and nothing where a link leads."""
    victim, out = tmp_path / "victim", tmp_path / "merged"
    victim.mkdir()
    (victim / "tools.jinja").write_text("kept")
    out.mkdir()
    (out / MORE_TEMPLATES).symlink_to(victim)
    command(config, out, "--overwrite")
    assert (victim / "tools.jinja").read_text() == "kept"
