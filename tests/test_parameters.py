# SPDX-License-Identifier: Apache-2.0
"""Parameters of merge methods, as mergekit validates them."""

from __future__ import annotations

import pytest

from mergekit_ace import AceOptions
from mergekit_ace.methods.ace import AceMerge
from mergekit_ace.methods.parameters import option_parameters
from mergekit_ace.plugin import our_methods

OPTIONS = {p.name: p for p in option_parameters(AceOptions)}
(REPORT,) = (p for p in AceMerge.spec.parameters if p.name == "report")


def test_every_option_is_a_parameter_with_the_same_default():
    offered = {name: parameter.default for name, parameter in OPTIONS.items()}
    assert offered == AceOptions().model_dump(by_alias=True)
    assert AceOptions(scale=0.5) == AceOptions(**{"lambda": 0.5})


@pytest.mark.parametrize("method", our_methods(), ids=lambda method: method.spec.name)
def test_every_parameter_explains_itself(method):
    for parameter in method.spec.parameters:
        assert parameter.method == method.spec.name
        assert parameter.description.endswith(".")
        assert parameter.allowed
        assert parameter.validate(parameter.default) == parameter.default
    assert "report" in [parameter.name for parameter in method.spec.parameters]


def test_numbers_that_yaml_takes_for_text():
    assert OPTIONS["epsilon"].validate("1e-5") == OPTIONS["epsilon"].validate(1e-5) == 1e-5


def test_report_paths(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert REPORT.validate("r.jsonl") == str(tmp_path / "r.jsonl")
    (tmp_path / "folder").mkdir()
    for bad, reason in [("", "not the name"), ("folder", "not the name"), ("a/b", "no folder")]:
        with pytest.raises(ValueError, match=reason):
            REPORT.validate(bad)


@pytest.mark.parametrize(
    ("content", "is_report"),
    [
        (b"", True),
        (b'{"tensor": "a"}\n', True),
        (b'{"tens', True),  # what a kill has left
        (b"alias ll='ls -l'\n", False),  # a config may come from anybody
    ],
)
def test_lines_are_appended_to_reports_alone(tmp_path, content, is_report):
    file = tmp_path / "r.jsonl"
    file.write_bytes(content)
    if is_report:
        assert REPORT.validate(str(file)) == str(file)
    else:
        with pytest.raises(ValueError, match="this file is no report, and lines would be appended"):
            REPORT.validate(str(file))
    assert file.read_bytes() == content
