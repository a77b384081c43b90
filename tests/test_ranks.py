# SPDX-License-Identifier: Apache-2.0
"""The benchmark of adapters merged as adapters, on adapters that have hardly been trained."""

from __future__ import annotations

import torch


def test_the_program_at_its_smallest(benchmark, run_example, tmp_path, monkeypatch):
    ranks = benchmark("ranks")
    monkeypatch.setattr(ranks, "ROWS", ranks.ROWS[-1:])
    flags = ["--families", "llama-lora-gentle", "--small", tmp_path]
    shown = run_example("benchmark", "ranks", *flags)
    (line,) = ranks.read_results(tmp_path / "results.jsonl")
    assert line["full"] == line["published"]
    assert line["apart"] == 0
    lost = [line[rank]["lost"] for rank in ("32", "16", "8")]
    assert 0 < lost[0] < lost[1] < lost[2] < 1
    before = (tmp_path / "results.jsonl").read_bytes()
    again = run_example("benchmark", "ranks", *flags)
    assert (tmp_path / "results.jsonl").read_bytes() == before, "something was repeated"
    assert f"\n| {line['row']} | " in again
    assert again in shown, "the table is the last that a run prints"


def test_the_adapter_of_a_row_has_the_tensors_of_its_full_merge(benchmark, tmp_path, monkeypatch):
    ranks, families = benchmark("ranks"), benchmark("evidence.families")
    # with all layers: in a single one, rounding decides which directions the queries changed in
    new_model = families.new_model
    monkeypatch.setattr(families, "new_model", lambda architecture, layers: new_model(architecture))
    family = families.make_family("llama-lora", 0, experts=2, folder=tmp_path, steps=2)
    family.train()
    examiner = benchmark("evidence.scoring").Examiner(family)
    for row in ranks.ROWS:
        full, _ = examiner.merge(row)
        merged = ranks.merge_as_adapter(examiner, row)
        for name in examiner.base:
            torch.testing.assert_close(merged[name], full[name], rtol=0, atol=1e-6, msg=row.name)
    cut = ranks.merge_as_adapter(examiner, row, rank=3)
    assert 0 < ranks.energy(examiner, cut) < ranks.energy(examiner, merged)
    name = "model.layers.0.mlp.up_proj.weight"
    change = cut[name] - examiner.base[name]
    assert torch.linalg.matrix_rank(change, rtol=1e-3) == 3


def test_answers_apart(benchmark):
    ranks, score = benchmark("ranks"), benchmark("evidence.scoring").Score
    one, other = score({"4": 0.5, "5": 0.25}, 1.0), score({"4": 0.5, "5": 0.25 - 1 / 384}, 1.0)
    assert ranks.apart(one, one) == 0
    assert ranks.apart(one, other) == ranks.apart(other, one) == 1
    assert ranks.apart(one, score(one.new, 1 - 2 / (4 * 384))) == 2
