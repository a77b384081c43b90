# SPDX-License-Identifier: Apache-2.0
"""The coefficient file: written, read, and refused."""

from __future__ import annotations

import os

import pytest
import torch
from coefficient_files import make_file
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from mergekit_ace.algebra.learner import LearnerConfig
from mergekit_ace.methods.coefficients import CoefficientFile, load_coefficients
from mergekit_ace.naming import FileError

NAMES = ["embed.weight", "layers.0.up.weight", "layers.1.up.weight", "norm.weight"]


@pytest.mark.parametrize("kind", ["shared", "concatenated", "direct"])
def test_what_is_saved_is_loaded(tmp_path, kind):
    learner, scores = LearnerConfig(input=kind, hidden=8), {"x": {"loss": 1.0}}
    file = make_file(NAMES, ["a", "b"], frozen=["head.weight"], scores=scores, learner=learner)
    file.save(tmp_path / "c.safetensors")
    again = CoefficientFile.load(tmp_path / "c.safetensors")
    assert again.contents == file.contents
    for name in ("coefficients", "statistics", "depths", "groups"):
        assert torch.equal(getattr(again, name), getattr(file, name))
    assert again.learner_state.keys() == file.learner_state.keys()
    predicted = again.learner(again.statistics, again.depths)
    assert torch.equal(predicted, file.learner(file.statistics, file.depths))
    assert not list(tmp_path.glob("*.partial"))


@pytest.mark.parametrize(
    ("metadata", "drop", "message"),
    [
        ({"version": "2"}, None, "of format version 1, but .* version: 2"),
        ({"format": "something"}, None, "not one of coefficients"),
        ({"contents": "{}"}, None, "damaged"),
        ({}, "coefficients", "damaged"),
    ],
)
def test_other_and_damaged_files_are_refused(tmp_path, metadata, drop, message):
    path = tmp_path / "c.safetensors"
    make_file(NAMES, ["a", "b"]).save(path)
    with safe_open(path, framework="pt") as file:
        known = file.metadata()
    tensors = {name: tensor for name, tensor in load_file(path).items() if name != drop}
    save_file(tensors, path, known | metadata)
    with pytest.raises(FileError, match=message):
        CoefficientFile.load(path)


def test_a_truncated_file_a_git_lfs_pointer_and_none_are_told(tmp_path):
    path = tmp_path / "c.safetensors"
    with pytest.raises(FileError, match="there is no coefficient file"):
        CoefficientFile.load(path)
    make_file(NAMES, ["a", "b"]).save(path)
    whole = path.read_bytes()
    pointer = b"version https://git-lfs.github.com/spec/v1\noid 0\n"
    for content, message in ((whole[:-10], "damaged"), (pointer, "git lfs pull")):
        path.write_bytes(content)
        with pytest.raises(FileError, match=message):
            CoefficientFile.load(path)


def test_a_file_is_read_once_until_it_changes(tmp_path):
    path = tmp_path / "c.safetensors"
    file = make_file(NAMES, ["a", "b"])
    file.save(path)
    first = load_coefficients(str(path))
    assert load_coefficients(str(path)) is first
    file.coefficients = file.coefficients + 1
    file.save(path)
    os.utime(path, ns=(1, 1))  # clocks of file systems may be slower than this test
    assert torch.equal(load_coefficients(str(path)).coefficients, file.coefficients)
