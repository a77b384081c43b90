# SPDX-License-Identifier: Apache-2.0
"""`mergekit-ace methods`, and the parameters that it tells of, as mergekit validates them."""

from __future__ import annotations

from pathlib import Path

import pytest
from commands import command

import mergekit_ace
from mergekit_ace import AceOptions
from mergekit_ace.methods.ace import AceMerge
from mergekit_ace.methods.base import describe_type
from mergekit_ace.methods.parameters import option_parameters
from mergekit_ace.plugin import our_methods

OPTIONS = {p.name: p for p in option_parameters(AceOptions)}
(REPORT,) = (p for p in AceMerge.spec.parameters if p.name == "report")


@pytest.mark.parametrize("method", our_methods(), ids=lambda method: method.spec.name)
def test_what_is_said_of_a_method(method):
    spec = method.spec
    text = " ".join(command("methods", spec.name).split())
    head = f"## `{spec.name}`: {spec.pretty_name}"
    for said in (head, spec.reference_url, method.summary, *method.citations):
        assert " ".join(said.split()) in text
    for parameter in spec.parameters:
        assert parameter.method == spec.name
        assert parameter.description.endswith(".")
        assert parameter.validate(parameter.default) == parameter.default
        allowed = describe_type(parameter.value_type)
        for said in (f"* `{parameter.name}`: ", allowed, parameter.description):
            assert said
            assert " ".join(said.split()) in text
    assert "* `report`: " in text
    assert method.layouts == () or "transposed" in method.layouts
    assert head in command("methods")


def test_words_for_what_is_allowed():
    text = command("methods", "wudi")
    assert "`solver`: adam; one of adam, exact. " in text
    assert "`weight`: 1.0; a number, 0 or greater; per expert. " in command("methods", "ace")
    unknown = command("methods", "acee", fails=True)
    assert "no method 'acee' here; there are ace, ace_plus" in unknown


def test_the_reference_in_the_repository_is_what_is_printed():
    """Renew it by `mergekit-ace methods --markdown > mergekit_ace/methods/README.md`."""
    file = Path(mergekit_ace.__file__).parent / "methods" / "README.md"
    assert file.read_text(encoding="utf-8") == command("methods", "--markdown")


def test_options_in_python_are_parameters_of_configs():
    offered = {name: parameter.default for name, parameter in OPTIONS.items()}
    assert offered == AceOptions().model_dump(by_alias=True)
    assert AceOptions(scale=0.5) == AceOptions(**{"lambda": 0.5})
    # YAML takes this number for text
    assert OPTIONS["epsilon"].validate("1e-5") == OPTIONS["epsilon"].validate(1e-5) == 1e-5


@pytest.mark.parametrize(
    ("path", "content", "fault"),
    [
        ("r.jsonl", None, ""),
        ("r.jsonl", b"", ""),
        ("r.jsonl", b'{"tensor": "a"}\n', ""),
        ("r.jsonl", b'{"tens', ""),  # what a kill has left
        ("r.jsonl", b"alias ll='ls -l'\n", "is no report, and lines would be appended"),
        ("", None, "not the name"),
    ],
)
def test_lines_are_appended_to_reports_alone(tmp_path, monkeypatch, path, content, fault):
    monkeypatch.chdir(tmp_path)
    file = tmp_path / path
    if content is not None:
        file.write_bytes(content)
    if fault:
        with pytest.raises(ValueError, match=fault):
            REPORT.validate(path)
    else:
        assert REPORT.validate(path) == str(file)
    if content is not None:
        assert file.read_bytes() == content
