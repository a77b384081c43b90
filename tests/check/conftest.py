# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

from pathlib import Path

import pytest
from checkpoints import save_family, tiny_llama


@pytest.fixture(scope="session")
def family(tmp_path_factory) -> Path:
    """A base and two experts, which nothing changes: mistakes are made in copies."""
    folder = tmp_path_factory.mktemp("family")
    save_family(tiny_llama(), folder)
    return folder
