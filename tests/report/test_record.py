# SPDX-License-Identifier: Apache-2.0
"""Reports that were cut off or edited: `report` and `card` say which line and field is wrong."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
from click.testing import CliRunner
from lines import layers, made_line

from mergekit_ace.cli import main
from mergekit_ace.report.record import Report, ReportError, read_records


def write(path: Path, lines: list[dict]) -> Path:
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def refused(path: Path) -> str:
    with pytest.raises(ReportError) as caught:
        read_records(path)
    return str(caught.value)


@pytest.mark.parametrize(
    "name", ["tensor", "models", "method", "shape", "layout", "rule", "weight", "tau", "changed"]
)
def test_a_field_that_is_missing(tmp_path, name):
    lines = layers(3, [1.0, 2.0])
    del lines[1][name]
    path = write(tmp_path / "r.jsonl", lines)
    text = refused(path)
    assert f"line 2 of {path} is not the line of a report: " in text
    assert f"{name}: Field required" in text
    assert "give the file that `report:` of a merge" in text


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("gamma", "many", "gamma: Input should be a valid number"),
        ("tau", {}, "tau: Input should be a valid array"),
        ("tau", [1.0, "two"], "tau.1: Input should be a valid number"),
        ("heterogeneous", "many", "heterogeneous: Input should be a valid boolean"),
        ("tau", [1.0], "a list does not have a value for each of 2 experts"),
        ("unchanged", [1.0, 2.0, 3.0], "a list does not have a value for each of 2 experts"),
        ("spectrum", {"before": "x"}, "spectrum.leading: Field required"),
    ],
)
def test_a_field_of_another_kind(tmp_path, name, value, message):
    lines = layers(3, [1.0, 2.0])
    lines[2][name] = value
    path = write(tmp_path / "r.jsonl", lines)
    text = refused(path)
    assert f"line 3 of {path} is not the line of a report: " in text
    assert message in text


def test_stacked_matrices_and_fields_of_later_versions(tmp_path):
    line = made_line("a.weight", [1.0, 2.0], anything={"new": 1})
    matrix = {name: line[name] for name in ("rule", "weight", "tau", "changed", "gamma")}
    head = {name: line[name] for name in ("tensor", "method", "shape", "layout", "models")}
    matrices = [matrix, {**matrix, "tau": [3.0, 4.0]}]
    path = write(tmp_path / "r.jsonl", [{**head, "matrices": matrices}])
    report = Report(read_records(path))
    assert list(report.matrices.label) == ["a.weight[0]", "a.weight[1]"]
    assert report.norms == pytest.approx([2, math.sqrt(6)])
    del matrices[1]["tau"]
    assert "matrices.1.tau: Field required" in refused(
        write(path, [{**head, "matrices": matrices}])
    )


def test_the_last_line_of_a_tensor_counts(tmp_path):
    """A merge that was repeated appends to the same file; tensors without a name are not one."""
    lines = [made_line("a.weight", [1.0]), *(made_line(None, [tau]) for tau in (1.0, 2.0))]
    lines.append(made_line("a.weight", [3.0], gamma="Infinity"))
    found = read_records(write(tmp_path / "r.jsonl", lines))
    assert [record.matrices[0].tau for record in found] == [(3.0,), (1.0,), (2.0,)]
    assert found[0].matrices[0].gamma == math.inf


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda text: text[:-40],
            "line 3 of {path} is not the line of a report: Invalid JSON: EOF",
        ),
        (
            lambda text: text + "\0\0\0",
            "line 4 of {path} is not the line of a report: Invalid JSON",
        ),
        (lambda text: text[:200] + text[300:], "line 1 of {path} is not the line of a report: "),
        (
            lambda text: "7\n",
            "line 1 of {path} is not the line of a report: Input should be an obj",
        ),
        (lambda text: "[" * 99_999 + "\n", "line 1 of {path} is not the line of a report: Invalid"),
        (lambda text: "", "{path} has no lines: no tensor was merged"),
    ],
)
def test_files_that_are_no_reports(tmp_path, change, message):
    path = write(tmp_path / "r.jsonl", layers(3, [1.0, 2.0]))
    path.write_text(change(path.read_text()))
    assert message.format(path=path) in refused(path)
    assert "cannot be read" in refused(tmp_path / "none.jsonl")


@pytest.mark.parametrize("change", ["\ufeff{}", "{}\n\n", "{}"])
def test_what_editors_add_does_no_harm(tmp_path, change):
    path = write(tmp_path / "r.jsonl", layers(3, [1.0, 2.0]))
    path.write_text(change.format(path.read_text().replace("\n", "\r\n")), encoding="utf-8")
    assert len(read_records(path)) == 3


def test_lines_of_two_merges(tmp_path):
    one, other = layers(2, [1.0, 2.0], method="ace"), made_line("b", [1.0, 2.0], method="tsv_m")
    text = refused(write(tmp_path / "r.jsonl", [*one, other]))
    assert "holds lines of several merges, by ace and tsv_m; keep those of one" in text


def test_the_command_shows_it_without_a_traceback(tmp_path):
    path = write(tmp_path / "r.jsonl", layers(2, [1.0, 2.0], gamma="large"))
    result = CliRunner().invoke(main, ["report", str(path), str(tmp_path / "page.html")])
    assert result.exit_code == 1
    assert result.output.startswith(f"Error: line 1 of {path} is not the line of a report")
    assert not (tmp_path / "page.html").exists()
