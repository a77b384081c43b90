# SPDX-License-Identifier: Apache-2.0
"""`inspect` of adapters: what it finds in the full models, without a weight of the base."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml
from checkpoints import tiny_llama
from click.testing import CliRunner
from peft_models import (
    CASES,
    EXPERTS,
    LINEAR,
    config_of,
    gpt2,
    mixtral,
    of_full_models,
    save_adapters,
    train_by_chance,
)

from mergekit_ace.cli import main

SAME = (
    "tensor", "method", "decisions_of", "shape", "layout", "rule", "weight", "heterogeneous",
    "normalized", "refined", "statistic", "rank", "prior", "coefficients",
)  # fmt: skip
NEAR = (
    "norm", "tau", "gamma", "log_variance", "threshold", "epsilon", "ridge", "sigma_iso",
    "amplification", "changed",
)  # fmt: skip


def inspect(config: dict, folder: Path, *flags: str, fails: bool = False) -> str:
    """Run the command; what it says."""
    path = folder.with_suffix(".yml")
    path.write_text(yaml.safe_dump(config))
    result = CliRunner().invoke(main, ["inspect", str(path), str(folder), "--quiet", *flags])
    assert (result.exit_code != 0) == fails, result.output
    return result.output


def lines_of(folder: Path) -> dict[str, dict]:
    lines = map(json.loads, (folder / "report.jsonl").read_text().splitlines())
    return {line["tensor"]: line for line in lines}


def compare_with_full_models(config: dict, folder: Path, base: str) -> None:
    """Inspect adapters without a weight of the base, and merged into full models."""
    inspect(of_full_models(config, folder / "cache"), folder / "full")
    without_weights(base)
    inspect(config, folder / "report")
    expected, found = lines_of(folder / "full"), lines_of(folder / "report")
    assert found.keys() == expected.keys()
    for name, line in expected.items():
        check_line(found[name], line)
        assert "base_norm" not in found[name]


def without_weights(base: str) -> None:
    for file in Path(base).glob("*.safetensors"):
        file.unlink()


def near(found, expected, name: str, rel: float = 2e-4) -> None:
    """Compare numbers in lists, whatever their depth."""
    if isinstance(expected, list):
        assert len(found) == len(expected), name
        for one, other in zip(found, expected, strict=True):
            near(one, other, name, rel)
    elif isinstance(expected, float | int):
        assert float(found) == pytest.approx(float(expected), rel=rel, abs=rel), name
    else:
        assert found == expected, name


def check_line(found: dict, expected: dict) -> None:
    for name in SAME:
        assert found.get(name) == expected.get(name), (name, found["tensor"])
    for name in NEAR:
        near(found.get(name), expected.get(name), f"{name} of {found['tensor']}")
    if "cosine" in expected:
        near(found["cosine"], expected["cosine"], "cosine")
    assert ("subspaces" in found) == ("subspaces" in expected)
    for name, value in expected.get("subspaces", {}).items():
        near(found["subspaces"][name], value, name, 2e-3)
    pairs = zip(found.get("matrices", ()), expected.get("matrices", ()), strict=True)
    for one, other in pairs:
        check_line({"tensor": found["tensor"], **one}, {"tensor": found["tensor"], **other})


METHODS = [
    ("ace", {}),
    ("ace", {"spectral_refinement": "always", "adaptive_normalization": "always"}),
    ("ace_relative", {}),
    ("tsv_m", {}),
]


@pytest.mark.parametrize(("method", "parameters"), METHODS)
def test_lines_are_those_of_the_full_models(tmp_path, method, parameters):
    settings = {"target_modules": LINEAR, "r": 16, "lora_alpha": 4}
    some = {**settings, "target_modules": ["q_proj", "up_proj"]}
    paths = save_adapters(tmp_path, tiny_llama, settings, settings, some)
    compare_with_full_models(config_of(paths, method, **parameters), tmp_path, paths[0])
    assert "adapter1" in (tmp_path / "report" / "report.html").read_text()
    assert (tmp_path / "report" / "summary.json").exists()


def test_methods_of_mergekit_are_shown_with_the_decisions_of_ace(tmp_path):
    settings = {"target_modules": LINEAR, "r": 16, "lora_alpha": 4}
    some = {**settings, "target_modules": ["q_proj", "up_proj"]}
    paths = save_adapters(tmp_path, tiny_llama, settings, settings, some)
    inspect(config_of(paths, "ace"), tmp_path / "ace")
    inspect(config_of(paths, "ties", weight=1.0), tmp_path / "ties")
    expected, found = lines_of(tmp_path / "ace"), lines_of(tmp_path / "ties")
    assert found.keys() == expected.keys()
    for name, line in expected.items():
        assert found[name]["decisions_of"] == "ace"
        check_line(found[name], {**line, "method": "ties", "decisions_of": "ace"})


KINDS = {
    "transposed": (gpt2, {**CASES["transposed"][1], "r": 16}),
    "experts": (mixtral, {"target_parameters": EXPERTS, "target_modules": ["q_proj"], "r": 16}),
    "table": (tiny_llama, {"target_modules": ["embed_tokens", "lm_head"], "r": 16}),
}


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_of_change(tmp_path, kind):
    build, options = KINDS[kind]
    paths = save_adapters(tmp_path, build, options, options)
    compare_with_full_models(config_of(paths, "ace_relative"), tmp_path, paths[0])


def test_what_is_held_whole_is_not_looked_at(tmp_path):
    paths = save_adapters(tmp_path, tiny_llama, CASES["saved"][1], CASES["linear"][1])
    without_weights(paths[0])
    inspect(config_of(paths, "task_arithmetic", weight=1.0), tmp_path / "report")
    found = lines_of(tmp_path / "report")
    assert "holds it whole" in found["lm_head.weight"]["skipped"]
    assert found["model.layers.0.self_attn.q_proj.weight"]["decisions_of"] == "ace"


def test_what_leaves_the_span_is_looked_at_in_full(tmp_path):
    paths = save_adapters(tmp_path, tiny_llama, {"target_modules": ["q_proj"]})
    settings = {"target_modules": ["q_proj"], "use_dora": True}
    paths.append(str(tmp_path / "dora"))
    train_by_chance(tiny_llama, Path(paths[2]), 3, **settings)
    said = inspect(config_of(paths, "ace"), tmp_path / "report", fails=True)
    assert "use_dora" in said
    assert "with --lora-merge-cache DIR" in said
    cache = str(tmp_path / "cache")
    inspect(config_of(paths, "ace"), tmp_path / "report", "--lora-merge-cache", cache)
    assert all(line["base_norm"] for line in lines_of(tmp_path / "report").values())
