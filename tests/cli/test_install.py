# SPDX-License-Identifier: Apache-2.0
"""Installed as a user installs it, in fresh virtual environments.

They see the packages that we depend on by their path, so nothing is downloaded; our own package is
installed into each for real.
"""

from __future__ import annotations

import os
import re
import shutil
import site
import subprocess
import sys
import venv
from pathlib import Path

import pytest
import yaml
from checkpoints import ace_config, check_merge, save_family, tiny_llama
from transformers import LlamaForCausalLM

PROJECT = Path(__file__).resolve().parents[2]
OFFLINE = ["--no-build-isolation", "--no-deps", "--no-index"]
HOOKS = "import sys; print([f for f in sys.meta_path if 'Host' in repr(f)])"


def run(*command: str | Path, cwd: Path = Path("/"), **environment: str) -> tuple[str, str]:
    """Run a program that works; what it says on stdout and on stderr."""
    clean = {k: v for k, v in os.environ.items() if not k.startswith(("PYTHON", "MERGEKIT"))}
    options = {"capture_output": True, "text": True, "cwd": cwd, "env": clean | environment}
    result = subprocess.run([str(part) for part in command], **options)
    assert result.returncode == 0, f"{result.stdout}\n{result.stderr}"
    return result.stdout, result.stderr


@pytest.fixture(scope="module")
def artifacts(tmp_path_factory) -> dict[str, Path]:
    """A checkout, its wheel, and the wheel of its sdist."""
    folder = tmp_path_factory.mktemp("dist")
    copy = tmp_path_factory.mktemp("source") / "project"
    copy.mkdir()
    trained = shutil.ignore_patterns(
        "family", "family-*", "families", "merged", "learned*", "run-*", "__pycache__"
    )
    for name in ("mergekit_ace", "examples", "tests", ".ci", ".github"):
        shutil.copytree(PROJECT / name, copy / name, ignore=trained)
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(PROJECT / name, copy)
    run(sys.executable, "-m", "hatchling", "build", "-d", folder, "-t", "sdist", cwd=copy)
    (sdist,) = folder.glob("*.tar.gz")
    made = {"editable": copy}
    for name, source in (("wheel", copy), ("sdist", sdist)):
        wheel = [sys.executable, "-m", "pip", "wheel", "--quiet", *OFFLINE, source]
        run(*wheel, "-w", folder / name)
        (made[name],) = (folder / name).glob("*.whl")
    return made


def test_sdist_and_source_build_the_same_wheel(artifacts):
    assert artifacts["wheel"].read_bytes() == artifacts["sdist"].read_bytes()


@pytest.mark.parametrize("kind", ["wheel", "editable"])
def test_install_merge_and_uninstall(kind, artifacts, tmp_path):
    venv.create(tmp_path / "venv", with_pip=False, symlinks=True)
    python = tmp_path / "venv" / "bin" / "python"
    (packages,) = (tmp_path / "venv").glob("lib/python*/site-packages")
    (packages / "borrowed.pth").write_text("\n".join(site.getsitepackages()) + "\n")
    pristine = {*packages.rglob("*")}
    pip = [sys.executable, "-m", "pip", "--python", python, "--quiet"]
    flags = [*OFFLINE, "--editable"] if kind == "editable" else OFFLINE
    run(*pip, "install", *flags, artifacts[kind])

    paths, out = save_family(tiny_llama(), tmp_path), tmp_path / "merged"
    (tmp_path / "ace.yml").write_text(yaml.safe_dump(ace_config(paths)))
    merge = ["run_yaml", tmp_path / "ace.yml", out]
    if kind == "editable":
        merge = ["multimerge", tmp_path / "ace.yml", "-I", tmp_path / "steps", "--out-path", out]
    merge[0] = f"mergekit.scripts.{merge[0]}"
    assert "mergekit-ace: warning" not in run(python, "-m", *merge, HF_HUB_OFFLINE="1")[1]
    check_merge(LlamaForCausalLM, paths, out)

    def imported(**environment: str) -> set[str]:
        """Return the modules that a Python process imports that does nothing."""
        _, told = run(python, "-X", "importtime", "-c", "pass", **environment)
        return set(re.findall(r"import time:\s+\d+ \|\s+\d+ \|\s+(\S+)", told))

    at_start = imported()
    assert at_start - imported(MERGEKIT_ACE_AUTOLOAD="0") == {"mergekit_ace"}
    assert not {"torch", "mergekit", "typing", "importlib.util", "importlib.abc"} & at_start

    if kind == "editable":  # a checkout that has moved is one line at every start of Python
        source = artifacts["editable"].rename(tmp_path / "elsewhere")
        (line,) = run(python, "-c", "pass")[1].splitlines()
        assert run(python, "-c", "pass", MERGEKIT_ACE_AUTOLOAD="0")[1] == ""
        assert line.startswith("mergekit-ace: warning: not loaded: No module named 'mergekit_ace'")
        source.rename(artifacts["editable"])

    assert (packages / "mergekit_ace.pth").exists()
    run(python, "-c", "import mergekit_ace")  # leaves its bytecode
    run(*pip, "uninstall", "--yes", "mergekit-ace")
    assert {*packages.rglob("*")} == pristine
    assert run(python, "-c", HOOKS) == ("[]\n", "")
