# SPDX-License-Identifier: Apache-2.0
"""What a report says, of lines made by hand."""

from __future__ import annotations

import math

import pytest
from lines import layers, made_line, report_of, spectrum

from mergekit_ace.report.summary import summarize


def said(lines: list[dict]) -> str:
    return "\n".join(summarize(report_of(lines))["sentences"])


def test_an_ordinary_family():
    text = said([*layers(4, [1.0, 2.0]), made_line("model.norm.weight", [1.0, 2.0], rule="mean")])
    assert "5 tensors of 2 experts: 4 merged by the closed form and 1 by the mean" in text
    assert "The most similar experts are expert-0 and expert-1, with a cosine of 0.00" in text
    assert "γ stays below the threshold in all 4 matrices" in text
    for word in ("barely", "opposite", "larger than", "base at all", "cannot be compared"):
        assert word not in text


def test_layers_outside_of_which_an_expert_barely_differs():
    lines = layers(30, [1.0, 1e-4])
    for n in range(20, 28):
        lines[n]["tau"] = [1.0, 1.0]
    text = said(lines[::-1])
    assert "expert-1 barely differs from the base outside layers 20–27." in text
    assert "expert-0 barely" not in text


def test_experts_that_are_odd():
    text = said(layers(4, [0.0, 1.0, 4000.0]))
    assert "expert-0 does not differ from the base at all" in text
    assert "expert-1 has moved 63 times less than the strongest expert" in text
    assert "expert-2 is 63% of the base's size away" in text


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
    ("statistic", "words"),
    [("gamma", "γ"), ("auto", "The variance of log τ"), ("log_variance", "The variance of log τ")],
)
def test_heterogeneity_and_refinement(statistic, words):
    lines = layers(3, [1.0, 2.0], statistic=statistic)
    assert f"{words} stays below the threshold in all 3 matrices" in said(lines)
    flagged = {"heterogeneous": True, "refined": True, "spectrum": spectrum(2, refined=True)}
    lines[0] |= flagged
    lines[2] |= flagged
    text = said(lines)
    assert f"{words} exceeds the threshold in 2 of 3 matrices." in text
    assert "The refinement of 2 matrices changes" in text
    assert "from 40% to 60%" in text
    summary = summarize(report_of(lines))
    assert summary["heterogeneous"] == summary["refined"] == 2


def test_merges_that_are_larger_than_what_the_experts_hold():
    lines = layers(3, [1.0, 1.0], amplification=20.0)
    lines[0]["ridge"] = 0.9
    lines += [made_line("model.layers.0.mlp.down_proj.weight", [1.0, 1.0], amplification=30.0)]
    lines += [made_line("model.layers.0.self_attn.q_proj.weight", [1.0, 1.0])]
    text = said(lines)
    assert "larger than what the experts hold in 4 of 5 matrices, of up_proj and down_proj" in text
    assert "is 30 in model.layers.0.mlp.down_proj.weight, 20 in model.layers." in text
    assert "leave `epsilon_scale` out, or raise `epsilon`" in text
    summary = summarize(report_of(lines))
    assert summary["largest_ridge"] == 0.9
    assert summary["largest_amplification"] == 30


@pytest.mark.parametrize(("other", "words"), [(0.0, ", and 0.00 with"), (None, "tasks; 0.80 in")])
def test_agreement_with_what_was_measured(other, words):
    cosine = [[0.8, other], [other, 0.8]]
    agreement = {"size": 1, "cosine": cosine, "angles": [[30.0], [60.0]]}
    lines = layers(3, [1.0, 1.0], agreement=agreement)
    assert words in said(lines)
    (kind,) = summarize(report_of(lines))["agreement"].values()
    expected = {"own": 0.8, "others": other, "overlap": (0.75 + 0.25) / 2, "chance": 1 / 20}
    assert kind == pytest.approx(expected)


def test_an_expert_that_lacks_a_tensor():
    lines = layers(2, [1.0, 2.0])
    lines.append(made_line("model.layers.2.mlp.up_proj.weight", [5.0], models=["org/expert-1"]))
    skipped = {"method": "ace", "shape": [], "layout": "", "models": []}
    lines.append({"tensor": "lm_head.weight", **skipped, "skipped": "the base lacks it"})
    summary = summarize(report_of(lines))
    assert summary["experts"] == ["org/expert-0", "org/expert-1"]
    assert summary["norm"] == pytest.approx([math.sqrt(2), 3])
    assert "1 tensor cannot be compared: lm_head.weight." in summary["sentences"]


def test_numbers_of_whole_models_weigh_tensors_by_size():
    one = made_line("a.0.weight", [1.0, 1.0], cosine=[[1.0, 1.0], [1.0, 1.0]], unchanged=[1.0, 0.0])
    two = made_line("a.1.weight", [9.0, 9.0], shape=[10, 60], unchanged=[0.5, 0.2])
    report = report_of([one, two])
    assert report.cosines[0][1] == pytest.approx(0.1)
    assert report.unchanged == pytest.approx([(200 + 300) / 800, 120 / 800])
    assert report.relative_sizes == pytest.approx([math.sqrt(10) / math.sqrt(20000)] * 2)


def test_names_that_are_not_told_apart_by_their_last_part():
    lines = layers(1, [1.0, 1.0], models=["a/final", "b/final"])
    assert report_of(lines).experts == ["a/final", "b/final"]


def test_a_report_of_a_method_that_is_gone():
    summary = summarize(report_of([made_line("a.weight", [1.0, 2.0], rule="gone", method="gone")]))
    assert summary["about"] == ""
    assert "1 by the rule 'gone'" in summary["sentences"][0]


def test_a_merge_tells_less_than_an_inspection():
    """And methods that solve nothing tell of no ridge."""
    lines = layers(2, [1.0, 2.0], method="tsv_m", rule="tsv_m")
    kept = ("tensor", "method", "shape", "layout", "models", "rule", "weight", "tau", "changed")
    summary = summarize(report_of([{name: line[name] for name in kept} for line in lines]))
    assert summary["norm"] == pytest.approx([math.sqrt(2), 2])
    for name in ("largest_ridge", "largest_amplification"):
        assert summary[name] is None
    assert summary["unchanged"] == summary["relative_size"] == [None, None]
    assert len(summary["sentences"]) == 1
