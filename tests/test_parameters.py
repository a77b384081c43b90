# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import os

import pytest

from mergekit_ace import AceOptions
from mergekit_ace.methods.ace import AceMerge
from mergekit_ace.methods.parameters import LAYOUT, OPTION_NAMES, OPTION_PARAMETERS, REPORT, WEIGHT


def test_every_option_is_a_parameter_with_the_same_default():
    offered = {OPTION_NAMES.get(p.name, p.name): p.default for p in OPTION_PARAMETERS}
    assert offered == AceOptions().model_dump()
    names = [p.name for p in AceMerge.spec.parameters]
    others = ["layout", "coefficients", "task", "report"]
    assert names == ["weight", *(p.name for p in OPTION_PARAMETERS), *others]
    assert all(p.allowed for p in AceMerge.spec.parameters)


@pytest.mark.parametrize("value", ["1e-5", 1e-5, "0.00001"])
def test_numbers_that_yaml_takes_for_text(value):
    (epsilon,) = (p for p in OPTION_PARAMETERS if p.name == "epsilon")
    assert epsilon.validate(value) == 1e-5


def test_whole_numbers():
    assert WEIGHT.validate(2) == 2.0


def test_defaults_are_valid():
    for parameter in AceMerge.spec.parameters:
        assert parameter.validate(parameter.default) == parameter.default


def test_layouts():
    assert LAYOUT.validate("stacked") == "stacked"
    with pytest.raises(ValueError, match="'layout' is 'Matrix'; allowed: one of auto, matrix"):
        LAYOUT.validate("Matrix")


def test_report_paths(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert REPORT.validate("r.jsonl") == str(tmp_path / "r.jsonl")
    assert REPORT.validate(None) is None
    (tmp_path / "folder").mkdir()
    for bad, reason in [("", "not the name"), ("folder", "not the name"), ("a/b", "no folder")]:
        with pytest.raises(ValueError, match=reason):
            REPORT.validate(bad)


def test_report_without_permission(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "access", lambda path, mode: False)  # root may write everywhere
    with pytest.raises(ValueError, match="no permission"):
        REPORT.validate(str(tmp_path / "r.jsonl"))


def test_options_reject_unknown_names():
    with pytest.raises(ValueError, match="epsilom"):
        AceOptions(epsilom=1)
