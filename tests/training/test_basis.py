# SPDX-License-Identifier: Apache-2.0
"""Coefficients that are learned over the components of a merge, and applied by its method."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import yaml
from families import (
    bert_family,
    changed,
    gpt2_family,
    llama_family,
    merge_of,
    mixtral_family,
    tensors,
    train,
    vit_family,
)
from mergekit.options import MergeOptions
from reference import naive_relative, task_vector_error
from safetensors.torch import load_file
from transformers import MixtralForCausalLM

from mergekit_ace.check.check import check_merge
from mergekit_ace.methods.coefficients import CoefficientFile
from mergekit_ace.naming import ConfigError

REFINED = {"epsilon": 1e-3, "spectral_refinement": "always"}


def with_basis(config: dict, basis: str, **parameters) -> dict:
    return {**config, "basis": basis, **({basis: parameters} if parameters else {})}


def weights(folder: str | Path, family: Callable) -> dict[str, torch.Tensor]:
    """Tensors on disk; in memory where they are packed otherwise there."""
    if family is not mixtral_family:
        return tensors(folder)
    return dict(MixtralForCausalLM.from_pretrained(folder).requires_grad_(False).named_parameters())


@pytest.mark.parametrize(
    ("family", "basis", "parameters"),
    [
        (llama_family, "ace_relative", {"centred": True}),
        (gpt2_family, "ace", {}),
        (gpt2_family, "ace_plus", {}),
        (bert_family, "ace_relative", {}),
        (vit_family, "ace", REFINED),
        (mixtral_family, "ace", REFINED),
        (mixtral_family, "task_vector", {}),
    ],
)
def test_the_method_merges_what_was_trained(tmp_path, mergekit_yaml, family, basis, parameters):
    """Every tensor of the merge is what the model in training had."""
    config, out = with_basis(family(tmp_path), basis, **parameters), tmp_path / "out"
    file = train(changed(config, max_steps=1), out)
    assert file.coefficients.shape[0] == 2 + (basis == "ace")
    generator = torch.Generator().manual_seed(0)  # whatever was learned in one step
    file.coefficients += 0.5 * torch.randn(file.coefficients.shape, generator=generator)
    file.save(out / "coefficients.safetensors")
    merge = merge_of(out)
    merged, base = (weights(f, family) for f in (mergekit_yaml(merge), merge["base_model"]))
    experts = [weights(m["model"], family) for m in merge["models"] if basis == "task_vector"]
    compared = 0
    for name, tensor in merged.items():
        column = file.columns.get(name)
        if column is None:
            assert torch.equal(tensor, base[name])
            continue
        parts = [expert[name].double() - base[name].double() for expert in experts]
        if not experts:
            stored = load_file(out / "state" / "components" / f"{column:05d}.safetensors")
            parts = [stored[str(row)].double() for row in range(len(stored))]
        pairs = zip(file.coefficients[:, column].tolist(), parts, strict=True)
        total = sum(value * part for value, part in pairs)
        expected = base[name].double() + total
        if total.any():
            rounding = 2**-23 * float(expected.norm() / total.norm())
            assert task_vector_error(tensor, expected, base[name]) <= 1e-4 + rounding, name
            compared += 1
    assert compared > 10


def test_training_starts_at_the_merge(tmp_path, mergekit_yaml):
    """With all coefficients 1 the file merges as the method does without it."""
    config = with_basis(llama_family(tmp_path), "ace", **REFINED)
    file = train(changed(config, learning_rate=1e-12), tmp_path / "out")
    torch.testing.assert_close(file.coefficients, torch.ones_like(file.coefficients))
    plain, learned = list(file.contents.scores.items())[-2:]
    assert (plain[0], learned[0]) == ("ace, without data", "ace, coefficients")
    assert learned[1]["loss"] == pytest.approx(plain[1]["loss"])
    merge = merge_of(tmp_path / "out")
    with_file = tensors(mergekit_yaml(merge, out="with"))
    del merge["parameters"]["coefficients"]
    merge["models"] = [{"model": model["model"]} for model in merge["models"]]
    for name, tensor in tensors(mergekit_yaml(merge, out="without")).items():
        torch.testing.assert_close(with_file[name], tensor, rtol=1e-5, atol=1e-6)


@pytest.fixture(scope="module")
def trained(tmp_path_factory) -> tuple[dict, Path]:
    folder = tmp_path_factory.mktemp("trained")
    config = {**with_basis(llama_family(folder), "ace_relative"), "exclude": ["embed_tokens"]}
    train(config, folder / "out")
    return config, folder / "out"


def test_against_the_transcription(trained, mergekit_yaml, tmp_path):
    config, out = trained
    merge, report = merge_of(out), tmp_path / "report.jsonl"
    merge["parameters"]["report"] = str(report)
    merged = tensors(mergekit_yaml(merge))
    file = CoefficientFile.load(out / "coefficients.safetensors")
    base, *experts = map(tensors, (config["base_model"], *(m["model"] for m in config["models"])))
    excluded, name = "model.embed_tokens.weight", "model.layers.0.mlp.down_proj.weight"
    assert torch.equal(merged[excluded], base[excluded])
    own = file.coefficients[:, file.columns[name]].tolist()
    lines = {line["tensor"]: line for line in map(json.loads, report.read_text().splitlines())}
    assert lines[name]["coefficients"] == own
    assert lines[excluded]["coefficients"] == [0.0, 0.0]
    assert lines[excluded]["rule"] == "base", "nothing is solved for it"
    expected = naive_relative(base[name], [e[name] for e in experts], coefficients=own)
    assert task_vector_error(merged[name], expected, base[name]) <= 5e-5


def findings(config: dict, folder: Path) -> list:
    (folder / "changed.yml").write_text(yaml.safe_dump(config))
    return check_merge(folder / "changed.yml", MergeOptions()).findings


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
    merge = merge_of(trained[1])
    assert [one for one in findings(merge, tmp_path) if "tokens" not in one.message] == []
    if "merge_method" in change:
        merge["merge_method"] = change["merge_method"]
        merge["parameters"] = {"coefficients": merge["parameters"]["coefficients"]}
    merge["parameters"] |= change.get("parameters", {})
    merge["models"] = merge["models"][: change.get("models")]
    with pytest.raises(ConfigError, match=message):
        mergekit_yaml(merge)
    assert any(re.search(message, found.message) for found in findings(merge, tmp_path))


@pytest.mark.parametrize(("weights", "count"), [((2.0, 2.0), 0), ((1.0, 0.5), 1)])
def test_a_check_mentions_weights_that_were_not_trained(trained, tmp_path, weights, count):
    """Only their ratio matters."""
    config = merge_of(trained[1])
    for expert, weight in zip(config["models"], weights, strict=True):
        expert["parameters"]["weight"] = weight
    told = [f for f in findings(config, tmp_path) if "different weights" in f.message]
    assert [f.level for f in told] == ["warning"] * count
