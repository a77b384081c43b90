# SPDX-License-Identifier: Apache-2.0
"""From samples to merged checkpoints: by the commands, against formulas in float64."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import yaml
from checkpoints import ace_config, state
from commands import command
from families import gpt2_family, llama_family
from measured_files import measure
from naive_peers import naive_fisher, naive_regmean
from reference import naive_mean, task_vector_error
from transformers import GPT2LMHeadModel, LlamaForCausalLM
from transformers.pytorch_utils import Conv1D

from mergekit_ace.algebra.ridge import MeasuredCovariance
from mergekit_ace.files.statistics import load_statistics
from mergekit_ace.report.record import read_records

FAMILIES = {"llama": (llama_family, LlamaForCausalLM), "gpt2": (gpt2_family, GPT2LMHeadModel)}


@pytest.fixture(params=FAMILIES)
def measured(request, tmp_path):
    """Paths of a base and two experts, their class, and statistics by the command."""
    make, kind = FAMILIES[request.param]
    config = {**make(tmp_path / "family"), "measure": ["covariances", "fisher"]}
    (tmp_path / "stats.yml").write_text(yaml.safe_dump(config))
    shown = command("statistics", tmp_path / "stats.yml", tmp_path / "stats", "--quiet")
    file = tmp_path / "stats" / "statistics.json"
    assert shown.strip().endswith(str(file))
    return [config["base_model"], *(e["model"] for e in config["models"])], kind, str(file)


@pytest.mark.parametrize("method", ["regmean", "fisher"])
def test_whole_checkpoints(measured, tmp_path, mergekit_yaml, method):
    paths, kind, file = measured
    report = tmp_path / "report.jsonl"
    given = {"statistics": file, "report": str(report)}
    out = mergekit_yaml(ace_config(paths, merge_method=method, parameters=given))
    (model, base), statistics = state(kind, paths[0]), load_statistics(file)
    experts, merged = [state(kind, path)[1] for path in paths[1:]], state(kind, out)[1]
    rules = {line.tensor: line.matrices[0].rule for line in read_records(report)}
    regressed = 0
    for name, tensor in base.items():
        if name == "lm_head.weight" and model.config.tie_word_embeddings:
            continue
        module = model.get_submodule(name.rpartition(".")[0])
        turned = isinstance(module, Conv1D) and tensor.ndim == 2
        stored = [tensor, *(expert[name] for expert in experts)]
        origin, *versions = [one.T if turned else one for one in stored]
        deltas = [version.double() - origin for version in versions]
        inputs = statistics.tensors[name].inputs
        if method == "fisher":
            information = [statistics.read(t, f"fisher/{name}") for t in (0, 1)]
            information = [one.T if turned else one for one in information]
            expected = origin + naive_fisher(deltas, information, [1.0, 1.0])
        elif tensor.ndim != 2 or inputs is None or "wte" in name:
            expected = naive_mean(origin, versions)
        else:
            packed = [statistics.read(t, f"covariance/{inputs}") for t in (0, 1)]
            read = [MeasuredCovariance(one, origin.shape[1]) for one in packed]
            known = [one.matrix(torch.zeros(1).double()) for one in read]
            expected = origin + naive_regmean(deltas, known, [1.0, 1.0])
            regressed += 1
            assert rules[name] == "regmean"
        got = merged[name].T if turned else merged[name]
        assert task_vector_error(got, expected, origin) <= 1e-4, name
    if method == "regmean":
        assert regressed == (15 if kind is LlamaForCausalLM else 8)
    assert "arxiv.org/abs/" in (out / "README.md").read_text()


def test_statistics_that_lack_an_expert_or_have_changed(tmp_path):
    config = llama_family(tmp_path / "family", experts=3)
    paths = [config["base_model"], *(e["model"] for e in config["models"])]
    file = Path(measure({**config, "models": config["models"][:2]}, tmp_path / "stats").path)
    merge = ace_config(paths, merge_method="regmean", parameters={"statistics": str(file)})
    place, out = tmp_path / "merge.yml", tmp_path / "out"
    place.write_text(yaml.safe_dump(merge))
    assert f"holds nothing of {paths[3]}" in command("check", place, fails=True)
    place.write_text(yaml.safe_dump({**merge, "models": merge["models"][:2]}))
    command("check", place)
    command("merge", place, out, "--quiet")
    command("merge", place, out, "--quiet", "--resume")
    file.write_text(file.read_text() + "\n")
    said = command("merge", place, out, "--quiet", "--resume", fails=True)
    assert "statistics.json" in said
