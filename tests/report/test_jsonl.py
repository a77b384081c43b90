# SPDX-License-Identifier: Apache-2.0
"""Lines of a report that lack a field, or hold something else: `report` and `card` say which."""

from __future__ import annotations

import copy
import json
from dataclasses import fields
from pathlib import Path

import pytest
from click.testing import CliRunner
from lines import layers, made_line

from mergekit_ace.cli import main
from mergekit_ace.report.jsonl import (
    MatrixLine,
    ReportError,
    parse_line,
    read_lines,
)
from mergekit_ace.report.tables import Report


def write(path: Path, lines: list[dict]) -> Path:
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def wrong_field(line: dict) -> str:
    try:
        parse_line(line)
    except ValueError as error:
        return str(error)
    return ""


def refused(path: Path) -> str:
    with pytest.raises(ReportError) as caught:
        read_lines(path)
    return str(caught.value)


NEEDED = [
    "tensor", "models", "method", "shape", "layout", "rule", "weight", "tau", "gamma",
    "log_variance",
    "threshold", "heterogeneous", "normalized", "refined", "rank", "ridge",
    "amplification", "norm", "base_norm", "unchanged", "unit", "histogram", "cosine",
    "relative_size",
]  # fmt: skip


@pytest.mark.parametrize("name", NEEDED)
def test_a_field_that_is_missing(tmp_path, name):
    lines = layers(3, [1.0, 2.0])
    del lines[1][name]
    text = refused(write(tmp_path / "r.jsonl", lines))
    assert f"line 2 of {tmp_path / 'r.jsonl'} is not the line of a report" in text
    assert f"it lacks the field {name}" in text
    assert "give the file that `report:` of a merge" in text


NUMBERS = ["gamma", "ridge", "threshold", "base_norm", "unit"]
LISTS = ["tau", "weight", "norm", "unchanged", "epsilon"]


@pytest.mark.parametrize("name", [*NUMBERS, *LISTS, "shape", "models", "heterogeneous", "rank"])
def test_a_field_of_another_kind(tmp_path, name):
    lines = layers(3, [1.0, 2.0])
    for value in ("many", {}):
        lines[2][name] = value
        path = write(tmp_path / "r.jsonl", lines)
        text = refused(path)
        assert f"line 3 of {path} is not the line of a report: its field {name} holds" in text
        assert f"{value!r}: Input should " in text


@pytest.mark.parametrize("name", LISTS)
def test_lists_of_another_length_or_of_text(tmp_path, name):
    for values, place, words in (
        ([1.0], name, "a value for each of 2 experts"),
        ([1.0, 2.0, 3.0], name, "a value for each of 2 experts"),
        ([1.0, "two"], f"{name}.1", "a valid number"),
    ):
        line = {**made_line("a.weight", [1.0, 2.0]), name: values}
        text = refused(write(tmp_path / "r.jsonl", [line]))
        assert f"its field {place} holds" in text
        assert words in text


@pytest.mark.parametrize("shape", [[], [10]])
def test_a_matrix_has_two_axes(shape):
    broken = made_line("a.weight", [1.0, 2.0], shape=shape)
    assert wrong_field(broken) == f"its field shape holds {tuple(shape)}: a matrix has two axes"
    assert wrong_field(made_line("a.bias", [1.0], shape=shape, rule="mean", layout="mean")) == ""


def test_tensors_without_a_name_are_not_taken_for_one(tmp_path):
    lines = [made_line("a.weight", [1.0]), *(made_line(None, [tau]) for tau in (1.0, 2.0))]
    found = read_lines(write(tmp_path / "r.jsonl", lines))
    assert [line.matrices[0].tau for line in found] == [(1.0,), (1.0,), (2.0,)]
    assert len(Report(found).rows) == 3


def test_parts_and_stacked_matrices():
    line = made_line("a.weight", [1.0, 2.0])
    broken = copy.deepcopy(line)
    del broken["subspaces"]["inputs"]
    assert wrong_field(broken) == "it lacks the field subspaces.inputs"
    broken = copy.deepcopy(line)
    broken["spectrum"]["before"] = "x"
    assert wrong_field(broken).startswith("its field spectrum.before holds 'x': Input should")
    own = {field.name for field in fields(MatrixLine)}
    matrices = [{n: v for n, v in line.items() if n in own} for _ in range(2)]
    stacked = {n: v for n, v in line.items() if n not in own} | {"matrices": matrices}
    assert wrong_field(stacked) == ""
    matrices[1]["tau"] = [1.0]
    assert wrong_field(stacked).startswith("its field tau holds (1.0,): there should be")
    del matrices[1]["tau"]
    assert wrong_field(stacked) == "it lacks the field matrices.1.tau"


def test_fields_of_later_versions_are_left_alone():
    assert wrong_field(made_line("a.weight", [1.0], anything={"new": 1})) == ""


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda text: text[:-40], "line 3 of {path} is not the line of a report: it was cut off"),
        (lambda text: text + "\0\0\0", "line 4 of {path} is not the line of a report: it was cut"),
        (lambda text: text[:200] + text[300:], "line 1 of {path} is not the line of a report: it"),
        (lambda text: f"[{text}]", "line 1 of {path} is not the line of a report: it is not JSON"),
        (lambda text: "7\n", "line 1 of {path} is not the line of a report: it holds 7 instead"),
        (lambda text: "[1]\n", "line 1 of {path} is not the line of a report: it holds [1] inst"),
        (lambda text: "[" * 99_999 + "\n", "line 1 of {path} is not the line of a report: it is"),
        (lambda text: "", "{path} has no lines: no tensor was merged"),
    ],
)
def test_files_that_are_no_reports(tmp_path, change, message):
    path = write(tmp_path / "r.jsonl", layers(3, [1.0, 2.0]))
    path.write_text(change(path.read_text()))
    assert message.format(path=path) in refused(path)


@pytest.mark.parametrize("change", ["\ufeff{}", "{}\n\n", "{}"])
def test_what_editors_add_does_no_harm(tmp_path, change):
    path = write(tmp_path / "r.jsonl", layers(3, [1.0, 2.0]))
    path.write_text(change.format(path.read_text().replace("\n", "\r\n")), encoding="utf-8")
    assert len(read_lines(path)) == 3


def test_lines_of_two_merges(tmp_path):
    one, other = layers(2, [1.0, 2.0], method="ace"), made_line("b", [1.0, 2.0], method="tsv_m")
    text = refused(write(tmp_path / "r.jsonl", [*one, other]))
    assert "holds lines of several merges, by ace and tsv_m; keep those of one" in text


def test_the_command_shows_it_without_a_traceback(tmp_path):
    lines = layers(2, [1.0, 2.0])
    lines[1]["gamma"] = "large"
    path = write(tmp_path / "r.jsonl", lines)
    result = CliRunner().invoke(main, ["report", str(path), "-o", str(tmp_path / "page.html")])
    assert result.exit_code == 1
    assert result.output.startswith(f"Error: line 2 of {path} is not the line of a report")
    assert "its field gamma holds 'large': Input should be a valid number" in result.output
    assert not (tmp_path / "page.html").exists()
