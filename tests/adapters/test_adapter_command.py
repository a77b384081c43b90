# SPDX-License-Identifier: Apache-2.0
"""`mergekit-ace adapter`: what it writes, says, refuses and replaces."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
import yaml
from checkpoints import configure, tiny_llama
from commands import command, run_config
from filelock import FileLock
from peft_models import (
    CASES,
    LINEAR,
    compare_changes,
    config_of,
    dense_changes,
    edit_tensors,
    train_by_chance,
)
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from mergekit_ace.files.saving import LOCK_FILE


@pytest.fixture
def own(family, tmp_path) -> list[str]:
    """A base and two adapters, to be damaged."""
    return [str(shutil.copytree(path, tmp_path / Path(path).name)) for path in family[:3]]


def run(config: dict, folder: Path, *flags: object, fails: bool = False) -> str:
    return run_config("adapter", config, folder / "adapter", *flags, fails=fails, quiet=False)


def test_what_is_written(own, tmp_path, settings_put_back):
    """vLLM takes `lora_alpha / r` for all modules."""
    torch.set_num_threads(3)
    for name in ("tokenizer_config.json", "tokenizer.json"):
        Path(own[2], name).write_text("{}")
    config, out = config_of(own, "ace") | {"out_dtype": "bfloat16"}, tmp_path / "adapter"
    assert f"{out}: 14 modules of rank 5; " in run(config, tmp_path)
    assert torch.get_num_threads() == 3
    settings = json.loads((out / "adapter_config.json").read_text())
    expected = {"r": 5, "lora_alpha": 5, "target_modules": sorted(LINEAR), "use_rslora": False}
    expected |= {"base_model_name_or_path": own[0], "task_type": "CAUSAL_LM"}
    assert expected.items() <= settings.items()
    tensors = load_file(out / "adapter_model.safetensors")
    assert {tensor.dtype for tensor in tensors.values()} == {torch.bfloat16}
    assert all(name.startswith("base_model.model.model.layers.") for name in tensors)
    assert {name.rpartition(".lora_")[2] for name in tensors} == {"A.weight", "B.weight"}
    head, text = (out / "README.md").read_text().split("---\n")[1:3]
    assert {"library_name": "peft", "base_model": own[0]}.items() <= yaml.safe_load(head).items()
    for words in ("merge_method: ace", "xu2026ace", "14 modules of rank 5", own[1]):
        assert words in text
    assert yaml.safe_load((out / "mergekit_config.yml").read_text()) == config
    assert (out / "tokenizer.json").read_text() == "{}"


@torch.no_grad()
def test_transformers_loads_it_by_itself(tmp_path):
    build, options = CASES["experts"]
    made = train_by_chance(build, tmp_path / "in", **options)
    made.base.save_pretrained(tmp_path / "base", save_original_format=False)
    run(config_of([str(tmp_path / name) for name in ("base", "in")], "ace"), tmp_path)
    tokens, model = torch.arange(8)[None], AutoModelForCausalLM.from_pretrained(tmp_path / "base")
    model.load_adapter(str(tmp_path / "adapter"))
    made.base.eval().load_state_dict(made.merged)
    expected = made.base(tokens).logits
    torch.testing.assert_close(model.eval()(tokens).logits, expected, rtol=0, atol=1e-5)


def test_a_rank_cuts_the_smallest_directions_and_says_how_much(family, tmp_path):
    run(config_of(family, "ace"), tmp_path)
    whole = dense_changes(tmp_path / "adapter")
    said = run(config_of(family, "ace"), tmp_path, "--rank", 3, "--overwrite")
    cut = dense_changes(tmp_path / "adapter")
    assert whole.keys() == cut.keys()
    lost = 0.0
    for name, full in whole.items():
        left, values, right = torch.linalg.svd(full, full_matrices=False)
        nearest = (left[:, :3] * values[:3]) @ right[:3]
        assert float((cut[name] - nearest).norm()) <= 1e-6 * float(full.norm())
        lost += float(values[3:].square().sum())
    share = lost / sum(float(full.square().sum()) for full in whole.values())
    told = f"rank 3, which cuts off {share:.2%} of ‖X‖²"
    assert told in said
    assert told in (tmp_path / "adapter" / "README.md").read_text()


def spoil(tensors: dict) -> None:
    name = next(name for name in tensors if "layers.1.mlp.up_proj.lora_B" in name)
    tensors[name][0, 0] = float("nan")


def silence(tensors: dict, part: str = "") -> None:
    """Let an adapter change nothing."""
    for name in (name for name in tensors if "_B" in name and part in name):
        tensors[name].zero_()


def refused(config: dict, folder: Path, *words: str) -> None:
    """The command ends with one message that has these words, and leaves nothing."""
    said = run(config, folder, fails=True)
    assert [word for word in words if word not in said] == [], said
    assert not (folder / "adapter").exists()


def test_adapters_that_change_nothing(own, tmp_path):
    """Of some modules, or of any; one that is alone comes out as it is."""
    edit_tensors(own[1], lambda tensors: silence(tensors, "layers.1.mlp.up_proj"))
    edit_tensors(own[2], silence)
    run(config_of(own, "ace"), tmp_path)
    found, expected = dense_changes(tmp_path / "adapter"), dense_changes(own[1])
    compare_changes(found, expected, {}, bar=1e-6)
    assert not found["model.layers.1.mlp.up_proj.weight"].any()
    shutil.rmtree(tmp_path / "adapter")
    edit_tensors(own[1], silence)
    refused(config_of(own, "ace"), tmp_path, "change nothing")


def test_what_is_no_adapter_of_the_base(own, tmp_path):
    """`test_adapter_read.py` has all that the reader refuses."""
    config = config_of(own, "ace")
    shutil.copytree(own[0], tmp_path / "copy")
    for other in (str(tmp_path / "full"), own[1], f"{tmp_path / 'copy'}+{own[2]}"):
        experts = [*config["models"], {"model": other}]
        words = f"{other} is no adapter of {own[0]}", "write `- model: BASE+ADAPTER`"
        refused({**config, "models": experts}, tmp_path, *words)
    whole = config_of(own, "ace")
    sources = [{"model": one["model"], "layer_range": [1, 2]} for one in whole.pop("models")]
    refused({**whole, "slices": [{"sources": sources}]}, tmp_path, "layers", "mergekit-ace merge")
    options = {"target_modules": ["q_proj"], "modules_to_save": ["lm_head"]}
    train_by_chance(tiny_llama, tmp_path / "saved", 3, **options)
    told = "holds lm_head.weight whole (`modules_to_save`)", "mergekit-ace merge"
    refused(config_of([*own, str(tmp_path / "saved")], "ace"), tmp_path, *told)
    Path(own[0], "config.json").unlink()
    refused(config, tmp_path, "config.json")


@pytest.mark.parametrize(
    ("method", "parameters", "words"),
    [
        ("linear", {"weight": 0.2, "normalize": False}, ["sum to 0.6", "the base itself"]),
        ("karcher", {}, ["makes no adapter", "mergekit-ace merge"]),
        ("wudi", {}, ["merge_method: wudi makes no adapter: "]),
        ("ace", {"layout": [{"filter": "no_such_part", "value": "matrix"}]}, ["no_such_part"]),
        ("ace", {"epsilom": 1e-3}, ["'epsilom'", "did you mean 'epsilon'"]),
    ],
)
def test_methods_and_parameters_that_make_no_adapter(family, tmp_path, method, parameters, words):
    refused(config_of(family, method, **parameters), tmp_path, *words)


def test_a_result_beyond_float16(own, tmp_path):
    huge = config_of(own, "ace", **{"lambda": 1e12}) | {"out_dtype": "float16"}
    refused(huge, tmp_path, "_proj.weight holds NaN, or numbers that torch.float16", "bfloat16")


def test_nothing_is_replaced_unasked(own, tmp_path):
    out = tmp_path / "adapter"
    out.mkdir()
    (out / "tokenizer.json").write_text("{}")
    said = run(config_of(own, "ace"), tmp_path, fails=True)
    assert f"{out} holds tokenizer.json. Choose another folder, or --overwrite" in said
    with FileLock(out / LOCK_FILE):
        assert "another run" in run(config_of(own, "ace"), tmp_path, "--overwrite", fails=True)
    run(config_of(own, "ace"), tmp_path, "--overwrite")
    assert not (out / "tokenizer.json").exists(), "no adapter carries one"
    (out / "notes.txt").write_text("mine")
    before = {path: path.read_bytes() for path in out.iterdir()}
    edit_tensors(own[2], spoil)  # found on the way: the old one stays whole
    said = run(config_of(own, "ace_plus"), tmp_path, "--overwrite", fails=True)
    assert f"{own[2]}/adapter_model.safetensors holds NaN" in said
    assert {path: path.read_bytes() for path in out.iterdir()} == before
    for read in own[:2]:
        before = {path: path.read_bytes() for path in Path(read).iterdir()}
        said = command("adapter", tmp_path / "adapter.yml", read, "--overwrite", fails=True)
        assert f"{read} holds a model, or an adapter that is merged" in said
        assert {path: path.read_bytes() for path in Path(read).iterdir()} == before


def test_what_is_seldom_meant_is_said(family, tmp_path, caplog):
    several = "may together undo what the base knew"
    assert several in run(config_of(family, "ace"), tmp_path, "--overwrite")
    for config in (config_of(family[:3], "ace"), config_of(family, "ace", **{"lambda": 0.5})):
        assert several not in run(config, tmp_path, "--overwrite")
    path = shutil.copytree(family[1], tmp_path / "other")
    configure(path, "adapter_config.json", base_model_name_or_path="some/other-model")
    run(config_of([family[0], str(path)], "ace"), tmp_path, "--overwrite")
    assert f"the adapter {path} was trained on some/other-model, not on" in caplog.text
