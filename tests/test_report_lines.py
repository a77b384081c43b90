# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from checkpoints import ace_config, save_family, tiny_llama
from matrices import family
from mergekit.merge_methods import merge_tensors
from safetensors.torch import load_file


def lines(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_a_line_per_tensor(tmp_path, mergekit_yaml):
    paths = save_family(tiny_llama(), tmp_path, scales=[0.001, 0.3])
    report = tmp_path / "ace.jsonl"
    mergekit_yaml(ace_config(paths, parameters={"report": str(report)}))
    entries = {line["tensor"]: line for line in lines(report)}
    base = load_file(Path(paths[0]) / "model.safetensors")
    assert entries.keys() == base.keys()
    for name, line in entries.items():
        assert line["shape"] == list(base[name].shape)
        assert line["layout"] == ("matrix" if base[name].ndim == 2 else "mean")
        assert line["models"] == paths[1:]
        assert line["seconds"] > 0
        deltas = [load_file(Path(p) / "model.safetensors")[name] - base[name] for p in paths[1:]]
        assert line["tau"] == pytest.approx([float(d.double().square().sum()) for d in deltas])
    line = entries["model.layers.0.mlp.up_proj.weight"]
    assert line["rule"] == "ace"
    assert line["heterogeneous"] == (line["log_variance"] > 1)
    assert {"gamma", "normalized", "refined", "epsilon", "rank"} <= line.keys()
    assert line["refined"]
    assert line["rank"] == 9
    assert line["sigma_iso"] > 0
    assert len(line["epsilon"]) == 2


def test_stacked_tensors_have_a_list_of_matrices(rng, tmp_path):
    base = torch.randn(3, 5, 5, generator=rng)
    experts = [base + torch.randn(3, 5, 5, generator=rng) for _ in range(2)]
    report = tmp_path / "r.jsonl"
    options = {"report": str(report), "layout": "stacked"}
    merge_tensors([base, *experts], "ace", base_index=0, parameters=options)
    (line,) = lines(report)
    assert len(line["matrices"]) == 3
    assert "tau" not in line


@pytest.mark.parametrize(
    ("method", "parameters", "recorded"),
    [
        ("tsv_m", {}, {"rank": 3}),
        ("iso_c", {}, {"rule": "iso_c"}),
        ("iso_cts", {"common_fraction": 0.4}, {"rank": 2}),
        ("cart", {"rank_fraction": 0.5}, {"rank": 5}),
        ("wudi", {"solver": "exact"}, {}),
        ("consensus_ta", {"mask_threshold": 0.0, "consensus": 3}, {"selected": 1.0}),
        ("consensus_ta", {"mask_threshold": 1e9}, {"selected": 0.0}),
        ("lines", {"alpha": 0.5}, {"coefficients": [0.5] * 3}),
        ("statsmerging", {"weight": [0.5, 0.0, -1.0]}, {"coefficients": [0.5, 0.0, -1.0]}),
    ],
)
def test_what_other_methods_say(rng, tmp_path, method, parameters, recorded):
    base, experts = family(rng, 20, 10, 3)
    report = tmp_path / "r.jsonl"
    given = {**parameters, "report": str(report)}
    merge_tensors([base, *experts], method, base_index=0, name="w", parameters=given)
    (line,) = lines(report)
    assert recorded.items() <= line.items()
    assert line["method"] == line["rule"] == method
    assert line["models"] == ["1", "2", "3"]
    tau = [float((expert - base).double().square().sum()) for expert in experts]
    assert line["tau"] == pytest.approx(tau)


def test_an_expert_that_is_the_base_in_another_precision(rng, tmp_path):
    base, experts = family(rng, 20, 10, 2)
    saved = [experts[0].bfloat16().float(), base.bfloat16().float()]
    for method in ("ace", "ace_relative", "tsv_m", "consensus_ta", "lines"):
        report = tmp_path / f"{method}.jsonl"
        options = {"report": str(report)}
        merge_tensors([base, *saved], method, base_index=0, parameters=options)
        (line,) = lines(report)
        assert line["changed"] == [1, 0]


def test_infinite_gamma_is_still_json(tmp_path):
    base = torch.zeros(4, 4)
    small, large = torch.eye(4) / 4, torch.eye(4)  # τ = 1/4 and 4: the mean of log τ is 0
    report = tmp_path / "r.jsonl"
    options = {"report": str(report)}
    merge_tensors([base, small, large], "ace", base_index=0, parameters=options)
    assert lines(report)[0]["gamma"] == "Infinity"


def test_threads_do_not_mix_their_lines_or_results(rng, tmp_path):
    """What --multi-gpu does."""
    families = [family(rng, 30, 20, 2) for _ in range(40)]
    report = tmp_path / "r.jsonl"

    def merge(n: int) -> torch.Tensor:
        base, experts = families[n]
        options = {"report": str(report)}
        return merge_tensors([base, *experts], "ace", base_index=0, name=str(n), parameters=options)

    alone = [merge(n) for n in range(40)]
    report.unlink()
    with ThreadPoolExecutor(8) as pool:
        together = list(pool.map(merge, range(40)))
    assert all(torch.equal(a, b) for a, b in zip(alone, together, strict=True))
    assert sorted(int(line["tensor"]) for line in lines(report)) == list(range(40))


def test_a_line_that_was_cut_off_takes_no_other_with_it(tmp_path):
    report = tmp_path / "r.jsonl"
    report.write_text('{"tensor": "a"}\n{"tensor": "b", "me')
    options = {"report": str(report)}
    for name in ("b", "c"):
        tensors = [torch.zeros(2, 2), torch.eye(2)]
        merge_tensors(tensors, "ace", base_index=0, name=name, parameters=options)
    texts = report.read_text().splitlines()
    assert texts[1] == '{"tensor": "b", "me'
    assert [json.loads(text)["tensor"] for text in texts[2:]] == ["b", "c"]
