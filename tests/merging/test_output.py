# SPDX-License-Identifier: Apache-2.0
"""Reports have the lines of every shard once; nothing is written where a link leads."""

from __future__ import annotations

import os

import pytest
from sharded import command, linear, refusal, save_llamas, write_config

from mergekit_ace.files.model_files import MORE_TEMPLATES
from mergekit_ace.merging.manifest import MANIFEST_FILE
from mergekit_ace.merging.output import (
    LOCK_FILE,
    SCRATCH_FOLDER,
    append_lines,
    drop_lines,
)


def test_reports(tmp_path):
    path = str(tmp_path / "report.jsonl")
    drop_lines(path, 0, {"a"})  # there is none
    lines = tmp_path / "lines.jsonl"
    lines.write_text('{"tensor": "a"}\n')
    append_lines({path: str(lines)})
    size = os.path.getsize(path)
    lines.write_text('{"tensor": "a"}\n{"tensor": "b"}\n{"tens')
    append_lines({path: str(lines)})
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


@pytest.mark.parametrize("name", [SCRATCH_FOLDER, MORE_TEMPLATES])
@pytest.mark.parametrize("flags", [(), ("--overwrite",)])
def test_a_folder_that_leads_elsewhere(tmp_path, config, flags, name):
    victim, out = tmp_path / "victim", tmp_path / "merged"
    victim.mkdir()
    (victim / "one.jinja").write_text("kept")
    out.mkdir()
    (out / name).symlink_to(victim)
    assert f"{out / name} is a link" in refusal(config, out, *flags)
    assert (victim / "one.jinja").read_text() == "kept"


def test_files_that_lead_elsewhere(tmp_path, config):
    victim, out = tmp_path / "victim", tmp_path / "merged"
    victim.write_text("kept")
    out.mkdir()
    (out / LOCK_FILE).symlink_to(victim)
    assert f"{out / LOCK_FILE} is a link" in refusal(config, out)
    (out / LOCK_FILE).unlink()
    (out / f"{MANIFEST_FILE}.partial").symlink_to(victim)  # as a kill leaves such a file
    command(config, out)
    assert victim.read_text() == "kept"
