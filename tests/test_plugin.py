# SPDX-License-Identifier: Apache-2.0
"""Registration, in this process."""

from __future__ import annotations

import importlib
import importlib.util
import subprocess
import sys

import pytest
from mergekit import merge_methods
from mergekit.merge_methods import registry

import mergekit_ace
from mergekit_ace import _autoload, plugin


@pytest.fixture
def empty_registry(monkeypatch):
    ours = {method.spec.name for method in plugin.our_methods()}
    methods = {name: m for name, m in registry._METHODS.items() if name not in ours}
    monkeypatch.setattr(registry, "_METHODS", methods)
    return methods


def test_twice_is_once(empty_registry):
    mergekit_ace.register()
    first = merge_methods.get("ace")
    mergekit_ace.register()
    _autoload.register_quietly()
    assert merge_methods.get("ace") is first


def test_reloading_the_package_installs_no_second_finder():
    finders = list(sys.meta_path)
    try:
        importlib.reload(mergekit_ace)
        importlib.reload(mergekit_ace)
        ours = [f for f in sys.meta_path if getattr(f, "__name__", "") == "_HostFinder"]
        assert len(ours) == 1
    finally:
        sys.meta_path[:] = finders


def test_a_name_already_taken(empty_registry, caplog):
    class Other:
        spec = merge_methods.MergeMethodSpec(name="ace")

    taken = Other()
    merge_methods.register(taken)
    plugin.register()
    assert merge_methods.get("ace") is taken
    (record,) = caplog.records
    assert record.name == "mergekit_ace.plugin"
    said = "merge method 'ace' is left to test_plugin, which has taken that name before"
    assert record.getMessage().startswith(said)
    ours = {method.spec.name: type(method) for method in plugin.our_methods()}
    del ours["ace"]
    assert all(type(merge_methods.get(name)) is kind for name, kind in ours.items())


@pytest.mark.parametrize(
    ("version", "works"),
    [
        ("0.1.5", True),
        ("0.1.12", True),
        ("0.1.6.dev3+g1234", True),
        ("0.1.4", False),
        ("0.0.6", False),
        ("0.2.0", False),
        ("0.2.0.dev1", False),
        ("1.0", False),
    ],
)
def test_versions_of_mergekit(monkeypatch, capsys, version, works):
    monkeypatch.setattr(plugin, "version", lambda name: version)
    _autoload.register_quietly()
    errors = capsys.readouterr().err.splitlines()
    if works:
        assert not errors
    else:
        (line,) = errors
        assert f"mergekit {version} is installed" in line
        assert "works with mergekit >=0.1.5,<0.2" in line


@pytest.mark.parametrize("error", [ImportError("no\nluck"), ZeroDivisionError(), SyntaxError("x")])
@pytest.mark.filterwarnings("error")
def test_a_bug_of_ours_is_one_line(monkeypatch, capsys, error):
    def fail():
        raise error

    monkeypatch.setattr(plugin, "register", fail)
    _autoload.register_quietly()
    (line,) = capsys.readouterr().err.splitlines()
    assert type(error).__name__ in line


def test_the_host_keeps_its_own_loader():
    assert merge_methods.__loader__ is merge_methods.__spec__.loader
    assert not isinstance(merge_methods.__loader__, _autoload.RegisteringLoader)
    spec = importlib.util.find_spec("mergekit.merge_methods")
    assert spec.origin == merge_methods.__file__


def test_finds_nothing_else():
    assert mergekit_ace._HostFinder.find_spec("mergekit") is None
    assert mergekit_ace._HostFinder.find_spec("mergekit.merge_methods.base") is None


def test_lives_with_another_finder_of_its_kind(monkeypatch):
    """One that asks all the others, as ours does."""

    class Other(mergekit_ace._HostFinder):
        pass

    monkeypatch.setattr(sys, "meta_path", [Other, *sys.meta_path])
    path = sys.modules["mergekit"].__path__
    spec = Other.find_spec(_autoload.HOST, path)
    assert spec.origin == merge_methods.__file__


def test_a_host_that_cannot_be_found():
    assert mergekit_ace._HostFinder.find_spec(_autoload.HOST, ["/nowhere"]) is None


def test_loader_registers_after_the_host(monkeypatch):
    order = []

    class HostLoader:
        attribute = 1

        def create_module(self, spec):
            return None

        def exec_module(self, module):
            order.append("host")

    monkeypatch.setattr(_autoload, "register_quietly", lambda: order.append("ours"))
    inner = HostLoader()
    loader = _autoload.RegisteringLoader(inner)
    spec = importlib.util.spec_from_loader("some_host", loader)
    module = importlib.util.module_from_spec(spec)
    loader.exec_module(module)
    assert order == ["host", "ours"]
    assert module.__loader__ is module.__spec__.loader is inner
    assert loader.attribute == 1


def test_every_public_name_can_be_imported():
    for name in mergekit_ace.__all__:
        assert getattr(mergekit_ace, name) is not None
    with pytest.raises(AttributeError, match="no_such_name"):
        _ = mergekit_ace.no_such_name


def test_typed():
    from importlib.resources import files

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
