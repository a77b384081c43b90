# SPDX-License-Identifier: Apache-2.0
"""The lines that a merge appends to its report."""

from __future__ import annotations

import json
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from matrices import family
from mergekit.merge_methods import merge_tensors


@pytest.fixture
def report(tmp_path) -> Path:
    return tmp_path / "r.jsonl"


@pytest.fixture
def merge(report) -> Callable[..., dict]:
    """Merge tensors, the base's first; the function returns the line that was appended."""

    def run(tensors, method: str = "ace", name: str = "w", **parameters) -> dict:
        given = {**parameters, "report": str(report)}
        merge_tensors(tensors, method, base_index=0, name=name, parameters=given)
        return json.loads(report.read_text().splitlines()[-1])

    return run


@pytest.mark.parametrize(
    ("method", "parameters", "recorded"),
    [
        ("wudi", {"solver": "exact"}, {}),
        ("consensus_ta", {"mask_threshold": 0.0, "consensus": 3}, {}),
        ("lines", {"alpha": 0.5}, {"coefficients": [0.5] * 3}),
        ("statsmerging", {"weight": [0.5, 0.0, -1.0]}, {"coefficients": [0.5, 0.0, -1.0]}),
    ],
)
def test_what_other_methods_say(rng, merge, method, parameters, recorded):
    base, experts = family(rng, 20, 10, 3)
    line = merge([base, *experts], method, **parameters)
    assert recorded.items() <= line.items()
    assert line["method"] == line["rule"] == method
    tau = [float((expert - base).double().square().sum()) for expert in experts]
    assert line["tau"] == pytest.approx(tau)
    if method != "statsmerging":
        saved = [experts[0], base.bfloat16().float()]
        parameters = {n: 2 if n == "consensus" else v for n, v in parameters.items()}
        assert merge([base, *saved], method, **parameters)["changed"] == [1, 0]


def test_single_matrices_stacks_and_numbers_that_json_lacks(rng, merge):
    small, large = torch.eye(4) / 4, torch.eye(4)  # τ = 1/4 and 4: the mean of log τ is 0
    assert merge([torch.zeros(4, 4), small, large])["gamma"] == "Infinity"
    line = merge(list(torch.randn(3, 3, 5, 5, generator=rng)), layout="stacked")
    assert len(line["matrices"]) == 3
    assert "tau" not in line


def test_threads_do_not_mix_their_lines_or_results(rng, report):
    """What --multi-gpu does."""
    families = [family(rng, 30, 20, 2) for _ in range(40)]
    options = {"report": str(report)}

    def work(n: int) -> torch.Tensor:
        base, experts = families[n]
        return merge_tensors([base, *experts], "ace", base_index=0, name=str(n), parameters=options)

    alone = [work(n) for n in range(40)]
    with ThreadPoolExecutor(8) as pool:
        assert all(map(torch.equal, alone, pool.map(work, range(40))))
    names = [json.loads(line)["tensor"] for line in report.read_text().splitlines()]
    assert sorted(map(int, names[40:])) == list(range(40))


def test_a_line_that_was_cut_off_takes_no_other_with_it(report, merge):
    report.write_text('{"tensor": "a"}\n{"tensor": "b", "me')
    for name in ("b", "c"):
        merge([torch.zeros(2, 2), torch.eye(2)], name=name)
    texts = report.read_text().splitlines()
    assert texts[1] == '{"tensor": "b", "me'
    assert [json.loads(text)["tensor"] for text in texts[2:]] == ["b", "c"]
