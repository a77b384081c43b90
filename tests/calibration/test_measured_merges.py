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
from reference import naive_ace, naive_mean, task_vector_error
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


def covariances_of(file: str, name: str, columns: int) -> list[torch.Tensor] | None:
    statistics = load_statistics(file)
    inputs = statistics.tensors[name].inputs
    if inputs is None:
        return None
    read = [statistics.read(t, f"covariance/{inputs}") for t in (0, 1)]
    return [MeasuredCovariance(p, columns).matrix(torch.zeros(1).double()) for p in read]


@pytest.mark.parametrize("method", ["regmean", "fisher", "ace"])
def test_whole_checkpoints(measured, tmp_path, mergekit_yaml, method):
    paths, kind, file = measured
    given = {"covariances": file, "mix": 0.5} if method == "ace" else {"statistics": file}
    report = tmp_path / "report.jsonl"
    given["report"] = str(report)
    out = mergekit_yaml(ace_config(paths, merge_method=method, parameters=given))
    model, base = state(kind, paths[0])
    experts = [state(kind, path)[1] for path in paths[1:]]
    _, merged = state(kind, out)
    rules = {line.tensor: line.matrices[0].rule for line in read_records(report)}
    regressed = 0
    for name, tensor in base.items():
        if name == "lm_head.weight" and model.config.tie_word_embeddings:
            continue
        own = [expert[name] for expert in experts]
        turned = isinstance(model.get_submodule(name.rpartition(".")[0]), Conv1D)
        turned = turned and tensor.ndim == 2
        versions = [t.T if turned else t for t in (tensor, *own)]
        known = covariances_of(file, name, versions[0].shape[-1]) if tensor.ndim == 2 else None
        deltas = [version.double() - versions[0] for version in versions[1:]]
        if method == "fisher":
            information = [load_statistics(file).read(t, f"fisher/{name}") for t in (0, 1)]
            expected = versions[0] + naive_fisher(
                deltas, [f.T if turned else f for f in information], [1.0, 1.0]
            )
        elif tensor.ndim != 2 or (method == "regmean" and (known is None or "wte" in name)):
            expected = naive_mean(versions[0], versions[1:])
        elif method == "regmean":
            expected = versions[0] + naive_regmean(deltas, known, [1.0, 1.0])
            regressed += 1
            assert rules[name] == "regmean"
        else:
            mix = 0.5 if known else 0.0
            expected = naive_ace(versions[0], versions[1:], measured=known, mix=mix)
            regressed += known is not None
        got = merged[name].T if turned else merged[name]
        assert task_vector_error(got, expected, versions[0]) <= 1e-4, name
    if method == "regmean":
        assert regressed == (15 if kind is LlamaForCausalLM else 8)
    if method == "ace":  # and the head of GPT-2, which is tied
        assert regressed == (15 if kind is LlamaForCausalLM else 9)
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
