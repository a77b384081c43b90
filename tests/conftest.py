# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import os

os.environ["HF_HUB_OFFLINE"] = "1"  # before anything imports huggingface_hub
os.environ.setdefault("OMP_WAIT_POLICY", "passive")
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")

from collections.abc import Callable
from pathlib import Path

import click
import pytest
import torch
import yaml
from click.testing import CliRunner


@pytest.fixture
def rng() -> torch.Generator:
    return torch.Generator().manual_seed(0)


def _runner(command: click.Command, folder: Path) -> Callable[..., Path]:
    """Run one of mergekit's own commands, in this process to spare its start.

    The function returned gives the output folder; a failure raises what the command raised.
    """

    def run(config: dict, *flags: str, out: str = "merged") -> Path:
        path = folder / f"{out}.yml"
        path.write_text(yaml.safe_dump(config))
        target = folder / out
        arguments = [str(path), str(target), "--quiet", *flags]
        result = CliRunner().invoke(command, arguments, catch_exceptions=False)
        assert result.exit_code == 0, result.output
        return target

    return run


@pytest.fixture
def mergekit_yaml(tmp_path: Path) -> Callable[..., Path]:
    from mergekit.scripts.run_yaml import main

    return _runner(main, tmp_path)


@pytest.fixture
def mergekit_pytorch(tmp_path: Path) -> Callable[..., Path]:
    from mergekit.scripts.merge_raw_pytorch import main

    return _runner(main, tmp_path)


@pytest.fixture
def mergekit_multi(tmp_path: Path) -> Callable[[list[dict]], Path]:
    from mergekit.scripts.multimerge import main

    def run(configs: list[dict]) -> Path:
        path, out = tmp_path / "multi.yml", tmp_path / "merged"
        path.write_text(yaml.safe_dump_all(configs))
        arguments = [str(path), "-I", str(tmp_path / "between"), "--out-path", str(out), "--quiet"]
        result = CliRunner().invoke(main, arguments, catch_exceptions=False)
        assert result.exit_code == 0, result.output
        return out

    return run
