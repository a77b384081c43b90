# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from checkpoints import save_family, tiny_llama


@pytest.fixture(scope="session")
def family(tmp_path_factory) -> Path:
    """A base and two experts, which nothing changes: mistakes are made in copies."""
    folder = tmp_path_factory.mktemp("family")
    save_family(tiny_llama(), folder)
    return folder


@pytest.fixture
def paths(family, here) -> list[str]:
    """Copies of the family in the present folder."""
    shutil.copytree(family, here, dirs_exist_ok=True)
    return ["./base", "./expert0", "./expert1"]
