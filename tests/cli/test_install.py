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
# How a user installs us, and what each merges with; the sdist builds the same wheel.
PROGRAMS = {"wheel": "run_yaml", "editable": "multimerge"}
OFFLINE = ["--no-build-isolation", "--no-deps", "--no-index"]


def run(*command: str | Path, **environment: str) -> subprocess.CompletedProcess[str]:
    clean = {k: v for k, v in os.environ.items() if not k.startswith(("PYTHON", "MERGEKIT"))}
    result = subprocess.run(
        [str(part) for part in command],
        capture_output=True,
        text=True,
        cwd="/",
        env=clean | environment,
    )
    assert result.returncode == 0, f"{result.stdout}\n{result.stderr}"
    return result


class Environment:
    """A virtual environment that borrows our dependencies."""

    def __init__(self, folder: Path):
        venv.create(folder, with_pip=False, symlinks=True)
        self.python = folder / "bin" / "python"
        (self.packages,) = folder.glob("lib/python*/site-packages")
        borrowed = "\n".join(site.getsitepackages())
        (self.packages / "borrowed.pth").write_text(borrowed + "\n")
        self.pristine = self.files()

    def files(self) -> set[str]:
        return {str(path.relative_to(self.packages)) for path in self.packages.rglob("*")}

    def pip(self, *arguments: str | Path) -> None:
        run(sys.executable, "-m", "pip", "--python", self.python, "--quiet", *arguments)

    def run(self, code: str, *flags: str, **environment: str) -> subprocess.CompletedProcess[str]:
        return run(self.python, *flags, "-c", code, **environment)

    def modules_at_start(self, **variables: str) -> set[str]:
        """Return the modules that a Python process imports that does nothing."""
        result = self.run("pass", "-X", "importtime", **variables)
        return set(re.findall(r"import time:\s+\d+ \|\s+\d+ \|\s+(\S+)", result.stderr))


@pytest.fixture(scope="module")
def artifacts(tmp_path_factory) -> dict[str, Path]:
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
    build = [sys.executable, "-m", "hatchling", "build", "-d", folder]
    result = subprocess.run([*build, "-t", "sdist"], cwd=copy, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    (sdist,) = folder.glob("*.tar.gz")
    made = {"editable": copy}
    for name, source in (("wheel", copy), ("sdist", sdist)):
        wheel = [sys.executable, "-m", "pip", "wheel", "--quiet", *OFFLINE, source]
        run(*wheel, "-w", folder / name)
        (made[name],) = (folder / name).glob("*.whl")
    return made


@pytest.fixture(scope="module", params=PROGRAMS)
def kind(request) -> str:
    """How we are installed: the tests run in their order for one, and then for the other."""
    return request.param


@pytest.fixture(scope="module")
def environment(kind, artifacts, tmp_path_factory) -> Environment:
    made = Environment(tmp_path_factory.mktemp(kind) / "venv")
    made.pip("install", *OFFLINE, *(["--editable"] if kind == "editable" else []), artifacts[kind])
    return made


def test_mergekit_in_a_fresh_process(environment, kind, tmp_path):
    paths, out, program = save_family(tiny_llama(), tmp_path), tmp_path / "merged", PROGRAMS[kind]
    (tmp_path / "ace.yml").write_text(yaml.safe_dump(ace_config(paths)))
    more = ["-I", tmp_path / "between", "--out-path"] if program == "multimerge" else []
    command = ["-m", f"mergekit.scripts.{program}", tmp_path / "ace.yml", *more, out]
    said = run(environment.python, *command, HF_HUB_OFFLINE="1").stderr
    assert "mergekit-ace: warning" not in said
    check_merge(LlamaForCausalLM, paths, out)


def test_start_up_loads_one_small_module(environment):
    without = environment.modules_at_start(MERGEKIT_ACE_AUTOLOAD="0")
    with_us = environment.modules_at_start()
    assert with_us - without == {"mergekit_ace"}
    assert not {"torch", "mergekit", "typing", "importlib.util", "importlib.abc"} & with_us


def test_a_moved_checkout_is_one_line(environment, kind, artifacts, tmp_path):
    """An editable install whose source is gone: no traceback at every start of Python."""
    if kind != "editable":
        pytest.skip("a wheel needs no checkout")
    source = artifacts["editable"].rename(tmp_path / "elsewhere")
    try:
        result = environment.run("print(1)")
        assert not environment.run("print(1)", MERGEKIT_ACE_AUTOLOAD="0").stderr
    finally:
        source.rename(artifacts["editable"])
    assert result.stdout == "1\n"
    (line,) = result.stderr.splitlines()
    assert line.startswith("mergekit-ace: warning: not loaded: No module named 'mergekit_ace'")


def test_uninstall_leaves_nothing(environment):
    assert "mergekit_ace.pth" in environment.files()
    environment.run("import mergekit_ace")  # leaves its bytecode
    environment.pip("uninstall", "--yes", "mergekit-ace")
    assert environment.files() == environment.pristine
    result = environment.run("import sys; print([f for f in sys.meta_path if 'Host' in repr(f)])")
    assert result.stdout == "[]\n"
    assert not result.stderr


def test_sdist_and_source_build_the_same_wheel(artifacts):
    assert artifacts["wheel"].read_bytes() == artifacts["sdist"].read_bytes()
