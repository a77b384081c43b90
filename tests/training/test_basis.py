# SPDX-License-Identifier: Apache-2.0
"""Coefficients that are learned over the components of a merge, and applied by its method."""

from __future__ import annotations

import copy
import json
import re
from pathlib import Path

import pytest
import torch
import yaml
from families import (
    bert_family,
    changed,
    gpt2_family,
    llama_family,
    mixtral_family,
    t5_family,
    train,
    vit_family,
)
from mergekit.options import MergeOptions
from reference import naive_relative, task_vector_error
from safetensors.torch import load_file
from transformers import MixtralForCausalLM

from mergekit_ace.check.check import check_merge
from mergekit_ace.methods.coefficients import CoefficientFile, CoefficientFileError

REFINED = {"epsilon": 1e-3, "spectral_refinement": "always"}


def with_basis(config: dict, basis: str, **parameters) -> dict:
    config = copy.deepcopy(config)
    config["basis"] = basis
    if parameters:
        config[basis] = parameters
    return config


FAMILIES = {
    "llama": llama_family,
    "gpt2": gpt2_family,
    "bert": bert_family,
    "vit": vit_family,
    "t5": lambda folder: t5_family(folder / "t5", "a"),
    "mixtral": mixtral_family,
}
# On disk the parameters of these have other names, or are packed otherwise, than in memory.
LOADED = {"mixtral": MixtralForCausalLM}


def weights(folder: str | Path, kind: str) -> dict[str, torch.Tensor]:
    if kind not in LOADED:
        return load_file(Path(folder) / "model.safetensors")
    model = LOADED[kind].from_pretrained(folder).requires_grad_(False)
    return dict(model.named_parameters())


@pytest.mark.parametrize(
    ("kind", "basis", "parameters", "dtype"),
    [
        ("llama", "ace", REFINED, "float32"),
        ("llama", "ace_relative", {"centred": True}, "bfloat16"),
        ("gpt2", "ace_relative", {}, "float32"),
        ("gpt2", "ace", {}, "float32"),
        ("bert", "ace_relative", {}, "float32"),
        ("vit", "ace", REFINED, "float32"),
        ("t5", "ace_relative", {}, "float32"),
        ("mixtral", "ace", REFINED, "float32"),
        ("mixtral", "ace_relative", {}, "float32"),
    ],
)
def test_the_method_merges_what_was_trained(
    tmp_path, mergekit_yaml, kind, basis, parameters, dtype
):
    """Every tensor of the merge is what the model in training had."""
    config = with_basis(FAMILIES[kind](tmp_path), basis, **parameters)
    out = tmp_path / "out"
    file = train(changed({**config, "component_dtype": dtype}, max_steps=1), out)
    assert file.contents.basis == basis
    assert file.coefficients.shape[0] == 2 + (basis == "ace")
    assert abs(float(file.coefficients[:2].mean()) - 1) < 0.5
    generator = torch.Generator().manual_seed(0)  # whatever was learned in one step
    file.coefficients += 0.5 * torch.randn(file.coefficients.shape, generator=generator)
    file.save(out / "coefficients.safetensors")
    merge = yaml.safe_load((out / "merge.yml").read_text())
    assert merge["merge_method"] == basis
    base, merged = (weights(f, kind) for f in (merge["base_model"], mergekit_yaml(merge)))
    columns = {n: c for c, t in enumerate(file.contents.tensors) for n in (t.name, *t.stored)}
    compared = 0
    for name, tensor in merged.items():
        if name not in columns:  # the base's
            assert torch.equal(tensor, base[name])
            continue
        parts = load_file(out / "state" / "components" / f"{columns[name]:05d}.safetensors")
        assert parts["0"].dtype == getattr(torch, dtype)
        total = sum(
            float(value) * parts[str(row)].double()
            for row, value in enumerate(file.coefficients[:, columns[name]])
        )
        expected = base[name].double() + total
        if total.any():
            rounding = 2**-23 * float(expected.norm() / total.norm())
            bar = 1e-4 if dtype == "float32" else 1e-2
            assert task_vector_error(tensor, expected, base[name]) <= bar + rounding, name
            compared += 1
    assert compared > 10


def test_training_starts_at_the_merge(tmp_path, mergekit_yaml):
    """With all coefficients 1 the file merges as the method does without it."""
    config = with_basis(llama_family(tmp_path), "ace", **REFINED)
    file = train(changed(config, learning_rate=1e-12), tmp_path / "out")
    torch.testing.assert_close(file.coefficients, torch.ones_like(file.coefficients))
    scores = file.contents.scores
    assert list(scores) == [
        "each expert on its own",
        "base model",
        "ace, without data",
        "ace, coefficients",
    ]
    assert scores["ace, coefficients"]["loss"] == pytest.approx(scores["ace, without data"]["loss"])
    merge = yaml.safe_load((tmp_path / "out" / "merge.yml").read_text())
    with_file = load_file(mergekit_yaml(merge, out="with") / "model.safetensors")
    del merge["parameters"]["coefficients"]
    for model in merge["models"]:
        del model["parameters"]
    without = load_file(mergekit_yaml(merge, out="without") / "model.safetensors")
    for name, tensor in without.items():
        torch.testing.assert_close(with_file[name], tensor, rtol=1e-5, atol=1e-6)


@pytest.fixture(scope="module")
def trained(tmp_path_factory) -> tuple[dict, Path]:
    folder = tmp_path_factory.mktemp("trained")
    config = with_basis(llama_family(folder), "ace_relative")
    config["exclude"] = ["embed_tokens"]
    train(config, folder / "out")
    return config, folder / "out"


def test_against_the_transcription(trained, mergekit_yaml, tmp_path):
    config, out = trained
    merge = yaml.safe_load((out / "merge.yml").read_text())
    report = tmp_path / "report.jsonl"
    merge["parameters"]["report"] = str(report)
    merged = load_file(mergekit_yaml(merge) / "model.safetensors")
    file = CoefficientFile.load(out / "coefficients.safetensors")
    base, *experts = (
        load_file(Path(folder) / "model.safetensors")
        for folder in (config["base_model"], *(m["model"] for m in config["models"]))
    )
    assert torch.equal(merged["model.embed_tokens.weight"], base["model.embed_tokens.weight"])
    name = "model.layers.0.mlp.down_proj.weight"
    own = file.coefficients[:, file.columns[name]].tolist()
    lines = {line["tensor"]: line for line in map(json.loads, report.read_text().splitlines())}
    assert lines[name]["coefficients"] == own
    left_out = lines["model.embed_tokens.weight"]
    assert left_out["coefficients"] == [0.0, 0.0]
    assert left_out["rule"] == "base", "nothing is solved for it"
    expected = naive_relative(base[name], [e[name] for e in experts], coefficients=own)
    assert task_vector_error(merged[name], expected, base[name]) <= 5e-5


def test_a_check_finds_nothing_wrong(trained):
    _, out = trained
    found = check_merge(out / "merge.yml", MergeOptions())
    assert [one for one in found.findings if "tokens" not in one.message] == []


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"merge_method": "statsmerging"}, "learned for components of ace_relative"),
        ({"merge_method": "ace"}, "write merge_method: ace_relative"),
        ({"parameters": {"epsilon": 0.5}}, "epsilon: 0.5 instead of None"),
        ({"parameters": {"layout": "matrix"}}, "layout: matrix instead of auto"),
        ({"models": 1}, "learned for 2 experts together, and there are 1"),
    ],
    ids=["statsmerging", "ace", "epsilon", "layout", "experts"],
)
def test_another_merge_is_refused(trained, mergekit_yaml, tmp_path, change, message):
    _, out = trained
    merge = yaml.safe_load((out / "merge.yml").read_text())
    if "merge_method" in change:
        merge["merge_method"] = change["merge_method"]
        path = merge["parameters"]["coefficients"]
        merge["parameters"] = {"coefficients": path}
    merge["parameters"] |= change.get("parameters", {})
    merge["models"] = merge["models"][: change.get("models")]
    with pytest.raises(CoefficientFileError, match=message):
        mergekit_yaml(merge)
    (tmp_path / "changed.yml").write_text(yaml.safe_dump(merge))
    findings = check_merge(tmp_path / "changed.yml", MergeOptions()).findings
    assert any(re.search(message, finding.message) for finding in findings)


def test_a_check_mentions_weights_that_were_not_trained(trained, tmp_path):
    out = trained[1]
    config = yaml.safe_load((out / "merge.yml").read_text())
    for weights, found in (((2.0, 2.0), 0), ((1.0, 0.5), 1)):  # only their ratio matters
        experts = [m for m in config["models"] if m["model"] != config["base_model"]]
        for expert, weight in zip(experts, weights, strict=True):
            expert.setdefault("parameters", {})["weight"] = weight
        (tmp_path / "weighted.yml").write_text(yaml.safe_dump(config))
        findings = check_merge(tmp_path / "weighted.yml", MergeOptions()).findings
        told = [f for f in findings if "different weights" in f.message]
        assert [f.level for f in told] == ["warning"] * found
