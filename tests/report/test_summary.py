# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import json
import math

import pytest
from lines import layers, made_line, report_of

from mergekit_ace.report.jsonl import ReportError, read_lines
from mergekit_ace.report.summary import summarize


def said(lines: list[dict]) -> str:
    return "\n".join(summarize(report_of(lines))["sentences"])


def test_an_ordinary_family():
    text = said([*layers(4, [1.0, 2.0]), made_line("model.norm.weight", [1.0, 2.0], rule="mean")])
    assert "5 tensors of 2 experts: 4 merged by the closed form and 1 by the mean" in text
    assert "The most similar experts are expert-0 and expert-1, with a cosine of 0.00" in text
    assert "γ stays below the threshold in all 4 matrices" in text
    for word in ("barely", "opposite", "larger than", "base at all", "frozen"):
        assert word not in text


def test_layers_outside_of_which_an_expert_barely_differs():
    lines = layers(30, [1.0, 1e-4])
    for n in range(20, 28):
        lines[n]["tau"] = [1.0, 1.0]
    text = said(lines)
    assert "expert-1 barely differs from the base outside layers 20–27." in text
    assert "expert-0 barely" not in text


def test_layers_are_in_the_order_of_their_numbers():
    lines = layers(12, [1.0])[::-1]
    labels = [row.layer for row in report_of(lines).rows]
    assert labels == list(range(12))


def test_gamma_because_of_the_unit():
    """What the specification measured: the same spread, γ of 0.09 and 0.95."""
    flagged = {"heterogeneous": True, "normalized": True, "refined": True}
    lines = layers(10, [1.0, 2.0])
    for line in lines[:4]:
        line |= {**flagged, "gamma": 0.95, "log_variance": 0.05}
    lines[4] |= {**flagged, "gamma": 2.0, "log_variance": 1.5}
    summary = summarize(report_of(lines))
    assert summary["heterogeneous"] == 5
    assert summary["heterogeneous_by_unit"] == 4
    text = "\n".join(summary["sentences"])
    assert "γ exceeds the threshold in 5 of 10 matrices, in 4 of them only because τ" in text
    assert "heterogeneity: log_variance" in text


@pytest.mark.parametrize("statistic", ["auto", "log_variance"])
def test_the_variance_of_log_tau_has_no_unit(statistic):
    lines = layers(3, [1.0, 2.0], statistic=statistic, gamma=5.0)
    assert "The variance of log τ stays below the threshold in all 3 matrices" in said(lines)
    lines[0] |= {"heterogeneous": True, "refined": True, "log_variance": 1.5}
    assert "The variance of log τ exceeds the threshold in 1 of 3 matrices." in said(lines)


def test_experts_that_are_odd():
    lines = layers(4, [0.0, 1.0, 4000.0])
    text = said(lines)
    assert "expert-0 does not differ from the base at all" in text
    assert "expert-1 has moved 63 times less than the strongest expert" in text
    assert "expert-2 is 63% of the base's size away" in text


def test_frozen_entries_are_counted_by_size():
    lines = layers(2, [1.0, 1.0])
    lines[0]["unchanged"] = [1.0, 0.0]
    lines[1] |= {"shape": [10, 60], "unchanged": [0.5, 0.2]}
    report = report_of(lines)
    assert report.unchanged == pytest.approx([(200 + 300) / 800, 120 / 800])
    assert "expert-0 left 62% of all entries exactly as they were" in said(lines)


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
    report = report_of(lines)
    assert report.cosines[0][1] == pytest.approx(cosine)
    text = said(lines)
    assert sentence in text
    assert text.count("cosine") == 1


def test_cosines_of_whole_models_weigh_tensors_by_size():
    one = made_line("a.0.weight", [1.0, 1.0], cosine=[[1.0, 1.0], [1.0, 1.0]])
    two = made_line("a.1.weight", [9.0, 9.0], cosine=[[1.0, 0.0], [0.0, 1.0]])
    assert report_of([one, two]).cosines[0][1] == pytest.approx(0.1)


def test_overlap_against_chance():
    crowded = {"size": 2, "stable_rank": [3.0, 3.0], "outputs": [[1, 0], [0, 1]]}
    inputs = [[1.0, 0.6], [0.6, 1.0]]
    text = said(layers(3, [1.0, 1.0], subspaces={**crowded, "inputs": inputs}))
    assert "share 60% of their leading input directions" in text
    assert "random ones would share 10%" in text


def test_kernels_have_the_inputs_of_their_whole_window():
    subspaces = {"size": 2, "stable_rank": [3.0, 3.0], "outputs": [[1, 0], [0, 1]]}
    subspaces["inputs"] = [[1.0, 0.6], [0.6, 1.0]]
    kernel = {"shape": [8, 4, 3, 3], "layout": "flattened", "subspaces": subspaces}
    lines = [made_line(f"layer.{n}.conv.weight", [1.0, 1.0], **kernel) for n in range(3)]
    assert "random ones would share 6%" in said(lines)


@pytest.mark.parametrize(("other", "words"), [(0.0, ", and 0.00 with"), (None, "tasks; 0.80 in")])
def test_an_agreement_of_nothing_counts(other, words):
    cosine = [[0.8, other], [other, 0.8]]
    agreement = {"size": 1, "cosine": cosine, "angles": [[30.0], [60.0]]}
    lines = layers(3, [1.0, 1.0], agreement=agreement)
    assert words in said(lines)
    (kind,) = summarize(report_of(lines))["agreement"].values()
    assert kind["others"] == other


def test_an_expert_that_lacks_a_tensor():
    lines = layers(2, [1.0, 2.0])
    lines.append(made_line("model.layers.2.mlp.up_proj.weight", [5.0], models=["org/expert-1"]))
    lines.append({"tensor": "lm_head.weight", "models": [], "skipped": "the base lacks it"})
    report = report_of(lines)
    assert report.models == ["org/expert-0", "org/expert-1"]
    assert report.norms == pytest.approx([math.sqrt(2), 3])
    text = said(lines)
    assert "1 tensor cannot be compared: lm_head.weight." in text


def test_refinement():
    spectrum = {"leading": 2, "before": [2.0, 1.0], "after": [3.0, 2.0], "alignment": [0.9, 0.8]}
    spectrum |= {"share_before": 0.2, "share_after": 0.5}
    flagged = {"heterogeneous": True, "refined": True, "spectrum": spectrum}
    text = said(layers(4, [1.0, 2.0], **flagged, gamma=0.5, log_variance=0.6))
    assert "The refinement of 4 matrices changes" in text
    assert "from 20% to 50%" in text


def test_names_that_are_not_told_apart_by_their_last_part():
    lines = layers(1, [1.0, 1.0], models=["a/final", "b/final"])
    assert report_of(lines).experts == ["a/final", "b/final"]


def test_a_report_of_a_method_that_is_gone():
    report = report_of([made_line("a.weight", [1.0, 2.0], rule="gone", method="gone")])
    assert report.title == "gone"
    assert report.about == ""
    assert "1 by the rule 'gone'" in summarize(report)["sentences"][0]


def test_coefficients_without_that_of_the_refinement():
    report = report_of(layers(1, [1.0, 2.0], coefficients=[0.3, 0.4, 0.9]))
    assert report.coefficients(report.lines[0]) == [0.3, 0.4]


def test_reading_lines(tmp_path):
    path = tmp_path / "r.jsonl"
    first = made_line("a.weight", [1.0, 2.0])
    newer = made_line("a.weight", [3.0, 4.0], gamma="inf")
    path.write_text("\n".join(map(json.dumps, (first, newer))) + "\n")
    (line,) = read_lines(path)  # a merge that was repeated appends to the same file
    assert line.matrices[0].tau == (3.0, 4.0)
    assert line.matrices[0].gamma == math.inf
    for text, message in (
        ("", "no lines"),
        ("{}", "line 1 of"),
        ("[1]", "line 1"),
        ("{", "line 1"),
    ):
        path.write_text(text)
        with pytest.raises(ReportError, match=message):
            read_lines(path)
    with pytest.raises(ReportError, match="cannot be read"):
        read_lines(tmp_path / "none.jsonl")


def test_a_method_without_statistics():
    lines = layers(4, [0.1, 2.0], rule="ace_relative", method="ace_relative")
    for line in lines:  # what only `ace` measures
        for field in ("gamma", "statistic", "heterogeneous", "refined", "spectrum"):
            del line[field]
    text = said(lines)
    assert "4 merged by the closed form of relative covariances" in text
    assert "γ" not in text
    assert "threshold" not in text


def test_an_expert_that_is_the_base_in_another_precision():
    lines = layers(4, [1.0, 2.0])
    for line in lines[:2]:
        line["changed"] = [1, 0]
    lines[2] |= {"tau": [1.0, 0.0], "changed": [1, 0]}  # the very base, which is nothing to tell
    sentence = "expert-1 is left out of 2 tensors, where it is the base, saved in another precision"
    assert sentence in said(lines)


def grouped_heads(count: int) -> list[dict]:
    """Matrices of three experts: q with T·o/i = 3, k and v with 1, down with 0.8."""
    shapes = {"q_proj": [60, 60], "k_proj": [20, 60], "v_proj": [20, 60], "down_proj": [48, 180]}
    return [
        made_line(f"model.layers.{n}.{kind}.weight", [1.0, 1.0, 1.0], shape=shape)
        for n in range(count)
        for kind, shape in shapes.items()
    ]


def test_experts_of_no_weight_have_no_rows():
    (_, line, *_) = grouped_heads(1)
    line["weight"] = [1.5, 1.5, 0.0]
    assert [row.rows_per_column for row in report_of([line]).rows] == [pytest.approx(2 / 3)]
    line |= {"shape": [60, 20], "layout": "transposed"}
    assert [row.rows_per_column for row in report_of([line]).rows] == [pytest.approx(2 / 3)]


def test_what_is_estimated_at_the_outputs():
    (_, line, *_) = grouped_heads(1)
    line |= {"shape": [20, 60], "side": "outputs"}
    assert [row.rows_per_column for row in report_of([line]).rows] == [pytest.approx(9)]
    assert "covariances of 1 matrix are estimated at the outputs" in said([line])
    assert "at the outputs" not in said([{**line, "side": "inputs"}])
    relative = {**line, "method": "ace_relative", "rule": "ace_relative", "statistic": None}
    assert "at the outputs" in said([relative])


def test_merges_that_are_larger_than_what_the_experts_hold():
    lines = grouped_heads(3)
    for n, line in enumerate(lines):
        line["ridge"] = 0.01 + 0.01 * n
        if "v_proj" in line["tensor"]:
            line["amplification"] = 20.0 + n
    lines[1]["amplification"] = 3.0
    summary = summarize(report_of(lines))
    text = "\n".join(summary["sentences"])
    assert (
        "larger than what the experts hold in 4 of 12 matrices, v_proj and k_proj (T·o/i = 1)"
        in text
    )
    assert (
        "‖X‖² / Σ ‖Δ_t‖² is 30 in model.layers.2.v_proj.weight, 26 in model.layers.1.v_proj.weight "
        "and 22 in model.layers.0.v_proj.weight" in text
    )
    assert "leave `epsilon_scale` out, or raise `epsilon`" in text
    assert summary["largest_ridge"] == pytest.approx(0.12)
    assert summary["largest_amplification"] == 30
    assert summary["near_threshold"] == {
        "model.layers.*.k_proj.weight": 1,
        "model.layers.*.v_proj.weight": 1,
        "model.layers.*.down_proj.weight": pytest.approx(0.8),
    }


def test_modules_that_few_matrices_are_of_are_left_out():
    lines = grouped_heads(12)
    for line in lines:
        if "k_proj" in line["tensor"] or line is lines[0]:
            line["amplification"] = 5.0
    lines[1] |= {"shape": [22, 60]}
    assert "13 of 48 matrices, mostly k_proj (T·o/i = 1 to 1.1)" in said(lines)


def test_reports_that_know_nothing_of_ridges():
    lines = layers(4, [1.0, 2.0])
    for line in lines:
        for field in ("ridge", "amplification"):
            del line[field]
    summary = summarize(report_of(lines))
    assert summary["largest_ridge"] is summary["largest_amplification"] is None
    assert summary["near_threshold"] == {}
    assert "T·o/i" not in "\n".join(summary["sentences"])


def test_an_infinite_ridge_is_read_as_a_number(tmp_path):
    line = made_line("w", [1.0, 1.0], ridge="inf")
    path = tmp_path / "r.jsonl"
    path.write_text(json.dumps(line) + "\n")
    assert read_lines(path)[0].matrices[0].ridge == math.inf
