# SPDX-License-Identifier: Apache-2.0
"""From samples to merged checkpoints: by the commands, against formulas in float64."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from checkpoints import ace_config, state
from commands import command, run_config
from families import gpt2_family, llama_family
from measured_files import measure
from naive_peers import naive_fisher, naive_regmean
from reference import naive_mean, task_vector_error
from transformers import GPT2LMHeadModel, LlamaForCausalLM
from transformers.pytorch_utils import Conv1D

from mergekit_ace.algebra.ridge import MeasuredCovariance
from mergekit_ace.files.statistics import load_statistics
from mergekit_ace.report.summary import read_records


@pytest.mark.parametrize(
    ("make", "kind", "count"),
    [(llama_family, LlamaForCausalLM, 15), (gpt2_family, GPT2LMHeadModel, 8)],
)
def test_whole_checkpoints(tmp_path, mergekit_yaml, make, kind, count):
    config = {**make(tmp_path / "family"), "measure": ["covariances", "fisher"]}
    file = tmp_path / "stats" / "statistics.json"
    assert run_config("statistics", config, tmp_path / "stats").strip().endswith(str(file))
    paths = [config["base_model"], *(e["model"] for e in config["models"])]
    merged = {}
    for method in ("fisher", "regmean"):
        report = tmp_path / f"{method}.jsonl"
        given = {"statistics": str(file), "report": str(report)}
        merge = ace_config(paths, merge_method=method, parameters=given)
        merged[method] = state(kind, mergekit_yaml(merge, out=method))[1]
        assert "arxiv.org/abs/" in (tmp_path / method / "README.md").read_text()
    rules = {line.tensor: line.matrices[0].rule for line in read_records(report)}
    (model, base), statistics = state(kind, paths[0]), load_statistics(str(file))
    experts = [state(kind, path)[1] for path in paths[1:]]
    regressed = 0
    for name, tensor in base.items():
        if name == "lm_head.weight" and model.config.tie_word_embeddings:
            continue
        module = model.get_submodule(name.rpartition(".")[0])
        turned = isinstance(module, Conv1D) and tensor.ndim == 2
        stored = [tensor, *(expert[name] for expert in experts)]
        stored += [merged[method][name] for method in merged]
        stored += [statistics.read(t, f"fisher/{name}") for t in (0, 1)]
        origin, *versions, fisher, regmean, one, two = (t.T if turned else t for t in stored)
        deltas = [version.double() - origin for version in versions]
        expected = origin + naive_fisher(deltas, [one, two], [1.0, 1.0])
        assert task_vector_error(fisher, expected, origin) <= 1e-4, name
        inputs, expected = statistics.tensors[name].inputs, naive_mean(origin, versions)
        if tensor.ndim == 2 and inputs and "wte" not in name:
            packed = [statistics.read(t, f"covariance/{inputs}") for t in (0, 1)]
            read = [MeasuredCovariance(each, origin.shape[1]) for each in packed]
            known = [each.matrix(torch.zeros(1).double()) for each in read]
            expected = origin + naive_regmean(deltas, known, [1.0, 1.0])
            regressed += 1
            assert rules[name] == "regmean"
        assert task_vector_error(regmean, expected, origin) <= 1e-4, name
    assert regressed == count


def test_statistics_that_lack_an_expert_or_have_changed(tmp_path):
    config = llama_family(tmp_path / "family", experts=3)
    paths = [config["base_model"], *(e["model"] for e in config["models"])]
    file = Path(measure({**config, "models": config["models"][:2]}, tmp_path / "stats").path)
    merge = ace_config(paths, merge_method="regmean", parameters={"statistics": str(file)})
    out = tmp_path / "out"
    run_config("merge", {**merge, "models": merge["models"][:2]}, out)
    command("check", tmp_path / "out.yml")
    command("merge", tmp_path / "out.yml", out, "--quiet", "--resume")
    file.write_text(file.read_text() + "\n")
    said = command("merge", tmp_path / "out.yml", out, "--quiet", "--resume", fails=True)
    assert "statistics.json" in said
    assert f"holds nothing of {paths[3]}" in run_config("merge", merge, out, fails=True)
    assert f"holds nothing of {paths[3]}" in command("check", tmp_path / "out.yml", fails=True)
