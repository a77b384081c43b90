# SPDX-License-Identifier: Apache-2.0
"""Families that no test changes, and merges of settings."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from sharded import command, save_llamas, save_speakers, write_config


@pytest.fixture(scope="session")
def llamas(tmp_path_factory) -> list[str]:
    return save_llamas(tmp_path_factory.mktemp("llamas"))


@pytest.fixture(scope="session")
def speakers(tmp_path_factory) -> list[str]:
    return save_speakers(tmp_path_factory.mktemp("speakers"))


@pytest.fixture
def merge(tmp_path: Path) -> Callable[..., str]:
    """Merge by settings, into the folder `merged`; what the command says."""

    def run(settings: dict, *flags: object, out: str = "merged", fails: bool = False) -> str:
        config = write_config(tmp_path / "merge.yml", settings)
        return command(config, tmp_path / out, *flags, fails=fails)

    return run
