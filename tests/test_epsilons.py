# SPDX-License-Identifier: Apache-2.0
"""The benchmark over ε: families near the interpolation threshold, and what is made of scores."""

from __future__ import annotations

import json
import math

import pytest
import torch
from safetensors.torch import load_file

from mergekit_ace.algebra import ridge_floor


def test_the_program_at_its_smallest(benchmark, run_example, tmp_path):
    epsilons = benchmark("epsilons")
    flags = ["--families", "llama-grouped", "--small", tmp_path, "--epsilons", 0, 0.01]
    flags += ["--parameters", "{}", '{"lambda": 0.5}']
    shown = run_example("benchmark", "epsilons", *flags)
    assert "\n| | llama-grouped, float32 | llama-grouped, bfloat16 |\n" in shown
    assert "\nace_relative, lambda: 0.5: accuracy" in shown
    assert shown.count("\n| **a smaller ε loses** | ") == 4
    assert "| q_proj | k_proj | v_proj | o_proj | gate_proj | up_proj | down_proj |" in shown
    results = tmp_path / "results.jsonl"
    lines = epsilons.read_results(results)
    assert len(lines) == 2 * 2 * 2 * 2  # methods, ε, parameters, precisions
    assert {path.name for path in tmp_path.iterdir()} == {"llama-grouped-0", "results.jsonl"}
    before = results.read_bytes()
    again = run_example("benchmark", "epsilons", *flags)
    assert results.read_bytes() == before, "something was repeated"
    assert again in shown, "the tables are the last that a run prints"
    usual = ridge_floor.SPECTRAL_RIDGE
    shown = run_example("benchmark", "epsilons", *flags[:-3], "--epsilons", 0, "--methods", "ace",
                        "--stored", "float32", "--spectral", usual, 30.0)  # fmt: skip
    assert "\nace, 30 of the spectrum: accuracy" in shown
    assert usual == ridge_floor.SPECTRAL_RIDGE
    new = epsilons.read_results(results)[len(lines) :]
    assert [line["row"] for line in new] == ["ace, 30 of the spectrum, ε = 0"]
    (plain,) = (line for line in lines if (line["row"], line["family"]) == (
        "ace, ε = 0", "llama-grouped, float32"))  # fmt: skip
    assert all(
        new[0]["amplification"][kind] != sizes for kind, sizes in plain["amplification"].items()
    )


def test_experts_of_grouped_heads_meet_the_threshold(benchmark):
    families, dictionaries = benchmark("evidence.families"), benchmark("evidence.dictionaries")
    sisters = {f"{name}-grouped" for name in families.LANGUAGE_FAMILIES if "llama" in name}
    assert sisters < set(families.GROUPED_FAMILIES)
    for name, (architecture, languages, _) in families.GROUPED_FAMILIES.items():
        model = dictionaries.new_model(architecture)
        (rows, columns) = model.model.layers[0].self_attn.v_proj.weight.shape
        ratio = {"0.9": 44 / 48, "1.1": 52 / 48}.get(name.rpartition("-")[2], 1.0)
        assert len(languages) * rows / columns == pytest.approx(ratio), name
        assert model.config.tie_word_embeddings == ("tied" in name)


def test_a_family_is_stored_in_another_precision_once(benchmark, tmp_path):
    families, dictionaries = benchmark("evidence.families"), benchmark("evidence.dictionaries")
    family = families.make_family("llama-tied-grouped", 0, experts=1, folder=tmp_path)
    saved = {}
    for folder in (family.base, *family.experts.values()):
        dictionaries.new_model(family.architecture).save_pretrained(folder)
        saved[folder.name] = load_file(folder / "model.safetensors")
    family.store_as(torch.bfloat16)
    copies = [family.base, *family.experts.values()]
    for folder in copies:
        stored = load_file(folder / "model.safetensors")
        in_memory = family.load(folder).state_dict()
        for name, tensor in saved[folder.name].items():
            assert torch.equal(stored[name], tensor.bfloat16()), name
            assert torch.equal(in_memory[name], tensor.bfloat16().float()), name
    written = [(folder / "model.safetensors").stat().st_mtime_ns for folder in copies]
    again = families.make_family("llama-tied-grouped", 0, experts=1, folder=tmp_path)
    again.store_as(torch.bfloat16)
    assert [again.base, *again.experts.values()] == copies
    assert written == [(folder / "model.safetensors").stat().st_mtime_ns for folder in copies]


def test_a_row_that_fails_is_told(benchmark, tmp_path, monkeypatch, capsys):
    epsilons = benchmark("epsilons")

    class Failing:
        def merge(self, row):
            raise ValueError("ace: 'v_proj' cannot be merged")

    assert {row.method for row in epsilons.make_rows({}, ["ace"])} == {"ace"}
    (row, *_) = epsilons.make_rows({})
    head = {"family": "llama-grouped, float32", "seed": 0, "experts": 4, "row": row.name}
    line = {**head, "group": row.group, "epsilon": 0.0, **epsilons.examine_row(Failing(), row)}
    assert "v_proj" in line["published"]["error"]
    known = {"mean": 0.4, "old": 1.0}
    other = {**line, "row": "ace, ε = 1", "epsilon": 1.0, "published": known, "amplification": {}}
    path = tmp_path / "results.jsonl"
    epsilons.keep([line, other], {}, path)
    epsilons.print_tables(epsilons.in_order(epsilons.read_results(path)))
    shown = capsys.readouterr().out
    assert "| ace, ε = 0 | error |\n| ace, ε = 1 | 0.400 |" in shown
    assert "loses** | 0.000 (best ε 1, errors) |" in shown


def test_what_a_smaller_epsilon_loses(benchmark):
    regret = benchmark("epsilons").regret

    def lines(**means: float) -> list[dict]:
        return [
            {"epsilon": float(e), "published": {"mean": mean}}
            for e, mean in zip((0, 1e-4, 1e-2, 1), means.values(), strict=False)
        ]

    assert regret(lines(a=0.1, b=0.3, c=0.5, d=0.2)) == (1e-2, pytest.approx(0.4), False)
    assert regret(lines(a=0.5, b=0.3, c=0.5, d=0.2)) == (1e-2, pytest.approx(0.2), False)
    assert regret(lines(a=0.5, b=0.3, c=0.2, d=0.1)) == (0.0, 0.0, False)
    assert regret(lines(a=math.nan, b=0.3, c=0.5)) == (1e-2, pytest.approx(0.2), True)
    two_seeds = lines(a=0.1, b=0.3, c=0.5) + lines(a=0.5, b=0.3, c=0.1)
    assert regret(two_seeds) == (1e-2, 0.0, False)
    assert all(map(math.isnan, regret(lines(a=math.nan, b=math.nan))[:2]))


def test_amplification_is_that_of_matrices_in_layers(benchmark):
    generator = torch.Generator().manual_seed(0)
    names = ["layers.0.attn.v_proj.weight", "layers.1.attn.v_proj.weight", "layers.0.norm.weight"]
    names += ["embed.weight"]
    base, first, second, merged = (
        {n: torch.randn(*([3] if "norm" in n else [3, 2]), generator=generator) for n in names}
        for _ in range(4)
    )
    found = benchmark("epsilons").amplification(base, [first, second], merged)
    wanted = []
    for name in names[:2]:
        sizes = [torch.linalg.norm(expert[name] - base[name]) for expert in (first, second)]
        wanted.append(float(torch.linalg.norm(merged[name] - base[name]) / max(sizes)))
    assert found == {"v_proj": pytest.approx(wanted)}
    assert json.loads(json.dumps(found)) == found
