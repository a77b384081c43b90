# SPDX-License-Identifier: Apache-2.0
"""Adapters are merged whole or not at all; what a merge reads is never replaced by its result."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
from checkpoints import ace_config, save_family, tiny_llama
from coefficient_files import make_file
from peft import LoraConfig, get_peft_model
from sharded import SHARDS, assert_same, command, contents, linear, refusal, write_config
from transformers import LlamaForCausalLM, PreTrainedModel


class Killed(BaseException):
    """Nobody catches it."""


@pytest.fixture(scope="module")
def family(tmp_path_factory) -> list[str]:
    """A base, an expert, and two adapters of the base."""
    folder = tmp_path_factory.mktemp("family")
    paths = save_family(tiny_llama(), folder, experts=1)
    for seed in (1, 2):
        torch.manual_seed(seed)
        settings = LoraConfig(
            r=2, target_modules="all-linear", init_lora_weights=False, use_dora=True
        )  # which is merged first
        paths.append(str(folder / f"adapter{seed}"))
        get_peft_model(LlamaForCausalLM.from_pretrained(paths[0]), settings).save_pretrained(
            paths[-1]
        )
    return paths


@pytest.fixture
def adapted(tmp_path, family) -> tuple[Path, Path]:
    """A config of two adapters, and the cache where they are merged first."""
    base, _, *adapters = family
    experts = [f"{base}+{adapter}" for adapter in adapters]
    return write_config(tmp_path / "merge.yml", ace_config([base, *experts])), tmp_path / "cache"


@pytest.mark.parametrize("saved", [0, 1])  # whole adapters, before the kill
def test_a_kill_while_adapters_are_merged(tmp_path, adapted, monkeypatch, saved):
    config, cache = adapted
    flags = ("--lora-merge-cache", cache)
    original, calls = PreTrainedModel.save_pretrained, []

    def save_half(self, folder, **named):
        calls.append(folder)
        original(self, folder, **named)
        if len(calls) > saved:
            (Path(folder) / "model.safetensors").unlink()
            raise Killed

    monkeypatch.setattr(PreTrainedModel, "save_pretrained", save_half)
    with pytest.raises(Killed):
        command(config, tmp_path / "merged", *flags, "--resume")
    monkeypatch.undo()
    command(config, tmp_path / "merged", *flags, "--resume")
    whole = tmp_path / "whole" / "merged"
    command(config, whole, "--lora-merge-cache", tmp_path / "another")
    assert_same(whole, tmp_path / "merged")
    assert len([path for path in cache.iterdir() if path.is_dir()]) == 2


def test_what_mergekit_has_left_half_is_replaced(tmp_path, adapted):
    config, cache = adapted
    command(config, tmp_path / "whole" / "merged", "--lora-merge-cache", cache)
    first, second = sorted(path for path in cache.iterdir() if path.is_dir())
    (first / "model.safetensors").unlink()
    weights = (second / "model.safetensors").read_bytes()
    (second / "model.safetensors").write_bytes(weights[:-100])
    command(config, tmp_path / "merged", "--lora-merge-cache", cache)
    assert (second / "model.safetensors").read_bytes() == weights
    assert_same(tmp_path / "whole" / "merged", tmp_path / "merged")


def test_an_adapter_that_was_trained_further(tmp_path, family, adapted):
    """What the cache holds of it is outdated: mergekit would take it all the same."""
    config, cache = adapted
    base, _, one, two = family
    own = tmp_path / "own"
    shutil.copytree(one, own)
    config = write_config(tmp_path / "own.yml", ace_config([base, f"{base}+{own}"]))
    command(config, tmp_path / "before" / "merged", "--lora-merge-cache", cache)
    shutil.copy(Path(two, "adapter_model.safetensors"), own)
    command(config, tmp_path / "after" / "merged", "--lora-merge-cache", cache)
    command(config, tmp_path / "fresh" / "merged", "--lora-merge-cache", tmp_path / "another")
    assert_same(tmp_path / "after" / "merged", tmp_path / "fresh" / "merged")
    assert contents(tmp_path / "before") != contents(tmp_path / "after")


def test_a_cache_that_is_gone(tmp_path, adapted):
    """The adapters are merged again, to the same files: a merge goes on with them."""
    config, cache = adapted
    out = tmp_path / "merged"
    command(config, out, *SHARDS, "--lora-merge-cache", cache)
    before = contents(out)
    next(out.glob("*.safetensors")).unlink()
    shutil.rmtree(cache)
    command(config, out, *SHARDS, "--lora-merge-cache", cache, "--resume")
    assert contents(out) == before


def test_a_cache_among_unfinished_files(tmp_path, adapted):
    config, _ = adapted
    out = tmp_path / "merged"
    cache = out / ".merging" / "cache"
    text = refusal(config, out, "--lora-merge-cache", cache, "--overwrite")
    assert f"{cache} (the cache of models) has a name that belongs to the result" in text
    assert [path for path in cache.iterdir() if path.is_dir()]


def test_a_coefficient_file_in_the_output(tmp_path, family):
    out = tmp_path / "out"
    out.mkdir()
    file = out / "coefficients.safetensors"
    make_file(list(tiny_llama().state_dict()), family[1:2]).save(file)
    parameters = {"coefficients": str(file)}
    settings = ace_config(family[:2], merge_method="statsmerging", parameters=parameters)
    config = write_config(tmp_path / "merge.yml", settings)
    before = contents(out)
    for flags in ((), ("--overwrite",)):
        text = refusal(config, out, *flags)
        assert "coefficients.safetensors" in text
        assert "choose another directory" in text
        assert contents(out) == before
    assert f"{file} (`coefficients:` of the config) has a name that belongs" in text
    command(config, tmp_path / "elsewhere")


def test_a_model_whose_files_are_links_into_the_output(tmp_path, family):
    """A former result, under another name and beside another tokenizer."""
    out, linked = tmp_path / "out", tmp_path / "linked"
    shutil.copytree(family[1], out)
    linked.mkdir()
    for path in out.iterdir():
        (linked / path.name).symlink_to(path)
    config = write_config(tmp_path / "merge.yml", linear([family[0], str(linked)]))
    before = contents(out)
    text = refusal(config, out, "--overwrite")
    assert "(a file of a model to be merged) has a name that belongs to the result" in text
    assert contents(out) == before


@pytest.mark.parametrize(
    "name",
    ["merge_manifest.json", "README.md", "model.safetensors", ".merging/report.jsonl"],
)
def test_a_report_under_a_name_of_the_result(tmp_path, family, name):
    out = tmp_path / "out"
    (out / ".merging").mkdir(parents=True)
    parameters = {"report": str(out / name)}
    config = write_config(tmp_path / "m.yml", ace_config(family[:2], parameters=parameters))
    for flag in ("--resume", "--overwrite"):
        assert "(`report:` of the config) has a name that" in refusal(config, out, flag)
    assert not (out / name).exists()


def test_a_config_under_a_name_of_the_result(tmp_path, family):
    out = tmp_path / "out"
    out.mkdir()
    config = write_config(out / "config.json", linear(family[:2]))  # JSON is YAML, too
    assert f"{config} (the config) has a name that" in refusal(config, out, "--overwrite")
    assert config.exists()


def test_what_may_lie_in_the_output(tmp_path, family):
    """The config of the former merge, a report, models in subfolders: none of it is dropped."""
    out = tmp_path / "out"
    shutil.copytree(family[0], out / "base")
    report = out / "report.jsonl"
    settings = ace_config([str(out / "base"), family[1]], parameters={"report": str(report)})
    out.mkdir(exist_ok=True)
    config = write_config(out / "mergekit_config.yml", settings)
    command(config, out)
    lines = report.read_text()
    command(config, out, "--overwrite")
    again = report.read_text()
    assert again.startswith(lines)
    assert again.count("\n") == 2 * lines.count("\n")
