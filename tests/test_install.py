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

PROJECT = Path(__file__).resolve().parent.parent
KINDS = ["wheel", "editable", "sdist"]


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
    for name in ("mergekit_ace", "examples", "tests"):
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


@pytest.fixture(scope="module", params=KINDS)
def installed(request, artifacts, tmp_path_factory) -> Environment:
    environment = Environment(tmp_path_factory.mktemp(request.param) / "venv")
    install(environment, request.param, artifacts[request.param])
    return environment


@pytest.fixture(scope="module")
def regular(artifacts, tmp_path_factory) -> Environment:
    environment = Environment(tmp_path_factory.mktemp("regular") / "venv")
    install(environment, "wheel", artifacts["wheel"])
    return environment


GET = "from mergekit import merge_methods as m; print(m.get('ace').spec.pretty_name)"


def test_known_to_mergekit_with_no_import_of_ours(installed):
    result = installed.run(GET)
    assert result.stdout == "ACE-Merging\n"
    assert "mergekit-ace" not in result.stderr


@pytest.mark.parametrize("command", ["run_yaml", "multimerge", "merge_raw_pytorch"])
def test_mergekit_commands_in_a_fresh_process(regular, tmp_path, command):
    paths = save_family(tiny_llama(), tmp_path)
    source = ace_config(paths)
    config, out = tmp_path / "ace.yml", tmp_path / "out"
    arguments = [config, out]
    if command == "multimerge":
        arguments = [config, "-I", tmp_path / "between", "--out-path", out]
    if command == "merge_raw_pytorch":
        source = ace_config([f"{path}/model.safetensors" for path in paths])
    config.write_text(yaml.safe_dump(source))
    start = f"from mergekit.scripts.{command} import main; main()"
    run(regular.python, "-c", start, *arguments, HF_HUB_OFFLINE="1")
    if command == "merge_raw_pytorch":
        shutil.copy(f"{paths[0]}/config.json", out)
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


def start_up(environment: Environment, **variables: str) -> dict[str, int]:
    """Modules imported by a Python process that does nothing, with their cumulative µs."""
    result = environment.run("pass", "-X", "importtime", **variables)
    found = re.findall(r"import time:\s+\d+ \|\s+(\d+) \|\s+(\S+)", result.stderr)
    return {name: int(microseconds) for microseconds, name in found}


def test_start_up_loads_one_small_module(installed):
    without = start_up(installed, MERGEKIT_ACE_AUTOLOAD="0")
    with_us = start_up(installed)
    assert with_us.keys() - without.keys() == {"mergekit_ace"}
    costly = {"torch", "mergekit", "typing", "importlib.util", "importlib.abc"}
    assert not costly & with_us.keys()


def test_start_up_costs_less_than_a_millisecond(regular):
    """The interpreter's own measure; the best of several runs is what it costs undisturbed."""
    assert min(start_up(regular)["mergekit_ace"] for _ in range(15)) < 1000


def test_switched_off(regular):
    code = (
        "from mergekit import merge_methods as m; "
        "print([x.spec.name for x in m.registered_methods()])"
    )
    off = regular.run(code, MERGEKIT_ACE_AUTOLOAD="0")
    assert "'ace'" not in off.stdout
    by_hand = regular.run("import mergekit_ace; " + code, MERGEKIT_ACE_AUTOLOAD="0")
    assert "'ace'" in by_hand.stdout
    late = regular.run(
        f"import mergekit.merge_methods, mergekit_ace; {code}", MERGEKIT_ACE_AUTOLOAD="0"
    )
    assert late.stdout.count("'ace'") == 1


def test_both_ways_together_register_once(regular):
    result = regular.run("import mergekit_ace; mergekit_ace.register(); " + GET)
    assert result.stdout == "ACE-Merging\n"
    assert "mergekit-ace" not in result.stderr


def test_another_version_of_mergekit(regular, tmp_path):
    """Its metadata comes first on the path; mergekit itself goes on working."""
    metadata = tmp_path / "mergekit-0.2.0.dist-info" / "METADATA"
    metadata.parent.mkdir()
    metadata.write_text("Metadata-Version: 2.1\nName: mergekit\nVersion: 0.2.0\n")
    code = (
        "import warnings; warnings.filterwarnings('ignore', category=DeprecationWarning)\n"
        "from mergekit import merge_methods as m\n"
        "print(m.get('linear').spec.name)"
    )
    result = regular.run(code, PYTHONPATH=str(tmp_path))
    assert result.stdout == "linear\n"
    (line,) = [line for line in result.stderr.splitlines() if "mergekit-ace" in line]
    assert "mergekit 0.2.0 is installed, but this release works with mergekit >=0.1.5,<0.2" in line
