# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import os

os.environ["HF_HUB_OFFLINE"] = "1"  # before anything imports huggingface_hub
os.environ.setdefault("OMP_WAIT_POLICY", "passive")
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import yaml


@pytest.fixture
def rng() -> torch.Generator:
    return torch.Generator().manual_seed(0)


@pytest.fixture
def mergekit_yaml(tmp_path: Path) -> Callable[..., Path]:
    """Run mergekit's own command, in this process to spare its start; the output folder.

    A failure raises what the command raised.
    """
    from click.testing import CliRunner
    from mergekit.scripts.run_yaml import main

    def run(config: dict, *flags: str, out: str = "merged") -> Path:
        path = tmp_path / f"{out}.yml"
        path.write_text(yaml.safe_dump(config))
        target = tmp_path / out
        result = CliRunner().invoke(
            main, [str(path), str(target), "--quiet", *flags], catch_exceptions=False
        )
        assert result.exit_code == 0, result.output
        return target

    return run
