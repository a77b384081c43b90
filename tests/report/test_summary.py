# SPDX-License-Identifier: Apache-2.0
"""Reports of lines made by hand: which are refused, and what the others say."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
from commands import command
from lines import layers, made_line, report_of

from mergekit_ace.report.summary import Report, read_records, summarize


def write(path: Path, lines: list[dict]) -> Path:
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


NO_LINE = "of {path} is not the line of a report: "


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda text: text.replace('"rule"', '"role"', 1),
            f"line 1 {NO_LINE}rule: Field required; remove it, or give the file that `report:` of",
        ),
        (lambda text: text.replace("0.3", '"x"', 1), f"line 1 {NO_LINE}threshold: "),
        (lambda text: text[:-40], f"line 3 {NO_LINE}Invalid JSON: EOF"),
        (lambda text: "", "no tensor was compared: give the report of a finished merge"),
        (
            lambda text: text + json.dumps(made_line("b", [1.0, 2.0], method="tsv_m")),
            "the report is of several merges, by ace and tsv_m; keep those of one",
        ),
    ],
)
def test_files_that_are_no_reports(tmp_path, change, message):
    path, page = write(tmp_path / "r.jsonl", layers(3, [1.0, 2.0])), tmp_path / "page.html"
    path.write_text(change(path.read_text()))
    said = command("report", path, page, fails=True)
    assert said.startswith(f"Error: {message.format(path=path)}"), said
    assert not page.exists()


def test_lines_are_read_as_they_come(tmp_path):
    """With what editors and later versions add; the last line of a tensor counts.

    Tensors without a name are not one.
    """
    stacked = made_line("b", [1.0, 2.0], anything={"new": 1})
    matrix = {name: stacked.pop(name) for name in ("rule", "weight", "tau", "changed", "gamma")}
    stacked["matrices"] = [matrix, {**matrix, "tau": [3.0, 4.0]}]
    lines = [made_line("a", [1.0, 1.0]), *(made_line(None, [tau, 1.0]) for tau in (1.0, 2.0))]
    lines += [stacked, made_line("a", [5.0, 1.0], gamma="Infinity")]
    path = write(tmp_path / "r.jsonl", lines)
    text = path.read_text().replace("\n", "\r\n")
    path.write_text(f"\ufeff{text}\n\n", encoding="utf-8")
    records = read_records(path)
    assert [record.matrices[0].tau[0] for record in records] == [5.0, 1.0, 2.0, 1.0]
    assert records[0].matrices[0].gamma == math.inf
    report = Report([records[0], records[3]])
    assert list(report.matrices.label) == ["a", "b[0]", "b[1]"]
    assert report.norms == pytest.approx([3, math.sqrt(7)])


KEPT = ("tensor", "method", "shape", "layout", "models", "rule", "weight", "tau", "changed")
ALIKE = [[1.0, 0.97], [0.97, 1.0]]
OPPOSED = [[1.0, -0.5], [-0.5, 1.0]]
ODD = ("barely", "opposite", "larger than", "takes no part", "left out")
WORDS = {  # lines, what they say, and what they do not say
    "ordinary": (
        [*layers(4, [1.0, 2.0]), made_line("model.norm.weight", [1.0, 2.0], rule="mean")],
        [
            "5 tensors of 2 experts: 4 merged by ACE-Merging, 1 by the mean",
            "γ stays below the threshold in all 4 matrices",
        ],
        ODD,
    ),
    "odd experts": (
        layers(4, [0.0, 1.0, 4000.0]),
        [
            "expert-0 takes no part: it is the base itself",
            "expert-1 has moved 63 times less than the strongest expert",
            "expert-2 is 63% of the base's size away",
        ],
        ["barely"],
    ),
    "few layers": (
        layers(20, [1.0, 1e-4]) + layers(30, [1.0, 1.0])[20:28] + layers(30, [1.0, 1e-4])[28:],
        ["expert-1 barely differs from the base outside layers 20–27."],
        ["expert-0 barely"],
    ),
    "the base in another precision": (  # not where it is the very base
        [*layers(2, [1.0, 2.0], changed=[1, 0]), made_line("a", [1.0, 0.0], changed=[1, 0])],
        ["expert-1 is left out of 2 tensors, where it is the base, saved in another precision"],
        ["expert-0"],
    ),
    "alike": (layers(3, [1.0, 4.0], cosine=ALIKE), ["nearly the same (cosine 0.97)"], ODD),
    "opposed": (
        layers(3, [1.0, 4.0], cosine=OPPOSED),
        ["pull in opposite directions (cosine -0.50)"],
        ["nearly the same"],
    ),
    "heterogeneous": (
        [*layers(1, [1, 2]), *layers(3, [1, 2], heterogeneous=True, refined=True)[1:]],
        ["γ exceeds the threshold in 2 of 3 matrices."],
        ["stays below"],
    ),
    "large": (
        [
            *layers(3, [1.0, 1.0], amplification=20.0),
            made_line("model.layers.0.mlp.down_proj.weight", [1.0, 1.0], amplification=30.0),
            made_line("model.layers.0.self_attn.q_proj.weight", [1.0, 1.0]),
        ],
        [
            "larger than what the experts hold in 4 of 5 matrices, of up_proj, down_proj",
            "is 30 in model.layers.0.mlp.down_proj.weight, 20 in model.layers.",
            "Leave epsilon_scale out, or raise epsilon",
        ],
        ["q_proj"],
    ),
    "merge": (  # which tells less than an inspection, and solves nothing
        [{name: line[name] for name in KEPT} for line in layers(2, [1, 2], rule="tsv_m")],
        ["2 tensors of 2 experts: 2 tsv_m."],
        ["γ", "\n"],
    ),
}


@pytest.mark.parametrize("case", WORDS)
def test_what_a_report_says(case):
    lines, words, others = WORDS[case]
    text = "\n".join(summarize(report_of(lines[::-1])))
    for word in words:
        assert word in text
    for word in others:
        assert word not in text


def test_numbers_of_whole_models():
    """Tensors weigh by size; one that an expert lacks counts for the others."""
    names = ["a/final", "b/final"]
    one = made_line("a.0.weight", [1.0, 1.0], cosine=[[1, 1], [1, 1]], models=names)
    two = made_line("a.1.weight", [9.0, 9.0], models=names)
    three = made_line("a.2.weight", [6.0], models=names[1:])
    report = report_of([one, two, three])
    assert report.experts == names  # the last part does not tell them apart
    assert report.norms == pytest.approx([math.sqrt(10), 4])
    assert report.relative_sizes == pytest.approx([math.sqrt(n / 30000) for n in (10, 16)])
    assert report.cosines[0] == pytest.approx([1, 0.1])
