# SPDX-License-Identifier: Apache-2.0
"""Shapes from headers; the errors themselves are tested through mergekit in test_errors."""

from __future__ import annotations

import os

import pytest
import torch
from mergekit.common import ModelReference
from safetensors.torch import save_file

from mergekit_ace.methods.architecture import check_shapes


@pytest.fixture
def files(tmp_path) -> list[ModelReference]:
    models = []
    for n in range(2):
        path = tmp_path / f"{n}.safetensors"
        save_file({"w": torch.zeros(3, 4)}, path)
        models.append(ModelReference.parse(str(path)))
    return models


def test_a_file_that_changed_is_read_again(files):
    check_shapes("w", files[1:], files[0])
    path = files[1].model.path
    save_file({"w": torch.zeros(3, 5)}, path)
    os.utime(path, ns=(1, 1))
    with pytest.raises(RuntimeError, match=r"shape \(3, 5\) in .*1.safetensors, but \(3, 4\)"):
        check_shapes("w", files[1:], files[0])


def test_a_tensor_without_axes(files):
    save_file({"w": torch.tensor(1.0)}, files[1].model.path)
    with pytest.raises(RuntimeError, match=r"shape \(\) in .*1.safetensors, but \(3, 4\)"):
        check_shapes("w", files[1:], files[0])


@pytest.mark.parametrize("modern", [True, False])
def test_pickled_files(files, tmp_path, modern):
    pickled = tmp_path / "model.bin"
    content = {"w": torch.zeros(9), "step": 3}
    torch.save(content, pickled, _use_new_zipfile_serialization=modern)
    with pytest.raises(RuntimeError, match=r"shape \(9,\) in .*model.bin"):
        check_shapes("w", [ModelReference.parse(str(pickled))], files[0])


def test_what_has_no_header_is_left_to_mergekit(files, tmp_path):
    (tmp_path / "none.bin").write_bytes(b"none")
    check_shapes("w", [ModelReference.parse(str(tmp_path / "none.bin"))], files[0])
    check_shapes("w", [ModelReference.parse(str(tmp_path / "missing"))], files[0])
    check_shapes("w", [1, 2], 0)
