# SPDX-License-Identifier: Apache-2.0
"""The start-up hook and the registration: whatever state the package is in, mergekit goes on."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from importlib.resources import files
from pathlib import Path

import pytest
from mergekit import merge_methods
from mergekit.merge_methods import registry

import mergekit_ace
from mergekit_ace import plugin

PACKAGE = Path(__file__).parents[2] / "mergekit_ace"
LOADED = "import site; site.addsitedir(sys.argv[1])"  # as Python does at its start, `.pth` and all
MERGEKIT = "import mergekit.merge_methods; print(mergekit.merge_methods.ready)"


@pytest.fixture
def packages(tmp_path) -> Path:
    """A folder with what the hook consists of, and a mergekit of a line, which takes no time."""
    (tmp_path / "mergekit_ace").mkdir()
    shutil.copy(PACKAGE / "__init__.py", tmp_path / "mergekit_ace")
    shutil.copy(PACKAGE / "start_up.pth", tmp_path / "mergekit_ace.pth")
    (tmp_path / "mergekit_ace" / "plugin.py").write_text("def register():\n    print('known')\n")
    host = tmp_path / "mergekit" / "merge_methods"
    host.mkdir(parents=True)
    (tmp_path / "mergekit" / "__init__.py").write_text("")
    (host / "__init__.py").write_text("ready = 'ready'\n")
    return tmp_path


def start(packages: Path, *steps: str, status: int = 0) -> tuple[list[str], list[str]]:
    """Run steps in a fresh process; the lines on stdout and stderr."""
    program = ["import os, sys", "sys.path.insert(0, sys.argv[1])", *steps]
    clean = {k: v for k, v in os.environ.items() if not k.startswith(("PYTHON", "MERGEKIT"))}
    done = subprocess.run(  # without what is installed here
        [sys.executable, "-S", "-c", "\n".join(program), str(packages)],
        capture_output=True,
        text=True,
        env=clean,
    )
    assert done.returncode == status, done.stderr
    return done.stdout.splitlines(), done.stderr.splitlines()


def test_as_it_should_be(packages):
    assert start(packages, LOADED, MERGEKIT) == (["known", "ready"], [])
    assert start(packages, MERGEKIT, LOADED) == (["ready", "known"], [])


FAILURES = {
    "no Python": "def broken(:\n",
    "an error": "raise RuntimeError('no\\nluck')\n",
    "something odd": "raise BaseException('odd')\n",
    "gone": None,  # after an upgrade that was interrupted
}
REMOVE = "import shutil; shutil.rmtree(sys.argv[1] + '/mergekit_ace')"


@pytest.mark.parametrize("failure", FAILURES)
@pytest.mark.parametrize("module", ["__init__.py", "plugin.py"])
def test_a_module_that_fails_is_one_line(packages, module, failure):
    path, text = packages / "mergekit_ace" / module, FAILURES[failure]
    path.write_text(text) if text else path.unlink()
    shown, (line,) = start(packages, LOADED, MERGEKIT)
    assert shown == ["ready"]
    assert line.startswith("mergekit-ace: warning: ")


@pytest.mark.parametrize("steps", [(REMOVE, LOADED), (LOADED, REMOVE)])
def test_a_package_that_is_gone(packages, steps):
    """Before a process starts, or while it runs."""
    shown, errors = start(packages, *steps, MERGEKIT)
    assert shown == ["ready"]
    assert len(errors) == 1


@pytest.mark.parametrize("stderr", ["None", "open(os.devnull)"])  # none at all; one that is closed
def test_nobody_to_tell(packages, stderr):
    (packages / "mergekit_ace" / "plugin.py").unlink()
    assert start(packages, f"sys.stderr = {stderr}", LOADED, MERGEKIT) == (["ready"], [])
    shutil.rmtree(packages / "mergekit_ace")
    assert start(packages, f"sys.stderr = {stderr}", LOADED, MERGEKIT) == (["ready"], [])


@pytest.mark.parametrize("module", ["__init__.py", "plugin.py"])
def test_an_interrupt_is_the_users(packages, module):
    (packages / "mergekit_ace" / module).write_text("raise KeyboardInterrupt\n")
    shown, errors = start(packages, LOADED, MERGEKIT, status=-2)
    assert shown == []
    assert errors[-1].startswith("KeyboardInterrupt")


def test_what_the_host_raises_is_its_own(packages):
    (packages / "mergekit" / "merge_methods" / "__init__.py").write_text("1 / 0\n")
    shown, errors = start(packages, LOADED, MERGEKIT, status=1)
    assert shown == []
    assert errors[-1] == "ZeroDivisionError: division by zero"
    assert not [line for line in errors if line.startswith("mergekit-ace")]


def test_switched_off(packages):
    """But not by an import of the package."""
    off = "os.environ['MERGEKIT_ACE_AUTOLOAD'] = '0'"
    by_hand = start(packages, off, LOADED, "import mergekit_ace", MERGEKIT)
    assert by_hand == (["known", "ready"], [])
    (packages / "mergekit_ace" / "__init__.py").write_text("1 / 0\n")
    assert start(packages, off, LOADED, MERGEKIT) == (["ready"], [])


@pytest.fixture
def empty_registry(monkeypatch):
    ours = {method.spec.name for method in plugin.our_methods()}
    methods = {name: m for name, m in registry._METHODS.items() if name not in ours}
    monkeypatch.setattr(registry, "_METHODS", methods)


def test_twice_is_once(empty_registry):
    mergekit_ace.register()
    first = merge_methods.get("ace")
    mergekit_ace.register()
    assert merge_methods.get("ace") is first


def test_a_name_already_taken(empty_registry, caplog):
    class Other:
        spec = merge_methods.MergeMethodSpec(name="ace")

    taken = Other()
    merge_methods.register(taken)
    plugin.register()
    assert merge_methods.get("ace") is taken
    (record,) = caplog.records
    said = "merge method 'ace' is left to test_start_up, which has taken that name before"
    assert record.getMessage().startswith(said)
    ours = {method.spec.name: type(method) for method in plugin.our_methods()}
    del ours["ace"]
    assert all(type(merge_methods.get(name)) is kind for name, kind in ours.items())


@pytest.mark.parametrize(
    ("version", "works"),
    [("0.1.5", True), ("0.1.6.dev3+g1", True), ("0.1.4", False), ("0.2.0.dev1", False)],
)
def test_versions_of_mergekit(monkeypatch, capsys, version, works):
    monkeypatch.setattr(plugin, "version", lambda name: version)
    mergekit_ace._register()
    errors = capsys.readouterr().err.splitlines()
    assert len(errors) == (not works)
    for line in errors:
        assert f"mergekit {version} is installed" in line
        assert "works with mergekit>=0.1.5,<0.2" in line


def test_lives_with_another_finder_of_its_kind(monkeypatch):
    """One that asks all the others, as ours does."""

    class Other(mergekit_ace._HostFinder):
        pass

    monkeypatch.setattr(sys, "meta_path", [Other, *sys.meta_path])
    spec = Other.find_spec("mergekit.merge_methods", sys.modules["mergekit"].__path__)
    assert spec.origin == merge_methods.__file__
    assert Other.find_spec("mergekit.merge_methods", ["/nowhere"]) is None


def test_every_public_name_can_be_imported():
    for name in mergekit_ace.__all__:
        assert getattr(mergekit_ace, name) is not None
    with pytest.raises(AttributeError, match="no_such_name"):
        _ = mergekit_ace.no_such_name
    assert (files("mergekit_ace") / "py.typed").is_file()


def test_a_module_of_ours_may_be_the_first_to_import_mergekit():
    """Registration then begins while that module is only half there."""
    program = (
        "import mergekit_ace.methods.ace\n"
        "from mergekit.merge_methods import get\n"
        "assert type(get('ace')).__name__ == 'AceMerge'"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "not registered" not in done.stderr
