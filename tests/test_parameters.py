# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import os
from typing import Annotated, Literal

import pytest
from pydantic import Field

from mergekit_ace import AceOptions
from mergekit_ace.algebra.ace import RelativeOptions
from mergekit_ace.algebra.task_vectors import Factor, Fraction, NonNegative, Number, Ridge
from mergekit_ace.methods.ace import AceMerge
from mergekit_ace.methods.parameters import (
    LAYOUT,
    REPORT,
    Meaning,
    describe_type,
    option_parameters,
    options_from,
)
from mergekit_ace.plugin import our_methods

OPTIONS = {p.name: p for p in option_parameters(AceOptions)}


def test_every_option_is_a_parameter_with_the_same_default():
    offered = {name: parameter.default for name, parameter in OPTIONS.items()}
    assert offered == AceOptions().model_dump(by_alias=True)
    assert options_from(AceOptions, {**offered, "layout": "auto"}) == AceOptions()
    names = [p.name for p in AceMerge.spec.parameters]
    others = ["side", "layout", "coefficients", "covariances", "mix", "task", "report"]
    assert names == ["weight", *OPTIONS, *others]


@pytest.mark.parametrize("method", our_methods(), ids=lambda method: method.spec.name)
def test_every_parameter_explains_itself(method):
    for parameter in method.spec.parameters:
        assert parameter.method == method.spec.name
        assert parameter.description.endswith(".")
        assert parameter.allowed
        assert parameter.validate(parameter.default) == parameter.default
    assert "report" in [parameter.name for parameter in method.spec.parameters]


@pytest.mark.parametrize(
    ("value_type", "words"),
    [
        (Number, "a finite number"),
        (NonNegative | None, "a number, 0 or greater"),
        (Fraction, "a number from 0 to 1"),
        (Annotated[Number, Field(gt=0)], "a number above 0"),
        (Factor | None, "a finite number, at most 1e15 in size"),
        (Ridge, "a number, 0 or greater, and at most 1e30"),
        (Annotated[Number, Field(gt=0, le=0.5)], "a number above 0, and at most 0.5"),
        (Annotated[int, Field(ge=1, strict=True)] | None, "a whole number, 1 or greater"),
        (int, "a whole number"),
        (bool, "true or false"),
        (Literal["a", "b"], "one of a, b"),
        (str | None, "text"),
        (Annotated[str, Meaning("a name")] | None, "a name"),
    ],
)
def test_types_in_words(value_type, words):
    assert describe_type(value_type) == words


@pytest.mark.parametrize("value", ["1e-5", 1e-5, "0.00001"])
def test_numbers_that_yaml_takes_for_text(value):
    assert OPTIONS["epsilon"].validate(value) == 1e-5


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


def test_lambda_is_scale():
    for model in (AceOptions, RelativeOptions):
        assert model(scale=0.5) == model(**{"lambda": 0.5})
        assert model(scale=0.5).model_dump()["scale"] == 0.5


@pytest.mark.parametrize("content", [b"", b'{"tensor": "a"}\n', b'{"tens'])
def test_a_report_that_goes_on(tmp_path, content):
    """That of another merge, or what a kill has left of one."""
    (tmp_path / "r.jsonl").write_bytes(content)
    (report,) = [p for p in AceMerge.spec.parameters if p.name == "report"]
    assert report.validate(str(tmp_path / "r.jsonl")) == str(tmp_path / "r.jsonl")


@pytest.mark.parametrize("content", [b"alias ll='ls -l'\n", b"\x10\0\0\0\0\0\0\0{}", b"[1]", b"{}"])
def test_nothing_is_appended_to_what_is_no_report(tmp_path, content):
    """A model, a config, a file that a shell reads: a config may come from anybody."""
    (tmp_path / "file").write_bytes(content)
    (report,) = [p for p in AceMerge.spec.parameters if p.name == "report"]
    with pytest.raises(ValueError, match="this file is no report, and lines would be appended"):
        report.validate(str(tmp_path / "file"))
