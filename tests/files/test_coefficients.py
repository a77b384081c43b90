# SPDX-License-Identifier: Apache-2.0
"""The coefficient file: written, read, and refused."""

from __future__ import annotations

import pytest
from coefficient_files import make_file
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from mergekit_ace.methods.coefficients import CoefficientFile
from mergekit_ace.naming import FileError

NAMES = ["embed.weight", "layers.0.up.weight", "layers.1.up.weight", "norm.weight"]


def test_other_and_damaged_files_are_refused(tmp_path):
    path = tmp_path / "c.safetensors"
    with pytest.raises(FileError, match="there is no coefficient file"):
        CoefficientFile.load(path)
    make_file(NAMES, ["a", "b"]).save(path)
    whole, tensors = path.read_bytes(), load_file(path)
    with safe_open(path, framework="pt") as file:
        known = file.metadata()
    for metadata, lacking, message in (
        ({"version": "1"}, "", "of format version 2, but .* version: 1"),
        ({"format": "something"}, "", "not one of coefficients"),
        ({"contents": "{}"}, "", "damaged"),
        ({}, "coefficients", "damaged"),
    ):
        save_file({n: t for n, t in tensors.items() if n != lacking}, path, known | metadata)
        with pytest.raises(FileError, match=message):
            CoefficientFile.load(path)
    pointer = b"version https://git-lfs.github.com/spec/v1\noid 0\n"
    for content, message in ((whole[:-10], "damaged"), (pointer, "git lfs pull")):
        path.write_bytes(content)
        with pytest.raises(FileError, match=message):
            CoefficientFile.load(path)
