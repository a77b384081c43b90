# SPDX-License-Identifier: Apache-2.0
"""The start-up hook: whatever state the package is in, Python and mergekit go on.

Each package is a copy beside a mergekit of three lines, so that a process takes no time.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[2] / "mergekit_ace"
LOADED = "import site; site.addsitedir(sys.argv[1])"  # as Python does at its start, `.pth` and all
MERGEKIT = "import mergekit.merge_methods; print(mergekit.merge_methods.ready)"


@pytest.fixture
def packages(tmp_path) -> Path:
    """A folder with what the hook consists of, and a stand-in for mergekit."""
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
