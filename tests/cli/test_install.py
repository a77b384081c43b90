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
KINDS = ["wheel", "editable"]  # the sdist builds the same wheel


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
    offline = ["--no-build-isolation", "--no-deps", "--no-index"]
    run(sys.executable, "-m", "pip", "wheel", "--quiet", *offline, copy, "-w", folder / "direct")
    run(sys.executable, "-m", "pip", "wheel", "--quiet", *offline, sdist, "-w", folder / "sdist")
    (wheel,) = (folder / "direct").glob("*.whl")
    (from_sdist,) = (folder / "sdist").glob("*.whl")
    return {"wheel": wheel, "editable": copy, "sdist": from_sdist}


def install(environment: Environment, kind: str, artifact: Path) -> None:
    flags = ["--no-build-isolation", "--no-deps", "--no-index"]
    flags += ["--editable"] if kind == "editable" else []
    environment.pip("install", *flags, artifact)


@pytest.fixture(scope="module")
def environments(artifacts, tmp_path_factory) -> dict[str, Environment]:
    made = {kind: Environment(tmp_path_factory.mktemp(kind) / "venv") for kind in KINDS}
    for kind, environment in made.items():
        install(environment, kind, artifacts[kind])
    return made


GET = "from mergekit import merge_methods as m; print(m.get('ace').spec.pretty_name)"


@pytest.mark.parametrize("kind", KINDS)
def test_known_to_mergekit_with_no_import_of_ours(environments, kind):
    """And once, if it is imported, too."""
    result = environments[kind].run(f"{GET}; import mergekit_ace; mergekit_ace.register(); {GET}")
    assert result.stdout == 2 * "ACE-Merging\n"
    assert "mergekit-ace" not in result.stderr


@pytest.mark.parametrize("program", ["run_yaml", "multimerge"])
def test_mergekit_in_a_fresh_process(environments, tmp_path, program):
    paths, out = save_family(tiny_llama(), tmp_path), tmp_path / "merged"
    (tmp_path / "ace.yml").write_text(yaml.safe_dump(ace_config(paths)))
    more = ["-I", tmp_path / "between", "--out-path"] if program == "multimerge" else []
    command = ["-m", f"mergekit.scripts.{program}", tmp_path / "ace.yml", *more, out]
    run(environments["wheel"].python, *command, HF_HUB_OFFLINE="1")
    check_merge(LlamaForCausalLM, paths, out)


def test_a_moved_checkout_is_one_line(artifacts, tmp_path):
    """An editable install whose source is gone: no traceback at every start of Python."""
    source = tmp_path / "source"
    shutil.copytree(artifacts["editable"], source)
    environment = Environment(tmp_path / "venv")
    install(environment, "editable", source)
    source.rename(tmp_path / "elsewhere")
    result = environment.run("print(1)")
    assert result.stdout == "1\n"
    (line,) = result.stderr.splitlines()
    assert line.startswith("mergekit-ace: warning: not loaded: No module named 'mergekit_ace'")
    assert not environment.run("print(1)", MERGEKIT_ACE_AUTOLOAD="0").stderr


def test_sdist_and_source_build_the_same_wheel(artifacts):
    assert artifacts["wheel"].read_bytes() == artifacts["sdist"].read_bytes()


@pytest.mark.parametrize("kind", KINDS)
def test_uninstall_leaves_nothing(kind, artifacts, tmp_path):
    environment = Environment(tmp_path / "venv")
    install(environment, kind, artifacts[kind])
    assert "mergekit_ace.pth" in environment.files()
    environment.run("import mergekit_ace")  # leaves its bytecode
    environment.pip("uninstall", "--yes", "mergekit-ace")
    assert environment.files() == environment.pristine
    result = environment.run("import sys; print([f for f in sys.meta_path if 'Host' in repr(f)])")
    assert result.stdout == "[]\n"
    assert not result.stderr


def modules_at_start(environment: Environment, **variables: str) -> set[str]:
    """Return the modules that a Python process imports that does nothing."""
    result = environment.run("pass", "-X", "importtime", **variables)
    return set(re.findall(r"import time:\s+\d+ \|\s+\d+ \|\s+(\S+)", result.stderr))


@pytest.mark.parametrize("kind", KINDS)
def test_start_up_loads_one_small_module(environments, kind):
    without = modules_at_start(environments[kind], MERGEKIT_ACE_AUTOLOAD="0")
    with_us = modules_at_start(environments[kind])
    assert with_us - without == {"mergekit_ace"}
    assert not {"torch", "mergekit", "typing", "importlib.util", "importlib.abc"} & with_us
