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
# Steps of a program. The first does what Python does at its start, `.pth` and all.
LOADED = "import site; site.addsitedir(sys.argv[1])"
MERGEKIT = "import mergekit.merge_methods; print(mergekit.merge_methods.ready)"
REMOVE = "import shutil; shutil.rmtree(sys.argv[1] + '/mergekit_ace')"
OFF = "os.environ['MERGEKIT_ACE_AUTOLOAD'] = '0'"
NO_STDERR, CLOSED_STDERR = "sys.stderr = None", "sys.stderr = open(os.devnull); sys.stderr.close()"
INIT, PLUGIN = "mergekit_ace/__init__.py", "mergekit_ace/plugin.py"
HOST = "mergekit/merge_methods/__init__.py"
WARNING = "mergekit-ace: warning: "
# A file and its text, or None where it is gone; steps; words on stdout; how stderr begins.
STARTS: list[tuple[tuple[str, str | None] | None, tuple[str, ...], str, str]] = [
    (None, (LOADED, MERGEKIT), "known ready", ""),
    (None, (MERGEKIT, LOADED), "ready known", ""),
    *(
        ((module, text), (LOADED, MERGEKIT), "ready", WARNING)
        for module in (INIT, PLUGIN)
        for text in (
            "def broken(:\n",
            "raise RuntimeError('no\\nluck')\n",
            "raise BaseException('odd')\n",
            None,  # after an upgrade that was interrupted
        )
    ),
    (None, (REMOVE, LOADED, MERGEKIT), "ready", WARNING),
    (None, (LOADED, REMOVE, MERGEKIT), "ready", WARNING),
    ((PLUGIN, None), (NO_STDERR, LOADED, MERGEKIT), "ready", ""),
    ((PLUGIN, None), (CLOSED_STDERR, LOADED, MERGEKIT), "ready", ""),
    (None, (OFF, LOADED, "import mergekit_ace", MERGEKIT), "known ready", ""),
    ((INIT, "1 / 0\n"), (OFF, LOADED, MERGEKIT), "ready", ""),
    # An interrupt is the user's, and what mergekit raises is its own.
    ((INIT, "raise KeyboardInterrupt\n"), (LOADED, MERGEKIT), "", "Traceback"),
    ((PLUGIN, "raise KeyboardInterrupt\n"), (LOADED, MERGEKIT), "", "Traceback"),
    ((HOST, "1 / 0\n"), (LOADED, MERGEKIT), "", "Traceback"),
]


@pytest.mark.parametrize(("file", "steps", "shown", "told"), STARTS)
def test_starts_of_python(tmp_path, file, steps, shown, told):
    """With what the hook consists of, and a mergekit of a line, which takes no time."""
    for folder in (PACKAGE.name, Path(HOST).parent):
        (tmp_path / folder).mkdir(parents=True)
    shutil.copy(PACKAGE / "__init__.py", tmp_path / INIT)
    shutil.copy(PACKAGE / "start_up.pth", tmp_path / "mergekit_ace.pth")
    (tmp_path / PLUGIN).write_text("def register():\n    print('known')\n")
    (tmp_path / "mergekit" / "__init__.py").touch()
    (tmp_path / HOST).write_text("ready = 'ready'\n")
    if file:
        changed, text = tmp_path / file[0], file[1]
        changed.unlink() if text is None else changed.write_text(text)
    program = "\n".join(["import os, sys", "sys.path.insert(0, sys.argv[1])", *steps])
    clean = {k: v for k, v in os.environ.items() if not k.startswith(("PYTHON", "MERGEKIT"))}
    command = [sys.executable, "-S", "-c", program, str(tmp_path)]  # without what is installed
    done = subprocess.run(command, capture_output=True, text=True, env=clean)
    errors = done.stderr.splitlines()
    assert done.stdout.split() == shown.split(), done.stderr
    assert bool(errors) == bool(told)
    assert done.stderr.startswith(told)
    if told == "Traceback":
        own = "ZeroDivisionError: division by zero" if file[0] == HOST else "KeyboardInterrupt"
        assert errors[-1].startswith(own)
        assert WARNING not in done.stderr
        assert done.returncode == (1 if file[0] == HOST else -2)
    else:
        assert len(errors) <= 1
        assert done.returncode == 0


def test_a_name_already_taken(monkeypatch, caplog):
    """And a registration that comes twice, as by an import of ours."""

    class Other:
        spec = merge_methods.MergeMethodSpec(name="ace")

    ours = {method.spec.name: type(method) for method in plugin.our_methods()}
    methods = {name: m for name, m in registry._METHODS.items() if name not in ours}
    monkeypatch.setattr(registry, "_METHODS", methods)
    taken = Other()
    merge_methods.register(taken)
    plugin.register()
    (record,) = caplog.records
    said = "merge method 'ace' is left to test_start_up, which has taken that name before"
    assert record.getMessage().startswith(said)
    assert merge_methods.get("ace") is taken
    del ours["ace"]
    assert all(type(merge_methods.get(name)) is kind for name, kind in ours.items())
    known = merge_methods.get("ace_plus")
    mergekit_ace.register()
    assert merge_methods.get("ace_plus") is known


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


def test_every_public_name_can_be_imported():
    for name in mergekit_ace.__all__:
        assert getattr(mergekit_ace, name) is not None
    with pytest.raises(AttributeError, match="no_such_name"):
        _ = mergekit_ace.no_such_name
    assert (files("mergekit_ace") / "py.typed").is_file()
