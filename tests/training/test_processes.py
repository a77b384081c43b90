# SPDX-License-Identifier: Apache-2.0
"""Data-parallel training, as a user starts it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import yaml
from families import llama_family, parsed

from mergekit_ace.coefficients.file import CoefficientFile
from mergekit_ace.training.run import run_training


def launch(config: dict, out: Path, processes: int) -> CoefficientFile:
    """torch's launcher: that of accelerate starts several processes on GPUs only."""
    path = out.with_suffix(".yml")
    path.write_text(yaml.safe_dump(config))
    command = [
        *(sys.executable, "-m", "torch.distributed.run", "--standalone"),
        *("--nproc-per-node", str(processes), "-m", "mergekit_ace.train", str(path), str(out)),
    ]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "ACCELERATE_USE_CPU": "true"}
    result = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert result.returncode == 0, result.stderr[-4000:]
    assert result.stdout.count("StatsMerging") == 1, "one process talks"
    return CoefficientFile.load(out / "coefficients.safetensors")


def test_two_processes_are_one_with_twice_the_batch(tmp_path):
    config = llama_family(tmp_path / "family", rows=23)
    config["training"] |= {"batch_size": 3, "epochs": 3}
    two = launch(config, tmp_path / "two", 2)
    config["training"]["batch_size"] = 6
    one = run_training(parsed(config), tmp_path / "one", quiet=True)
    torch.testing.assert_close(two.coefficients, one.coefficients, rtol=1e-5, atol=1e-5)
    assert one.coefficients.std() > 0.01
    for name, score in two.contents.scores.items():
        other = one.contents.scores[name]
        assert score["accuracy"] == pytest.approx(other["accuracy"], abs=1e-5)
        assert score["loss"] == pytest.approx(other["loss"], abs=1e-5)


def test_accumulated_gradients_are_one_with_twice_the_batch(tmp_path):
    config = llama_family(tmp_path / "family", rows=23)
    config["training"] |= {"batch_size": 3, "gradient_accumulation": 2}
    two = run_training(parsed(config), tmp_path / "two", quiet=True)
    config["training"] |= {"batch_size": 6, "gradient_accumulation": 1}
    one = run_training(parsed(config), tmp_path / "one", quiet=True)
    torch.testing.assert_close(two.coefficients, one.coefficients, rtol=1e-5, atol=1e-5)
