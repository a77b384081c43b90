# SPDX-License-Identifier: Apache-2.0
"""Registration, in this process."""

from __future__ import annotations

import subprocess
import sys
from importlib.resources import files

import pytest
from mergekit import merge_methods
from mergekit.merge_methods import registry

import mergekit_ace
from mergekit_ace import plugin


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
    said = "merge method 'ace' is left to test_plugin, which has taken that name before"
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
