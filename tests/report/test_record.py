# SPDX-License-Identifier: Apache-2.0
"""Reports of lines made by hand: which are refused, and what the others say."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
from click.testing import CliRunner
from lines import layers, made_line, report_of

from mergekit_ace.cli import main
from mergekit_ace.report.record import Report, ReportError, read_records, summarize

SKIPPED = {"tensor": "a", "method": "ace", "shape": [], "layout": "", "models": []}


def write(path: Path, lines: list[dict]) -> Path:
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def refused(path: Path) -> str:
    with pytest.raises(ReportError) as caught:
        read_records(path)
    return str(caught.value)


def said(lines: list[dict]) -> str:
    return "\n".join(summarize(report_of(lines))["sentences"])


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
        ("tau", [1.0], "a list does not have a value for each of 2 experts"),
        ("unchanged", [1.0, 2.0, 3.0], "a list does not have a value for each of 2 experts"),
        ("subspaces", {"inputs": "x"}, "subspaces.size: Field required"),
    ],
)
def test_a_field_of_another_kind(tmp_path, name, value, message):
    lines = layers(3, [1.0, 2.0])
    lines[2][name] = value
    path = write(tmp_path / "r.jsonl", lines)
    text = refused(path)
    assert f"line 3 of {path} is not the line of a report: " in text
    assert message in text


NO_LINE = "of {path} is not the line of a report: "


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda text: text[:-40], f"line 3 {NO_LINE}Invalid JSON: EOF"),
        (lambda text: text + "\0\0\0", f"line 4 {NO_LINE}Invalid JSON"),
        (lambda text: text[:200] + text[300:], f"line 1 {NO_LINE}"),
        (lambda text: "7\n", f"line 1 {NO_LINE}Input should be an obj"),
        (lambda text: "[" * 99_999 + "\n", f"line 1 {NO_LINE}Invalid"),
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
    ("lines", "message"),
    [
        (layers(2, [1.0, 2.0], gamma="large"), "Error: line 1 of {path} is not the line"),
        ([{**SKIPPED, "skipped": "why"}], "Error: no tensor could be compared"),
    ],
)
def test_the_command_shows_it_without_a_traceback(tmp_path, lines, message):
    path, page = write(tmp_path / "r.jsonl", lines), tmp_path / "page.html"
    result = CliRunner().invoke(main, ["report", str(path), str(page)])
    assert result.exit_code == 1
    assert result.output.startswith(message.format(path=path))
    assert not page.exists()


def test_an_ordinary_family():
    text = said([*layers(4, [1.0, 2.0]), made_line("model.norm.weight", [1.0, 2.0], rule="mean")])
    assert "5 tensors of 2 experts: 4 merged by the closed form and 1 by the mean" in text
    assert "The most similar experts are expert-0 and expert-1, with a cosine of 0.00" in text
    assert "γ stays below the threshold in all 4 matrices" in text
    for word in ("barely", "opposite", "larger than", "base at all", "cannot be compared"):
        assert word not in text


def test_experts_that_are_odd():
    text = said(layers(4, [0.0, 1.0, 4000.0]))
    assert "expert-0 does not differ from the base at all" in text
    assert "expert-1 has moved 63 times less than the strongest expert" in text
    assert "expert-2 is 63% of the base's size away" in text


def test_layers_outside_of_which_an_expert_barely_differs():
    lines = layers(30, [1.0, 1e-4, 0.0])
    for n in range(20, 28):
        lines[n]["tau"] = [1.0, 1.0, 0.0]
    text = said(lines[::-1])
    assert "expert-1 barely differs from the base outside layers 20–27." in text
    assert text.count("barely") == 1


def test_an_expert_that_is_the_base_in_another_precision():
    lines = layers(4, [1.0, 2.0])
    for line in lines[:2]:
        line["changed"] = [1, 0]
    lines[2] |= {"tau": [1.0, 0.0], "changed": [1, 0]}  # the very base, which is nothing to tell
    sentence = "expert-1 is left out of 2 tensors, where it is the base, saved in another precision"
    assert sentence in said(lines)


@pytest.mark.parametrize(
    ("cosine", "sentence"),
    [
        (0.97, "learned nearly the same (cosine 0.97)"),
        (-0.5, "pull in opposite directions (cosine -0.50)"),
        (0.3, "with a cosine of 0.30"),
    ],
)
def test_pairs(cosine, sentence):
    lines = layers(3, [1.0, 4.0], cosine=[[1.0, cosine], [cosine, 1.0]])
    assert summarize(report_of(lines))["cosine"][0][1] == pytest.approx(cosine)
    text = said(lines)
    assert sentence in text
    assert text.count("cosine") == 1


@pytest.mark.parametrize(
    ("statistic", "words"), [("gamma", "γ"), ("auto", "The variance of log τ")]
)
def test_heterogeneity(statistic, words):
    lines = layers(3, [1.0, 2.0], statistic=statistic)
    assert f"{words} stays below the threshold in all 3 matrices" in said(lines)
    for line in lines[1:]:
        line |= {"heterogeneous": True, "refined": True}
    assert f"{words} exceeds the threshold in 2 of 3 matrices." in said(lines)
    summary = summarize(report_of(lines))
    assert summary["heterogeneous"] == summary["refined"] == 2


def test_merges_that_are_larger_than_what_the_experts_hold():
    lines = layers(3, [1.0, 1.0], amplification=20.0)
    lines[0]["ridge"] = 0.9
    lines += [made_line("model.layers.0.mlp.down_proj.weight", [1.0, 1.0], amplification=30.0)]
    lines += [made_line("model.layers.0.self_attn.q_proj.weight", [1.0, 1.0])]
    text = said(lines)
    assert "larger than what the experts hold in 4 of 5 matrices, of up_proj, down_proj" in text
    assert "is 30 in model.layers.0.mlp.down_proj.weight, 20 in model.layers." in text
    assert "leave epsilon_scale out, or raise epsilon" in text
    summary = summarize(report_of(lines))
    assert (summary["largest_ridge"], summary["largest_amplification"]) == (0.9, 30)


@pytest.mark.parametrize(("other", "words"), [(0.0, ", and 0.00 with"), (None, "tasks; 0.80 in")])
def test_agreement_with_what_was_measured(other, words):
    lines = layers(3, [1.0, 1.0], agreement=[[0.8, other], [other, 0.8]])
    assert words in said(lines)
    (kind,) = summarize(report_of(lines))["agreement"].values()
    assert kind == pytest.approx({"own": 0.8, "others": other})


def test_an_expert_that_lacks_a_tensor():
    lines = layers(2, [1.0, 2.0], models=["a/final", "b/final"])
    lines.append(made_line("model.layers.2.mlp.up_proj.weight", [5.0], models=["b/final"]))
    lines.append({**SKIPPED, "tensor": "lm_head.weight", "skipped": "the base lacks it"})
    report = report_of(lines)
    assert report.experts == ["a/final", "b/final"]  # the last part does not tell them apart
    summary = summarize(report)
    assert summary["norm"] == pytest.approx([math.sqrt(2), 3])
    assert summary["cosine"][0] == pytest.approx([1, 0])
    assert "1 tensor cannot be compared: lm_head.weight." in summary["sentences"]


def test_numbers_of_whole_models_weigh_tensors_by_size():
    one = made_line("a.0.weight", [1.0, 1.0], cosine=[[1.0, 1.0], [1.0, 1.0]])
    report = report_of([one, made_line("a.1.weight", [9.0, 9.0])])
    assert report.cosines[0][1] == pytest.approx(0.1)
    assert report.relative_sizes == pytest.approx([math.sqrt(10) / math.sqrt(20000)] * 2)


def test_a_merge_tells_less_than_an_inspection():
    """And methods that solve nothing tell of no ridge."""
    lines = layers(2, [1.0, 2.0], method="tsv_m", rule="tsv_m")
    kept = ("tensor", "method", "shape", "layout", "models", "rule", "weight", "tau", "changed")
    summary = summarize(report_of([{name: line[name] for name in kept} for line in lines]))
    assert summary["norm"] == pytest.approx([math.sqrt(2), 2])
    assert summary["largest_ridge"] is summary["largest_amplification"] is None
    assert summary["relative_size"] == [None, None]
    assert len(summary["sentences"]) == 1
